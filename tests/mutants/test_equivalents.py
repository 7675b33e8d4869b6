"""Mutants that are called equivalent give the same bits as their kernel, whatever their reasons say."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.flex import dense
from support.mutants import kernel_of

from attnfuzz.harness.core import environment
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Inputs, Kernel
from attnfuzz.kernels.expressions.tracing import traced
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case, Recipe

pytest.importorskip("libcst")

from support.operators import bank

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.interpreted]
CONFIG = Config(tile_m=16, tile_n=16, num_warps=4, num_stages=1)
SIZES = (0, 1, 15, 16, 17, 33)
"""Around the edges of a tile."""
VARLEN = [
    Problem(seqlens_q=lengths[0], seqlens_k=lengths[1], heads=2, kv_heads=1, dim_qk=24, dim_v=17, dtype="float32", causal=causal)
    for lengths in [tuple(zip(*itertools.product(SIZES, SIZES), strict=True))]
    for causal in (None, "bottom_right")
]
"""Two problems: all pairs of those lengths, with dims that are padded."""


SCORE = traced(lambda score, b, h, q_idx, kv_idx: score * 0.5 + kv_idx)
FLEX = [
    dense(*lengths, batch=1, score=score, causal=causal, heads=2, kv_heads=1)
    for lengths in ((64, 64), (64, 40), (33, 64))
    for score, causal in ((SCORE, None), (SCORE, "bottom_right"), (None, "bottom_right"))
]
"""Whole blocks and others, with a band and without, with a score_mod and without."""
PROBLEMS = {"triton.varlen": VARLEN, "triton.flex": FLEX}
IDS = [id_ for kernel in PROBLEMS for id_ in bank.equivalents(kernel)]


@functools.cache
def inputs_of(problem: Problem) -> Inputs:
    return materialise(problem, Recipe(pattern="normal_scaled", seed=7), "cpu")


def outputs(kernel: Kernel, problem: Problem) -> list[torch.Tensor]:
    """The outputs of each Config; on ragged problems of one, whose tiles the lengths surround."""
    inputs, results = inputs_of(problem), []
    for config in (CONFIG,) if problem.packing == "ragged" else kernel.configs(problem):
        built = kernel.build(problem, config, "cpu")
        o, lse = built.forward(inputs)
        assert lse is not None
        results += [o, lse, *built.backward(inputs, o, lse)[:3]]
    return results


@functools.cache
def right(kernel: str, problem: Problem) -> list[torch.Tensor]:
    return outputs(registry.get(kernel), problem)


@pytest.mark.parametrize("id_", IDS)
def test_it_gives_the_same_bits(id_: str) -> None:
    pytest.importorskip("triton")
    mutant = bank.operator_mutant(id_)
    kernel = kernel_of(mutant)
    for problem in PROBLEMS[mutant.kernel]:
        for got, expected in zip(outputs(kernel, problem), right(mutant.kernel, problem), strict=True):
            assert torch.equal(got, expected)


def test_a_mutant_that_is_not_equivalent_gives_others() -> None:
    """One that loses the last key where a tile begins with it, in dQ alone: a hundred Cases are needed to find it."""
    pytest.importorskip("triton")
    kernel = kernel_of(bank.operator_mutant("triton.varlen._backward_queries.bound.14"))
    same = [torch.equal(*each) for each in zip(outputs(kernel, VARLEN[1]), right("triton.varlen", VARLEN[1]), strict=True)]
    assert same == [True, True, False, True, True]


SURVIVORS = {
    # dO = 1 beyond the sequence makes dP the sum of a row of V, which overflows.
    "triton.varlen._backward_keys.constant.4": (
        Case(
            kernel="triton.varlen",
            problem=Problem(seqlens_q=(3,), seqlens_k=(2,), heads=1, kv_heads=1, dim_qk=64, dim_v=128, dtype="float32"),
            recipe=Recipe(pattern="near_overflow", v_scale=2.0**24),
        ),
        ("nonfinite", "dk"),
    ),
    # A row whose LSE is -10000 is taken for one without keys.
    "triton.flex.preprocess.constant.3": (
        Case(
            kernel="triton.flex",
            problem=dense(3, 1, score=traced(lambda score, b, h, q_idx, kv_idx: score - 10000.0)),
            recipe=Recipe(pattern="zeros"),
        ),
        ("mismatch", "dv"),
    ),
}
"""Cases that are not drawn: what shows the mutants that campaigns do not find."""


@pytest.mark.parametrize("id_", SURVIVORS)
def test_a_survivor_is_not_equivalent(id_: str) -> None:
    pytest.importorskip("triton")
    environment.prepare("cpu")
    case, failure = SURVIVORS[id_]
    case = msgspec.structs.replace(case, config=registry.get(case.kernel).configs(case.problem)[0])
    kernel = registry.register(kernel_of(bank.operator_mutant(id_)))
    try:
        assert run_trial(case, "cpu").status == "pass"
        failures = run_trial(msgspec.structs.replace(case, kernel=kernel.name), "cpu").failures
    finally:
        registry.unregister(kernel.name)
    assert [(each.kind, each.output) for each in failures] == [failure]
    assert id_ not in bank.equivalents(case.kernel)
