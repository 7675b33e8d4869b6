"""The budgets of O and LSE, element by element: each function is one kernel on a GPU (oracles/fused).

Tensors are `(Z, rows, keys)`, `(Z, rows, dim)`, `(Z, rows, 1)` or `(Z, 1, dim)`, float64; for symbols see bounds.py.
"""

from __future__ import annotations

import math

import torch

from attnfuzz.oracles.budgets.roundings import Rounding
from attnfuzz.oracles.formats import CUT_OF_TF32X3, EPS, LAST_BITS, OF_TF32X3, TINY, Format, on_grid
from attnfuzz.oracles.frames import Steps
from attnfuzz.oracles.fused import fused

__all__ = [
    "LAMBDA", "TIES", "accumulated", "difference", "exponentials", "leading", "least", "limited", "lost", "lse_budget",
    "o_budget", "of_keys", "of_partials", "of_split_lse", "of_values", "probabilities", "row_sums", "scaled_scores",
    "split_errors", "spread_of", "steps_of", "sum_budget", "unrounded_p", "visible_scores", "with_sinks",
]  # fmt: skip

LAMBDA, TIES = 6.0, 4.0
"""Limits on an error, as multiples of the root mean square of independent roundings and of repeated ones."""
_NOTHING = -120.0
"""Scores less than their row's maximum by that have P = 0 in float32, whose smallest number is exp(-103), also where a kernel's
maximum is off by 1 (beyond that the row is lost), or lags behind by a factor of 2^8 (lazy_rescale)."""
_OVERFLOWS = 80.0
"""An error of an exponent's argument from which on a right kernel's exp(s - m) may be infinite in float32."""
_MOST = 600.0
"""Largest delta whose exponential is added up: the sum over a row stays finite."""


@fused
def of_keys(k: torch.Tensor, scale: Steps) -> tuple[torch.Tensor, ...]:
    """Return |k|, |scale k|, and the square of that."""
    size = k.abs()
    scaled = size * abs(scale)
    return size, scaled, scaled * scaled


@fused
def of_values(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return |x| and its square."""
    return x.abs(), x * x


@fused
def visible_scores(
    product: torch.Tensor, size: torch.Tensor, visible: torch.Tensor, scale: Steps, of_s: float, of_size: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return s, -inf where not `visible`, and |s| of_s + A of_size, from q . k and A, the sum of its terms' sizes times scale."""
    s = product * scale
    delta = s.abs().mul_(of_s).add_(size * of_size)
    return s.masked_fill(~visible, -torch.inf), delta


@fused
def with_sinks(
    s: torch.Tensor, delta: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor, is_sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return s, -inf where not `visible`, and delta, where a key `is_sink`: its score, and an error of 4 eps |sink|."""
    return torch.where(visible & is_sink, sinks, s), torch.where(is_sink, sinks.abs() * (4 * EPS), delta)


@fused
def scaled_scores(
    product: torch.Tensor, size: torch.Tensor, scale: Steps, of_s: float, of_size: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return s and delta as `visible_scores`, without a mask."""
    s = product * scale
    return s, s.abs().mul_(of_s).add_(size * of_size)


@fused
def exponentials(
    hidden: torch.Tensor, largest: torch.Tensor, delta: torch.Tensor, masked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exp(s - m) and delta + 4 eps |m| + 4 tiny; if `masked`, 0 where s is -inf, or so low that every kernel's P is 0.

    `largest`: m, -inf without keys. A score of s - 1e9 has an error of 240, and hides its key all the same.
    """
    m = torch.where(largest == -torch.inf, 0.0, largest)
    below = hidden - m
    e = on_grid(below, delta).exp_()
    delta = delta + (m.abs() * (4 * EPS) + 4 * TINY)
    return e, torch.where((below == -torch.inf) | (below + delta < _NOTHING), 0.0, delta) if masked else delta


@fused
def row_sums(total: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return l, LSE and m of each row, from the sum of exp(s - m) and m; 1, 0 and 0 in rows without keys, and 1 for these."""
    dead = largest == -torch.inf
    m, l = torch.where(dead, 0.0, largest), torch.where(dead, 1.0, total)  # noqa: E741
    # So fine that P adds up to 1 within what `difference` leaves out.
    l = on_grid(l, l * (EPS / 256))  # noqa: E741
    return l, m + l.log(), m, dead.to(torch.float64)


@fused
def probabilities(e: torch.Tensor, l: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: E741
    """Return P and P (e^delta - 1)."""
    p = e / l
    return p, p * delta.clamp(max=_MOST).expm1_()


@fused
def lse_budget(
    lse: torch.Tensor, m: torch.Tensor, dead: torch.Tensor, raised: torch.Tensor, widest: torch.Tensor, log_keys: Steps
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return Lambda and M_LSE of each row, from the sum of P (e^delta - 1) and the largest delta; 1 if that is beyond 1.

    Lambda is at most the largest delta, and taken to be that where the sum would be endless. Where an exponent is off by so much
    that exp overflows, as in a row of which all scores are -1e10, LSE may be anything.
    """
    shift = torch.where(widest > _MOST, widest, raised.log1p()).clamp_(min=0.0)
    m_lse = (lse.abs() + m.abs()).mul_(4 * EPS).add_(shift).add_((log_keys + 1) * (8 * EPS))
    m_lse = torch.where(widest > _OVERFLOWS, torch.inf, m_lse)
    return shift, torch.where(dead != 0, 0.0, m_lse), (widest > 1.0).to(torch.float64)


def leading(e: torch.Tensor, delta: torch.Tensor, u: float, unsure: torch.Tensor | None) -> torch.Tensor:
    """Return where P is exactly 1 before it is normalised, in every kernel: the row's maximum; none in `unsure` rows."""
    top = (e == 1.0) & (delta < u / 8)
    return top if unsure is None else top & ~unsure


@fused
def unrounded_p(
    e: torch.Tensor,
    l: torch.Tensor,  # noqa: E741
    delta: torch.Tensor,
    shift: torch.Tensor,
    m: torch.Tensor,
    unsure: torch.Tensor | None,
    rounding: Rounding,
    exact: bool,
    noise: bool,
) -> tuple[torch.Tensor, ...]:
    """Return P e_f^2, and of the rounding of exp(s - m), over l: mean square, worst case, flushed, and with `noise` h^2 / 3.

    `exact`: whether a row's maximum gives P = 1, else P is known but for a factor; `unsure`: rows in which it may be another.
    """
    eta, l2 = rounding.form.eta, l * l
    e_f = delta.clamp(max=80.0).expm1_().mul_(shift.clamp(max=80.0).exp_())
    of_e = (e / l * e_f).mul_(e_f)
    top = leading(e, delta, rounding.form.u, unsure) if exact else None
    variance = rounding.variance(e, eta, top)
    worst, flushed = rounding.worst(e, eta), rounding.flushed(e, None, eta)
    if top is not None:
        worst = worst.masked_fill(top, 0.0)
        flushed = torch.where(top, (m.abs() + 1) * (8 * EPS), flushed)
    of_p = (of_e, variance / l2, worst / l, flushed / l)
    if not noise:
        return of_p
    # Where the maximum lags, what is rounded is a multiple of e, whose unit is not known.
    return (*of_p, (rounding.true_variance(e, variance) if exact else rounding.most_variance(e, variance)) / l2)


@fused
def o_budget(
    pv: torch.Tensor,
    size: torch.Tensor,
    mean2: torch.Tensor,
    e_f2: torch.Tensor,
    v_most: torch.Tensor,
    v_sum: torch.Tensor,
    n_k: Steps,
    terms_k: Steps,
    rounding: Rounding,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return O on a grid, acc, and B without flushed values, from P @ v, P @ |v|, P @ v^2, sum P e_f^2, max |v| and sum |v|."""
    variance = (difference(mean2, pv * pv) * e_f2).sqrt_()
    reorder = accumulated(steps_of(n_k), pv, size, rounding)
    o = on_grid(pv, reorder)
    return o, reorder, torch.minimum(variance, v_most + o.abs()).add_(reorder).add_(lost(v_sum, 1.0, terms_k))


@fused
def of_partials(size: torch.Tensor, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the roundings of partial O add to O: mean square, worst case, flushed; `size`: X = P @ |v|.

    O = sum_s w_s O_s over splits s, with w_s = l_s / l, which add up to 1, and |sum_s w_s |O_s|| <= X however keys are split. An
    error of max(u |O_s|, eta) each adds up to u X + eta at most, and its mean square to that of one rounding of X, as if the
    splits were rounded alike: u^2 X^2 / 3, by the coarsest unit. How keys are split is not known, hence no smaller bound.
    """
    eta = rounding.form.eta
    variance = rounding.most_variance(size, rounding.variance(size, eta))
    return variance, size * rounding.form.u + size.clamp(max=eta), rounding.flushed(size, None, eta)


@fused
def of_split_lse(delta: torch.Tensor, s: torch.Tensor, most: torch.Tensor, form: Format) -> torch.Tensor:
    """Return delta with the rounding of LSE of the split that holds a key, 0 where s is -inf; `most`: |LSE| of the row.

    LSE_S of a split S with key j is at least s_j and at most LSE, however keys are split: its rounding is off by
    u max(|s_j|, |LSE|) or by eta, and moves all P of the split by that factor. It may overflow: then the row is lost.
    """
    size = torch.maximum(s.abs(), most)
    error = torch.where(size >= 0.999 * form.largest, _MOST, size * form.u + form.eta)
    return torch.where(s == -torch.inf, 0.0, delta + error)


@fused
def split_errors(p: torch.Tensor, delta: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return P e_f^2 for the delta of `of_split_lse`."""
    e_f = delta.clamp(max=80.0).expm1_().mul_(shift.clamp(max=80.0).exp_())
    return (p * e_f).mul_(e_f)


@fused
def limited(
    hard: torch.Tensor,
    sigma2: torch.Tensor,
    tau2: torch.Tensor | None,
    b: torch.Tensor,
    flush: torch.Tensor | None,
    dead: torch.Tensor,
    endless: torch.Tensor,
    half: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return B (with `flush`), M = min(H, 6 sigma + 4 tau) + B, and 6 sigma + 4 tau where it is the limit, else 0.

    Where `dead` is not 0, both are 0; where `endless` is not 0, M is infinite.
    Without `half` M is H + B: truncation to tf32 is not random.
    """
    b = torch.where(dead != 0, 0.0, b if flush is None else b + flush)
    spread = spread_of(sigma2, tau2)
    m = (torch.minimum(hard, spread) if half else hard) + b
    m = torch.where(dead != 0, 0.0, m).masked_fill(endless != 0, torch.inf)
    return b, m, _limiting(spread, hard)


@fused
def sum_budget(
    result: torch.Tensor,
    size: torch.Tensor,
    hard: torch.Tensor,
    sigma2: torch.Tensor,
    tau2: torch.Tensor | None,
    b: torch.Tensor,
    steps: Steps,
    rounding: Rounding,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return acc, B with it, M, and 6 sigma + 4 tau where that is the limit, of a sum over rows of `steps` matrix steps."""
    reorder = accumulated(steps, result, size, rounding)
    b, spread = b + reorder, spread_of(sigma2, tau2)
    m = (torch.minimum(hard, spread) if rounding.half else hard) + b
    return reorder, b, m, _limiting(spread, hard)


def _limiting(spread: torch.Tensor, hard: torch.Tensor) -> torch.Tensor:
    # Twelve equal errors have 6 sigma = H, but for the last bits.
    return spread.masked_fill(spread >= hard * (1 - LAST_BITS), 0.0)


@fused
def accumulated(steps: Steps, result: torch.Tensor, size: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return the error of fp32 accumulation over n = `steps` matrix steps of 16: eps (4 n |x| + 6 sqrt(n) X).

    X is the sum of the terms' sizes. float32 products are added one by one: sqrt(16 n) roundings in place of sqrt(n). By tf32x3
    their sum is cut toward zero: eps (21 n + 24) |x| more.
    """
    count = steps * 16 if rounding.form.u == EPS else steps
    root = math.sqrt(count) if isinstance(count, float | int) else count.sqrt()
    each = steps * (4 * EPS)
    if rounding.tf32x3:
        each = each + (steps * (16 * CUT_OF_TF32X3) + OF_TF32X3) * EPS
    return result.abs().mul_(each).add_(size * (root * (6 * EPS)))


def steps_of(n: Steps) -> Steps:
    """Return the matrix steps of 16 over `n` terms, and two more."""
    return math.ceil(n / 16) + 2 if isinstance(n, float | int) else (n / 16).ceil() + 2


@fused
def spread_of(sigma2: torch.Tensor, tau2: torch.Tensor | None) -> torch.Tensor:
    """Return 6 sigma + 4 tau."""
    spread = sigma2.sqrt().mul_(LAMBDA)
    return spread if tau2 is None else spread.add_(tau2.sqrt(), alpha=TIES)


@fused
def difference(mean_square: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """Return the variance as the mean square less the square of the mean: 0 where it is float64's error alone.

    The root of such an error, 2**-52 of the mean square, would be 2**-26 of the mean: near an error of float32.
    """
    return on_grid(mean_square - square, mean_square * (EPS / 16)).clamp_(min=0)


@fused
def lost(size_x: torch.Tensor, size_y: torch.Tensor | float, terms: Steps) -> torch.Tensor:
    """Return the loss of sum x y by flushing below the smallest normal float32: tiny (sum |x| + sum |y| + terms + 1).

    A flushed operand loses tiny times the other one, a flushed product or sum tiny.
    """
    return (size_x + (size_y + (terms + 1))).mul_(TINY)


@fused
def least(hard: torch.Tensor, sigma2: torch.Tensor, tau2: torch.Tensor | None, half: bool) -> torch.Tensor:
    """Return min(H, 6 sigma + 4 tau), or H for tf32, whose truncation is not random."""
    return torch.minimum(hard, spread_of(sigma2, tau2)) if half else hard
