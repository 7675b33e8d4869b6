"""float32 products by three of tf32: what tensor cores cut of sums is in the budgets of kernels that declare it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from msgspec.structs import replace
from support.emulated.arithmetic import Float32
from support.emulated.kernel import TF32X3, Emulated

from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Deviations
from attnfuzz.kernels.problem import Needs, OutputName, Problem
from attnfuzz.oracles.budgets.bounds import budgets
from attnfuzz.oracles.budgets.forward_formulas import accumulated
from attnfuzz.oracles.budgets.roundings import Rounding
from attnfuzz.oracles.formats import CUT_OF_TF32X3, EPS, OF_TF32X3
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


@pytest.mark.parametrize(("queries", "keys", "wrong"), [(8, 1500, {"o", "dq", "dk"}), (1500, 8, {"dv"})])
def test_long_sums_pass_where_it_is_declared(queries: int, keys: int, wrong: set[OutputName]) -> None:
    long = replace(problem(keys, 16, 16), seqlens_q=(queries,), softmax_scale=0.05, needs=Needs())
    assert failing(DECLARED, long, "uniform01", 0) == set()
    assert failing(Deviations(), long, "uniform01", 0) == wrong


def test_steps_of_products_and_of_sums_have_what_is_cut() -> None:
    plain, cut = (Rounding.of("float32", each, "cpu") for each in (Deviations(), DECLARED))
    assert [plain.steps(dim) for dim in (8, 16, 192)] == [1, 1, 12]
    assert [4 * (cut.steps(dim) - plain.steps(dim)) for dim in (8, 16, 192)] == [34.5, 45.0, 276.0]
    one, more = torch.ones(1, dtype=torch.float64), []
    for steps in (3.0, torch.full((1,), 3.0, dtype=torch.float64)):
        of_plain, of_cut = (float(accumulated(steps, 2 * one, 5 * one, each)) / EPS for each in (plain, cut))
        assert of_plain == pytest.approx(4 * 3 * 2 + 6 * 48**0.5 * 5)
        more.append(of_cut - of_plain)
    assert more == pytest.approx([2 * (21 * 3 + 24)] * 2)


def test_it_is_of_float32_on_the_devices_that_are_declared() -> None:
    assert not Rounding.of("float16", DECLARED, "cpu").tf32x3
    assert not Rounding.of("float32", DECLARED, "cuda").tf32x3
    assert not Rounding.of("float32", replace(DECLARED, tf32_on=("cpu",)), "cpu").tf32x3, "plain tf32 is coarser"


def test_budgets_of_dp_grow_with_its_dims() -> None:
    """Scores are 0, P is a half. One key has most of dP, whose error is most of the error of its dS."""
    inputs = materialise(replace(problem(2, 16, 256), needs=Needs()), Recipe(pattern="uniform01"), "cpu")
    q, k, v = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k), inputs.v.clone()
    q[:, :, 0], v[0] = 1.0, v[0] / 64
    inputs = dataclasses.replace(inputs, q=q, k=k, v=v)
    allowed = [budgets(inputs, each, "cpu").outputs["dk"].allowed[0, 1, 0] for each in (Deviations(), DECLARED)]
    d_p = inputs.d_o[:, 0].double() @ inputs.v[1, 0].double()
    # Three queries; what D and the sums over keys and rows have more is a third of this.
    cut = CUT_OF_TF32X3 * 256 + OF_TF32X3
    assert float(allowed[1] - allowed[0]) > 0.99 * float(d_p.sum()) / 2 * cut * EPS
