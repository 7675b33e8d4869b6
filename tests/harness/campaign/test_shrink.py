"""The order in which simpler Cases are tried: few trials, and those of few tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.campaign.shrink import Shrinker
from attnfuzz.harness.judge.failure import Failure, Kind
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.problem import Layout, Problem
from attnfuzz.strategies.case import Case, Recipe
from attnfuzz.strategies.shrink_steps import change

PASS = Verdict(status="pass")
LAYOUTS = dict.fromkeys(("layout_q", "layout_k", "layout_v", "layout_do"), Layout(order="htd", pitch=3))
PROBLEM = Problem(
    seqlens_q=(90,),
    seqlens_k=(400,),
    heads=4,
    kv_heads=2,
    dim_qk=8,
    dim_v=8,
    softmax_scale=0.5,
    slack_q=3,
    softcap=20.0,
    **LAYOUTS,
)
CASE = Case(kernel="acme.flash", problem=PROBLEM, recipe=Recipe(pattern="needle", q_scale=4.0, v_scale=2.0, seed=9))


def shrunk(fails: Callable[[Case], bool], kind: Kind = "mismatch") -> tuple[Case, list[Case]]:
    """The minimal Case, and all that were tried."""
    failed = Failure(kernel="acme.flash", kind=kind, output="o", check="element", message="")
    fail = Verdict(status="fail", failures=(failed,))
    executor = FunctionExecutor(lambda case: fail if fails(case) else PASS)
    finding = Finding(failed.identity, CASE, fail)
    return Shrinker(finding, TrialRunner(executor), lambda _: True, ()).shrink(60.0).case, executor.cases


def test_a_change_that_did_not_help_is_tried_last() -> None:
    """A single key passes; that was tried again after each step, in every Case on the way."""
    case, tried = shrunk(lambda case: case.problem.seqlens_k[0] >= 3 and case.recipe.pattern == "needle")
    assert (case.problem.seqlens_q, case.problem.seqlens_k) == ((1,), (3,))
    assert case.recipe == Recipe(pattern="needle")
    assert sum(each.problem.seqlens_k == (1,) for each in tried) <= 4
    assert len(tried) <= 60


def test_steps_that_lead_back_end_where_all_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their Verdicts are known after the first time, so that no trial would notice that time is over."""
    circle = [replace(CASE, recipe=Recipe(seed=seed)) for seed in range(3)]

    def steps(case: Case, *_: object) -> list[Case]:
        return [circle[(case.recipe.seed + 1) % 3], circle[(case.recipe.seed + 2) % 3]]

    monkeypatch.setattr("attnfuzz.harness.campaign.shrink.simpler", steps)
    case, tried = shrunk(lambda _: True)
    assert case == circle[0], "from seed 9 to 1, 2 and 0"
    assert set(circle) <= set(tried)


def test_a_change_that_helps_only_after_another_is_taken_in_the_end() -> None:
    """Plain values show it with one head alone, which is reached after they were tried."""
    case, _ = shrunk(lambda case: case.problem.softcap == 0 or case.recipe.pattern == "needle")
    assert case.recipe == Recipe()
    assert case.problem == Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=8, dim_v=8)


def test_most_trials_are_of_few_tokens() -> None:
    _, tried = shrunk(lambda case: case.problem.softcap > 0 and case.recipe.pattern == "needle")
    assert sum(each.problem.total_k > 40 for each in tried) <= 8


def test_plain_values_that_show_it_among_many_tokens_are_kept() -> None:
    """With uniform values three keys show it, with normal ones 16: the slope of a softcap is near 1 for small scores."""
    case, _ = shrunk(lambda case: case.problem.seqlens_k[0] >= (16 if case.recipe.pattern == "normal" else 3))
    assert (case.recipe, case.problem.seqlens_k) == (Recipe(), (16,))


def test_few_cases_hang_on_the_way_to_the_minimal_one() -> None:
    """Each costs a deadline: the Case itself is not run again, and a nearly minimal one is reached at once."""
    hung = 0

    def hangs(case: Case) -> bool:
        nonlocal hung
        hung += case.problem.softcap > 0
        return case.problem.softcap > 0

    case, tried = shrunk(hangs, "hang")
    assert case.problem == Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=8, dim_v=8, softcap=20.0)
    assert CASE not in tried
    assert hung <= 4


def test_the_last_run_of_a_hang_takes_a_deadline_but_no_step_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Deadline(FunctionExecutor):
        def begin(self, case: Case, *, patient: bool = False) -> None:
            now[0] += 100.0 if patient else 0.1
            super().begin(case, patient=patient)

    failed = Failure(kernel="acme.flash", kind="hang", check="kernel", message="")
    fail = Verdict(status="fail", failures=(failed,))
    executor = Deadline(lambda case: fail if case.problem.softcap > 0 else PASS)
    finding = Shrinker(Finding(failed.identity, CASE, fail), TrialRunner(executor), lambda _: True, ()).shrink(60.0)
    assert finding.case.problem.total_k == 1
    assert not finding.partly
    assert now[0] > 1060.0


def test_what_hangs_by_many_parts_at_once_is_shrunk_step_by_step() -> None:
    def hangs(case: Case) -> bool:
        p = case.problem
        return p.softcap > 0 and p.heads > 1 and p.seqlens_k[0] >= 3 and case.recipe.pattern == "needle"

    case, tried = shrunk(hangs, "hang")
    assert (case.problem.seqlens_k, case.problem.heads, case.recipe) == ((3,), 2, Recipe(pattern="needle"))
    assert CASE in tried


def test_a_case_that_was_slow_once_is_no_hang() -> None:
    """It passes when it is run again in the end: the one that was found is shrunk step by step then."""
    slow = iter([True])
    case, tried = shrunk(lambda case: case.problem.heads == 4 or next(slow, False), "hang")
    assert (case.problem.heads, case.problem.seqlens_k) == (4, (1,))
    assert tried.count(CASE) >= 2


def test_a_change_is_the_new_value_of_each_part() -> None:
    other = replace(CASE, problem=replace(PROBLEM, seqlens_q=(7,)), recipe=replace(CASE.recipe, seed=1), check="twice")
    assert change(CASE, other) == {("seqlens_q", (7,)), ("seed", 1), ("check", "twice")}
    assert change(CASE, CASE) == frozenset()
