"""float32 products by three of tf32: what tensor cores cut of scores and of dP is in the budgets of kernels that declare it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.emulated.arithmetic import Float32
from support.emulated.kernel import TF32X3, Emulated

from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Deviations
from attnfuzz.kernels.problem import Needs, OutputName, Problem
from attnfuzz.strategies.case import Case, Pattern, Recipe

DECLARED = TF32X3.capabilities.deviations
SEEDS = range(2)


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def problem(keys: int, dim_qk: int, dim_v: int) -> Problem:
    """LSE of one key is its score, a sum of `dim_qk` products; dQ and dK of more keys have dP, a sum of `dim_v`."""
    return Problem(
        seqlens_q=(3,), seqlens_k=(keys,), dim_qk=dim_qk, dim_v=dim_v, dtype="float32", softmax_scale=1.0, needs=Needs(dlse=True)
    )


def failing(
    declared: Deviations, of: Problem, pattern: Pattern, seed: int, float32: Float32 = "tf32x3"
) -> set[OutputName | None]:
    """The outputs that fail of a kernel whose products are `float32`."""
    kernel = Emulated("test.tf32x3", float32="tf32x3")
    kernel.capabilities = replace(kernel.capabilities, deviations=declared)
    kernel.float32 = float32
    registry.register(kernel)
    case = Case(kernel=kernel.name, problem=of, recipe=Recipe(pattern=pattern, seed=seed), config=Config())
    return {each.output for each in run_trial(case, "cpu").failures}


@pytest.mark.parametrize("pattern", ["uniform01", "normal", "sparse"])
@pytest.mark.parametrize("dims", [(192, 128), (16, 256), (256, 32)])
@pytest.mark.parametrize("keys", [1, 9])
def test_a_right_kernel_that_declares_it_passes(keys: int, dims: tuple[int, int], pattern: Pattern) -> None:
    for seed in SEEDS:
        assert failing(DECLARED, problem(keys, *dims), pattern, seed) == set()


@pytest.mark.parametrize(("keys", "dims"), [(1, (192, 128)), (9, (256, 32))])
def test_scores_of_one_sign_fail_where_it_is_not_declared(keys: int, dims: tuple[int, int]) -> None:
    for seed in SEEDS:
        assert failing(Deviations(), problem(keys, *dims), "uniform01", seed) == {"lse"}


@pytest.mark.parametrize("pattern", ["uniform01", "normal"])
@pytest.mark.parametrize("keys", [1, 9])
def test_plain_tf32_fails_where_it_is_declared(keys: int, pattern: Pattern) -> None:
    for seed in SEEDS:
        assert {"o", "lse"} <= failing(DECLARED, problem(keys, 256, 32), pattern, seed, "tf32")
