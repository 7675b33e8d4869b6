"""Detection power is measured rightly: its arithmetic, campaigns that find a bug, that find none, and that end early."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace
from support import detection
from support.detection import Attempt, Found, attempt, beyond, rates
from support.mutants import mutants

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
