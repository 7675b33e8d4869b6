"""The budget is time on the wall, compiles included: at its end trials end, shrinking has a grace, the rest is counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.engine import Compiling, Sleeper, campaign, tidy, tried
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign import coordinator, drawer
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.events import CompileFinished, Event, FailureFound, TrialFinished
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.executors import Compiled, Compiler
from attnfuzz.harness.isolation.outcomes import OutOfTime
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.faults.host import FaultyReference
from attnfuzz.strategies.case import Case

__all__ = ["tidy"]

PASS = Verdict(status="pass")
FAIL = Verdict(
    status="fail", failures=(Failure(kernel="torch.reference_cpu", kind="mismatch", output="o", check="element", message=""),)
)
LATE = 2.0
"""Seconds that a run may take beyond its budget and the grace."""


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only where this module sleeps, at once: a busy machine changes nothing."""
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_trial_that_never_ends_does_not_prolong_the_run(workers: int, tidy: Path) -> None:
    """The deadline is far away: at the end of the budget its Case is no finding, and is not left for the next run."""
    done, events = campaign(["fault.pyloop"], tidy, budget=9.0, deadline=300.0, workers=workers)
    assert 9.0 <= done.seconds < 9.0 + LATE
    assert (done.findings, done.lost) == ((), None)
    assert tried(events), "some passed before"


@pytest.mark.slow
def test_shrinking_after_the_end_is_bounded_by_the_grace(tidy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial takes a second, so that shrinking would take a minute."""
    monkeypatch.setattr(Settings, "grace", property(lambda _: 3.0))
    kernel = Sleeper("test.slow", 0.7, wrong=True)
    done, events = campaign([kernel], tidy, budget=9.0, workers=1)
    assert [each for each in events if isinstance(each, FailureFound)]
    assert done.seconds < 9.0 + 3.0 + LATE
    [finding] = done.findings
    assert finding.partly
    assert finding.shrink_trials > 0
    assert Path(str(finding.path)).exists()


class Late(FunctionExecutor):
    """Each trial takes `seconds`, and fails; it ends at the limit, as in a child process."""

    def __init__(self, seconds: float) -> None:
        super().__init__(lambda _: FAIL)
        self._seconds, self._until = seconds, float("inf")
        self.out_of_time = 0

    def limit(self, until: float | None) -> None:
        self._until = float("inf") if until is None else until

    def finish(self) -> Verdict:
        time.sleep(max(0.0, min(self._seconds, self._until - time.monotonic())))
        if time.monotonic() >= self._until:
            self.out_of_time += 1
            raise OutOfTime
        return super().finish()

    def mapped(self, case: Case) -> str:
        self.finish()
        return "nothing ran"


@pytest.mark.usefixtures("instant")
def test_a_trial_of_shrinking_that_takes_long_ends_with_the_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found shortly before the end; each trial of a smaller Case takes longer than the grace."""
    monkeypatch.setattr(Settings, "grace", property(lambda _: 0.5))
    kernel, executor, events = registry.get("torch.reference_cpu"), Late(1.2), list[Event]()
    settings = Settings(budget=3.0, out=str(tmp_path), plain=True)
    done = run_campaign([kernel], settings, events.append, executor)
    assert executor.out_of_time
    assert done.seconds < 3.0 + 0.5 + 0.5
    [finding] = done.findings
    assert finding.partly
    assert Path(str(finding.path)).exists()
    assert not list(tmp_path.glob("inflight/*"))


@pytest.mark.usefixtures("instant")
def test_a_failing_relation_is_kept_without_time_for_the_oracle_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Case is judged again against the oracle alone, which does not end before the run does."""
    monkeypatch.setattr(Settings, "grace", property(lambda _: 0.5))
    relation = Verdict(
        status="fail", failures=(Failure(kernel="torch.reference_cpu", kind="relation", output="o", check="twice", message=""),)
    )

    class Relations(Late):
        def finish(self) -> Verdict:
            self._seconds = 0.0 if self.cases[-1].check != "oracle" or not self.related else 60.0
            super().finish()
            self.related |= self.cases[-1].check != "oracle"
            return relation if self.cases[-1].check != "oracle" else PASS

        related = False

    done = run_campaign([registry.get("torch.reference_cpu")], Settings(budget=2.0, out=None), lambda _: None, Relations(0.0))
    [finding] = done.findings
    assert (finding.identity.kind, finding.partly) == ("relation", True)


# --- compiles


class SlowCompiler:
    """One compile after the other, each `seconds` long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: list[Case] = []
        self._since = 0.0

    def start(self, case: Case) -> None:
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(case)

    def poll(self, seconds: float) -> list[Compiled]:
        time.sleep(min(seconds, 0.01))
        if not self._waiting or time.monotonic() < self._since + self._seconds:
            return []
        self._since = time.monotonic()
        return [Compiled(self._waiting.pop(0), self._seconds)]

    def close(self) -> None:
        self._waiting.clear()


class Slow(FunctionExecutor):
    """All trials pass in a tenth of a second; the compiler is slow."""

    def __init__(self, compile_seconds: float) -> None:
        super().__init__(self._pass)
        self._compile_seconds = compile_seconds

    def _pass(self, _: Case) -> Verdict:
        time.sleep(0.1)
        return PASS

    def compiler(self) -> Compiler:
        return SlowCompiler(self._compile_seconds)


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns and rounds of a few Cases, so that a budget of seconds has many."""
    monkeypatch.setattr(coordinator, "_SHORTEST", 0.1)
    monkeypatch.setattr(drawer, "EXAMPLES", 5)


def compiled_kernels(count: int) -> list[FaultyReference]:
    """Kernels of two compile keys each."""
    return [FaultyReference(f"test.compiled{number}", lambda *_: None, lambda: None) for number in range(count)]


def run(kernels: Sequence[FaultyReference], executor: FunctionExecutor, **changed: object) -> tuple[object, list[Event]]:
    events: list[Event] = []
    for each in kernels:
        registry.register(each)
    try:
        settings = Settings(**{"plain": True, "out": None, "jobs": 1, **changed})  # type: ignore[arg-type]
        return run_campaign(kernels, settings, events.append, executor), events
    finally:
        for each in kernels:
            registry.unregister(each.name)


def assert_breadth_first(events: Sequence[Event], kernels: set[str]) -> None:
    compiles = [each.kernel for each in events if isinstance(each, CompileFinished)]
    assert set(compiles[: len(kernels)]) == kernels, "each kernel's first comes before any kernel's second"
    last = max(at for at, each in enumerate(events) if isinstance(each, CompileFinished))
    before = {each.kernel for each in events[:last] if isinstance(each, TrialFinished)}
    assert before == kernels, "Trials of all kernels begin before the last variant is compiled"


@pytest.mark.usefixtures("short_turns", "instant")
def test_trials_begin_before_the_last_variant_is_compiled() -> None:
    kernels = compiled_kernels(4)
    done, events = run(kernels, Slow(0.5), budget=7.0)
    assert_breadth_first(events, {each.name for each in kernels})
    assert all(each.unreached == 0 for each in done.summaries)  # type: ignore[attr-defined]


def _cases(events: Sequence[Event], kernel: str) -> list[Case]:
    return [each.case for each in events if isinstance(each, TrialFinished) and each.kernel == kernel]


@pytest.mark.usefixtures("short_turns", "instant")
@pytest.mark.slow
def test_variants_without_code_are_not_tried_and_are_counted() -> None:
    """Of four kernels, the last has nothing compiled when the time is over, and the others one variant of two at most."""
    kernels = compiled_kernels(4)
    done, events = run(kernels, Slow(1.5), budget=3.9)
    summaries = {each.kernel: each for each in done.summaries}  # type: ignore[attr-defined]
    masks = {name: {each.problem.causal for each in _cases(events, name)} for name in summaries}
    assert all(len(masks[name]) <= each.compiles <= 1 for name, each in summaries.items())
    assert (summaries["test.compiled0"].compiles, len(masks["test.compiled0"])) == (1, 1)
    assert (summaries["test.compiled3"].compiles, len(masks["test.compiled3"])) == (0, 0)
    assert 0 < summaries["test.compiled0"].unreached < summaries["test.compiled3"].unreached
    assert done.seconds < 3.9 + LATE  # type: ignore[attr-defined]


@pytest.mark.usefixtures("instant")
def test_with_a_limit_on_cases_the_compiler_does_not_decide_which_are_tried() -> None:
    ids = []
    for seconds in (0.0, 0.2):
        done, events = run(compiled_kernels(2), Slow(seconds), max_examples=30)
        first = next(at for at, each in enumerate(events) if isinstance(each, TrialFinished))
        name = events[first].kernel  # type: ignore[union-attr]
        assert not [each for each in events[first:] if isinstance(each, CompileFinished) and each.kernel == name]
        ids.append(sorted(tried(events)))
        assert [each.cases for each in done.summaries] == [30, 30]  # type: ignore[attr-defined]
    assert ids[0] == ids[1]


@pytest.mark.usefixtures("short_turns", "instant")
def test_with_all_variants_a_budget_draws_the_same_cases_and_tries_some_before_the_last_compile() -> None:
    _, events = run(compiled_kernels(1), Slow(0.0), max_examples=30)
    without = sorted(tried(events))
    done, events = run(compiled_kernels(1), Slow(0.5), max_examples=30, budget=60.0, all_variants=True)
    assert sorted(tried(events)) == without
    kinds = [type(each) for each in events if isinstance(each, TrialFinished | CompileFinished)]
    assert kinds.index(TrialFinished) < len(kinds) - 1 - kinds[::-1].index(CompileFinished)
    assert done.seconds < 30.0  # type: ignore[attr-defined]


@pytest.mark.slow
def test_workers_begin_before_the_last_variant_is_compiled(tmp_path: Path, tidy: Path) -> None:
    kernels = [Compiling(f"test.compiling{number}", 1.5, tmp_path) for number in range(4)]
    done, events = campaign(kernels, None, budget=18.0, workers=2, jobs=1)
    assert_breadth_first(events, {each.name for each in kernels})
    assert done.seconds < 18.0 + LATE
