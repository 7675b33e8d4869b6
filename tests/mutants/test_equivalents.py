"""Mutants that are called equivalent give the same bits as their kernel, whatever their reasons say."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import pytest
from support.mutants import kernel_of

from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Inputs, Kernel
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Recipe

pytest.importorskip("libcst")

from support.operators import bank

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

CONFIG = Config(tile_m=16, tile_n=16, num_warps=4, num_stages=1)
SIZES = (0, 1, 15, 16, 17, 33)
"""Around the edges of a tile."""
VARLEN = [
    Problem(seqlens_q=lengths[0], seqlens_k=lengths[1], heads=2, kv_heads=1, dim_qk=24, dim_v=17, dtype="float32", causal=causal)
    for lengths in [tuple(zip(*itertools.product(SIZES, SIZES), strict=True))]
    for causal in (None, "bottom_right")
]
"""Two problems: all pairs of those lengths, with dims that are padded."""


@functools.cache
def inputs_of(problem: Problem) -> Inputs:
    return materialise(problem, Recipe(pattern="normal_scaled", seed=7), "cpu")


def outputs(kernel: Kernel, problem: Problem) -> list[torch.Tensor]:
    built, inputs = kernel.build(problem, CONFIG, "cpu"), inputs_of(problem)
    o, lse = built.forward(inputs)
    assert lse is not None
    return [o, lse, *built.backward(inputs, o, lse)[:3]]


@functools.cache
def right(kernel: str, problem: Problem) -> list[torch.Tensor]:
    return outputs(registry.get(kernel), problem)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("id_", bank.equivalents("triton.varlen"))
def test_it_gives_the_same_bits(id_: str) -> None:
    pytest.importorskip("triton")
    kernel = kernel_of(bank.operator_mutant(id_))
    for problem in VARLEN:
        for got, expected in zip(outputs(kernel, problem), right("triton.varlen", problem), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.interpreted
def test_a_mutant_that_is_not_equivalent_gives_others() -> None:
    """One that loses the last key where a tile begins with it, in dQ alone: a hundred Cases are needed to find it."""
    pytest.importorskip("triton")
    kernel = kernel_of(bank.operator_mutant("triton.varlen._backward_queries.bound.14"))
    same = [torch.equal(*each) for each in zip(outputs(kernel, VARLEN[1]), right("triton.varlen", VARLEN[1]), strict=True)]
    assert same == [True, True, False, True, True]
