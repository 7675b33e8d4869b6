"""Failures that show only in some runs: the minimal Case shows one in half of its runs, or the finding says why not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign.chance import HALF, RUNS, Sampler, often
from attnfuzz.harness.campaign.corpus import Corpus, read_case
from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.campaign.explainer import Explainer
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.campaign.shrink import Shrinker
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.shrink_steps import larger

FAILED = Failure(kernel="acme.flash", kind="mismatch", output="o", check="element", message="")
FAIL, PASS = Verdict(status="fail", failures=(FAILED,)), Verdict(status="pass")
Chance = Callable[[Problem], float]


def keys(p: Problem) -> int:
    return max(p.seqlens_k)


CHANCES: dict[str, Chance] = {
    "the same for all": lambda p: 0.2,
    "more with more keys": lambda p: min(1.0, keys(p) / 64),
    "more with fewer keys": lambda p: min(1.0, 4 / keys(p)),
    "each block of its own": lambda p: 1 - 0.8 ** (p.batch * p.heads),
    "from three keys on": lambda p: 0.7 if keys(p) >= 3 else 0.0,
    "seldom below 20 keys": lambda p: 0.9 if keys(p) >= 20 else 0.05,
}


def case_of(n_k: int = 40) -> Case:
    problem = Problem(seqlens_q=(7, 1), seqlens_k=(n_k, 3), heads=4, kv_heads=2, dim_qk=8, dim_v=8)
    return Case(kernel="acme.flash", problem=problem)


def runner_of(chance: Chance, seed: int) -> TrialRunner:
    numbers = random.Random(seed)
    return TrialRunner(FunctionExecutor(lambda case: FAIL if numbers.random() < chance(case.problem) else PASS))


def shrunk(chance: Chance, seed: int, case: Case | None = None, **options: Any) -> tuple[Finding, TrialRunner]:
    runner = runner_of(chance, seed)
    finding = Finding(FAILED.identity, case or case_of(), FAIL)
    return Shrinker(finding, runner, lambda _: True, (), **options).shrink(60.0), runner


@pytest.mark.parametrize("name", CHANCES)
def test_a_minimal_case_shows_its_failure_in_half_of_its_runs_or_says_why_not(name: str) -> None:
    chance = CHANCES[name]
    for seed in range(20):
        finding, runner = shrunk(chance, seed)
        assert often(finding.rate) != bool(finding.seldom), "either, never both"
        assert chance(finding.case.problem) > 0.19
        assert runner.trials < 800


@pytest.mark.parametrize("name", [each for each in CHANCES if each != "the same for all"])
def test_what_some_cases_show_often_ends_at_one_of_them(name: str) -> None:
    """Shrinking by one failure in twelve runs ended at Cases that fail once in thirty, or left the first one as it was."""
    findings = [shrunk(CHANCES[name], seed)[0] for seed in range(20)]
    assert sum(CHANCES[name](each.case.problem) >= 0.4 and not each.partly for each in findings) >= 12


def test_the_rate_is_that_of_the_minimal_case() -> None:
    """The first shows it in 12 of 100 runs, one with few keys every time."""
    seen = [shrunk(lambda p: 1.0 if keys(p) <= 4 else 0.12, seed)[0] for seed in range(10)]
    assert {each.rate for each in seen if keys(each.case.problem) <= 4} == {None}
    assert sum(keys(each.case.problem) <= 4 for each in seen) >= 8


def test_where_the_minimal_case_shows_it_seldom_a_larger_one_is_kept() -> None:
    """A race of blocks: one of a single head hardly shows it."""
    finding, _ = shrunk(CHANCES["each block of its own"], 3, case_of(1))
    p = finding.case.problem
    assert p.batch * p.heads >= 3
    assert often(finding.rate)


def test_there_must_be_room_for_a_larger_case() -> None:
    case = case_of(1)
    for seed in range(6):
        finding, _ = shrunk(lambda p: 0.25, seed, case, room=lambda _: False)
        assert finding.seldom in ("", "no larger Case shows it in half of its runs (tried: 0)") or finding.partly


def test_the_reason_is_in_the_case_file(tmp_path: Path) -> None:
    finding, runner = next(each for each in (shrunk(lambda _: 0.2, seed) for seed in range(9)) if each[0].seldom)
    finding = Finding(**{name: getattr(finding, name) for name in Finding.__slots__} | {
        "explanation": Explainer(finding, runner, {}, lambda _: True).explain(60.0, 60.0)
    })  # fmt: skip
    stored = read_case(Corpus(tmp_path).write(finding, seed=0)).finding
    assert stored.rate == finding.rate
    assert stored.explanation is not None
    assert stored.explanation.ended.endswith("says nothing; no larger Case shows it in half of its runs (tried: 7)")


def test_a_case_that_fails_nearly_always_does_not_end_at_one_that_fails_sometimes() -> None:
    """What shows in four runs has no rate at first; the Case at the end shows it in one of four."""
    for seed in range(20):
        finding, _ = shrunk(lambda p: 0.97 if keys(p) >= 10 else 0.25, seed)
        assert keys(finding.case.problem) >= 10 or finding.rate is not None


def test_no_time_is_no_rate() -> None:
    runner = runner_of(lambda _: 0.5, 0)
    sampler = Sampler(runner, lambda verdict: verdict == FAIL, lambda _: True)
    assert sampler.measured(case_of()) is None
    assert sampler.fails_as_often(case_of(), HALF) is None
    assert runner.trials == 0


@pytest.mark.parametrize(("chance", "counts"), [(1.0, True), (0.8, True), (0.3, False), (0.0, False)])
def test_half_of_the_runs_is_more_than_chance(chance: float, counts: bool) -> None:
    """A Case that fails in 30 of 100 runs counts as one of half in one of twenty samples."""
    answers = []
    for seed in range(40):
        runner = runner_of(lambda _: chance, seed)
        answers.append(Sampler(runner, lambda verdict: verdict == FAIL, lambda _: False).fails_as_often(case_of(), HALF))
        assert runner.trials <= RUNS
    assert sum((each is not None) == counts for each in answers) >= 36


def test_larger_cases_have_more_of_everything_and_no_other_values() -> None:
    case = case_of()
    for each in larger(case):
        assert each.recipe == case.recipe
        assert each.config == case.config
        assert each.problem.groups == case.problem.groups
        assert each.problem.batch * each.problem.heads * each.problem.total_k > 8 * 43
