"""Detection power is measured rightly: its arithmetic, campaigns that find a bug, that find none, and that end early."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support import detection, tasks
from support.detection import Attempt, Found, attempt, beyond, rates, spread
from support.mutants import mutants
from support.verdict import processes

from attnfuzz.harness.campaign.events import TrialFinished
from attnfuzz.harness.isolation.child import ChildError
from attnfuzz.harness.isolation.outcomes import OutOfTime
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Recipe, case_from_json


def found(cases: int | None, *, shrinking: float = 1.0, simple: bool = True) -> Found:
    return Found("A", 0, cases, 2.0, shrinking=shrinking, simple=simple and cases is not None)


def test_rates_count_what_was_never_found_as_the_most() -> None:
    few = rates([found(3), found(1, shrinking=4.0), found(None), found(9, shrinking=2.0, simple=False)])
    assert (few.attempts, few.killed, few.median, few.ninetieth, few.shrinking, few.simple) == (4, 3, 9, None, 2.0, 2)
    assert rates([found(each) for each in range(1, 11)]).ninetieth == 10
    none = rates([found(None)])
    assert (none.killed, none.median, none.shrinking) == (0, None, 0.0)


def test_minimal_cases_are_measured_part_by_part() -> None:
    case = mutants()["MSK-05"].direct_case("mutant.MSK-05")
    p = Problem(seqlens_q=(16, 16), seqlens_k=(1, 0), dim_qk=16, dim_v=16)
    small = replace(case, problem=p, config=Config(tile_m=16, tile_n=16), recipe=Recipe(seed=7))
    assert beyond(small) == ()
    assert beyond(replace(small, recipe=Recipe(pattern="needle"))) == ("values",)
    assert beyond(replace(small, problem=replace(p, seqlens_q=(17, 16)))) == ("tiles",)
    assert beyond(replace(small, problem=replace(p, seqlens_k=(16, 33)))) == ("tiles",)
    assert beyond(replace(small, problem=replace(p, seqlens_q=(1, 0, 0), seqlens_k=(1, 1, 0)))) == ("sequences",)
    assert beyond(replace(small, problem=replace(p, heads=2, kv_heads=2))) == ("kv_heads",)


def test_a_campaign_finds_a_bug_and_shrinks_it() -> None:
    pytest.importorskip("triton")
    one = attempt(Attempt("MSK-05", 0, 60))
    assert one.cases is not None
    assert one.cases <= 60
    assert one.kind in ("mismatch", "nonfinite", "aggregate")
    case = case_from_json(one.case)
    assert case.kernel == mutants()["MSK-05"].name
    assert case.problem.causal is None
    assert one.simple
    assert one.beyond == ()
    assert 0 < one.shrinking < 60
    assert one.tokens == case.problem.total_q + case.problem.total_k


def test_a_campaign_that_is_too_short_says_which_case_came_nearest() -> None:
    pytest.importorskip("triton")
    one = attempt(Attempt("DIM-04", 0, 1))
    assert (one.cases, one.tried) == (None, 1)
    assert one.nearest
    for each in one.nearest.values():
        assert 0 <= each.ratio < 1
        assert case_from_json(each.case).kernel == mutants()["DIM-04"].name


def test_a_campaign_that_ctrl_c_ends_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    run = detection.run_campaign
    monkeypatch.setattr(detection, "run_campaign", lambda *args: dataclasses.replace(run(*args), interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        attempt(Attempt("DIM-04", 0, 1))


def verdict(*, fails: bool) -> Verdict:
    failure = Failure(kernel="mutant.MSK-05", kind="mismatch", output="dq", check="element", message="wrong")
    return Verdict(status="fail" if fails else "pass", failures=(failure,) * fails)


def test_cases_of_a_batch_after_the_first_that_fails_do_not_count() -> None:
    """All of a batch are counted before one of its failures is looked at."""
    case, listener = mutants()["MSK-05"].direct_case("mutant.MSK-05"), detection._Listener()
    for fails in (False, False, True, False, True):
        listener(TrialFinished(case.kernel, "generate", case, verdict(fails=fails)))
    listener(TrialFinished(case.kernel, "shrink", case, verdict(fails=False)))
    assert (listener.drawn, listener.failing) == (3, True)


def test_each_kernel_has_its_share_at_any_time() -> None:
    bank = [each for each in mutants() if mutants()[each].kernel in ("triton.varlen", "triton.paged")]
    order = [mutants()[each].kernel for each in spread(bank)]
    assert sorted(spread(bank)) == sorted(bank)
    whole = order.count("triton.paged")
    assert whole * 0.4 <= order[: len(order) // 2].count("triton.paged") <= whole * 0.6


class Scripted:
    """An executor whose Verdicts are given for each kernel, the last one for good; "time" for none in time."""

    def __init__(self, fails: dict[str, list[Any]]) -> None:
        self.fails, self.processes = fails, 0
        self.limits: list[float | None] = []

    def fresh(self) -> None:
        self.processes += 1

    def limit(self, until: float | None) -> None:
        self.limits.append(until)

    def trial(self, case: Any) -> Verdict:
        left = self.fails[case.kernel]
        fails = left.pop(0) if len(left) > 1 else left[0]
        if fails == "time":
            raise OutOfTime
        return verdict(fails=fails)


MUTANT = mutants()["MSK-05"]
CRASH = Found("MSK-05", 0, 3, 1.0, kind="crash", case=MUTANT.direct_case(MUTANT.name).canonical())
WRONG = dataclasses.replace(CRASH, cases=13, kind="mismatch")
ONCE = "it fails with crash once, and passes that Case 3 times"
EACH = "it fails with crash once in each of 3 campaigns, and passes that Case 3 times"
LATE = "it fails with crash once in each of 3 campaigns, and has no Verdict of that Case again in time"
DEATHS = {
    # Of its campaigns one after the other, its Case run again, and the right kernel's: (Cases to find it, why not, campaigns).
    "it dies again": ([CRASH], [False, True], False, (3, "", 1)),
    "it dies once, and then fails": ([CRASH, WRONG], [False], False, (13, "", 2)),
    "it dies once in each campaign": (
        [CRASH] * 3,
        [False],
        False,
        (None, EACH, 3),
    ),
    "there is no Verdict in time": ([CRASH] * 3, ["time"], False, (None, LATE, 3)),
    "it dies once, and again in the last campaign": ([CRASH] * 3, [*[False] * 6, True], False, (3, "", 3)),
    "the right kernel fails": ([CRASH], [True], True, (None, "triton.varlen fails in the same Case", 1)),
}


@pytest.mark.parametrize(("campaigns", "again", "right", "expected"), list(DEATHS.values()), ids=list(DEATHS))
def test_a_crash_on_a_gpu_counts_where_it_shows_again_and_the_right_kernel_passes(
    campaigns: list[Found], again: list[bool], right: bool, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hang of a busy machine ended a campaign after 13 Cases, and the bug counted as not found."""
    left, executor = list(campaigns), Scripted({MUTANT.name: again, "triton.varlen": [right]})
    monkeypatch.setattr(detection, "_campaign", lambda *_: executor.limits.append(7.0) or left.pop(0))
    task = Attempt("MSK-05", 0, 500, device="cuda")
    found = detection._tried(task, MUTANT, cast("Any", None), cast("Any", executor))
    assert (found.cases, found.otherwise, len(campaigns) - len(left)) == expected
    # 7: a campaign begins. The limit on the runs before it is lifted then.
    later = [at for at, limit in enumerate(executor.limits) if limit == 7.0][1:]
    assert all(executor.limits[at - 1] is None for at in later)
    assert (executor.limits[1] or 0.0) > time.monotonic()


@pytest.mark.parametrize(("budget", "expected"), [(0.0, [0.0]), (60.0, [60.0, 40.0, 20.0]), (22.0, [22.0])])
def test_the_time_of_all_campaigns_is_that_of_one(budget: float, expected: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    executor, budgets, now = Scripted({MUTANT.name: [False]}), list[float](), [100.0]

    def campaign(task: Attempt, kernel: Any, isolated: Any, start: float, left: float) -> Found:
        assert start == 100.0
        budgets.append(left)
        now[0] += 20.0
        return CRASH

    monkeypatch.setattr(detection, "_campaign", campaign)
    monkeypatch.setattr(detection, "time", SimpleNamespace(monotonic=lambda: now[0]))
    task = Attempt("MSK-05", 0, 500, device="cuda", budget=budget)
    assert detection._tried(task, MUTANT, cast("Any", None), cast("Any", executor)).cases is None
    assert budgets == expected


def test_a_crash_on_a_cpu_is_not_the_bugs() -> None:
    executor: Any = Scripted({})
    on_cpu = detection._why_not_found(Attempt("MSK-05", 0, 500), MUTANT, CRASH, executor)
    assert on_cpu == "it fails with crash, which the bug does not cause"


def test_an_error_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(Scripted):
        def close(self) -> None:
            self.processes = -1

    executor = Gone({})

    def run(*_: Any) -> None:
        raise ChildError("no process can be started")

    monkeypatch.setattr(detection, "executor", lambda *_, **more: executor)
    monkeypatch.setattr(detection, "run_campaign", run)
    one = attempt(Attempt("MSK-05", 4, 60, device="cuda"))
    assert (one.mutant, one.seed, one.cases, one.device) == ("MSK-05", 4, None, "cuda")
    assert one.error == "ChildError: no process can be started"
    assert executor.processes == -1


def test_tasks_end_with_their_time_and_what_has_ended_is_there() -> None:
    start = time.monotonic()
    rows = processes.finished(tasks.sleeping, [0.0, 600.0], 2, seconds=8.0)
    assert next(rows) == 0.0
    with pytest.raises(processes.TimeOver):
        next(rows)
    assert time.monotonic() - start < 60


def test_tasks_of_a_lost_process_are_tried_again(tmp_path: Path) -> None:
    files = [str(tmp_path / each) for each in ("right", "dies")]
    assert sorted(processes.finished(tasks.dying_once, files, 2, again=1)) == ["dies", "right"]
    (tmp_path / "dies").unlink()
    with pytest.raises(processes.LostProcess):
        list(processes.finished(tasks.dying_once, files, 2))
