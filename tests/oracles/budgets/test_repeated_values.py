"""Roundings of values that repeat: by the unit of their own, and by the largest that a unit may be where it is not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.budgets.bounds import Budgets, budgets
from attnfuzz.oracles.budgets.roundings import Rounding
from attnfuzz.strategies.case import Recipe

ROUNDING = Rounding.of("bfloat16", Deviations(), "cpu")
U, ETA = ROUNDING.form.u, ROUNDING.form.eta


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of_mean(x: torch.Tensor) -> torch.Tensor:
    return ROUNDING.variance(x, ETA)


def test_a_few_values_may_all_have_the_largest_rounding() -> None:
    x = numbers(1.01, 1.01, 1.99, 0.0)
    found = ROUNDING.repeated(x, of_mean(x), numbers(8, 9, 500, 500))
    assert torch.allclose(found, numbers(0.18 * (1.01 * U) ** 2, (1.01 * U) ** 2 / 3, (1.99 * U) ** 2 / 3, 0.0), rtol=1e-12)


@pytest.mark.parametrize(
    ("size", "scale", "half_unit"),
    [
        (1.01, 1.0, U),
        (0.99, 1.0, U / 2),
        (1.9, 0.6, U / 0.6),
        (1.01, 0.6, U),
        (1.01, 4.0, U),
        # Less is missing to the power of two than a sum in float64 has errors.
        (1 - 1e-12, 1.0, U),
        (2.0**-126, 1.0, ETA),
    ],
)
def test_ds_has_its_own_unit_or_that_after_scaling_if_it_is_larger(size: float, scale: float, half_unit: float) -> None:
    x = numbers(size)
    assert torch.allclose(ROUNDING.repeated_ds(x, of_mean(x), scale), numbers(half_unit**2 / 3), rtol=1e-9)
    assert torch.equal(ROUNDING.repeated_ds(x, numbers(0.0), scale), numbers(0.0)), "flushed, or exact"
    of_each = ROUNDING.repeated_ds(x.repeat(2), of_mean(x.repeat(2)), numbers(scale, 1.0))
    assert torch.equal(of_each[:1], ROUNDING.repeated_ds(x, of_mean(x), scale))


def made() -> Budgets:
    """Budgets of 60 values, 10 times each: of so many the worst case is further off than tau."""
    n, of_block = 600, torch.arange(600) // 10 * 10
    problem = Problem(seqlens_q=(n,), seqlens_k=(n,), dim_qk=16, dim_v=16, dtype="bfloat16", softmax_scale=0.15)
    inputs = materialise(problem, Recipe(seed=3), "cpu")
    inputs = replace(inputs, **{name: getattr(inputs, name)[of_block] for name in ("q", "k", "v", "d_o")})
    return budgets(inputs, Deviations(), "cpu", ties=True, generic=False)


def mean(_: Rounding, size: torch.Tensor, variance: torch.Tensor, *__: Any) -> torch.Tensor:
    return variance


@pytest.mark.parametrize(
    ("name", "changed"),
    [("repeated", {"o", "dq", "dk"}), ("true_variance", {"dv"}), ("repeated_ds", {"dq", "dk"})],
)
def test_which_budgets_the_roundings_of_repeated_values_are_in(
    name: str, changed: set[OutputName], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D, and with it dQ and dK, takes the roundings of P that O takes; the units of dV's P and of dS are known."""
    plain = made()
    monkeypatch.setattr(Rounding, name, mean)
    without = made()
    differ = {each for each, budget in plain.outputs.items() if not torch.equal(budget.allowed, without.outputs[each].allowed)}
    assert differ == changed


def test_the_unit_decides_and_not_the_size() -> None:
    """A P just above a power of two has twice the rounding, for its size, of one just below the next."""
    above, below = numbers(1.001 * 2.0**-7), numbers(1.999 * 2.0**-7)
    of_size = [float(ROUNDING.true_variance(x, of_mean(x)).sqrt() / x) for x in (above, below)]
    assert of_size[0] / of_size[1] == pytest.approx(1.999 / 1.001)
