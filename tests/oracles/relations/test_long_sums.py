"""Sums of float32 over many keys, added one by one: their error is within what `constant_v` allows, and more is not."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attnfuzz.oracles.formats import Format  # noqa: E402
from attnfuzz.oracles.relations.constant_formulas import Roundings, of_o  # noqa: E402

EXACT = Roundings(u=0.0, form=Format.of("float32"), truncates=False, tf32=False, tf32x3=False, splits=False)
TILE = 16


def one_by_one(keys: int, sigma: float, seed: int) -> tuple[float, float]:
    """O of a constant V, and V: products are added one by one, the row sum tile by tile."""
    random = np.random.default_rng(seed)
    scores = random.standard_normal(keys) * sigma
    p = np.exp(scores - scores.max()).astype(np.float32)
    value = np.float32(random.uniform(-1, 1))
    total = np.add.accumulate(p * value)[-1]
    tiles = np.concatenate([p, np.zeros(-keys % TILE, np.float32)]).reshape(-1, TILE).sum(1)
    return float(total) / float(np.add.accumulate(tiles)[-1]), float(value)


def over_limit(got: float, value: float, keys: int, sigma: float) -> float:
    """The error of O over what is allowed."""
    numbers = (got, value, 0.0, 1 / keys**0.5, sigma, float(keys))
    o, c, d_o, p, spread, counts = (torch.tensor([[[each]]], dtype=torch.float64) for each in numbers)
    expected, allowed, _ = of_o(o, c, d_o, p, spread, counts, 0.0, EXACT)
    return float((o - expected).abs() / allowed)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.4, 3.5, 5.0])
@pytest.mark.parametrize("keys", [2_000, 20_000, 108_855, 400_000])
def test_a_sum_in_order_is_within_what_is_allowed(keys: int, sigma: float) -> None:
    """P below the last bits of the sum is lost, or rounded up: a correct kernel on an H200 was 1.1 times the limit off."""
    assert max(over_limit(*one_by_one(keys, sigma, seed), keys, sigma) for seed in range(3)) < 0.9


@pytest.mark.parametrize("sigma", [1.0, 3.5])
@pytest.mark.parametrize("keys", [2_000, 20_000, 108_855])
def test_a_row_sum_that_lacks_a_thousandth_is_not(keys: int, sigma: float) -> None:
    got, value = one_by_one(keys, sigma, 0)
    assert over_limit(got * 1.001, value, keys, sigma) > 1.5
