"""Batches in child processes: each Case has the Verdict that it has alone, whatever one of them does to the child."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace as replace_task
from typing import Any

import pytest
from msgspec.structs import replace

from attnfuzz.harness.campaign import context
from attnfuzz.harness.campaign.backlog import Backlog
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.context import Batch
from attnfuzz.harness.campaign.events import Event, TrialFinished
from attnfuzz.harness.campaign.plan import plan_of
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.outcomes import Death, OutOfTime, Task
from attnfuzz.harness.isolation.supervisor import Running
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case, Recipe
from attnfuzz.strategies.draw import drawn
from attnfuzz.strategies.trials import trial_cases

SIZE, FAULTY = 5, 2


@pytest.fixture(scope="module")
def executor() -> Iterator[Isolated]:
    isolated = Isolated("cpu", deadline=4.0, memory=3 << 30)
    yield isolated
    isolated.close()


def cases_of(name: str, faulty: int | None = FAULTY) -> list[Case]:
    """Cases of which one alone triggers the fault: three keys, or for a wrong shape three queries."""
    kernel = registry.get(name)
    plain = Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=16, dim_v=16, dtype="float32")
    wrong = replace(plain, seqlens_q=(3,), seqlens_k=(3,))
    return [
        Case(
            kernel=name,
            problem=wrong if number == faulty else plain,
            config=kernel.configs(plain)[0],
            recipe=Recipe(seed=number),
        )
        for number in range(SIZE)
    ]


def plain(verdicts: list[Verdict]) -> list[str]:
    """Verdicts without what differs from run to run."""
    failures = [tuple(replace(failure, detail="") for failure in each.failures) for each in verdicts]
    return [repr(replace(each, seconds={}, failures=kept)) for each, kept in zip(verdicts, failures, strict=True)]


def identities(verdict: Verdict) -> tuple[str, list[Identity]]:
    return verdict.status, [each.identity for each in verdict.failures]


ALONE = {
    "raises": "exception",
    "nan": "nonfinite",
    "bounds": "guard",
    "shape": "contract",
    "abort": "crash",
    "exit": "crash",
    "pipes": "crash",
    "pyloop": "hang",
    "huge": "out-of-memory",
    "memory": "out-of-memory",
}


SLOW = ("memory", "pyloop", "raises")


@pytest.mark.parametrize("slug", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in ALONE])
def test_a_fault_in_the_middle_is_that_of_its_case(slug: str, executor: Isolated) -> None:
    cases = cases_of(f"fault.{slug}")
    executor.statistics.lost.clear()
    verdicts = executor.batch(cases)
    assert [each.status for each in verdicts] == ["fail" if at == FAULTY else "pass" for at in range(SIZE)]
    assert verdicts[FAULTY].failures[0].kind == ALONE[slug]
    died = ALONE[slug] in ("crash", "hang") or slug == "memory"
    assert bool(executor.statistics.lost) == died or ALONE[slug] == "out-of-memory"
    others = [at for at in range(SIZE) if at != FAULTY]
    executor.fresh()
    alone = {at: executor.trial(cases[at]) for at in others}
    assert plain([verdicts[at] for at in others]) == plain([alone[at] for at in others])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("torch.reference_cpu", 800),
        ("triton.varlen", 600),
        ("tilelang.varlen", 600),
    ],
)
def test_drawn_cases_of_every_check_have_the_verdicts_that_they_have_alone(name: str, count: int) -> None:
    """As a campaign draws and gathers them: figures included."""
    kernel = registry.get(name)
    if reason := kernel.unavailable("cpu"):
        pytest.skip(reason)
    plan = plan_of(kernel, Settings(device="cpu"))
    # Of two variants, so that a compiler takes seconds.
    strategy = trial_cases(kernel, device="cpu", limits=plan.limits, variants=plan.variants[:2])
    cases = drawn(strategy, seed=5, examples=2 * count, quota=count)
    assert len(cases) >= 0.9 * count
    backlog = Backlog(lambda _: None)
    backlog.add(0, [({"": each}, each) for each in cases])
    backlog.mark([""])
    isolated = Isolated("cpu", backends=[kernel.backend])
    differing = []
    try:
        while batch := backlog.take(Batch(True, 32, 1e9, lambda _: 1.0)):
            together = isolated.batch(batch)
            alone = [isolated.trial(each) for each in batch]
            assert [identities(each) for each in together] == [identities(each) for each in alone]
            differing += [case for case, a, b in zip(batch, plain(together), plain(alone), strict=True) if a != b]
        assert not isolated.statistics.lost
        assert not differing
    finally:
        isolated.close()


def test_a_memory_fault_of_an_interpreted_kernel_is_that_of_its_case(executor: Isolated) -> None:
    name = "fault.memory.unwritten"
    kernel = registry.get(name)
    if reason := kernel.unavailable("cpu"):
        pytest.skip(reason)
    problem = Problem(seqlens_q=(3,), seqlens_k=(4,), dim_qk=64, dim_v=64)
    config = min(kernel.configs(problem), key=lambda each: each.tile("tile_m") * each.tile("tile_n"))
    cases = [Case(kernel=name, problem=problem, config=config, recipe=Recipe(seed=number)) for number in range(2)]
    assert plain(executor.batch(cases)) == plain([executor.trial(each) for each in cases])


def test_a_death_that_only_the_whole_batch_shows_is_kept(executor: Isolated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the Cases before it left in the process: all pass alone, and the Case at work has the crash."""
    cases = cases_of("fault.abort", None)
    executor.describe()
    begin, finish = executor._supervisor.begin, executor._supervisor.finish
    batches: list[Any] = []

    def watched(task: Any) -> Any:
        if task.target.endswith(":trials"):
            batches.append(begin(task))
            return batches[-1]
        return begin(task)

    def ends(running: Any, until: float | None = None) -> Any:
        outcome = finish(running, until)
        return Death("exit", "kernel", 0.1, 0.0, -11, "", 0, 3) if running in batches else outcome

    monkeypatch.setattr(executor._supervisor, "begin", watched)
    monkeypatch.setattr(executor._supervisor, "finish", ends)
    verdicts = executor.batch(cases)
    assert [bool(each.failures) for each in verdicts] == [False, False, False, True, False]
    [failure] = verdicts[3].failures
    assert (failure.kind, failure.check, failure.message) == ("crash", "kernel", "SIGSEGV")


def test_a_batch_for_which_there_is_no_memory_runs_as_two(executor: Isolated, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that other processes use may have no memory for 96 Cases at once; one by one they take many times as long."""
    kernel = registry.get("fault.nan")
    of = Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=16, dim_v=16, dtype="float32")
    cases = [Case(kernel=kernel.name, problem=of, config=kernel.configs(of)[0], recipe=Recipe(seed=at)) for at in range(20)]
    supervisor, sizes, lost = executor._supervisor, list[int](), executor.statistics.batches_lost
    begin = supervisor.begin

    def refuses(task: Task, **options: Any) -> Running:
        sizes.append(len(task.cases))
        if len(task.cases) > 10:
            task = replace_task(task, target="attnfuzz.no_such_module:function")
        return begin(task, **options)

    monkeypatch.setattr(supervisor, "begin", refuses)
    assert [each.status for each in executor.batch(cases)] == ["pass"] * 20
    assert [each for each in sizes if each] == [20, 10, 10]
    assert executor.statistics.batches_lost == lost + 1


@pytest.mark.parametrize("count", [1, SIZE])
def test_a_batch_that_an_error_leaves_at_work_is_ended(count: int, executor: Isolated) -> None:
    """The next kernel must not wait for it, nor have its Verdicts."""
    executor.begin_batch(cases_of("fault.pyloop", 0)[:count])
    at_work = executor._begun[2] if executor._begun else executor._batch and executor._batch.running
    assert at_work
    executor.fresh()
    assert at_work.child not in executor._supervisor._children.living
    with pytest.raises(AssertionError):
        executor.finish_batch()
    assert executor._begun is None
    start = time.monotonic()
    [verdict] = executor.batch(cases_of("fault.pyloop", None)[:1])
    assert (verdict.status, time.monotonic() - start < 3.0) == ("pass", True)
    assert len(executor.batch(cases_of("fault.nan", None))) == SIZE
    with pytest.raises(AssertionError):
        executor.finish_batch()


@pytest.mark.parametrize(("slug", "count"), [pytest.param("abort", 24, marks=pytest.mark.slow), ("nan", 32)])
def test_a_campaign_in_batches_tries_the_same_cases(
    slug: str, count: int, executor: Isolated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one batch is examined the next one runs, or its child dies: what is tried and what fails stay the same."""
    settings = Settings(max_examples=count, out=None, shrink=0.5, max_failures=None)
    tried = []
    for batch in (Batch(), Batch(True, 8, 1e9)):
        monkeypatch.setitem(context._BATCHES, "cpu", batch)
        cases = dict[str, bool]()

        def heard(event: Event, cases: dict[str, bool] = cases) -> None:
            if isinstance(event, TrialFinished) and event.phase == "generate":
                assert event.case.id not in cases
                cases[event.case.id] = bool(event.verdict.failures)

        done = run_campaign([registry.get(f"fault.{slug}")], settings, heard, executor)
        [summary] = done.summaries
        assert summary.cases == len(cases) == count
        tried.append((cases, {each.identity for each in summary.findings}))
        executor.fresh()
    assert tried[0] == tried[1]
    assert sum(tried[0][0].values()) > 2


def test_a_batch_ends_with_the_time_of_the_run(executor: Isolated) -> None:
    cases = cases_of("fault.pyloop")
    executor.trial(cases[0])
    start = time.monotonic()
    executor.limit(start + 1.0)
    try:
        with pytest.raises(OutOfTime):
            executor.batch(cases)
        assert time.monotonic() - start < 3.0
    finally:
        executor.limit(None)
    assert executor.batch(cases[:FAULTY])[0].status == "pass", "the next batch has a child of its own"
