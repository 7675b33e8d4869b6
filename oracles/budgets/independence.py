"""Whether an output's errors are independent; checked where a statistic over all of them is beyond its limit.

Rows may have equal errors by their structure, without a fault: with P = exp(-slope (i - j)) under a window, additional scores of
1e-3 change no rounding, so that all rows are rounded alike (measured on an H200: z of 3.7 x its limit, R of 1.2 x). And beside a
large sink all P are a few of float16's subnormal numbers: 2.07 to 2.23 units become 2 in every row and key, which is 0.14 units
too small each time (R of dV 1.05 to 12 x its limit in 14 of 6,000 Cases with such sinks, by a script that is not in the
repository). Six figures:

    z_k = |sum_r t_r| / sqrt(sum_r t_r^2), t_r = sum_d w err ref of a row (aggregate.py), err the error of exact values by the
          roundings of P and dS, without and with the last one: the largest over the ways a kernel may round, eight references
          of P's exponent included, nine beside a sink. The last one leans too where P has few values: 255/256 of a dO with
          eight bits is always rounded down (one query, 128 keys and scores near 0 in bfloat16: z of 1.6 x its limit)
    R_k = R of the outputs that these known roundings make of exact values, the largest over the ways that round where O's budget
          assumes: for O the one reference that is its row's maximum, since the others have other units; beside a sink its keys'
          maximum too (scores of -0.3 to 1 beside a sink of 2.4, float16: R of 1.002 x its limit)
    c^2 = the mean over rows of sum_de corr(d, e)^2 / D^2: 1 where a row's error is a multiple of one number, as the error of D
          in a row that sees few keys, and 1 / n where it has n independent numbers; equal values have equal last roundings
    V   = the part of the variance of sum_r t_r that is not in sum_r t_r^2: 0 for O, dV and dQ, whose rows share no error. An
          error of D in row i is in dK of all keys that it sees. With V_D its variance (delta.py) and g_ij = sum_d w ref scale q
          of key j and row i: sum_i V_D (sum_j P_ij g_ij)^2 - sum_ij V_D P_ij^2 g_ij^2, at least 0
    W   = the variance of dK's sum w err^2 from D: of a sum of as many squares of single numbers as rows have errors of D that
          count. With x_i the error of dK by one of sqrt(V_D) in row i, 2 sum_ik (sum w x_i x_k)^2: the part of i = k, and the
          variance of sum w (sum_i +-x_i)^2 over random signs, which is the rest
    L   = the noise that the largest single number behind D's errors is expected to add: the largest eigenvalue of the matrix
          sum w x_i x_k

Independent roundings have z_k below 3.5 except for some in a thousand: it is the largest of 2 to 18 ways. A mean of n squares of
single numbers, twenty or more, exceeds 1 + 10 / sqrt(n) one time in a million, and 1 + 3 / sqrt(n) three times in a hundred.
One square alone exceeds 1 + 10 + 13 one time in a million, hence 13 L in R's limit. R_k was at most 1 + 1.1 / sqrt(nu) in the
1,226 generic outputs of 800 drawn Cases (nu as in aggregate.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnfuzz.kernels.problem import OutputName
from attnfuzz.oracles.budgets.delta import Delta
from attnfuzz.oracles.budgets.forward import Forward
from attnfuzz.oracles.budgets.scores import Scores
from attnfuzz.oracles.formats import TINY, half_ulp, on_grid
from attnfuzz.oracles.frames import Placed

__all__ = ["Independence", "Shared"]

_REFERENCES = 8
_SAMPLED = 32
_WINDOW = 16.0
"""Mantissas are equal within u / 16, as in repeats.py."""
_NOTHING = 1e-300
_SIGNS = 32
"""Draws of signs, for a standard deviation that is right within an eighth."""
_STEPS = 12
"""Multiplications by a matrix whose largest eigenvalue is wanted. At least 0.87 of it is found (247 frames), and less than 0.94
only where other eigenvalues are nearly as large (by a script that is not in the repository)."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What errors that rows of an output share add: V, W and L."""

    of_t: float = 0.0
    of_noise: float = 0.0
    largest: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """An output as the sum over m of a rounded factor times `values (Z, m, dim)`."""

    expected: torch.Tensor
    """(Z, n, dim)."""
    values: torch.Tensor
    variance: torch.Tensor
    """Variance of the factor's rounding, (Z, n, m)."""
    single: tuple[torch.Tensor, torch.Tensor] | None = None
    """Variance (Z, n, 1) and direction (Z, n, dim) of one error shared by a whole row."""


class Independence:
    """Collects z_k, c and what R_k is taken from, of every output from whole frames."""

    Z_LIMIT = 3.5

    def __init__(self) -> None:
        self._sums: dict[OutputName, torch.Tensor] = {}
        self._shared: list[torch.Tensor] = []
        self._moved: dict[OutputName, tuple[torch.Tensor, int]] = {}
        self._correlated: dict[OutputName, list[torch.Tensor]] = {}

    def add(self, t: Scores, f: Forward, delta: Delta, placed: Placed) -> None:
        """Add one frame."""
        weight = t.p if t.changed is None else t.p * t.changed.slope
        d_s = weight * on_grid(t.d_o @ t.v.mT - delta.d, delta.b)
        var_p, var_s = (half_ulp(x, t.form).square_().div_(3).masked_fill_(x == 0, 0.0) for x in (t.p, d_s))
        k, q, of_d = t.k * t.scale, t.q * t.scale, weight * weight * delta.sigma2
        rows, keys = placed.sampled(_SAMPLED)
        products: tuple[tuple[OutputName, _Product, torch.Tensor, Iterator[torch.Tensor]], ...] = (
            ("o", _Product(f.o, t.v, var_p), rows, _of_p(t)),
            ("dv", _Product(t.p.mT @ t.d_o, t.d_o, var_p.mT), keys, iter([_rounding(t, t.p).mT])),
            ("dq", _Product(d_s @ k, k, var_s, (delta.sigma2, weight @ k)), rows, _of_ds(t, f, delta, weight)),
            ("dk", _Product(d_s.mT @ q, q, (var_s + of_d).mT), keys, (x.mT for x in _of_ds(t, f, delta, weight))),
        )
        for name, product, sampled, errors in products:
            self._add_known(name, product, errors, t, placed)
            self._correlated.setdefault(name, []).append(_correlated(product, sampled, t))
        self._shared.append(_shared_of_dk(products[-1][1], weight.mT, delta, t, len(self._shared)))

    def figures(self) -> dict[OutputName, tuple[float, float]]:
        """Return (z_k, c) of each output."""
        values: dict[OutputName, tuple[float, float]] = {}
        for name, sums in self._sums.items():
            total, squares = sums.unbind(-1)
            known = (total.abs() / squares.clamp(min=_NOTHING).sqrt()).nan_to_num(nan=math.inf).amax()
            values[name] = (float(known), math.sqrt(float(torch.cat(self._correlated[name]).mean())))
        return values

    def shared(self, name: OutputName) -> Shared:
        """Return V, W and L of an output."""
        if name != "dk":
            return Shared()
        of_frames = torch.stack(self._shared)
        of_t, squares, _, *drawn = of_frames.sum(0).tolist()
        rest = float(torch.tensor(drawn, dtype=torch.float64).var())
        # Where D has no bound, sums may be infinite.
        return Shared(max(0.0, of_t), math.inf if math.isnan(rest) else 2 * squares + rest, float(of_frames[:, 2].max()))

    def moved(self, name: OutputName) -> list[torch.Tensor]:
        """Return how far the known roundings of R_k move an output, `(heads, tokens, dim)`, one for each way to round."""
        whole, ways = self._moved[name]
        return list(whole.chunk(ways, -1))

    def _add_known(self, name: OutputName, product: _Product, errors: Iterator[torch.Tensor], t: Scores, placed: Placed) -> None:
        """Add sum t and sum t^2 of the rows, and store what moves them, for each of `errors`."""
        weighted = product.expected * _weights(product, t)
        moved = [error @ product.values for error in errors]
        self._store(name, moved[: 1 + _adds_sinks_last(t)] if name == "o" else moved, placed)
        moved += [each + _rounding(t, product.expected + each) for each in moved]
        of_rows = [(each * weighted).nan_to_num_(nan=0.0).sum(-1) for each in moved]
        if t.sunk and name in ("dk", "dv"):
            # The last key is the sink, whose large P would outweigh the others: it is no row of the output.
            of_rows = [each[:, :-1] for each in of_rows]
        sums = torch.stack([torch.stack([each.sum(), each.square().sum()]) for each in of_rows])
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def _store(self, name: OutputName, moved: list[torch.Tensor], placed: Placed) -> None:
        problem, parts, of_rows = placed.tokens.problem, torch.cat(moved, -1), name in ("o", "dq")
        if name not in self._moved:
            heads, tokens = (problem.heads, problem.total_q) if of_rows else (problem.kv_heads, problem.total_k)
            self._moved[name] = (parts.new_zeros((heads, tokens, parts.shape[-1])), len(moved))
        whole, _ = self._moved[name]
        if of_rows:
            placed.store_rows(whole, parts)
        else:
            placed.store_sums(whole, placed.sums(whole).copy_(parts))


def _weights(product: _Product, t: Scores) -> torch.Tensor:
    """Return w of every element."""
    return 1 / (product.variance @ product.values.square() + half_ulp(product.expected, t.form).square_().div_(3))


def _shared_of_dk(product: _Product, weight: torch.Tensor, delta: Delta, t: Scores, seed: int) -> torch.Tensor:
    """Return what dK's V, W and L are taken from, `(3 + _SIGNS,)`: V, half of the part of W of each row alone, L, the sums drawn.

    `weight`: P, times the derivative of the score, (Z, keys, rows). `seed`: of the signs, another one for each frame, since the
    variances of frames are added, and sums drawn by the same signs vary together.
    """
    w = _weights(product, t).masked_fill_(product.expected == 0, 0.0)
    if t.sunk:
        # As in `_add_known`.
        w, weight, expected = w[:, :-1], weight[:, :-1], product.expected[:, :-1]
    else:
        expected = product.expected
    q, sigma2 = product.values, delta.sigma2
    of_d = ((w * expected) @ q.mT).mul_(weight)
    of_t = (sigma2[..., 0] * (of_d.sum(1).square_() - of_d.square().sum(1))).nan_to_num_(nan=0.0).sum()
    alone = sigma2[..., 0] * ((w @ q.square().mT) * weight.square()).sum(1)
    # From one generator on the host, so that all devices have the same.
    signs = torch.randint(0, 2, (_SIGNS, *sigma2.shape), generator=torch.Generator().manual_seed(seed)).to(q) * 2 - 1
    moving = sigma2.sqrt() * q

    drawn = [(w * (weight @ (each * moving)).square_()).nan_to_num_(nan=0.0).sum() for each in signs]
    largest, at = q.new_zeros(len(q)), signs[0]
    for _ in range(_STEPS):
        # The matrix of sum w x_i x_k times a unit vector.
        at = at / at.norm(dim=1, keepdim=True).clamp(min=_NOTHING)
        moved = w * (weight @ (at * moving))
        at = ((weight.mT @ moved) * moving).sum(-1, keepdim=True).nan_to_num(nan=0.0, posinf=0.0)
        largest = torch.maximum(largest, at.norm(dim=(1, 2)))
    return torch.stack([of_t, alone.square_().nan_to_num_(nan=0.0).sum(), largest.amax(), *drawn])


def _rounding(t: Scores, x: torch.Tensor) -> torch.Tensor:
    unit = 2 * half_ulp(x, t.form)
    return torch.round(x / unit).mul_(unit).sub_(x)


def _adds_sinks_last(t: Scores) -> bool:
    """Whether a kernel may round P by the keys' own maximum, beside a sink: not where P is divided by the row sum before."""
    return t.sunk and not t.normalised_p


def _of_p(t: Scores) -> Iterator[torch.Tensor]:
    """Yield the roundings of P where exp(s - m) is rounded, for several m, since tiles differ in it; the largest P is exact.

    The first m is the row's maximum. Where that may be the sink, the second is the keys' own, since a kernel may add it last.
    """
    e, l = t.rounded  # noqa: E741
    for number in range(_REFERENCES):
        factor = 2.0 ** (number / _REFERENCES)
        yield _rounding(t, e * factor).masked_fill_(t.top, 0.0).div_(factor * l)
        if _adds_sinks_last(t) and not number:
            largest = e[..., :-1].amax(-1, keepdim=True)
            # Below that P is nothing beside the sink, and 1 / P may be infinite.
            of_keys = 1 / torch.where(largest > TINY, largest, 1.0)
            yield _rounding(t, e * of_keys).masked_fill_(e == largest, 0.0).div_(of_keys * l)


def _of_ds(t: Scores, f: Forward, delta: Delta, weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the roundings of dS before or after scaling, with D from the exact O, the rounded one or rounded products."""
    moved = (t.d_o * _rounding(t, f.o)).sum(-1, keepdim=True)
    d_p, scale = t.d_o @ t.v.mT, abs(t.only_scale)
    ways = (delta.d, delta.d + moved, *(() if delta.products is None else (delta.d + moved + delta.products,)))
    for d in ways:
        exact = weight * on_grid(d_p - d, delta.b)
        for factor in (1.0, scale or 1.0):
            yield _rounding(t, exact * factor).div_(factor)


def _correlated(product: _Product, sampled: torch.Tensor, t: Scores) -> torch.Tensor:
    """Return c^2 of sampled rows."""
    squares = []
    n, dim = product.expected.shape[1:]
    last = half_ulp(product.expected, t.form).square_().div_(3)
    for at in sampled.tolist():
        z, row = divmod(at, n)
        values = product.values[z]
        covariance = (values.mT * product.variance[z, row]) @ values
        if product.single is not None:
            one, direction = product.single[0][z, row], product.single[1][z, row]
            covariance += one * direction[:, None] * direction
        covariance += _last_covariance(product.expected[z, row], last[z, row], t)
        size = covariance.diagonal().clamp(min=_NOTHING).rsqrt()
        squares.append((covariance * size[:, None] * size).square().sum() / dim**2)
    return torch.stack(squares) if squares else torch.ones(1, dtype=torch.float64, device=t.p.device)


def _last_covariance(expected: torch.Tensor, variance: torch.Tensor, t: Scores) -> torch.Tensor:
    """Return the covariance `(dim, dim)` of the last roundings of a row: those equal but for sign and exponent have one.

    Such rows are those of dV where dO has one element for all dims (measured on an H100: R was 1.01 x its limit).
    """
    mantissa = torch.frexp(expected).mantissa
    alike = (mantissa.abs()[:, None] - mantissa.abs()).abs() <= t.form.u / _WINDOW
    size = variance.sqrt() * torch.where(mantissa < 0, -1.0, 1.0)
    return torch.where(alike, size[:, None] * size, 0.0)
