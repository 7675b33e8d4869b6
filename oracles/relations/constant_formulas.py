"""The limits of constant.py, element by element: each function is one kernel on a GPU (oracles/fused).

Shapes as in size_formulas.py; notation as in constant.py. `u`: unit roundoff of P, 0 where P is not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnfuzz.oracles.formats import CUT_OF_TF32X3, EPS, OF_TF32X3, TF32, Format, half_ulp, rounded
from attnfuzz.oracles.fused import fused

__all__ = ["Roundings", "alike_of_live", "of_dk", "of_dq", "of_keys", "of_o", "of_rows", "of_sum", "rows_of_dk"]


@dataclass(frozen=True, slots=True)
class Roundings:
    """Constants of a kernel: of P and its dtype, whether tensor cores truncate sums, and whether LSE of splits is rounded."""

    u: float
    form: Format
    truncates: bool
    tf32: bool
    tf32x3: bool
    splits: bool


@fused
def of_o(
    got: torch.Tensor,
    c: torch.Tensor,
    d_o: torch.Tensor,
    p: torch.Tensor,
    sigma: torch.Tensor,
    counts: torch.Tensor,
    of_d: float,
    of: Roundings,
) -> tuple[torch.Tensor, ...]:
    """Return O as expected, how far it may be off, and the terms of B_i; `of_d`: the error of sum_d |dO c| over that."""
    n, live = counts.clamp(min=1.0), counts > 0
    expected = torch.where(live, c, 0.0)
    alike = torch.hypot(p, _alike(sigma, of.u))
    rounding = torch.hypot(torch.zeros_like(p) + of.u, n * of.form.eta) * 5
    # P and c are truncated by tf32, not rounded: always toward zero.
    relative = torch.zeros_like(p) + TF32 if of.tf32 else (rounding * alike).clamp(max=of.u + of.form.eta)
    # The terms of O have one sign: tensor cores truncate their sum at each step of 16 keys.
    steps = n / 8 if of.truncates else _alike_in_sums(n, sigma)
    if of.tf32x3:
        steps = n * CUT_OF_TF32X3 + OF_TF32X3
    before = (relative + (n.sqrt() * 2 + 8 + steps) * EPS) * expected.abs()
    top, bottom = rounded(expected + before, of.form), rounded(expected - before, of.form)
    allowed = torch.where(live, torch.maximum(top - expected, expected - bottom), 0.0)
    off = (got - expected).abs().nan_to_num(nan=0.0, posinf=0.0) + before
    terms = d_o.abs() * off + (d_o * expected).abs() * of_d
    return expected, allowed, torch.where(live, terms, 0.0)


@fused
def of_dq(off: torch.Tensor, largest: torch.Tensor, counts: torch.Tensor, scale: float, eta: float) -> torch.Tensor:
    """Return how far dQ may be off 0; `largest`: the largest key in each dim."""
    return off * largest * (1.1 * scale) + (counts > 0).to(torch.float64) * eta


@fused
def rows_of_dk(
    off: torch.Tensor, q: torch.Tensor, q_size: torch.Tensor, longest: torch.Tensor, lse: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return what each row adds to the limit of dK; `longest`: the norm of the longest key."""
    p = torch.exp((q_size * longest * scale - lse).clamp(max=0.0)).nan_to_num(nan=1.0)
    return off * p * q.abs()


@fused
def of_dk(total: torch.Tensor, touched: torch.Tensor, scale: float, eta: float) -> torch.Tensor:
    """Return how far dK may be off 0, from the sum over the rows that see a key."""
    return torch.where(touched != 0, total, 0.0) * (1.1 * scale) + touched * eta


@fused
def of_rows(
    d_o: torch.Tensor, p: torch.Tensor, sigma: torch.Tensor, exponent: torch.Tensor, counts: torch.Tensor, of: Roundings
) -> tuple[torch.Tensor, ...]:
    """Return of each row that sees a key dO, |dO|, and the variance that P's roundings give its part of the sum of dV."""
    n, alike = counts.clamp(min=1.0), _alike(sigma, of.u)
    of_flushed = torch.hypot(n.sqrt(), n * alike) * of.form.eta
    by_row = torch.hypot(torch.hypot(p, alike) * of.u, of_flushed) + (exponent * 2 + 8) * EPS
    by_row = torch.hypot(by_row, exponent * of.u if of.splits else torch.zeros_like(exponent))
    own = torch.where(counts > 0, d_o, 0.0)
    return own, own.abs(), (own * by_row).square()


@fused
def alike_of_live(sigma: torch.Tensor, counts: torch.Tensor, of: Roundings) -> torch.Tensor:
    """Return the share of P's roundings that does not average out, of rows that see a key."""
    return torch.where(counts > 0, _alike(sigma, of.u), 0.0)


@fused
def of_keys(d_v: torch.Tensor, same: torch.Tensor, truncated: float, form: Format) -> tuple[torch.Tensor, ...]:
    """Return of each element of dV how far the sum may be off by it, and its square.

    The keys' own roundings are equal where some row weighs all its keys alike (`same`), or where dV is close to 0. Subnormal P
    have a few hundred values, and so have their products: their roundings do not average out.
    """
    size = d_v.abs()
    near, subnormal = (size < 32 * form.eta).to(torch.float64), (size < 2.0**form.min_exponent).to(torch.float64)
    least = near * (form.eta * 0.75) + torch.maximum(near, subnormal) * (form.eta / 4)
    return size * truncated + same * half_ulp(size, form) + least, d_v.square()


@fused
def of_sum(
    expected: torch.Tensor,
    variance: torch.Tensor,
    squares: torch.Tensor,
    truncated: torch.Tensor,
    carried: float,
    flushed: float,
) -> torch.Tensor:
    """Return how far the sum of dV over the keys may be off."""
    spread = (variance + squares * (carried * carried)).sqrt() + flushed + expected.abs() * (carried / 8)
    return spread * 7 + truncated


def _alike(sigma: torch.Tensor, u: float) -> torch.Tensor:
    """Return the share of P's roundings that does not average out: P within 4 u, as with a scale of 0, are rounded alike."""
    return (torch.zeros_like(sigma) + 4 * u) / sigma.clamp(min=1e-300).clamp(min=4 * u) if u else torch.zeros_like(sigma)


def _alike_in_sums(n: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Return the error of a sum of n terms that are added one by one in float32, in eps of it, beyond that of random terms.

    Equal terms are rounded alike while the sum keeps its last bit: each by up to eps of the sum so far, half of the whole on
    average. Terms count as equal within half of that bit, which is at most n eps of a term: P that spread by less.

    Terms below two units of the sum's last bit, 4 eps of it, are lost or become a unit, which does not average out: an eighth of
    the most that they can be off is taken, as measured below, and at most all that they are. P = exp(sigma x) / (n exp(sigma^2
    / 2)) of normal x is so small for x < y = (log(4 n eps) + sigma^2 / 2) / sigma: a part of at most exp(-y^2 / 2) of the terms,
    and of at most exp(-(y - sigma)^2 / 2) of their sum. Of 320 sums of 2,000 to 400,000 terms the worst was off by 0.47 of the
    limit, and of 168 by 5.8 times the limit without this part (by a script that is not in the repository; test_long_sums.py has
    some).
    """
    alike = n * EPS
    y = ((n * (4 * EPS)).log() + sigma.square() / 2) / sigma.clamp(min=1e-3)
    small = (y.clamp(max=0.0).square() / -2).exp() * n / 16
    lost = ((y - sigma).clamp(max=0.0).square() / -2).exp() / EPS
    return n / 2 * (alike / torch.maximum(sigma, alike)) + torch.minimum(small, lost)
