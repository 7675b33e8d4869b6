"""Bounds for rows in doubt: rows with scores that mask_mod may or may not hide (mask_doubt.py).

O, LSE and dQ of such a row are not judged. Its share of dK and dV lies in a range: with w = exp(s - m), a certain score has P
between w / (sum of w over all scores that may be seen) and w / (sum of w over certain scores); a score in doubt has P between
0 and the latter. This holds even where forward and backward keep different scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.formats import EPS
from attnfuzz.oracles.frames import Placed

__all__ = ["Doubt", "Doubts"]

_ROUNDED = 1.02
"""Factor for two roundings of the moved values, each by at most u = 2^-8."""
_MOST = 16.0
"""Largest sum of w over all scores, as a multiple of that over certain ones, for which the range is narrow enough to judge."""
_HUGE = 80.0


@dataclass(frozen=True, slots=True, eq=False)
class Doubt:
    """The scores in doubt of one frame, and the bounds on P that follow."""

    rows: torch.Tensor
    """(1 or Z, rows, 1): whether a score of the row is in doubt."""
    reach: torch.Tensor
    """Scores that are or may be seen, in all rows, bool `(1 or Z, rows, keys)`."""
    endless: torch.Tensor
    """(Z, rows, 1): rows in doubt without bounds, since scores in doubt outweigh the certain ones."""
    low: torch.Tensor
    high: torch.Tensor
    """Bounds on P `(Z, rows, keys)` in exact arithmetic, for rows in doubt that are not endless."""

    @staticmethod
    def of(s: torch.Tensor, m: torch.Tensor, visible: torch.Tensor, scores: torch.Tensor) -> Doubt:
        """Build it from the scores s, the rows' maxima m, the visible scores and the scores in doubt."""
        rows, reach = scores.any(-1, keepdim=True), visible | scores
        w = torch.exp(s.masked_fill(~reach, -torch.inf) - m)
        certain = w.masked_fill(scores, 0.0)
        least, most = certain.sum(-1, keepdim=True), w.sum(-1, keepdim=True)
        endless = rows & ~((least > 0) & (most <= least * _MOST))
        known = rows & ~endless
        low, high = (torch.where(known, x / total, 0.0) for x, total in ((certain, most), (w, least)))
        return Doubt(rows, reach, endless, low, high)

    def widest(self, delta: torch.Tensor, s_size: torch.Tensor) -> torch.Tensor:
        """Return delta, in rows in doubt the largest of the row: P may use another maximum and another sum."""
        largest = s_size.masked_fill(~self.reach, 0.0).amax(-1, keepdim=True)
        one = delta.masked_fill(~self.reach, 0.0).amax(-1, keepdim=True)
        one = one + 16 * EPS * (largest + 1 + math.log2(max(2, s_size.shape[-1])))
        return torch.where(self.rows, one.nan_to_num(nan=_HUGE, posinf=_HUGE), delta)

    @property
    def hidden(self) -> torch.Tensor:
        """(Z, rows, keys): scores that no kernel sees, and all scores of endless rows."""
        return ~self.reach | self.endless

    def moved(self, p: torch.Tensor, e: torch.Tensor, rounding: torch.Tensor) -> torch.Tensor:
        """Return how far a kernel's P may be from `p`, with relative error `e` and `rounding`, the largest rounding of `high`.

        0 in rows that are endless or not in doubt.
        """
        off = (torch.maximum(self.high - p, p - self.low) + self.high * e) * _ROUNDED + rounding
        return torch.where(self.rows & ~self.endless, off, 0.0)


class Doubts:
    """Collects rows and keys that are not judged, over all frames."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self._problem, self._device = problem, device
        self._rows: torch.Tensor | None = None
        self._keys: torch.Tensor | None = None

    def add(self, placed: Placed, doubt: Doubt) -> None:
        """Add those of one frame."""
        p = self._problem
        if self._rows is None or self._keys is None:
            self._rows = torch.zeros((p.heads, p.total_q, 1), dtype=torch.bool, device=self._device)
            self._keys = torch.zeros((p.kv_heads, p.total_k, 1), dtype=torch.bool, device=self._device)
        placed.store_rows(self._rows, doubt.rows.expand_as(doubt.endless))
        keys = placed.sums(self._keys)
        keys |= (doubt.endless & doubt.reach).any(1)[..., None]
        placed.store_sums(self._keys, keys)

    def counts(self) -> dict[OutputName, int]:
        """Return the number of elements of each output that are not judged; empty if no frame's mask compares floats."""
        if self._rows is None or self._keys is None:
            return {}
        rows, keys = torch.stack([self._rows.sum(), self._keys.sum()]).tolist()
        of_qk, of_v = self._problem.dim_qk, self._problem.dim_v
        return {"o": rows * of_v, "lse": rows, "dq": rows * of_qk, "dk": keys * of_qk, "dv": keys * of_v}
