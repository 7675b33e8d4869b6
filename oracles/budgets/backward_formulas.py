"""The budgets of dQ, dK and dV, element by element: each function is one kernel on a GPU (oracles/fused).

Tensors are `(Z, rows, keys)`, `(Z, rows or keys, dim)`, `(Z, rows, 1)` or `(Z, 1, keys)`, float64; for symbols see
oracles/budgets/bounds.py and backward.py.
"""

from __future__ import annotations

import math

import torch

from attnfuzz.oracles.budgets.forward_formulas import accumulated, difference, least, lost, steps_of
from attnfuzz.oracles.budgets.roundings import VARIANCE, Rounding
from attnfuzz.oracles.formats import EPS, TINY, Format, half_ulp, on_grid
from attnfuzz.oracles.frames import Steps
from attnfuzz.oracles.fused import fused, stacked

__all__ = [
    "around_d", "delta_bound", "dq_bound", "dq_sums", "key_loss", "of_d_p", "of_ds", "of_dv", "of_dv_in_doubt", "of_o",
    "of_products", "of_q", "of_scaled_k", "parts_of_ds", "parts_of_own_ds", "random_of_d", "recomputed", "spread_of_d",
    "unit_of_ds",
]  # fmt: skip


@stacked
def of_o(
    o: torch.Tensor,
    m_o: torch.Tensor,
    sigma2: torch.Tensor,
    tau2: torch.Tensor | None,
    b: torch.Tensor,
    d_o: torch.Tensor,
    pv: torch.Tensor,
    reorder: torch.Tensor,
    form: Format,
    dim_v: int,
) -> tuple[torch.Tensor, ...]:
    """Return the terms, of each dim, of D and of its error by O's rounding and arithmetic.

    dO^2 E2, dO (rd(O) - O) exp(-2 S / h^2), |dO| r, |dO| (acc + eps (6 + Dv / 16) |O|), dO O, |dO| + |O|.
    """
    h, o_size, d_size = half_ulp(o, form), o.abs(), d_o.abs()
    unit = 2 * h
    error = torch.round(o / unit).mul_(unit).sub_(o).masked_fill(o_size > form.largest, 0.0)
    h2 = h * h
    r = torch.minimum(h, error.abs() + m_o)
    s = torch.addcmul(sigma2, b, b)
    certain = ((s if tau2 is None else s + tau2) * -4).div_(h2).exp_()
    size = torch.where(error.abs() <= h / 64, h2, h2 / 3)
    e2 = torch.minimum(torch.lerp(size, error * error, certain), r * r)
    det = (d_o * error).mul_(certain.sqrt())
    steps = EPS * (6 + dim_v / 16)
    return d_o * d_o * e2, det, d_size * r, (reorder + o_size * steps).mul_(d_size), d_o * pv, d_size + o_size


@fused
def of_products(d_o: torch.Tensor, o: torch.Tensor, m_o: torch.Tensor, rounding: Rounding) -> tuple[torch.Tensor, ...]:
    """Return x = dO O, of its rounding the mean square, worst case and flushed part, its error of dO rd(O), and a bound on |x|.

    D = sum_d rd(x_d), x_d = dO_d rd(O_d): the roundings are independent, h^2 / 3 each by x's own unit, so that V_D grows by their
    sum, and H_D by that of max(u |x|, eta), |x| <= |dO| (|O| + h + M_O).
    """
    form = rounding.form
    h = half_ulp(o, form)
    x = d_o * o
    size = d_o.abs() * (o.abs() + h + torch.where(m_o == torch.inf, 0.0, m_o))
    variance = rounding.true_variance(x.abs(), rounding.variance(x.abs(), form.eta))
    of_rounded = d_o * torch.round(o / (2 * h)).mul_(2 * h)
    unit = 2 * half_ulp(of_rounded, form)
    moved = torch.round(of_rounded / unit).mul_(unit).sub_(of_rounded)
    return x, variance, rounding.worst(size, form.eta), rounding.flushed(x.abs(), None, form.eta), moved, size


@stacked
def of_d_p(
    d_p: torch.Tensor,
    p: torch.Tensor,
    variance: torch.Tensor,
    worst: torch.Tensor,
    flushed: torch.Tensor,
    moved: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the terms, of each key, of D's error by P's: v_f dP^2, c_f |dP| (or c_f `moved`), P dP^2 and flushed |dP|."""
    size, square = d_p.abs(), d_p * d_p
    return variance * square, worst * (size if moved is None else moved), p * square, flushed * size


@fused
def random_of_d(
    by_o: torch.Tensor, det: torch.Tensor, by_p: torch.Tensor, hard_o: torch.Tensor, hard_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return V_D and H_D of each row from the sums of `of_o` and `of_d_p`."""
    return torch.maximum(by_o, det * det) + by_p, hard_o + hard_p


@fused
def delta_bound(
    d: torch.Tensor,
    mean2: torch.Tensor,
    e_f2: torch.Tensor,
    arithmetic: torch.Tensor,
    flush: torch.Tensor,
    sizes: torch.Tensor,
    d_lse: torch.Tensor | None,
    dead: torch.Tensor,
    dim_v: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return D (less dLSE) and B_D of each row from the sums of `of_o` and `of_d_p`."""
    b = (difference(mean2, d * d) * e_f2).sqrt_().add_(arithmetic).add_(flush) + lost(sizes, 0.0, dim_v)
    if d_lse is not None:
        d, b = d - d_lse, b + d_lse.abs() * (2 * EPS)
    return d, torch.where(dead != 0, 0.0, b)


@fused
def around_d(b: torch.Tensor, hard: torch.Tensor, sigma2: torch.Tensor, tau2: torch.Tensor | None, half: bool) -> torch.Tensor:
    """Return B_D + min(H_D, 6 sqrt(V_D) + 4 sqrt(T_D)) of each row."""
    return least(hard, sigma2, tau2, half) + b


@fused
def recomputed(delta: torch.Tensor, s: torch.Tensor, lse: torch.Tensor, m_lse: torch.Tensor) -> torch.Tensor:
    """Return e = exp(delta + M_LSE + 4 eps (|s| + |LSE|)) - 1; where s is -inf, P is 0 and e of no meaning."""
    e = (delta + s.abs() * (4 * EPS)).add_(lse.abs() * (4 * EPS) + m_lse)
    return e.clamp_(max=80.0).expm1_()


@fused
def of_dv(
    p: torch.Tensor, delta: torch.Tensor, s: torch.Tensor, lse: torch.Tensor, m_lse: torch.Tensor, rounding: Rounding, noise: bool
) -> tuple[torch.Tensor, ...]:
    """Return P e, and what `_rounded_again` does, for a recomputed P."""
    e = recomputed(delta, s, lse, m_lse)
    pe = p * e
    return (pe, *_rounded_again(p, e, pe, None, rounding, noise))


@fused
def of_dv_in_doubt(
    p: torch.Tensor, e: torch.Tensor, pe: torch.Tensor, unsure: torch.Tensor, rounding: Rounding, noise: bool
) -> tuple[torch.Tensor, ...]:
    """Return what `_rounded_again` does, where P e has how far P may move, and no P of `unsure` rows is exact."""
    return _rounded_again(p, e, pe, unsure, rounding, noise)


def _rounded_again(
    p: torch.Tensor, e: torch.Tensor, pe: torch.Tensor, unsure: torch.Tensor | None, rounding: Rounding, noise: bool
) -> tuple[torch.Tensor, ...]:
    """Return of P's rounding before dV: P e + flushed, flushed, mean square, worst case times 1 + e, and with `noise` h^2 / 3."""
    eta, rest, one = rounding.form.eta, 1 - p, None
    if not rounding.tf32:
        one = (rest < rounding.form.u / 8) & (e < rounding.form.u / 8)
        one = one if unsure is None else one & ~unsure
    variance = rounding.variance(p, eta, one)
    worst, flushed = rounding.worst(p, eta), rounding.flushed(p, pe, eta)
    if one is not None:
        exact = rest if rounding.half else 0.0
        worst, flushed = torch.where(one, exact, worst), torch.where(one, exact, flushed)
    parts = (pe + flushed, flushed, variance, torch.addcmul(worst, worst, e))
    return (*parts, rounding.true_variance(p, variance)) if noise else parts


@fused
def of_ds(
    d_p: torch.Tensor,
    d: torch.Tensor,
    b_d: torch.Tensor,
    p: torch.Tensor,
    pe: torch.Tensor,
    c_size: torch.Tensor,
    of_row: torch.Tensor,
    of_key: torch.Tensor,
    of_dp: float,
    of_c: float,
    gap: bool,
) -> tuple[torch.Tensor, ...]:
    """Return dS = P (dP - D), E, the error of its own arithmetic, and with `gap` |dP - D|.

    `of_row`, `of_key`: what dP loses by flushing, of each row and of each key; `of_dp` and `of_c`: factors of |dP| and C.
    """
    off = on_grid(d_p - d, b_d)
    size = off.abs()
    inner = (d_p.abs() * of_dp).add_(c_size * of_c).add_(size * (4 * EPS)).add_(of_row).add_(of_key)
    # A P of 0, hidden or not, has nothing to lose.
    flushed = torch.where(p == 0, 0.0, (size + 1) * TINY)
    e_s = inner.mul_(p + pe).addcmul_(pe, size).add_(flushed)
    return (p * off, e_s, size) if gap else (p * off, e_s)


@fused
def lost_ds(d_s: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return what dS loses where it, or P, is below the smallest normal float32, which a device may flush: all of it at once."""
    return torch.where(p < 2 * TINY, d_s.abs(), 0.0) + TINY


@fused
def unit_of_ds(scale: torch.Tensor, eta: float) -> torch.Tensor:
    """Return max(1, 1 / |scale|) eta, eta where the scale is 0."""
    return torch.where(scale == 0, 1.0, 1 / scale.abs()).clamp_(min=1.0).mul_(eta)


@fused
def parts_of_ds(
    d_s: torch.Tensor,
    e_s: torch.Tensor,
    p: torch.Tensor,
    pe: torch.Tensor,
    around: torch.Tensor,
    b_d: torch.Tensor,
    flush_d: torch.Tensor,
    eta: Steps,
    rounding: Rounding,
    own: bool,
) -> tuple[torch.Tensor, ...]:
    """Return `parts_of_own_ds` of a dS without score_mod: its error is E + P (1 + e) `around`."""
    grown = p + pe
    return _parts_of_ds(d_s, torch.addcmul(e_s, grown, around), e_s, pe, grown, p, b_d, flush_d, eta, rounding, own)


@fused
def parts_of_own_ds(
    d_s: torch.Tensor,
    slack: torch.Tensor,
    e_s: torch.Tensor,
    pe: torch.Tensor,
    grown: torch.Tensor,
    weight: torch.Tensor,
    b_d: torch.Tensor,
    flush_d: torch.Tensor,
    eta: float,
    rounding: Rounding,
    own: bool,
) -> tuple[torch.Tensor, ...]:
    """Return what enters the sums of dQ and dK, of a dS with error `slack`, E = `e_s`, and P (1 + e) = `grown`.

    |dS| + slack, its roundings (mean square with that of its inputs, worst case, flushed), B for dQ and for dK, flushed with D's
    for dK, and with `own` the mean square of its own rounding.
    """
    return _parts_of_ds(d_s, slack, e_s, pe, grown, weight, b_d, flush_d, eta, rounding, own)


def _parts_of_ds(
    d_s: torch.Tensor,
    slack: torch.Tensor,
    e_s: torch.Tensor,
    pe: torch.Tensor,
    grown: torch.Tensor,
    weight: torch.Tensor,
    b_d: torch.Tensor,
    flush_d: torch.Tensor,
    eta: Steps,
    rounding: Rounding,
    own: bool,
) -> tuple[torch.Tensor, ...]:
    d_size = d_s.abs()
    size = d_size + slack
    alone = rounding.variance(d_size, eta)
    random = torch.addcmul(alone, slack, slack, value=VARIANCE * rounding.form.u**2) if rounding.half else alone
    flushed, worst = rounding.flushed(d_size, slack, eta), rounding.worst(size, eta)
    systematic = e_s + flushed
    of_dq, of_dk = torch.addcmul(systematic, pe, b_d), torch.addcmul(systematic, grown, b_d)
    parts = (size, random, worst, flushed, of_dq, of_dk, torch.addcmul(flushed, weight, flush_d))
    return (*parts, alone) if own else parts


@fused
def of_scaled_k(d_s: torch.Tensor, size: torch.Tensor, rounding: Rounding) -> tuple[torch.Tensor, ...]:
    """Return what times k^2, |k| and 1 is the error of dQ = scale dS @ rd(c k) / c: mean square, worst case, flushed.

    c = scale log2(e) is any number, hence a mean square of u^2 / 3, by the coarsest unit; an entry of c k loses eta, times ln 2.
    """
    form = rounding.form
    return (d_s * d_s).mul_(form.u**2 / 3), size * form.u, size * (form.eta * 0.7)


@fused
def dq_sums(
    product: torch.Tensor,
    pk: torch.Tensor,
    of_b: torch.Tensor,
    of_flush: torch.Tensor,
    b_d: torch.Tensor,
    flush_d: torch.Tensor,
    scale: Steps,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dQ, its B without accumulation, and the flushed part of B; `product`: dS @ k."""
    pk_size = (pk * scale).abs()
    return product * scale, torch.addcmul(of_b, pk_size, b_d), torch.addcmul(of_flush, pk_size, flush_d)


@fused
def spread_of_d(
    random: torch.Tensor, worst: torch.Tensor, pk: torch.Tensor, sigma2_d: torch.Tensor, hard_d: torch.Tensor, scale: Steps
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sigma^2 and H of dQ: those of dS's roundings and those of D."""
    pk_size = (pk * scale).abs()
    return torch.addcmul(random, pk_size * pk_size, sigma2_d), torch.addcmul(worst, pk_size, hard_d)


@fused
def dq_bound(
    dq: torch.Tensor,
    b: torch.Tensor,
    reach: torch.Tensor,
    k_sum: torch.Tensor,
    of_row: torch.Tensor,
    terms_k: Steps,
    n_k: Steps,
    scale: Steps,
    rounding: Rounding,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return acc of dQ and B with it; `reach`: sum |dS| |k|, `of_row`: sum |dS|."""
    halves = math.ceil(n_k / 32) if isinstance(n_k, float | int) else (n_k / 32).ceil()
    reorder = accumulated(steps_of(n_k) + halves, dq, reach, rounding)
    return reorder, (b + reorder).add_(lost(k_sum, of_row, terms_k) * (abs(scale) + 1))


@fused
def key_loss(q_sum: torch.Tensor, of_key: torch.Tensor, terms_q: Steps, touched: torch.Tensor, factor: Steps) -> torch.Tensor:
    """Return what dK loses by flushing, where some row sees the key, from sum |q| and sum |dS|."""
    return lost(q_sum, of_key, terms_q).mul_(factor).mul_(touched)


@fused
def of_q(q: torch.Tensor, scale: Steps, sigma2_d: torch.Tensor, hard_d: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return scale q, |scale q|, its square, V_D times that, and H_D |scale q|."""
    scaled = q * scale
    size, square = scaled.abs(), scaled * scaled
    return scaled, size, square, square * sigma2_d, size * hard_d
