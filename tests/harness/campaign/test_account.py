"""Where the time of a campaign goes: the steps of a worker add up to its time, and each has what belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engine import Sleeper, campaign, tidy
from support.runs import FunctionExecutor, run_kernel

from attnfuzz.harness.campaign import account as module
from attnfuzz.harness.campaign.account import STAGES, STEPS, Account, OfCheck, Times, counted
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.drawer import Drawer
from attnfuzz.harness.campaign.events import CampaignFinished, Event, FailureFound, Shrunk, TrialFinished
from attnfuzz.harness.campaign.journal import Journal
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.outcomes import ExecutionError
from attnfuzz.harness.isolation.statistics import Statistics
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

__all__ = ["tidy"]

KERNEL = registry.get("torch.reference_cpu")
WRONG = Failure(kernel=KERNEL.name, kind="mismatch", output="o", check="element", message="O is wrong")
SENT, CHILD, NEW, WRITTEN, HEARD, DRAWN, FRESH = 0.125, 0.5, 2.0, 0.0625, 0.25, 4.0, 8.0
"""Seconds of the parts of a run, all different, and exact in binary."""


class Watch:
    """A clock that only goes on when `sleep` is called."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """The clock of every account."""
    watch = Watch()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: watch.now))
    return watch


class SlowExecutor(FunctionExecutor):
    """Sleeps in every call; its first Case, and each after a fresh start, waits for a new child too."""

    def __init__(self, watch: Watch, failing: Callable[[Case], bool] = lambda _: False) -> None:
        super().__init__(self._judged, self._renew)
        self._watch, self._failing, self._new = watch, failing, True
        self.renewed = 0

    def begin(self, case: Case, *, patient: bool = False) -> None:
        self._watch.sleep(SENT)
        if self._new:
            self._new = False
            self._watch.sleep(NEW)
            self.statistics.start_seconds += NEW
            self.statistics.children += 1
        super().begin(case, patient=patient)

    def _judged(self, case: Case) -> Verdict:
        self._watch.sleep(CHILD)
        failures = (WRONG,) if self._failing(case) else ()
        return Verdict(status="fail" if failures else "pass", failures=failures, seconds={"kernel": 0.25, "oracle": 0.125})

    def _renew(self) -> None:
        self._watch.sleep(FRESH)
        self._new = True
        self.renewed += 1


class SlowJournal(Journal):
    """Sleeps in every write."""

    def __init__(self, folder: Path, watch: Watch) -> None:
        super().__init__(folder)
        self._watch, self.writes = watch, 0

    def _slow(self) -> None:
        self._watch.sleep(WRITTEN)
        self.writes += 1

    def launch(self, *cases: Case, deaths: int = 0) -> None:
        self._slow()
        super().launch(*cases, deaths=deaths)

    def launch_next(self, cases: Sequence[Case]) -> None:
        self._slow()
        super().launch_next(cases)

    def landed(self, *failing: Case) -> None:
        self._slow()
        super().landed(*failing)


def test_every_second_of_a_turn_is_in_its_step(watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take, waits = Drawer.take, []

    def slow_take(self: Drawer, *, wait: bool, until: float | None = None) -> Any:
        if wait:
            watch.sleep(DRAWN)
            waits.append(until)
        return take(self, wait=wait, until=until)

    monkeypatch.setattr(Drawer, "take", slow_take)
    executor, journal = SlowExecutor(watch), SlowJournal(tmp_path, watch)

    def listen(event: Event) -> None:
        watch.sleep(HEARD * isinstance(event, TrialFinished))

    settings = Settings(max_examples=12, out=None, plain=True)
    times = run_kernel(KERNEL, settings, executor, listener=listen, journal=journal).times
    assert waits
    assert times.worker == {
        "turn": 0.0,
        "campaign": 12 * HEARD,
        "draw": len(waits) * DRAWN,
        "journal": journal.writes * WRITTEN,
        "start": FRESH + NEW,
        "trial": 12 * (SENT + CHILD),
        "shrink": 0.0,
        "other": 0.0,
    }
    assert sum(times.worker.values()) == watch.now
    assert times.child == {**dict.fromkeys(STAGES, 0.0), "kernel": 12 * 0.25, "oracle": 12 * 0.125}
    assert (times.cases, times.batches, times.children) == (12, 12, 1)


def test_what_a_finding_takes_is_shrinking(watch: Watch, tmp_path: Path) -> None:
    """The trial that shows it is none of it; children that its trials wait for are, and so are their stages."""
    opened: list[float] = []
    closed: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, FailureFound):
            opened.append(watch.now)
        elif isinstance(event, Shrunk):
            closed.append(watch.now)

    executor = SlowExecutor(watch, lambda case: case.problem.heads >= 2)
    settings = Settings(max_examples=30, out=None, plain=True)
    run = run_kernel(KERNEL, settings, executor, listener=listen, journal=SlowJournal(tmp_path, watch))
    assert run.tally.shrink_cases > 3
    assert executor.renewed > 1
    times = run.times
    [begin], [end] = opened, closed
    assert times.worker["shrink"] == end - begin
    assert times.worker["trial"] == times.cases * (SENT + CHILD)
    # The worker's first child, and the one after those of shrinking, if that has ended its own.
    assert times.worker["start"] in (FRESH + NEW, FRESH + 2 * NEW)
    assert times.cases == 30
    assert times.child["kernel"] == 30 * 0.25
    assert sum(times.worker.values()) == watch.now


def test_a_batch_counts_once(watch: Watch) -> None:
    account = Account(Statistics())
    problem = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=8, dim_v=8)
    plain, twice = (Case(kernel="k", problem=problem, check=each) for each in ("oracle", "twice"))
    account.judged([plain, plain, twice], [Verdict(status="pass", seconds={"judge": 0.5, "kernel": 0.25})] * 3)
    account.judged([plain], [Verdict(status="pass")])
    times = account.take()
    assert (times.cases, times.batches, times.child["judge"]) == (4, 2, 1.5)
    assert times.checks == {"oracle": OfCheck(3, 1.5), "twice": OfCheck(1, 0.75)}
    assert (times + Times(checks={"twice": OfCheck(1, 1.0)})).checks == {"oracle": OfCheck(3, 1.5), "twice": OfCheck(2, 1.75)}
    assert (Times() + times).checks == times.checks
    assert account.take() == Times(), "the next account begins at 0"


def test_a_step_within_a_step_is_not_in_both(watch: Watch) -> None:
    account = Account(Statistics())

    class Slow:
        def ask(self, seconds: float, *, error: bool = False) -> float:
            watch.sleep(seconds)
            if error:
                raise OSError("planted")
            return seconds

    slow = counted(Slow(), account, "campaign")
    with account.step("draw"):
        watch.sleep(1.0)
        assert slow.ask(2.0) == 2.0
        with pytest.raises(OSError, match="planted"):
            slow.ask(4.0, error=True)
        watch.sleep(8.0)
    watch.sleep(16.0)
    times = account.take()
    assert {name: each for name, each in times.worker.items() if each} == {"draw": 9.0, "campaign": 6.0, "other": 16.0}
    assert (times + times).worker["draw"] == 18.0


def test_the_time_of_a_kernel_that_broke_is_not_the_next_ones(watch: Watch) -> None:
    class Breaks(SlowExecutor):
        def finish(self) -> Verdict:
            if self.cases[-1].kernel == KERNEL.name:
                watch.sleep(64.0)
                raise ExecutionError("planted")
            return super().finish()

    kernels = [KERNEL, registry.get("fault.nan")]
    settings = Settings(max_examples=5, out=None, plain=True)
    done = run_campaign(kernels, settings, lambda _: None, Breaks(watch))
    assert [each.kernel for each in done.broken] == [KERNEL.name]
    times = {each.kernel: each.times for each in done.summaries}
    assert times[KERNEL.name] == Times()
    other = times["fault.nan"]
    assert other is not None
    assert other.worker["trial"] == 5 * (SENT + CHILD)
    assert sum(other.worker.values()) == other.worker["trial"] + FRESH + NEW


@pytest.mark.slow
def test_times_of_worker_processes_are_added_up(tidy: Path) -> None:
    seconds = 0.02
    done, events = campaign([Sleeper("test.account", seconds)], tidy, max_examples=150, workers=2)
    times = _times(done)
    trials = [each.verdict for each in events if isinstance(each, TrialFinished)]
    assert times.cases == times.batches == len(trials) == 150
    assert times.children >= 2
    assert times.worker["start"] > 0
    # Every Verdict's stages have come, and fit into the time that workers waited for them.
    assert times.child["kernel"] == pytest.approx(sum(each.seconds["kernel"] for each in trials))
    assert times.child["kernel"] > 150 * seconds
    assert times.worker["trial"] > sum(times.child.values())
    assert times.worker["journal"] > 0 < times.worker["campaign"]
    assert times.worker["shrink"] == 0
    assert set(times.worker) == set(STEPS)
    assert all(each >= 0 for each in times.worker.values())
    assert sum(times.worker.values()) < 2 * done.seconds


def _times(done: CampaignFinished) -> Times:
    [summary] = done.summaries
    assert summary.times is not None
    return summary.times
