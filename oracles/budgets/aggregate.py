"""Two statistics over a whole output that find errors within every element's budget: excess noise, and a scale or a bias.

With err = out - ref, h = half an ulp of ref, res = |rd(ref) - ref|, S = sigma^2 + Bh^2 + ((B - Bh) / 8)^2, Bh the flushed part of
B, and f = 1 - exp(-4 S / h^2):

    w = 1 / (S + h^2 / 3);  Ex = S + res^2 (1 - f) + f h^2 / 3, the expected square of the error
    R = sum w err^2 / (g sum w Ex)                                                                      limit 1 + 3 / sqrt(nu)
    z = max(0, |sum_r t_r| - sum w |ref| (Bh + (B - Bh) / 4 + acc / 3)) / sqrt(sum_r t_r^2), t_r = sum_d w err ref of a row
                                                                                                        limit 6

z is the smaller of that and the same with err - (1 - f) (rd(ref) - ref): where outputs repeat, for example in one-hot rows,
their known last rounding repeats too.

acc is the accumulation's part of B. Tensor cores truncate the sum at every step of 16 terms: where these have one sign, a whole
output is too small by 1.7 eps a step (measured on an H200, the same for four kernels with tiles of 16 to 128 keys).

nu is the effective number of rows, (sum y)^2 / sum y^2 with y_r = sum_d w Ex, at least 16. Both are computed only where values
are generic (repeats.py), since the errors of equal values are not independent. Limits as measured: on 875 correct cases
(R - 1) sqrt(nu) was at most 1.26 and z at most 2.6. Beyond a limit, independence is checked (independence.py): with c the
correlation within a row, R's limit is 1 + max(3, 10 c) / sqrt(nu); where roundings are known to add up, one and a half times
what they add up to is taken from z, since the kernel's own way to round may be another. So it is with R, where known roundings
alone have an R_k above 1 + 1.5 / sqrt(nu): one and a half times R_k - 1. Errors that rows of an output share, those of D in
dK, make the sum of t vary more than sum_r t_r^2 says (measured where one token is large: sum t over sqrt(sum t^2) had a standard
deviation of 2.95, and over sqrt(sum t^2 + V) of 1.01): V, their part of its variance, is added to sum_r t_r^2 but for a quarter
of it, for which the limit has room: 6 standard deviations are at least 5.3 then, and z of normal values is what it was. They are
few numbers too: with W the variance of the noise by them and L the largest of them, R's limit is
1 + max(3 / sqrt(nu), 10 sqrt(c^2 / nu + W / (2 E^2)) + 13 L / E), E = g sum w Ex (one token large, rows that see 8 keys and a
sink: R of a correct kernel 1.05 x the limit without W; a sequence of one query and 127 keys beside longer ones, whose error of D
is 3.9 standard deviations: 1.34 x the limit without L).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from attnfuzz.kernels.problem import OutputName
from attnfuzz.oracles.budgets.bounds import Budget
from attnfuzz.oracles.budgets.independence import Independence, Shared
from attnfuzz.oracles.budgets.repeats import Generic, Repeats, generic
from attnfuzz.oracles.formats import LAST_BITS, Format, half_ulp, on_grid, rounded
from attnfuzz.oracles.fused import fused

__all__ = ["SUMS", "of_limits", "statistics", "sums_of_rows", "suspicious"]

_R_LIMIT, _R_SINGLE, _Z_LIMIT = 3.0, 10.0, 6.0
_R_LARGEST = 13.0
"""Beside _R_SINGLE: one square of a normal number exceeds 24 one time in a million."""
_R_KNOWN = 1.5
"""Times 1 / sqrt(nu): how far R of known roundings is beyond 1 where they add up."""
_KNOWN = 1.5
"""Factor of what known roundings add up to: a kernel's way to round is one of those that were tried, or a similar one."""
_ROOM = 0.25
"""Part of sum t^2 by which the variance of the sum may be larger, since the limit of z is far beyond what chance makes."""
_FEWEST_ROWS = 16.0
_NOTHING = 1e-300
_NONE = Shared()
SUMS = 8
"""Numbers of an output behind its statistics."""


def statistics(
    outputs: Mapping[OutputName, tuple[torch.Tensor, torch.Tensor, Budget]],
    repeats: Repeats | None,
    form: Format,
    independence: Callable[[], Independence | None] = lambda: None,
) -> dict[OutputName, tuple[float, float]]:
    """Return (R, z) of each output in units of their limits: 1 is the limit. Empty where the values are not generic.

    Args:
        outputs: a kernel's values, the expected ones, and the budget, float64 `(heads, tokens, dim)`.
        repeats: how often values repeat.
        form: the dtype's format.
        independence: called only where a statistic is beyond its limit.
    """
    figures = repeats.figures() if repeats is not None else None
    if figures is None or not outputs:
        return {}
    sums = _sums(list(outputs.values()), form)
    # One copy from the device for all.
    numbers = torch.cat([figures.flatten(), sums.flatten()]).tolist()
    width = figures.shape[1]
    values = generic([numbers[at : at + width] for at in range(0, figures.numel(), width)])
    of = {name: numbers[figures.numel() + at * SUMS :][:SUMS] for at, name in enumerate(outputs)}
    ratios = {name: pair for name, row in of.items() if (pair := of_limits(name, values, row))}
    dependence = independence() if any(max(pair) > 1 for pair in ratios.values()) else None
    if dependence is None:
        return ratios
    for name, (known_z, correlated) in dependence.figures().items():
        if name in ratios:
            known = of[name]
            if ratios[name][0] > 1:
                known = _less_known(name, values, known, _noise_of(outputs[name], dependence.moved(name), form))
            known_z = known_z if known_z > Independence.Z_LIMIT else 0.0
            if pair := of_limits(name, values, known, correlated, known_z, dependence.shared(name)):
                ratios[name] = pair
    return ratios


def suspicious(outputs: Mapping[OutputName, tuple[torch.Tensor, torch.Tensor, Budget]], form: Format) -> bool:
    """Whether R or z of any output is beyond its limit for generic values."""
    if not outputs:
        return False
    rows = _sums(list(outputs.values()), form).tolist()
    ratios = (of_limits(name, Generic(), row) for name, row in zip(outputs, rows, strict=True))
    return any(max(each) > 1 for each in ratios if each)


def of_limits(
    name: OutputName,
    repeats: Generic,
    sums: Sequence[float],
    correlated: float = 0.0,
    known_z: float = 0.0,
    shared: Shared = _NONE,
) -> tuple[float, float] | None:
    """Return (R, z) over their limits, from an output's `_sums`; None where they are not computed.

    `correlated`, `known_z`, `shared`: c, z_k where it counts, V, W and L (independence.py).
    """
    g = repeats.g
    noise, expected, _, slope, t, t2, s, s2 = sums
    nu = _effective_rows(name, repeats, sums)
    # Sixteen equal rows have a nu of 16, and equal weights a g of 1.25, but for the last bits.
    most = Repeats.LIMIT * (1 - LAST_BITS)
    if g >= most or nu < _FEWEST_ROWS * (1 - LAST_BITS) or (name == "dv" and repeats.of_d_o >= most):
        return None
    # Values that repeat g times in the mean have g times the noise.
    expected = max(expected * max(g, 1.0), _NOTHING)
    spread = math.hypot(correlated / math.sqrt(nu), math.sqrt(shared.of_noise / 2) / expected)
    r = noise / expected / (1 + max(_R_LIMIT / math.sqrt(nu), _R_SINGLE * spread + _R_LARGEST * shared.largest / expected))
    z = min(_z(x, x2, slope, known_z, shared.of_t) for x, x2 in ((t, t2), (s, s2))) / _Z_LIMIT
    return r, z


def _z(total: float, squares: float, slope: float, known_z: float, shared: float) -> float:
    beyond = max(0.0, abs(total) - slope - _KNOWN * known_z * math.sqrt(squares))
    return beyond / math.sqrt(max(squares + max(0.0, shared - _ROOM * squares), _NOTHING))


def _effective_rows(name: OutputName, repeats: Generic, sums: Sequence[float]) -> float:
    nu = sums[1] * sums[1] / max(sums[2], _NOTHING)
    return min(nu, repeats.carrying) if name == "dk" else nu


def _less_known(name: OutputName, repeats: Generic, sums: Sequence[float], known: float) -> list[float]:
    """Return an output's `_sums` with less noise where known roundings alone, with a noise of `known`, add up."""
    noise, expected, *others = sums
    beyond = known - expected * max(repeats.g, 1.0)
    adds_up = beyond > expected * max(repeats.g, 1.0) * _R_KNOWN / _effective_rows(name, repeats, sums) ** 0.5
    return [max(0.0, noise - _KNOWN * beyond) if adds_up else noise, expected, *others]


def _noise_of(output: tuple[torch.Tensor, torch.Tensor, Budget], moved: list[torch.Tensor], form: Format) -> float:
    """Return sum w err^2 of exact values that are `moved`, then rounded: the largest over the ways in `moved`."""
    _, expected, budget = output
    return float(_sums([(rounded(expected + each, form), expected, budget) for each in moved], form)[:, 0].max())


def _sums(outputs: list[tuple[torch.Tensor, torch.Tensor, Budget]], form: Format) -> torch.Tensor:
    """Return the sums of every output, `(outputs, SUMS)`, on the device."""
    parts = sums_of_rows(outputs, form)
    return torch.stack([each.sum(-1) for each in parts])


def sums_of_rows(outputs: list[tuple[torch.Tensor, torch.Tensor, Budget]], form: Format) -> list[torch.Tensor]:
    """Return for each output and each of its rows w err^2, w Ex, y^2, B's share of t, and t, t^2 of both t: `(SUMS, rows)`."""
    return [_of_rows(got, expected, budget, form) for got, expected, budget in outputs]


def _of_rows(got: torch.Tensor, expected: torch.Tensor, budget: Budget, form: Format) -> torch.Tensor:
    b, flush, noise, reorder = budget.b, budget.flush, budget.noise, budget.reorder
    assert b is not None
    assert flush is not None
    assert noise is not None
    assert reorder is not None
    columns = torch.stack(_terms(got, expected, b, flush, noise, budget.allowed, reorder, form)).flatten(1, -2).sum(-1)
    noise_, y, slope, t, other = columns
    return torch.stack([noise_, y, y * y, slope, t, t * t, other, other * other])


@fused
def _terms(
    got: torch.Tensor,
    expected: torch.Tensor,
    b: torch.Tensor,
    flush: torch.Tensor,
    noise: torch.Tensor,
    allowed: torch.Tensor,
    reorder: torch.Tensor,
    form: Format,
) -> tuple[torch.Tensor, ...]:
    """Return of each element w err^2, w Ex, B's share of t, t, and t without the last rounding where it is known."""
    expected = on_grid(expected, b)
    h = half_ulp(expected, form)
    unit, h2 = 2 * h, h * h
    res = torch.round(expected / unit).mul_(unit).sub_(expected)
    rest = (b - flush).clamp_(min=0.0)
    s = noise + flush * flush + (rest / 8).square_()
    stays = (s / h2).mul_(-4).exp_()
    h2 = h2 / 3
    likely = res.square().mul_(stays).add_(s).add_((1 - stays).mul_(h2))
    counted = torch.isfinite(got) & (expected != 0) & (allowed < torch.inf)
    w = torch.where(counted, 1 / (s + h2), 0.0)
    error = torch.where(counted, got - expected, 0.0)
    weighted = w * error
    columns = (
        weighted * error,
        (w * likely).nan_to_num_(nan=0.0),
        (rest / 4).add_(flush).add_(reorder, alpha=1 / 3).mul_(w).mul_(expected.abs()),
        weighted * expected,
        torch.addcmul(error, stays, res, value=-1).mul_(w).mul_(expected),
    )
    return tuple(each.nan_to_num_(nan=0.0) for each in columns)
