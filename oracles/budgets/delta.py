"""The budget of D = rowsum(dO * O), which all of dS takes, and dP with it. Notation as in oracles/budgets/bounds.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnfuzz.kernels.contract import Deviations
from attnfuzz.oracles.budgets import backward_formulas as formulas
from attnfuzz.oracles.budgets.forward import Forward, OfP
from attnfuzz.oracles.budgets.forward_formulas import difference
from attnfuzz.oracles.budgets.roundings import neighbours
from attnfuzz.oracles.budgets.scores import Scores
from attnfuzz.oracles.fused import sums_of

__all__ = ["Delta", "delta_error"]


@dataclass(slots=True, eq=False)
class Delta:
    """D = rowsum(dO * O) (- dLSE) and its error, each (Z, rows, 1): H_D, V_D = sigma^2, T_D = tau^2, B_D; and dP = dO v^T.

    `flush` is the part of B_D from flushed P.
    """

    d_p: torch.Tensor
    d: torch.Tensor
    hard: torch.Tensor
    sigma2: torch.Tensor
    tau2: torch.Tensor | None
    b: torch.Tensor
    flush: torch.Tensor
    products: torch.Tensor | None = None
    """(Z, rows, 1): how far the roundings of dO * O move D, where they are declared, from that of the rounded O."""
    over: torch.Tensor | None = None
    """(Z, rows, 1): whether such a product may overflow, so that D is anything."""

    def move(self, moved: torch.Tensor, gap: torch.Tensor, c_size: torch.Tensor) -> None:
        """Add the error of D where a mask_mod in doubt moves P by up to `moved`: sum moved (|dP - D| + |dO| |v|^T / 64).

        P adds up to 1 under every mask, so that |dP - D| bounds a change; the second part is for roundings.
        """
        off = (moved * torch.add(gap, c_size, alpha=1 / 64)).sum(-1, keepdim=True)
        self.b, self.flush = self.b + off, self.flush + off


def delta_error(t: Scores, f: Forward, p: OfP, deviations: Deviations) -> Delta:
    """Compute D and its error, for kernels that take D from the rounded O or from an fp32 one.

    res = |rd(O) - O|, h = half ulp of O, r = min(h, res + M_O), S = sigma^2 + tau^2 + B^2 of O, f = 1 - exp(-4 S / h^2)
    E2 = min(res^2 (1 - f) + f h^2 / 3, r^2), h^2 in place of h^2 / 3 where res <= h / 64
    det = sum_d dO (rd(O) - O) exp(-2 S / h^2)
    V_D = max(sum_d dO^2 E2, det^2) + sum_j v_f dP^2;  T_D = sum_d (n_d - 1) dO^2 E2 + sum_j (n - 1) w_f dP^2
    w_f as for tau^2 of O (`forward`)
    H_D = sum_d |dO| r + sum_j c_f |dP|, by tf32 c_f C with C = |dO| |v|^T: every entry of v is truncated separately
    B_D = sqrt(sum P e_f^2) sqrt(sum P dP^2 - D^2) + sum_d |dO| acc(O) + eps (6 + Dv / 16) sum_d |dO O| + flushed @ |dP|
          + lost(dO, O)

    Where O is a number of the dtype, as where one key has all of the weight, P's own error is one factor of all dims: their
    roundings have sizes up to h, not evenly below it, and only their signs are independent. Scores of 31,000 had dQ 1.05 x a
    budget with h^2 / 3, on an H100.

    Declared deviations: partial O add sum_d dO^2 v_o to V_D and sum_d |dO| c_o to H_D, v_o and c_o of `of_partials`; products of
    dO and O that are rounded add sum_d v_x and sum_d c_x of their own (`of_products`). Both may be flushed; ties count as O's do.
    LSE of splits that is rounded adds sqrt(sum P e_f^2) sqrt(sum P dP^2 - D^2) by its delta to B_D, and to its flushed part.
    """
    d_p = t.d_o @ t.v.mT
    of_o = formulas.of_o(f.o, f.m_o, f.sigma2, f.tau2, f.b, t.d_o, f.pv, f.reorder, t.form, t.v.shape[-1])
    by_o, det, hard_o, arithmetic, d, sizes = sums_of(of_o)
    moved = t.d_size @ t.v_size.mT if t.rounding.tf32 else None
    of_p = formulas.of_d_p(d_p, t.p, p.variance, p.worst, p.flushed, moved)
    by_p, hard_p, mean2, flush = sums_of(of_p)
    sigma2, hard = formulas.random_of_d(by_o, det, by_p, hard_o, hard_p)
    tau2 = None
    if p.repeated is not None:
        tau2 = (of_o[0] * (neighbours(f.o, t.form.u / 16) - 1)).sum(-1, keepdim=True)
        tau2 += (p.repeated * d_p * d_p).sum(-1, keepdim=True)
    lesser, b = formulas.delta_bound(d, mean2, f.e_f2, arithmetic, flush, sizes, t.d_lse, t.dead, t.v.shape[-1])
    if t.l_error is not None:
        b = b + t.l_error * d.abs()
    delta = Delta(d_p=d_p, d=lesser, hard=hard, sigma2=sigma2, tau2=tau2, b=b, flush=flush)
    if f.of_splits is not None:
        moved_d = (difference(mean2, d * d) * f.of_splits).sqrt_().masked_fill_(t.dead != 0, 0.0)
        delta.b, delta.flush = delta.b + moved_d, delta.flush + moved_d
    if f.of_partials is not None:
        _add_to_delta(delta, t, f.o, t.d2 * f.of_partials[0], *(t.d_size * x for x in f.of_partials[1:]))
    if deviations.half_delta_products and t.rounding.half:
        _of_products(delta, t, f)
    return delta


def _add_to_delta(
    delta: Delta, t: Scores, x: torch.Tensor, variance: torch.Tensor, worst: torch.Tensor, flushed: torch.Tensor
) -> None:
    """Add roundings of x, one for each dim, to the error of D: their mean square, worst case and flushed part."""
    delta.sigma2 = delta.sigma2 + variance.sum(-1, keepdim=True)
    delta.hard = delta.hard + worst.sum(-1, keepdim=True)
    flush = flushed.sum(-1, keepdim=True).masked_fill_(t.dead != 0, 0.0)
    delta.b, delta.flush = delta.b + flush, delta.flush + flush
    if delta.tau2 is not None:
        delta.tau2 = delta.tau2 + ((neighbours(x, t.form.u / 16, t.form.eta / 8) - 1) * variance).sum(-1, keepdim=True)


def _of_products(delta: Delta, t: Scores, f: Forward) -> None:
    """Add the roundings of dO * O to the error of D; where a product may overflow, D has no bound."""
    x, *errors, moved, size = formulas.of_products(t.d_o, f.o, f.m_o, t.rounding)
    _add_to_delta(delta, t, x, *errors)
    delta.products = moved.sum(-1, keepdim=True)
    delta.over = (size >= 0.999 * t.form.largest).any(-1, keepdim=True)
