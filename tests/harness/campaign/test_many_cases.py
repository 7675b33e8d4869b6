"""Many Cases: stored ones do not delay the start of a run, and tried ones do not fill the memory."""

from __future__ import annotations

import gc
import math
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.engine import campaign
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.context import CampaignContext, WorkerContext
from attnfuzz.harness.campaign.coordinator import Coordinator, LocalTurns
from attnfuzz.harness.campaign.corpus import Corpus, read_case
from attnfuzz.harness.campaign.events import Event, Finding, KernelStarted, TrialFinished
from attnfuzz.harness.campaign.explain import Explanation, Part
from attnfuzz.harness.campaign.kernel_state import KernelState
from attnfuzz.harness.campaign.plan import plan_of
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.campaign.worker import Worker
from attnfuzz.harness.campaign.worker_link import Turn, TurnEnd
from attnfuzz.harness.judge.failure import Failure, Place
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case, Recipe

KERNEL = registry.get("torch.reference_cpu")
PASS = Verdict(status="pass")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_ten_thousand_stored_cases_do_not_delay_the_start(workers: int, tmp_path: Path) -> None:
    problem = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=64, dim_v=64, dtype="float32")
    case = Case(kernel=KERNEL.name, problem=problem, config=KERNEL.configs(problem)[0])
    failure = Failure(kernel=KERNEL.name, kind="mismatch", output="o", check="element", message="O is wrong")
    corpus, verdict = Corpus(tmp_path / "out"), Verdict(status="fail", failures=(failure,))

    def seconds(out: Path) -> float:
        start, first = time.monotonic(), list[float]()

        def listen(event: Event) -> None:
            if isinstance(event, TrialFinished) and not first:
                first.append(time.monotonic() - start)

        campaign([KERNEL.name], out, listen, budget=20.0, workers=workers)
        return first[0]

    without = seconds(tmp_path / "empty")
    for number in range(10_000):
        from msgspec.structs import replace

        corpus.write(Finding(failure.identity, replace(case, recipe=Recipe(seed=number)), verdict, shrunk=True), seed=0)
    delay = seconds(tmp_path / "out") - without
    print(f"10,000 stored Cases delay the first trial by {delay:.2f} s with {workers} workers")
    assert delay < 5.0


def test_reading_stored_cases_is_quick_enough_for_many(tmp_path: Path) -> None:
    """The start of a run reads all of them: 400 in a fifth of a second is 10,000 in five."""
    problem = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=64, dim_v=64, dtype="float32")
    failure = Failure(kernel=KERNEL.name, kind="mismatch", output="o", check="element", message="O is wrong")
    corpus, verdict = Corpus(tmp_path), Verdict(status="fail", failures=(failure,))
    for number in range(400):
        case = Case(kernel=KERNEL.name, problem=problem, config=KERNEL.configs(problem)[0], recipe=Recipe(seed=number))
        corpus.write(Finding(failure.identity, case, verdict, shrunk=True), seed=0)
    events: list[Event] = []
    start, first = time.monotonic(), list[float]()

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, KernelStarted):
            first.append(time.monotonic() - start)

    settings = Settings(max_examples=1, out=str(tmp_path), plain=True)
    run_campaign([KERNEL], settings, listen, FunctionExecutor(lambda _: PASS))
    assert len([each for each in events if isinstance(each, TrialFinished)]) == 1
    assert first[0] < 1.0, "a busy machine takes five times as long"


@pytest.mark.parametrize("expected", [1.0, math.nan])
def test_reading_a_stored_case_takes_few_calls(expected: float, tmp_path: Path) -> None:
    """With annotations evaluated for each file, as msgspec does, it took 725, and 4,000 files a third of a budget of 10 s."""
    problem = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=64, dim_v=64, dtype="float32")
    place = Place(sequence=0, position=1, head=0, dim=2, got=2.0, expected=expected, allowed=0.1)
    failure = Failure(kernel=KERNEL.name, kind="mismatch", output="o", check="element", message="O is wrong", place=place)
    corpus, verdict = Corpus(tmp_path), Verdict(status="fail", failures=(failure,))
    part = Part(part="seqlen_q", value="3", fails=("1", "2"), passes=("0",))
    explanation = Explanation(parts=(part,) * 12, trials=40)
    for number in range(21):
        case = Case(kernel=KERNEL.name, problem=problem, config=KERNEL.configs(problem)[0], recipe=Recipe(seed=number))
        corpus.write(Finding(failure.identity, case, verdict, shrunk=True, explanation=explanation), seed=0)
    paths = sorted(corpus.folder.iterdir())
    read_case(paths[0])
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        files = [read_case(each) for each in paths[1:]]
    finally:
        sys.setprofile(None)
    assert all(each.finding.place is not None and each.finding.explanation == explanation for each in files)
    print(f"{calls / len(files):.0f} calls for each file")
    assert calls / len(files) < 400


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_share_the_stored_cases_and_draw_none_before(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """150 stored Cases are three turns' worth."""
    monkeypatch.setattr("attnfuzz.harness.campaign.replays.SHARE", 1.0)
    problem = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=64, dim_v=64, dtype="float32")
    failure = Failure(kernel=KERNEL.name, kind="mismatch", output="o", check="element", message="O is wrong")
    corpus, verdict = Corpus(tmp_path), Verdict(status="fail", failures=(failure,))
    for number in range(150):
        case = Case(kernel=KERNEL.name, problem=problem, config=KERNEL.configs(problem)[0], recipe=Recipe(seed=number))
        corpus.write(Finding(failure.identity, case, verdict, shrunk=True), seed=0)
    settings = Settings(max_examples=160, out=None, plain=True)
    context, executor = CampaignContext(settings), FunctionExecutor(lambda _: PASS)
    state = KernelState(KERNEL, plan_of(KERNEL, settings), context, list(corpus.of(KERNEL.name)))
    coordinator = Coordinator(context, [state], executor, workers)
    turns = [coordinator.turn(number % workers) for number in range(workers)]
    assert [isinstance(each, Turn) and each.only_earlier for each in turns] == [True] * workers
    for number, turn in enumerate(turns):
        assert isinstance(turn, Turn)
        coordinator.end_turn(number, KERNEL.name, TurnEnd(1.0, not_tried=turn.earlier))
    Worker(lambda _: (KERNEL, state.plan), WorkerContext(settings, executor), coordinator, LocalTurns(coordinator)).work()
    assert {each.recipe.seed for each in executor.cases[:150]} == set(range(150))
    assert len(executor.cases) == len(set(executor.cases)) == 160


@pytest.mark.slow
def test_three_thousand_cases_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker and its campaign remember of Cases has an end, or grows by an id for each where their number has."""
    monkeypatch.setattr("attnfuzz.harness.campaign.runner._PASSED", 200)
    settings = Settings(max_examples=3000, out=None, plain=True)
    context = CampaignContext(settings)
    executor = FunctionExecutor(lambda _: PASS)
    state = KernelState(KERNEL, plan_of(KERNEL, settings), context)
    coordinator = Coordinator(context, [state], executor)
    worker = Worker(lambda _: (KERNEL, state.plan), WorkerContext(settings, executor), coordinator, LocalTurns(coordinator))
    worker.work()
    assert len(executor.cases) == len({each.id for each in executor.cases}) == 3000
    run = worker._runs[KERNEL.name]
    assert len(run._runner.memo) == 200
    backlog, rounds = run._supply._backlog, state.rounds
    assert (len(backlog), len(backlog._left), len(backlog._cases)) == (0, 0, 0)
    assert (len(rounds._untried), len(rounds._round_of), len(rounds._undrawn), len(rounds._returned)) == (0, 0, 0, 0)
    assert len(rounds._known) == 3000
    assert (len(state.findings.closed), len(state.findings._open), len(state.earlier._queue or ())) == (0, 0, 0)
    assert (len(coordinator.compiles._active), len(coordinator.compiles._queues)) == (0, 0)


@pytest.mark.slow
def test_a_run_of_hours_keeps_no_more_objects_than_one_of_minutes() -> None:
    """Ten thousand Cases more leave not even one object each behind; until the first six thousand what is remembered fills."""
    text = (
        '{"status": "pass", "figures": {"o": {"elements": 64, "worst": 0.5}}, "seconds": {"kernel": 0.25},'
        ' "device": "cpu (of a kind)", "versions": {"python": "3.11.7", "torch": "2.13.0"}}'
    )
    objects: dict[int, int] = {}
    count = 0

    def look(event: Event) -> None:
        nonlocal count
        if isinstance(event, TrialFinished):
            count += 1
            executor.cases.clear()
            if count in (6000, 16000):
                gc.collect()
                objects[count] = sys.getallocatedblocks()
            if count == 16000:
                raise KeyboardInterrupt

    settings = Settings(budget=600, out=None, plain=True, in_process=True)
    executor = FunctionExecutor(lambda _: msgspec.json.decode(text, type=Verdict))
    run_campaign([KERNEL], settings, look, executor)
    assert objects[16000] - objects[6000] < 5000
