"""What trials have shown is counted while no worker waits for an answer, and before anything asks for it."""

from __future__ import annotations

import pickle
import signal
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign import kernel_state, worker_main
from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.coordinator import Coordinator
from attnfuzz.harness.campaign.coverage import OTHERS, Phase, Tally, Worst
from attnfuzz.harness.campaign.events import Event, TrialFinished
from attnfuzz.harness.campaign.kernel_state import KernelState
from attnfuzz.harness.campaign.plan import plan_of
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.campaign.worker_group import GroupWorker, WorkerGroup
from attnfuzz.harness.campaign.worker_main import Answer, Message
from attnfuzz.harness.core.signals import interrupted_once
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Figures, Verdict
from attnfuzz.kernels.problem import SINKS, Problem
from attnfuzz.kernels.registry import get
from attnfuzz.strategies.case import Case, Recipe
from attnfuzz.strategies.draw import drawn
from attnfuzz.strategies.trials import trial_cases

KERNEL = get("torch.reference_cpu")
PROBLEM = Problem(seqlens_q=(3,), seqlens_k=(5,), dim_qk=16, dim_v=16, dtype="float32")
PASS = Verdict(status="pass", seconds={"kernel": 0.5})


def case(number: int) -> Case:
    return Case(kernel=KERNEL.name, problem=PROBLEM, config=KERNEL.configs(PROBLEM)[0], recipe=Recipe(seed=number))


@pytest.fixture
def state() -> KernelState:
    settings = Settings(out=None, max_examples=9000)
    return KernelState(KERNEL, plan_of(KERNEL, settings), CampaignContext(settings))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    cases: list[Case] = []
    add = Tally.add
    monkeypatch.setattr(Tally, "add", lambda self, phase, each, verdict: (cases.append(each), add(self, phase, each, verdict)))
    return cases


def test_trials_are_counted_in_order_once_they_are_asked_for(state: KernelState, counted: list[Case]) -> None:
    for number in range(5):
        state.note("generate", case(number), PASS)
    state.note("shrink", case(9), PASS)
    assert state.tried
    assert not counted
    assert (state.tally.cases, state.tally.shrink_cases, state.tally.stages) == (5, 1, {"kernel": 3.0})
    assert counted == [*map(case, range(5)), case(9)]
    state.note("generate", case(5), PASS)
    summary = state.summary()
    assert summary.cases == sum(summary.drawn["dtype"].values()) == 6


def test_beyond_so_many_one_is_counted_for_each_that_comes(
    state: KernelState, counted: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_state, "_MOST_UNCOUNTED", 3)
    for number in range(3):
        state.note("generate", case(number), PASS)
    assert not counted
    for number in range(3, 8):
        state.note("generate", case(number), PASS)
        assert counted == [*map(case, range(number - 2))]
    assert state.tally.cases == 8


def test_counting_ends_in_time_and_goes_on_where_it_ended(state: KernelState, counted: list[Case]) -> None:
    coordinator = Coordinator(CampaignContext(Settings(out=None)), [state], FunctionExecutor(lambda _: PASS))
    state.note("generate", case(0), PASS)
    assert not coordinator.count(0.0)
    assert not counted
    assert coordinator.count()
    assert coordinator.count(0.0), "nothing is left"
    assert len(counted) == 1


class Scripted(GroupWorker):
    """Sends messages, and notes how many trials were counted when it was answered."""

    def __init__(self, messages: Iterable[Message], counted: list[Case]) -> None:
        super().__init__(0)
        self.messages, self._counted, self.answers = deque(messages), counted, list[tuple[Any, int]]()

    def receive(self) -> Message:
        return self.messages.popleft()

    def send(self, answer: Answer) -> None:
        self.answers.append((answer.value, len(self._counted)))


class ScriptedGroup(WorkerGroup):
    def __init__(self, context: CampaignContext, worker: Scripted) -> None:
        super().__init__(context, 1)
        self._numbers.clear()
        self._living, self._worker, self.waits = [worker], worker, list[float]()

    def _heard(self, seconds: float) -> Iterable[GroupWorker]:
        self.waits.append(seconds)
        return [self._worker] if self._worker.messages else []


def test_a_worker_is_answered_before_its_trials_are_counted(
    state: KernelState, counted: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    trials = tuple(("trial", (KERNEL.name, "generate", case(number), PASS)) for number in range(40))
    context = CampaignContext(Settings(out=None), listener=events.append, end=time.monotonic() + 60)
    worker = Scripted([Message((*trials, ("ready", (KERNEL.name, ["a key"]))), asks=True)] * 2, counted)
    group, coordinator = ScriptedGroup(context, worker), Coordinator(context, [state], FunctionExecutor(lambda _: PASS), 2)
    add = Tally.add
    monkeypatch.setattr(Tally, "add", lambda *a: (time.sleep(0.001), add(*a)))
    for _ in range(2):
        group._step(coordinator)
    assert worker.answers == [(set(), 0), (set(), 0)]
    assert sum(isinstance(each, TrialFinished) for each in events) == 80, "listeners have them at once"
    while len(counted) < 80:
        before = len(counted)
        group._step(coordinator)
        assert before < len(counted) <= before + 40, "in parts, between which it looks for messages"
    assert group.waits[-1] > 0, "nothing is left to count"
    assert set(group.waits[:-1]) == {0.0}


def judged(number: int) -> Verdict:
    """A Verdict with figures of its own; each fifth one is wrong, each seventh has an output that is not judged."""
    figures = {
        "o": Figures(
            elements=9, worst=number / 40, sigmas=number / 9, r=None if number % 3 else number / 100, doubted=number % 2
        ),
        "dq": Figures(elements=9, worst=0.1, z=0.5, unjudged="too long" if number % 7 == 0 else ""),
    }
    if number % 11 == 0:
        # It failed before an output was judged.
        figures = {}
    wrong = (
        (Failure(kernel=KERNEL.name, kind="mismatch", check="oracle", output="o", message="wrong"),)
        if number % 5 == 0 or not figures
        else ()
    )
    sinks = {SINKS: Figures(elements=1, worst=number / 50)} if number % 4 == 0 else {}
    status: Any = "fail" if wrong else "pass"
    return Verdict(status=status, figures=figures, captured=sinks, failures=wrong, seconds={"kernel": 0.5, "judge": 0.25})


def all_trials() -> list[tuple[Phase, Case, Verdict]]:
    cases = drawn(trial_cases(KERNEL, device="cpu"), seed=3, examples=90, quota=90)
    phases: tuple[Phase, ...] = ("generate", "generate", "replay", "shrink", "rerun")
    return [(phases[at % 5], each, judged(at)) for at, each in enumerate(cases)]


def test_what_workers_have_counted_is_what_the_campaign_counts(state: KernelState, counted: list[Case]) -> None:
    trials, whole = all_trials(), Tally()
    for trial in trials:
        whole.add(*trial)
    assert len(whole.drawn["keys mod 32"]) > 10
    assert whole.outputs["o"].failures
    assert whole.failed_unjudged
    counted.clear()
    context = CampaignContext(Settings(out=None), end=time.monotonic() + 60)
    coordinator = Coordinator(context, [state], FunctionExecutor(lambda _: PASS), 2)
    messages = []
    for begin, end in ((0, 1), (1, 40), (40, 40), (40, len(trials))):
        reports = [("trial", (KERNEL.name, *trial, True)) for trial in trials[begin:end]]
        counts = [*worker_main._counts(reports)]
        assert [name for name, _ in counts] == ["add_counts"] * bool(reports)
        messages.append(pickle.loads(pickle.dumps(Message((*counts, *reports, ("ready", (KERNEL.name, []))), asks=True))))
    assert len(counted) == len(trials), "in the worker"
    group = ScriptedGroup(context, Scripted(messages, counted))
    while group._worker.messages or state._uncounted:
        group._step(coordinator)
    assert len(counted) == len(trials), "and not again"
    assert state.tally == whole
    assert state._contrast._seen == sum(phase == "generate" and not verdict.failures for phase, _, verdict in trials)


class Sent:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def recv(self) -> Answer:
        return Answer(set())


def test_counts_come_before_the_trials_and_a_question_last() -> None:
    connection: Any = Sent()
    campaign = worker_main._RemoteCampaign(connection)
    for number in range(3):
        campaign.trial(KERNEL.name, "generate", case(number), judged(number + 1))
    campaign.trial("another", "shrink", case(3), judged(4))
    campaign.ready(KERNEL.name, [])
    campaign.ready(KERNEL.name, [])
    first, second = connection.messages
    methods = [method for method, _ in first.reports]
    assert methods == ["add_counts", "add_counts", *["trial"] * 4, "ready"]
    tallies = dict(arguments for method, arguments in first.reports if method == "add_counts")
    assert (tallies[KERNEL.name].cases, tallies["another"].shrink_cases) == (3, 1)
    assert [method for method, _ in second.reports] == ["ready"], "once"


def test_a_message_counts_each_value_apart() -> None:
    heads = [Case(kernel=KERNEL.name, problem=replace(PROBLEM, heads=n, kv_heads=n)) for n in range(1, 61)]
    ((_, (_, tally)),) = worker_main._counts([("trial", (KERNEL.name, "generate", each, PASS, True)) for each in heads])
    assert len(tally.drawn["heads"]) == 60
    whole = Tally()
    whole.merge(tally)
    assert len(whole.drawn["heads"]) == 41


def test_figures_are_counted_by_output() -> None:
    tally = Tally()
    tally.add("generate", case(0), judged(3))
    tally.add("generate", case(1), judged(2))
    assert tally.outputs["o"] == Worst(2, worst=3 / 40, sigmas=3 / 9, r=0.03, aggregated=1, doubted=1)
    assert tally.outputs["dq"] == Worst(2, worst=0.1, z=0.5)


def test_counts_of_rare_values_are_kept_together_wherever_they_are_counted() -> None:
    one, other = Tally(drawn={"heads": {str(n): 1 for n in range(40)}}), Tally(drawn={"heads": {"39": 2, "40": 3, "41": 4}})
    one.merge(other)
    assert (one.drawn["heads"]["39"], one.drawn["heads"][OTHERS], len(one.drawn["heads"])) == (3, 7, 41)


def test_the_only_worker_has_its_trials_counted_at_once(state: KernelState, counted: list[Case]) -> None:
    """The record of a run that is killed has them: the tally that its events pass on is read while they wait."""
    coordinator = Coordinator(CampaignContext(Settings(out=None)), [state], FunctionExecutor(lambda _: PASS), 1)
    coordinator.trial(KERNEL.name, "generate", case(0), PASS)
    assert (state._tally.cases, len(counted)) == (1, 1)


def test_counting_is_not_interrupted(state: KernelState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle counted a trial by half."""
    context = CampaignContext(Settings(out=None), end=time.monotonic() + 60)
    coordinator = Coordinator(context, [state], FunctionExecutor(lambda _: PASS), 2)
    group = ScriptedGroup(context, Scripted([], []))
    add = Tally.add

    def interrupted(self: Tally, *trial: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        add(self, *trial)

    monkeypatch.setattr(Tally, "add", interrupted)
    state.note("generate", case(0), PASS)
    with interrupted_once(), pytest.raises(KeyboardInterrupt):
        group._step(coordinator)
    assert state._tally.cases == 1
    assert not state._uncounted


def test_a_summary_compares_all_cases(state: KernelState, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failing Cases have in common is known of those alone that are counted."""
    seen: list[int] = []
    monkeypatch.setattr(type(state.findings), "compare", lambda _, contrast: seen.append(contrast._seen))
    for number in range(4):
        state.note("generate", case(number), PASS)
    state.summary()
    assert seen == [4]
