"""The last bits of float64 sums, which differ with the width of a frame, change no budget and no statistic."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.overrides import TorchFunctionMode

from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.contract import Deviations, Inputs
from attnfuzz.kernels.problem import Dtype, Problem
from attnfuzz.oracles.budgets import aggregate, backward_formulas, forward_formulas, sums
from attnfuzz.oracles.budgets.bounds import Budget, Budgets, budgets
from attnfuzz.oracles.budgets.repeats import Generic, Repeats
from attnfuzz.oracles.budgets.roundings import Rounding
from attnfuzz.oracles.formats import Format, half_ulp, half_ulp_of_sum, on_grid
from attnfuzz.strategies.case import PATTERNS, Pattern, Recipe

EVERY = (
    Deviations(half_partials=True, ds_from_rounded_p=True),
    Deviations(half_delta_products=True, half_partial_o=True, half_scaled_k=True, half_split_lse=True),
)
FLOAT16 = Format.of("float16")
PLAIN = Problem(seqlens_q=(40, 33), seqlens_k=(35, 24), dim_qk=16, dim_v=16, heads=4, kv_heads=2)
SUMS = ("matmul", "__matmul__", "baddbmm_", "sum")
FIGURES = 1e-4
"""Figures have four digits."""
COUNTS, A_PAIR = 3, 2e-3
"""The last figures of `Repeats` of a frame are mean counts of neighbours, which one pair at the edge of a window changes by a
thousandth in these batches. They matter beyond 1.25."""
PARTS = ("allowed", "random", "b", "flush", "noise", "reorder")


class LastBits(TorchFunctionMode):
    """Moves every float64 sum by up to 2^-51 of the sizes of its terms: by more than another order of additions does."""

    def __init__(self) -> None:
        super().__init__()
        self._random = torch.Generator().manual_seed(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in SUMS and result.dtype == torch.float64:
            size = self._size(func.__name__, args, kwargs or {})
            result.add_(size * (torch.rand(size.shape, generator=self._random, dtype=torch.float64) - 0.5) * 2.0**-50)
        return result

    @staticmethod
    def _size(name: str, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            if name == "sum":
                return args[0].abs().sum(*args[1:], **kwargs).nan_to_num(posinf=0.0)
            return (args[-2].abs() @ args[-1].abs()).nan_to_num(posinf=0.0)


def inputs_of(pattern: Pattern, dtype: Dtype, seed: int = 3) -> Inputs:
    return materialise(replace(PLAIN, dtype=dtype), Recipe(pattern=pattern, seed=seed), "cpu")


def differing(one: Budgets, other: Budgets) -> list[str]:
    """Return the parts that differ by four digits of themselves and of the element's budget."""
    names = []
    for name, part in itertools.product(one.outputs, PARTS):
        x, y = getattr(one.outputs[name], part), getattr(other.outputs[name], part)
        scale = one.outputs[name].allowed ** (2 if part == "noise" else 1)
        if ((x - y).abs() > FIGURES * torch.maximum(scale, x.abs())).any():
            names.append(f"{name} {part}")
    figures = [None if each.repeats is None else each.repeats.figures() for each in (one, other)]
    if figures[0] is not None:
        for part, close in ((slice(-COUNTS), FIGURES), (slice(-COUNTS, None), A_PAIR)):
            if not torch.allclose(*(each[..., part] for each in figures), rtol=close, atol=1e-9, equal_nan=True):
                names.append("repeats")
    return names


def moved_by_last_bits(inputs: Inputs, *, ties: bool = False) -> list[str]:
    """Return the parts of the budgets, with and without these deviations, that the last bits of sums change."""
    names = []
    for deviations in (Deviations(), *EVERY):
        with LastBits():
            other = budgets(inputs, deviations, "cpu", ties=ties)
        names += differing(budgets(inputs, deviations, "cpu", ties=ties), other)
    return names


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow), "float32"])
def test_budgets_of_every_pattern_stand_the_last_bits_of_sums(dtype: Dtype) -> None:
    moved = {pattern: parts for pattern in PATTERNS if (parts := moved_by_last_bits(inputs_of(pattern, dtype)))}
    assert not moved


@pytest.mark.parametrize("pattern", ["ties", "dup_keys", "fewvalued", "constant_v"])
def test_budgets_with_ties_stand_the_last_bits_of_sums(pattern: Pattern) -> None:
    assert not moved_by_last_bits(inputs_of(pattern, "float16"), ties=True)


@pytest.mark.parametrize(
    ("module", "name", "exactly", "pattern", "dtype"),
    [
        (forward_formulas, "on_grid", lambda x, _: x, "ties", "float16"),
        (forward_formulas, "on_grid", lambda x, _: x, "constant_v", "bfloat16"),
        (backward_formulas, "on_grid", lambda x, _: x, "constant_v", "bfloat16"),
        (sums, "half_ulp_of_sum", half_ulp, "huge_logits", "bfloat16"),
    ],
)
def test_an_exact_comparison_is_noticed(
    module: ModuleType, name: str, exactly: Any, pattern: Pattern, dtype: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether the last bits of one batch turn a comparison is chance.
    several = [inputs_of(pattern, dtype, seed) for seed in (3, 4, 6)]
    assert not any(moved_by_last_bits(inputs) for inputs in several)
    monkeypatch.setattr(module, name, exactly)
    assert any(moved_by_last_bits(inputs) for inputs in several)


@pytest.mark.parametrize("exact", [0.0, 1.0, -0.5, 0.75, 1 + 2.0**-11, 3 * 2.0**-13])
def test_values_on_the_grid_are_exact_again(exact: float) -> None:
    """Zero, powers of two and halves between float16 numbers, as sums of terms of size 1 whose error in float32 is 2^-20."""
    near = exact + torch.linspace(-8, 8, 33, dtype=torch.float64) * 2.0**-53
    assert torch.equal(on_grid(near.clone(), torch.full_like(near, 2.0**-20)), torch.full_like(near, exact))


def test_the_grid_moves_values_by_far_less_than_float32() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for error in (1e-3, 2.0**-20, 2.0**-26):
        moved = (on_grid(x.clone(), torch.full_like(x, error)) - x).abs()
        assert 0 < moved.max() <= error * 2.0**-17
    endless = torch.tensor([torch.inf, -torch.inf, 3.0], dtype=torch.float64)
    assert torch.equal(on_grid(endless.clone(), torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)), endless)
    assert on_grid(torch.ones(1, dtype=torch.float64), torch.tensor([torch.inf], dtype=torch.float64)).isfinite().all()


def test_a_sum_just_below_a_power_of_two_has_its_unit() -> None:
    x = torch.tensor([1 - 2.0**-53, 1.0, 1 + 2.0**-52], dtype=torch.float64)
    assert half_ulp_of_sum(x, FLOAT16).unique().tolist() == [2.0**-11]
    assert half_ulp(x, FLOAT16).unique().tolist() == [2.0**-12, 2.0**-11]
    assert len(Rounding(FLOAT16, True, False).true_variance(x, x).unique()) == 1


def test_a_variance_of_the_last_bits_is_none() -> None:
    mean = torch.tensor([0.7, 1e6], dtype=torch.float64)
    square = mean * mean
    assert forward_formulas.difference(square * (1 + 2.0**-50), square).tolist() == [0.0, 0.0]
    spread = square * 2.0**-30
    assert torch.allclose(forward_formulas.difference(square + spread, square), spread, rtol=1e-3)


def test_twelve_equal_errors_are_limited_by_their_worst_case() -> None:
    """6 sigma of twelve uniform errors within 1 is 12: the worst case, and the last bits decided which of both was the limit."""
    sigma2 = 4 * (1 + torch.tensor([-4, 0, 4], dtype=torch.float64) * 2.0**-52)

    def limiting(hard: float) -> torch.Tensor:
        zero = torch.zeros_like(sigma2)
        return forward_formulas.sum_budget(zero, zero, zero + hard, sigma2, None, zero, 1.0, Rounding(FLOAT16, True, False))[3]

    assert limiting(12.0).tolist() == [0.0] * 3
    assert limiting(12.1).gt(0).all()


@pytest.mark.parametrize("off", [-(2.0**-48), 0.0, 2.0**-48])
def test_sixteen_equal_rows_have_statistics_and_a_fourth_more_neighbours_have_none(off: float) -> None:
    sums = [16.0, 16 * (1 + off), 16.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert aggregate.of_limits("o", Generic(), sums) is not None
    assert aggregate.of_limits("o", Generic(g=Repeats.LIMIT * (1 + off)), sums) is None
    assert aggregate.of_limits("dv", Generic(of_d_o=Repeats.LIMIT * (1 + off)), sums) is None


@pytest.mark.parametrize("exact", [0.0, 1.0, 1 + 2.0**-11])
def test_statistics_stand_the_last_bits_of_expected_values(exact: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 0, which is not counted, at a power of two, and at a half, whose rounding has either sign."""

    def sums(off: float) -> torch.Tensor:
        expected = torch.full((1, 20, 4), exact + off, dtype=torch.float64)
        parts = {name: torch.full_like(expected, 1e-7) for name in ("allowed", "b", "flush", "reorder")}
        budget = Budget(noise=torch.full_like(expected, 1e-14), **parts)
        [columns] = aggregate.sums_of_rows([(torch.full_like(expected, exact + 2.0**-11), expected, budget)], FLOAT16)
        return columns

    def stands() -> bool:
        return all(torch.allclose(sums(off), sums(0.0), rtol=1e-9) for off in (-(2.0**-53), 2.0**-52))

    assert stands()
    monkeypatch.setattr(aggregate, "on_grid", lambda x, _: x)
    assert not stands()
