"""Errors of a factor before it enters a product (rounded once to the dtype, truncated to tf32, or flushed to zero), and of sums.

Notation: u = unit roundoff of the dtype, eta = half its smallest subnormal.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.problem import Dtype
from attnfuzz.oracles.formats import CUT_OF_TF32X3, EPS, OF_TF32X3, TF32, TINY, Format, half_ulp_of_sum
from attnfuzz.oracles.frames import Steps
from attnfuzz.oracles.fused import fused

__all__ = ["VARIANCE", "Rounding", "direction", "near", "neighbours", "repeated_sum"]

_FEW = 8
"""Where each value repeats more often in a row than that, the row has few values."""

VARIANCE = 0.18
"""Mean square of a relative rounding error over u**2, for a log-uniform mantissa."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounding of intermediate values to `form`: for half-precision kernels, or for tf32 where that is declared."""

    form: Format
    half: bool
    tf32: bool
    tf32x3: bool = False

    @staticmethod
    def of(dtype: Dtype, deviations: Deviations, device: str) -> Rounding:
        """Return that of a kernel on "cpu" or "cuda" that declares `deviations`."""
        half = dtype != "float32"
        tf32 = not half and device in deviations.tf32_on
        return Rounding(Format.of(dtype), half, tf32, not half and not tf32 and device in deviations.tf32x3_on)

    def steps(self, dim: int) -> float:
        """Return the matrix steps of 16 over `dim` products, one at least: a sum is off by 4 eps of it for each.

        By tf32x3 a sum is cut toward zero by up to 21/16 eps for each product and 24 eps, as that many steps more.
        """
        return max(1.0, dim / 16) + ((CUT_OF_TF32X3 * dim + OF_TF32X3) / 4 if self.tf32x3 else 0.0)

    def variance(self, x: torch.Tensor, eta: Steps, exact: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean square of one rounding of x >= 0: 0 where it may be flushed (see `flushed`), or where `exact`.

        max(0.18 u^2 x^2, eta^2 / 3): a rounding error is uniform over 2 eta in the subnormals and in the binade above them.
        """
        if not self.half:
            return torch.zeros_like(x)
        gone = x <= 4 * eta
        if exact is not None:
            gone |= exact
        return (x * x).mul_(VARIANCE * self.form.u**2).clamp_(min=eta * eta / 3).masked_fill_(gone, 0.0)

    def true_variance(self, x: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        """Return h^2 / 3 of x >= 0 by its true unit, where its `variance` is not 0."""
        if not self.half:
            return variance
        return half_ulp_of_sum(x, self.form).square_().mul_(1 / 3).masked_fill_(variance == 0, 0.0)

    def most_variance(self, x: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        """Return u^2 x^2 / 3, the largest that `true_variance` is of any multiple of x >= 0, over the multiple's square."""
        if not self.half:
            return variance
        return torch.maximum((x * x).mul_(self.form.u**2 / 3), variance).masked_fill_(variance == 0, 0.0)

    def repeated(self, x: torch.Tensor, variance: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the rounding of x >= 0 on steps that are not known, of which there are `counts` in a row.

        A few values may all be where it is largest; many are, in the mean, as their `variance` says.
        """
        return torch.where(counts > _FEW, self.most_variance(x, variance), variance)

    def repeated_ds(self, size: torch.Tensor, variance: torch.Tensor, scale: Steps) -> torch.Tensor:
        """Return the mean square of dS's rounding by its own unit, or by that of dS times the scale if that is more.

        `size`: |dS| and the error before it is rounded. Measured: 10 values of 500 keys each, next to a power of two, had dQ
        1.01 x a budget by the mean over mantissas, 0.18 u^2 dS^2.
        """
        by_unit = half_ulp_of_sum(size, self.form)
        scaled = half_ulp_of_sum(size * scale, self.form).div_(scale)
        return torch.maximum(by_unit, scaled).square_().mul_(1 / 3).masked_fill_(variance == 0, 0.0)

    def worst(self, x: torch.Tensor, eta: Steps) -> torch.Tensor:
        """Return the largest error of x >= 0: max(u x, min(x, eta)), or tf32's truncation."""
        if self.half:
            return torch.maximum(self.form.u * x, x.clamp(max=eta))
        return x * TF32 if self.tf32 else torch.zeros_like(x)

    def flushed(self, x: torch.Tensor, slack: torch.Tensor | None, eta: Steps) -> torch.Tensor:
        """Return min(x + slack, eta) where x >= 0 may be flushed as a whole, else 0: a coherent error, not a random one."""
        if not self.half:
            return torch.zeros_like(x)
        size = x if slack is None else x + slack
        return size.clamp(max=eta).masked_fill_(x > 4 * eta, 0.0)


def neighbours(x: torch.Tensor, window: Steps, least: Steps = 0.0) -> torch.Tensor:
    """Count the entries of the last dimension within `window * |x|` of each x, itself included; float64, at least 1.

    Values that repeat are rounded alike, so that their errors add up and do not average out. `least`: a lower bound on the
    distance, for values whose units do not shrink with them.
    """
    return _counted(x, *_around(x, window, least))


def repeated_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the part in the error of a float32 sum over the last dimension, x times a factor, that equal terms x have.

    Equal terms that are added one after the other are rounded alike each time, each by up to eps of the sum so far, or lost as a
    whole: n terms x, added last, by n min(|x|, eps (X - n |x| / 2)), X = sum |x|, which is n / 2 eps X where no others are. The
    errors of groups of different terms are taken as independent: r |x| is returned, r^2 X^2 the sum of their squares, and for
    each group at least (n - 1) eps (1 - n |x| / 2 X) |x|, since the factors of the others may be 0. n - 1 is taken for n. X is of
    this frame: where a sequence is in several, terms of the others are not in it.

    Measured: of 564,000 sums of 64 to 4,096 terms with 1 to 64 values, in three orders, the worst was off by 0.82 of this and
    `accumulated`; with n |x| for X, as if each group were a sum of its own, by 1.35, and O of a correct kernel by 1.015.
    """
    size = x.abs()
    n = neighbours(x, EPS * x.shape[-1] / 2)
    part = size / size.sum(-1, keepdim=True).clamp_(min=TINY)
    own = (n * part).clamp_(max=1.0)
    each = (n - 1) * (1 - own / 2) * EPS
    whole = torch.minimum(each, own).square_().div_(n).sum(-1, keepdim=True).sqrt_()
    return size * torch.maximum(each, whole)


def near(x: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Count the entries of the last dimension within `distance` of each x; float64, at least 1."""
    return _counted(x, x - distance, x + distance)


@fused
def _around(x: torch.Tensor, window: Steps, least: Steps) -> tuple[torch.Tensor, torch.Tensor]:
    distance = (window * x.abs()).clamp_(min=least)
    return x - distance, x + distance


def _counted(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    ordered = x.sort(-1)[0].contiguous()
    above = torch.searchsorted(ordered, high.contiguous(), right=True)
    below = torch.searchsorted(ordered, low.contiguous())
    return (above - below).to(torch.float64).clamp_(min=1)


@functools.cache
def direction(dim: int, device: torch.device) -> torch.Tensor:
    """Return a random direction, `(dim,)` float64: equal rows have equal projections on it, and different rows hardly ever."""
    generator = torch.Generator().manual_seed(dim)
    return torch.randn(dim, generator=generator, dtype=torch.float64).to(device)
