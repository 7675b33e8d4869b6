"""Dims of which V's rows are narrower than K's: ptxas 12.8 has made wrong code of them (kernels/triton/padding.py)."""

from __future__ import annotations

import pytest
from support.triton_mode import interpreted

from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Dtype, Problem
from attnfuzz.kernels.triton.padding import padded_dims
from attnfuzz.strategies.case import Case


def _problem(kernel: str, dim_qk: int, dim_v: int, dtype: Dtype = "bfloat16") -> Problem:
    packing = "dense" if "dense" in registry.get(kernel).capabilities.packings else "ragged"
    return Problem(seqlens_q=(70,), seqlens_k=(150,), dim_qk=dim_qk, dim_v=dim_v, dtype=dtype, packing=packing)


@pytest.mark.parametrize(
    ("dims", "dtype", "exact", "expected"),
    [
        ((115, 15), "bfloat16", False, (128, 64)),
        ((33, 15), "float16", True, (64, 64)),
        ((31, 15), "float16", False, (32, 32)),
        ((255, 33), "bfloat16", False, (256, 64)),
        ((15, 115), "bfloat16", False, (16, 128)),
        ((192, 128), "bfloat16", False, (256, 128)),
        ((1, 1), "bfloat16", False, (16, 16)),
        ((115, 15), "float32", False, (128, 32)),
        ((115, 15), "float32", True, (128, 16)),
    ],
)
def test_the_dims_of_tiles(dims: tuple[int, int], dtype: Dtype, exact: bool, expected: tuple[int, int]) -> None:
    of = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=dims[0], dim_v=dims[1], dtype=dtype)
    assert padded_dims(of, exact=exact) == expected


@interpreted
@pytest.mark.parametrize("kernel", ["triton.flex", "triton.varlen"])
def test_narrow_rows_of_v_are_right_on_the_cpu(kernel: str) -> None:
    of = _problem(kernel, 35, 7)
    verdict = run_trial(Case(kernel=kernel, problem=of, config=registry.get(kernel).configs(of)[0]), "cpu")
    assert verdict.status == "pass", verdict.failures


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [pytest.param("triton.flex", marks=pytest.mark.slow), "triton.varlen"])
@pytest.mark.parametrize(
    "dims", [(115, 15), pytest.param((33, 15), marks=pytest.mark.slow), pytest.param((255, 15), marks=pytest.mark.slow)], ids=str
)
def test_every_config_of_warp_groups_is_right(kernel: str, dims: tuple[int, int]) -> None:
    of = _problem(kernel, *dims)
    for config in [each for each in registry.get(kernel).configs(of) if each.integer("tile_m") >= 64]:
        verdict = run_trial(Case(kernel=kernel, problem=of, config=config), "cuda")
        assert verdict.status == "pass", (config, verdict.failures)
