"""The typical errors of sizes.py, element by element: each function is one kernel on a GPU (oracles/fused).

Notation as there. Tensors of rows are `(heads, rows)` or `(heads, rows, 1)`, of columns `(heads, 1, dim)`; `counts` are the keys
that a row sees, `touched` is 1 for keys that some row sees, else 0; `live` rows see a key. Sizes of a row are its norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnfuzz.oracles.formats import EPS
from attnfuzz.oracles.fused import fused

__all__ = ["Errors", "by_key", "column", "of_lse", "of_rows", "squares_of_dk", "squares_of_dv", "unit_of_dq", "unit_of_o"]

_LEAST = 1e-300


@dataclass(frozen=True, slots=True)
class Errors:
    """Constants of a kernel: `u` of P and dS, the output's own last rounding, and half a subnormal unit.

    `half`: whether P is rounded to half precision; `splits`: whether LSE of splits is. `partials`, `times`: factors of errors
    where partial dK and dV, or partial O, are rounded; `of_delta`: Delta's error over that of O's rounding.
    """

    u: float
    own: float
    eta: float
    half: bool
    splits: bool
    partials: float
    times: float
    of_delta: float


@fused
def of_rows(
    q_size: torch.Tensor,
    rms_k: torch.Tensor,
    counts: torch.Tensor,
    shift: torch.Tensor | None,
    scale: float,
    z: float,
    wide: float,
) -> tuple[torch.Tensor, ...]:
    """Return sigma, p, the largest exponent and the error of float32 arithmetic of each row; `wide`: factor of the shift."""
    n = counts.clamp(min=1.0)
    sigma = q_size * rms_k * scale
    half_square = sigma.square() / 2
    led = torch.exp(sigma * z - half_square) / n
    p = torch.maximum(torch.exp(half_square) / n.sqrt(), led).clamp(max=1.0)
    lifted = sigma * 3 if shift is None else sigma * 3 + shift.abs() * wide
    exponent = n.log() + lifted
    return sigma, p, exponent, (exponent * 2 + 4 + n.sqrt() / 2) * EPS


@fused
def column(column_size: torch.Tensor, size: torch.Tensor, dim: float) -> torch.Tensor:
    """Return the root of a column's mean square over that of all, at least 1, from the norms of columns and of all."""
    return (column_size.square() / size.square().clamp(min=_LEAST) * dim).clamp(min=1.0).sqrt()


@fused
def of_lse(exponent: torch.Tensor, counts: torch.Tensor, p: torch.Tensor, errors: Errors, l_from_rounded_p: bool) -> torch.Tensor:
    """Return the largest error of LSE in natural units.

    Of a score: tensor cores truncate each step of its product, up to 2 eps a step of 16, and scale, log2(e), ln(2) and the result
    are rounded. Measured on an H200 where one key is seen: 4.2 eps of it.
    """
    n = counts.clamp(min=1.0)
    allowed = (exponent * 6 + 16 + n.log2() * 2) * EPS
    if l_from_rounded_p:
        allowed = allowed + p * (4 * errors.u)
    return allowed + exponent * (2 * errors.u) if errors.splits else allowed


@fused
def unit_of_o(
    expected: torch.Tensor,
    p: torch.Tensor,
    exponent: torch.Tensor,
    fp32: torch.Tensor,
    counts: torch.Tensor,
    rms_v: torch.Tensor,
    of_column: torch.Tensor,
    errors: Errors,
) -> torch.Tensor:
    """Return the typical error of O. Partial O are rounded once more, each by a unit of its own."""
    size = rms_v * p
    rounding = torch.hypot(_of_p(exponent, errors) * size, counts.clamp(min=1.0) * size * errors.eta) * errors.times
    return _total(expected * errors.times, size, rounding * of_column, fp32, counts, errors)


@fused
def unit_of_dq(
    expected: torch.Tensor,
    q: torch.Tensor,
    sigma: torch.Tensor,
    q_size: torch.Tensor,
    d_size: torch.Tensor,
    p: torch.Tensor,
    exponent: torch.Tensor,
    fp32: torch.Tensor,
    counts: torch.Tensor,
    rms_k: torch.Tensor,
    rms_v: torch.Tensor,
    mean_k: torch.Tensor,
    of_column: torch.Tensor,
    scale: float,
    flushed: float,
    errors: Errors,
) -> torch.Tensor:
    """Return the typical error of dQ; `mean_k`: the mean key; `flushed`: a lost subnormal of dS.

    The error of Delta is times |sum_j P_ij k_j| / rms(k), without its random part.
    """
    toward_q = sigma / q_size.clamp(min=_LEAST) * q
    drift = torch.hypot(toward_q, mean_k / rms_k.clamp(min=_LEAST))
    size = d_size * rms_v * rms_k * p * scale
    rounding = _of_p(exponent, errors) * size * (torch.hypot(p, drift) * (2 * errors.of_delta) + 1)
    rounding = torch.hypot(rounding, counts.clamp(min=1.0) * flushed * scale * rms_k * p)
    return _total(expected, size, rounding * of_column, fp32, counts, errors)


@fused
def squares_of_dv(
    d_o: torch.Tensor,
    d_size: torch.Tensor,
    exponent: torch.Tensor,
    counts: torch.Tensor,
    fp32: torch.Tensor,
    accumulated: float,
    dim: float,
    errors: Errors,
) -> torch.Tensor:
    """Return the variance that each row adds to dV of a key that it sees; `fp32`: the largest of all rows'."""
    n = counts.clamp(min=1.0)
    square = d_size.square() / dim
    size = square.sqrt() / n
    rounding = size * torch.hypot(_of_p(exponent, errors), n * errors.eta)
    return _squares(d_o, square, size, rounding, counts, fp32 + accumulated, errors)


@fused
def squares_of_dk(
    q: torch.Tensor,
    q_size: torch.Tensor,
    d_size: torch.Tensor,
    rms_v: torch.Tensor,
    p: torch.Tensor,
    exponent: torch.Tensor,
    counts: torch.Tensor,
    fp32: torch.Tensor,
    accumulated: float,
    dim: float,
    scale: float,
    flushed: float,
    errors: Errors,
) -> torch.Tensor:
    """Return the same of dK; `flushed`: a lost subnormal of dS."""
    square = q_size.square() / dim
    each = square.sqrt() * scale
    size = each * (d_size * rms_v) / counts.clamp(min=1.0)
    rounding = torch.hypot(_of_p(exponent, errors) * size * (p * (2 * errors.of_delta) + 1), each * flushed)
    return _squares(q, square, size, rounding, counts, fp32 + accumulated, errors)


@fused
def by_key(
    expected: torch.Tensor,
    squares: torch.Tensor,
    touched: torch.Tensor,
    k_size: torch.Tensor,
    rms_q: torch.Tensor,
    fp32: torch.Tensor,
    accumulated: float,
    scale: float,
    least: float,
    errors: Errors,
) -> torch.Tensor:
    """Return the typical error of dK or dV from the sums of `squares`, with exp(tau^2) of each key."""
    peak = torch.exp((k_size * rms_q * scale).square()).clamp(max=20.0)
    fixed = torch.where(touched != 0, squares, 0.0).sqrt() * peak
    return torch.hypot(torch.hypot(fixed, (fp32 + accumulated + errors.own) * expected.abs()), touched * least)


def _of_p(exponent: torch.Tensor, errors: Errors) -> torch.Tensor:
    """Return the relative error of P: u, and where LSE of splits is rounded also u times that, at most the largest exponent."""
    of_splits = exponent * errors.u if errors.splits else torch.zeros_like(exponent)
    return torch.hypot(of_splits, torch.zeros_like(exponent) + errors.u)


def _total(
    expected: torch.Tensor, size: torch.Tensor, rounding: torch.Tensor, fp32: torch.Tensor, counts: torch.Tensor, errors: Errors
) -> torch.Tensor:
    live = counts > 0
    fixed = torch.where(live, torch.hypot(rounding, fp32 * size), 0.0)
    least = live.to(torch.float64) * errors.eta
    return torch.hypot(torch.hypot(fixed, (fp32 + errors.own) * expected.abs()), least)


def _squares(
    x: torch.Tensor,
    square: torch.Tensor,
    size: torch.Tensor,
    rounding: torch.Tensor,
    counts: torch.Tensor,
    fp32: torch.Tensor,
    errors: Errors,
) -> torch.Tensor:
    """Return of each row its variance, times the square of x over the row's mean `square`: few rows do not average out."""
    part = (x.square() / square.clamp(min=_LEAST)).clamp(min=1.0)
    of_row = (rounding * errors.partials).square() + (fp32 * size).square()
    return torch.where(counts > 0, of_row, 0.0) * part
