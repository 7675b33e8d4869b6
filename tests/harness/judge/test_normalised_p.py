"""A kernel that divides P by its row sum before P is rounded.

The unit of its last bit is another than that of exp(s - m), and a P below the smallest normal half loses more.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters import dense
from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.oracles.budgets.roundings import Rounding
from attnfuzz.oracles.formats import Format
from attnfuzz.strategies.case import Case, Recipe

FORMS: dict[str, Any] = {"gradients": False, "devices": ("cpu",), "dims": ((64, 64),), "dtypes": ("float16",)}


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def normalised(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """O (batch, seqlen, heads, dim) of P that is normalised and rounded to the dtype of v, in that order."""
    s = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1).to(v.dtype).float(), v.float()).to(v.dtype)


NEARLY_EQUAL = [Recipe(q_scale=0.25, k_scale=0.25, seed=seed) for seed in range(4)]
SUBNORMAL = [Recipe(pattern="needle", q_scale=2.0, k_scale=4.0, v_scale=4.0, seed=seed) for seed in range(40)]
"""With two keys that share a row, and others whose P are a few steps of 2^-24."""


def checks(length: int, recipes: list[Recipe] = NEARLY_EQUAL, **deviations: bool) -> set[str]:
    """Checks that fail in any of the Cases of `length` keys."""
    kernel = registry.register(dense(normalised, name="theirs", deviations=Deviations(**deviations), **FORMS))
    lengths = (length,)
    needs = Needs(outputs=("o",))
    problem = Problem(seqlens_q=lengths, seqlens_k=lengths, packing="dense", dim_qk=64, dim_v=64, needs=needs)
    cases = [Case(kernel=kernel.name, problem=problem, recipe=recipe) for recipe in recipes]
    return {failure.identity.kind for case in cases for failure in run_trial(case, "cpu").failures}


# 1 / 63 lies just above a power of two, where a half has its coarsest unit; 1 / 60 has the same, and is larger.
@pytest.mark.parametrize("length", [60, 63, 126])
def test_it_passes_if_it_is_declared(length: int) -> None:
    assert not checks(length, normalised_p=True)


def test_a_maximum_that_lags_explains_the_unit_but_not_what_is_lost_below_it() -> None:
    assert not checks(63, lazy_rescale=True)
    assert checks(40, SUBNORMAL, lazy_rescale=True) == {"mismatch"}
    assert not checks(40, SUBNORMAL, normalised_p=True)


def test_a_wrong_p_is_found_beside_the_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda self, dim: softmax(self, dim) * 1.004)
    assert "mismatch" in checks(40, normalised_p=True)


def test_it_is_noise_if_it_is_not() -> None:
    assert checks(63) == {"aggregate"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_most_variance_is_that_of_some_multiple(dtype: str) -> None:
    rounding = Rounding(Format.of(dtype), half=True, tf32=False)  # type: ignore[arg-type]
    x = torch.linspace(0.01, 1, 200, dtype=torch.float64)
    variance = rounding.variance(x, rounding.form.eta)
    factors = torch.linspace(0.5, 2, 301, dtype=torch.float64)
    true = torch.stack([rounding.true_variance(x * f, rounding.variance(x * f, rounding.form.eta)) / f**2 for f in factors])
    most = rounding.most_variance(x, variance)
    assert bool((true.amax(0) <= most * (1 + 1e-9)).all())
    assert bool((true.amax(0) > most * 0.9).all())
