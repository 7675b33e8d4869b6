"""Detection power is measured rightly: its arithmetic, a campaign that finds a bug, one that does not, and wrong use."""

from __future__ import annotations

from types import ModuleType

import pytest
from click.testing import CliRunner
from support.benchmarks import loaded
from support.detection import Attempt, Found, attempt, rates
from support.mutants import mutants

from attnfuzz.strategies.case import case_from_json


@pytest.fixture(scope="module")
def command() -> ModuleType:
    return loaded("mutants")


def found(cases: int | None, *, shrinking: float = 1.0, simple: bool = True) -> Found:
    return Found("A", 0, cases, 2.0, shrinking=shrinking, simple=simple and cases is not None)


def test_rates_count_what_was_never_found_as_the_most() -> None:
    few = rates([found(3), found(1, shrinking=4.0), found(None), found(9, shrinking=2.0, simple=False)])
    assert (few.attempts, few.killed, few.median, few.ninetieth, few.shrinking, few.simple) == (4, 3, 9, None, 2.0, 2)
    assert rates([found(each) for each in range(1, 11)]).ninetieth == 10
    none = rates([found(None)])
    assert (none.killed, none.median, none.shrinking) == (0, None, 0.0)


def test_a_campaign_finds_a_bug_and_shrinks_it() -> None:
    pytest.importorskip("triton")
    one = attempt(Attempt("MSK-05", 0, 60))
    assert one.cases is not None
    assert one.cases <= 60
    assert one.kind in ("mismatch", "nonfinite", "aggregate")
    case = case_from_json(one.case)
    assert case.kernel == mutants()["MSK-05"].name
    assert case.problem.causal is None


def test_a_campaign_that_is_too_short_says_how_near_it_came() -> None:
    pytest.importorskip("triton")
    one = attempt(Attempt("DIM-04", 0, 1))
    assert one.cases is None
    assert one.worst
    assert all(0 <= each < 1 for each in one.worst.values())


def test_an_unknown_mutant_is_refused(command: ModuleType) -> None:
    done = CliRunner().invoke(command.main, ["MSK-99"])
    assert done.exit_code == 2
    assert "ID='MSK-99': no mutant has that id; it is one of ADD-01" in done.output
