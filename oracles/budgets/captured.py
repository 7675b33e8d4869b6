"""Budgets of captured tensors' gradients: sums of dS times d score_mod / d tensor over the scores that read the tensor."""

from __future__ import annotations

import math

import torch

from attnfuzz.oracles.formats import EPS, TINY
from attnfuzz.oracles.modifiers import Changed, Modifiers

__all__ = ["CapturedSums"]


class CapturedSums:
    """Sums over the frames of a batch that give the budget of each tensor with a gradient.

    M = sum (slack |g| + |P (dP - D)| e_g) + 6 eps sqrt(n) sum |P (dP - D) g| + n tiny, with g = d score_mod / d tensor, e_g its
    error, slack the error of dS, n the terms of the sum. It is a worst case: the errors of D of many rows count as if they had
    one sign. Kernels add the terms in float32, unrounded; where dS is taken from rounded P, that rounding is in the slack.
    Infinite where a row with its mask in doubt contributes.
    """

    def __init__(self, modifiers: Modifiers) -> None:
        self._modifiers = modifiers
        self._sums: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def add(self, changed: Changed, d_s: torch.Tensor, slack: torch.Tensor, doubtful: torch.Tensor | None) -> None:
        """Add one frame: `d_s` is P (dP - D), 0 for hidden scores, `slack` bounds its error, except where `doubtful`."""
        for tensor, index, slope, error in self._modifiers.gradients(changed):
            shape = self._modifiers.tensors[tensor.name].shape
            if tensor.name not in self._sums:
                zeros = torch.zeros((3, math.prod(shape)), dtype=torch.float64, device=d_s.device)
                self._sums[tensor.name] = (zeros[0], zeros[1], zeros[2])
            flat = torch.zeros((), dtype=torch.int64, device=d_s.device)
            for at, size in zip(index, shape, strict=True):
                flat = flat * size + at
            flat = flat.expand(d_s.shape).flatten()
            size = d_s.abs()
            off = (slack * (slope.abs() + error)).addcmul_(size, error)
            if doubtful is not None:
                off.masked_fill_(doubtful & (slope.abs() + error > 0), torch.inf)
            terms = (off, size * slope.abs(), (size + slack > 0).double())
            for total, term in zip(self._sums[tensor.name], terms, strict=True):
                total.index_add_(0, flat, term.flatten())

    def allowed(self) -> dict[str, torch.Tensor]:
        """Return M of each tensor that some frame has read, float64, in its shape."""
        budgets = {}
        for name, (error, size, count) in self._sums.items():
            budget = error + 6 * EPS * count.sqrt() * size + count * TINY
            budgets[name] = budget.reshape(self._modifiers.tensors[name].shape)
        return budgets
