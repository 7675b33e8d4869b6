"""O of a frame in float64, and its budget.

Notation as in oracles/budgets/bounds.py. Tensors are `(Z, rows, keys)` and `(Z, rows, dim)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnfuzz.oracles.budgets import forward_formulas as formulas
from attnfuzz.oracles.budgets.roundings import neighbours, repeated_sum
from attnfuzz.oracles.budgets.scores import Scores

__all__ = ["Forward", "OfP", "forward"]

_HUGE = 1e60
"""Limit on mean squares of lost rows: their squares stay finite."""


@dataclass(slots=True, eq=False)
class Forward:
    """O and its budget M = min(H, 6 sigma + 4 tau) + B."""

    o: torch.Tensor
    """P @ v on a grid."""
    pv: torch.Tensor
    pk: torch.Tensor
    """P @ v and P @ k."""
    sigma2: torch.Tensor
    tau2: torch.Tensor | None
    hard: torch.Tensor
    b: torch.Tensor
    flush: torch.Tensor
    """The part of B from flushed values."""
    reorder: torch.Tensor
    """The part of B from accumulation."""
    noise: torch.Tensor | None
    """sigma^2 by P's true units."""
    m_o: torch.Tensor
    random: torch.Tensor
    """6 sigma + 4 tau where that is the limit, else 0."""
    e_f2: torch.Tensor
    """sum_j P e_f^2: the mean square of P's relative error due to the score's."""
    of_partials: tuple[torch.Tensor, ...] | None = None
    """Of the roundings of partial O, where they are declared: mean square, worst case, flushed."""
    of_splits: torch.Tensor | None = None
    """As `e_f2`, with the roundings of LSE of splits, where they are declared."""


@dataclass(slots=True, eq=False)
class OfP:
    """The roundings of exp(s - m), over l, each `(Z, rows, keys)`: mean square, that times (n - 1), worst case, flushed."""

    variance: torch.Tensor
    repeated: torch.Tensor | None
    worst: torch.Tensor
    flushed: torch.Tensor


def forward(t: Scores, *, ties: bool, lean: bool = False) -> tuple[Forward, OfP]:
    """Compute the budget of O and the roundings in it; `lean` leaves out the parts for statistics over a whole output.

    pi = P l, e_f = (e^delta - 1) e^Lambda;  where pi is the row's maximum, it is exactly 1
    Where P is divided by the row sum before its rounding, which is declared, pi = P and l = 1, and no pi is exact.
    sigma^2 = var(pi) / l^2 @ v^2;  tau^2 = ((n - 1) w) / l^2 @ v^2, n the number of equal P in the row,
        w = var(pi), or u^2 pi^2 / 3 where n > 8 (`Rounding.repeated`)
    H = cap(pi) / l @ |v|
    B = min( sqrt(sum P e_f^2) sqrt(P @ v^2 - O^2), max|v| + |O| ) + acc(M / 16 + 2, O, P @ |v|) + flushed @ |v| + lost(v, P)
        with ties, in float32, + repeated_sum(P) @ |v|

    Where partial O are rounded, which is declared, `of_partials` adds their sigma^2, H and flushed values; where LSE of splits
    is, min(sqrt(sum P e_f^2) sqrt(P @ v^2 - O^2), max|v| + |O|) by its delta is added to B, and to the flushed values.
    """
    e, l = t.rounded  # noqa: E741
    of_e, variance, worst, flushed, *exact_units = formulas.unrounded_p(
        e, l, t.delta, t.shift, t.m, t.unsure, t.rounding, t.exact, not lean
    )
    v_size, v2 = t.v_size, t.v2
    pv, size, mean2, pk = (t.p @ t.values).split([*[t.v.shape[-1]] * 3, t.k.shape[-1]], -1)
    e_f2 = of_e.sum(-1, keepdim=True).clamp_(max=_HUGE)
    hard, sigma2, flush = worst @ v_size, variance @ v2, flushed @ v_size
    noise = exact_units[0] @ v2 if exact_units else None
    tau2 = repeated = None
    if ties and t.rounding.half:
        counts = neighbours(t.e, t.form.u / 16, t.form.eta / 8)
        repeated = (counts - 1).mul_(t.rounding.repeated(e / l, variance, counts))
        tau2 = repeated @ v2
    v_most, v_sum = v_size.amax(1, keepdim=True), v_size.sum(1, keepdim=True)
    o, reorder, b = formulas.o_budget(pv, size, mean2, e_f2, v_most, v_sum, t.n_k, t.terms_k, t.rounding)
    if ties and not t.rounding.half:
        b += (repeated_sum(t.e) @ v_size).div_(t.l)
    if t.l_error is not None:
        b += o.abs() * t.l_error
    of_partials = None
    if t.half_partial_o:
        of_partials = formulas.of_partials(size, t.rounding)
        sigma2, hard, flush = (x + more for x, more in zip((sigma2, hard, flush), of_partials, strict=True))
        noise = None if noise is None else noise + of_partials[0]
    of_splits = None
    if t.of_splits is not None:
        of_splits = formulas.split_errors(t.p, t.of_splits, t.shift).sum(-1, keepdim=True).clamp_(max=_HUGE)
        moved = (formulas.difference(mean2, pv * pv) * of_splits).sqrt_()
        # All P of a split are off by one factor: no random error.
        flush = flush + torch.minimum(moved, v_most + o.abs())
    b, m_o, random = formulas.limited(hard, sigma2, tau2, b, flush, t.dead, t.lost, t.rounding.half)
    result = Forward(
        o=o, pv=pv, pk=pk, sigma2=sigma2, tau2=tau2, hard=hard, b=b, flush=flush, reorder=reorder, noise=noise, m_o=m_o,
        random=random, e_f2=e_f2, of_partials=of_partials, of_splits=of_splits,
    )  # fmt: skip
    return result, OfP(variance=variance, repeated=repeated, worst=worst, flushed=flushed)
