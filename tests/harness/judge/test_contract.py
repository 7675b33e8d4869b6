"""Outputs whose elements share memory are refused; other strides than contiguous ones are allowed."""

from __future__ import annotations

import pytest
import torch

from attnfuzz.harness.judge.judge import judge
from attnfuzz.harness.judge.truth import truth
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.contract import Deviations, Outputs
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.strategies.case import Recipe

PROBLEM = Problem(seqlens_q=(2, 3), seqlens_k=(2, 2), heads=2, kv_heads=2, dim_qk=4, dim_v=4, needs=Needs(outputs=("o",)))


def judged(o: torch.Tensor, recipe: Recipe):
    inputs = materialise(PROBLEM, recipe, "cpu")
    return judge("k", inputs, Outputs(o=o), truth(inputs, Deviations(), "cpu"))


@pytest.mark.parametrize(
    "o",
    [
        torch.zeros(1, 2, 4).half().expand(5, 2, 4),
        torch.zeros(5, 2, 1).half().expand(5, 2, 4),
        torch.zeros(()).half().expand(5, 2, 4),
        torch.zeros(64).half().as_strided((5, 2, 4), (4, 4, 1)),
        torch.zeros(64).half().as_strided((5, 2, 4), (7, 4, 1)),
    ],
    ids=["rows expanded", "dims expanded", "one element", "rows on heads", "rows over heads in part"],
)
def test_elements_that_share_memory_are_refused(o: torch.Tensor) -> None:
    """Also where the values are right: V = 0 gives O = 0."""
    (failure,) = judged(o, Recipe(pattern="constant_v")).failures
    assert (failure.kind, failure.output, failure.check) == ("contract", "o", "strides")
    assert failure.message == f"O has strides {o.stride()} where memory of its own for each element is expected"


@pytest.mark.parametrize(
    "strides",
    [(8, 4, 1), (1, 5, 10), (16, 8, 2), (2, 1, 10), (100, 4, 1)],
    ids=["contiguous", "transposed", "every second", "heads innermost", "pitch"],
)
def test_other_strides_are_right(strides: tuple[int, ...]) -> None:
    recipe = Recipe()
    inputs = materialise(PROBLEM, recipe, "cpu")
    expected = truth(inputs, Deviations(), "cpu")["o"].expected.transpose(0, 1).half()
    o = torch.full((1000,), torch.nan).half().as_strided((5, 2, 4), strides)
    o.copy_(expected)
    assert judged(o, recipe).status == "pass"


def test_interleaved_elements_that_share_none_are_right() -> None:
    recipe = Recipe()
    inputs = materialise(PROBLEM, recipe, "cpu")
    expected = truth(inputs, Deviations(), "cpu")["o"].expected.transpose(0, 1).half()
    # Heads 3 apart, dims 2 apart: 0 2 4 6 and 3 5 7 9.
    o = torch.full((100,), torch.nan).half().as_strided((5, 2, 4), (10, 3, 2))
    o.copy_(expected)
    assert judged(o, recipe).status == "pass"
