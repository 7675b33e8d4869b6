"""How long a stage may take: the full deadline for what has not run yet, then a multiple of its usual time."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from attnfuzz.harness.isolation.deadlines import Deadlines, scores_of
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

CASE = Case(kernel="k", problem=Problem(seqlens_q=(4, 0, 10), seqlens_k=(5, 7, 20), heads=3, dim_qk=16, dim_v=16))
SCORES = 3 * (20 + 200)


def learned(seconds: float = 0.1) -> Deadlines:
    deadlines = Deadlines(60.0, None)
    for _ in range(3):
        deadlines.learn("k", "code", {"kernel": seconds}, SCORES)
    return deadlines


def test_scores_are_those_of_all_heads_and_sequences() -> None:
    assert scores_of(CASE) == SCORES
    assert scores_of(replace(CASE, problem=replace(CASE.problem, causal="top_left"))) == SCORES


@pytest.mark.parametrize(
    ("code", "scores", "kernel"), [("code", SCORES, 2.0), ("code", 4 * SCORES, 2.0), ("other", SCORES, 60.0)]
)
def test_code_that_has_run_has_twenty_times_its_usual_time(code: str, scores: int, kernel: float) -> None:
    assert learned().of("k", code, scores)["kernel"] == kernel


@pytest.mark.parametrize(("full", "times", "kernel"), [(60.0, 1, 30.0), (5.0, 1, 5.0), (60.0, 20, 40.0)])
def test_a_process_that_shares_the_gpu_has_a_least_time(full: float, times: int, kernel: float) -> None:
    deadlines = Deadlines(full, None)
    for _ in range(3):
        deadlines.learn("k", "code", {"kernel": 0.1}, SCORES)
    usual = deadlines.of("k", "code", SCORES, times)
    assert usual["kernel"] == min(full, times * 2.0)
    assert deadlines.shared(usual)["kernel"] == kernel
    deadlines.note_hang("k", "kernel")
    assert deadlines.shared(deadlines.of("k", "code", SCORES, times))["kernel"] == min(full, 30.0)
    assert deadlines.shared(deadlines.full) == deadlines.full


def test_the_latest_codes_are_remembered() -> None:
    """Where Cases have modifiers, nearly each has a code of its own: a set of their keys grew by a kilobyte for each."""
    deadlines = learned()
    for number in range(10_000):
        deadlines.learn("k", f"{number}", {"kernel": 0.1}, SCORES)
        if number % 1000 == 0:
            deadlines.learn("k", "code", {"kernel": 0.1}, SCORES)
    assert len(deadlines._finished) <= 4096
    assert [deadlines.of("k", code, SCORES)["kernel"] for code in ("code", "9999", "8000", "5000")] == [2.0, 2.0, 2.0, 60.0]


def test_a_case_with_many_more_scores_than_any_before_has_the_full_deadline() -> None:
    """On a GPU that fifteen others used, a relation of 46,000 tokens was taken for a hang after two seconds."""
    deadlines = learned()
    assert deadlines.of("k", "code", 4 * SCORES + 1)["kernel"] == 60.0
    deadlines.learn("k", "code", {"kernel": 1.0}, 4 * SCORES + 1)
    assert deadlines.of("k", "code", 4 * SCORES + 1)["kernel"] == 20.0


def test_a_kernel_that_is_known_to_hang_costs_no_full_deadline_for_a_large_case() -> None:
    deadlines = learned()
    deadlines.note_hang("k", "kernel")
    assert deadlines.of("k", "code", 100 * SCORES)["kernel"] == 1.0


def test_a_kernel_that_is_known_to_hang_has_little_time_for_a_small_case() -> None:
    """Large Cases, and the first of each process, take many times as long as the small ones that shrinking tries."""
    deadlines = learned()
    for seconds in (0.2, 0.2, 0.2, 3.0):
        deadlines.learn("k", "code", {"kernel": seconds}, 10)
    deadlines.learn("k", "code", {"kernel": 9.0}, 4 * SCORES)
    assert deadlines.of("k", "code", 10)["kernel"] == 60.0, "suspected only: 20 times the longest of all"
    deadlines.note_hang("k", "kernel")
    assert deadlines.of("k", "code", 10)["kernel"] == 12.0, "four times the longest of as few scores"
    assert deadlines.of("k", "code", 0)["kernel"] == 12.0, "of the fewest"
    assert deadlines.of("k", "code", 4 * SCORES)["kernel"] == 36.0
    for _ in range(10):
        deadlines.learn("k", "code", {"kernel": 0.2}, 10)
    assert deadlines.of("k", "code", 10)["kernel"] == 2.0, "ten times the median of the latest"
    assert deadlines.of("k", "code", 10, times=3)["kernel"] == 6.0
