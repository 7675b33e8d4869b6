"""Sums over rows, of which dK and dV and their budgets are made, and what equal and known roundings add to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnfuzz.oracles.budgets.forward_formulas import TIES
from attnfuzz.oracles.budgets.scores import Scores
from attnfuzz.oracles.formats import half_ulp_of_sum
from attnfuzz.oracles.frames import Steps

__all__ = ["Sums", "add_partials", "beyond", "elsewhere"]


@dataclass(slots=True, eq=False)
class Sums:
    """The parts of dK or dV that are sums over rows, `(Z, keys, dim)`: each frame of a long sequence adds to them in place.

    `sigma2` to `flush` as for O; `result` the gradient, `size` the sum of its terms' sizes, `noise` sigma^2 by P's true units.
    """

    result: torch.Tensor
    size: torch.Tensor
    sigma2: torch.Tensor
    hard: torch.Tensor
    b: torch.Tensor
    tau2: torch.Tensor | None = None
    flush: torch.Tensor | None = None
    noise: torch.Tensor | None = None

    @staticmethod
    def within(whole: torch.Tensor, names: Sequence[str]) -> Sums:
        """Return views of `whole (Z, keys, n dim)`, one for each name, side by side; all zero before the first frame."""
        return Sums(**dict(zip(names, whole.chunk(len(names), -1), strict=True)))


def add_partials(t: Scores, sums: Sums, x: torch.Tensor, y: torch.Tensor, scale: Steps) -> None:
    """Add one rounding of each query head's share of x^T y, before the group is summed, to the sums of dK or dV.

    A frame with part of the rows has only parts of the shares: u sum_g |share| then bounds their roundings.
    """
    shares = (x.unflatten(1, (-1, t.rows)).mT @ y.unflatten(1, (-1, t.rows))).abs_()
    shares.mul_(scale[:, None] if isinstance(scale, torch.Tensor) else scale)
    worst = t.rounding.worst(shares, t.form.eta).sum(1).mul_(1.01)
    if not t.whole:
        sums.b.add_(worst)
        # A share may overflow where their sum does not; a part of the rows may use that part of the range.
        sums.b.masked_fill_((shares >= 0.999 * t.form.largest * t.part).any(1), torch.inf)
        return
    # By their true units: over a whole output the mean square of 0.18 u^2 x^2 is off by more than the statistics allow.
    random = half_ulp_of_sum(shares, t.form).square_().mul_(1 / 3).sum(1)
    sums.hard.add_(worst)
    sums.sigma2.add_(random)
    # A share may overflow where their sum does not.
    sums.b.masked_fill_((shares + (sums.hard + sums.b)[:, None] >= 0.999 * t.form.largest).any(1), torch.inf)
    sums.b.add_(t.rounding.flushed(shares, None, t.form.eta).sum(1))
    if sums.noise is not None:
        sums.noise.add_(random)


def elsewhere(n: torch.Tensor, t: Scores) -> torch.Tensor:
    """Return how many others are equal where `n` rows of this frame are: as many are assumed in each other part of the rows."""
    return (n / t.part - 1).masked_fill_(n == 1, 0.0)


def beyond(known: torch.Tensor, sigma2: torch.Tensor) -> torch.Tensor:
    """Return tau^2 such that 6 sigma + 4 tau is at least 3 sigma + `known`."""
    return (known - 3 * sigma2.sqrt()).clamp_(min=0.0).div_(TIES).square_()
