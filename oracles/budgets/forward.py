"""Scores, probabilities, O and LSE of a frame in float64, and the budgets of O and LSE.

Notation as in oracles/budgets/bounds.py. Tensors are `(Z, rows, keys)` and `(Z, rows, dim)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attnfuzz.kernels.contract import Deviations
from attnfuzz.oracles.budgets.doubts import Doubt
from attnfuzz.oracles.budgets.roundings import Rounding, neighbours
from attnfuzz.oracles.formats import EPS, TF32, TINY, Format, on_grid
from attnfuzz.oracles.frames import Loaded, Placement, Steps
from attnfuzz.oracles.modifiers import Changed

__all__ = [
    "LAMBDA",
    "TIES",
    "Forward",
    "OfP",
    "Scores",
    "accumulated",
    "at_least_one",
    "difference",
    "forward",
    "least",
    "lost",
    "repeated_sum",
    "scores",
    "spread_of",
    "steps_of",
]

LAMBDA, TIES = 6.0, 4.0
"""Limits on an error, as multiples of the root mean square of independent roundings and of repeated ones."""
_HUGE = 1e60


@dataclass(slots=True, eq=False)
class Scores:
    """float64 quantities of the forward on a frame. q, d_o: `(Z, rows, dim)`; k, v: `(Z, keys, dim)`."""

    rounding: Rounding
    form: Format
    scale: Steps
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_o: torch.Tensor
    d_lse: torch.Tensor | None
    q_size: torch.Tensor
    k_size: torch.Tensor
    v_size: torch.Tensor
    d_size: torch.Tensor
    """|q|, |scale| |k|, |v|, |dO|."""
    k2: torch.Tensor
    v2: torch.Tensor
    d2: torch.Tensor
    """Squares of scale k, v, dO."""
    values: torch.Tensor
    """v, |v|, v^2 and k side by side, for one product with P."""
    unseen: torch.Tensor
    dead: torch.Tensor
    """(Z, rows, 1): whether the row sees no key."""
    s_size: torch.Tensor
    """|s|."""
    top: torch.Tensor
    """Scores that are their row's maximum, where P is exactly 1."""
    m: torch.Tensor
    e: torch.Tensor
    """exp(s - m): P before it is normalised."""
    l: torch.Tensor  # noqa: E741
    p: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    """Bound on the error of a score's exponent argument."""
    lost_rows: torch.Tensor
    """(Z, rows, 1): whether scores are too inexact (an error beyond 1 in the exponent) for any budget."""
    m_lse: torch.Tensor
    shift: torch.Tensor
    l_error: torch.Tensor | None
    """Relative error of a row sum of rounded P, where that is declared."""
    n_k: Steps
    """Keys of the sequence, or of each sequence `(Z, 1, 1)`."""
    terms_q: Steps
    terms_k: Steps
    """Rows and keys in this frame, without padding."""
    rows: int
    """Rows of each query head."""
    part: float
    """Share of the rows of the longest sequence in this frame."""
    k_sum: torch.Tensor
    """(Z, 1, dim_qk): sum_j |k|."""
    touched: torch.Tensor
    """(Z, keys, 1): 1 for keys that some row sees, else 0."""
    changed: Changed | None
    """Scores after softcap and score_mod."""
    doubt: Doubt | None
    """Scores that mask_mod may or may not hide."""

    @property
    def only_scale(self) -> float:
        """The scale of a frame with one for all sequences."""
        assert isinstance(self.scale, float)
        return self.scale

    @property
    def whole(self) -> bool:
        """Whether all rows of the sequences are in this frame."""
        return self.part == 1.0

    @property
    def lost_keys(self) -> torch.Tensor:
        """(Z, keys, 1): whether some row that sees or may see the key has unbounded errors."""
        if self.doubt is None:
            return (self.lost_rows & ~self.unseen).any(1)[..., None]
        return ((self.lost_rows | self.doubt.endless) & self.doubt.reach).any(1)[..., None]


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
    e_f2: torch.Tensor
    """sum_j P e_f^2: the mean square of P's relative error due to the score's."""


@dataclass(slots=True, eq=False)
class OfP:
    """The roundings of exp(s - m), each `(Z, rows, keys)`: mean square, that times (n - 1), worst case, flushed."""

    variance: torch.Tensor
    repeated: torch.Tensor | None
    worst: torch.Tensor
    flushed: torch.Tensor


def accumulated(steps: Steps, result: torch.Tensor, size: torch.Tensor, form: Format) -> torch.Tensor:
    """Return the error of fp32 accumulation over n = `steps` matrix steps of 16: eps (4 n |x| + 6 sqrt(n) X).

    X is the sum of the terms' sizes. float32 products are added one by one: sqrt(16 n) roundings in place of sqrt(n).
    """
    steps_ = steps * 16 if form.u == EPS else steps
    root = steps_.sqrt() if isinstance(steps_, torch.Tensor) else math.sqrt(steps_)
    return result.abs().mul_(4 * EPS * steps).add_(size * (6 * EPS * root))


def repeated_sum(x: torch.Tensor) -> torch.Tensor:
    """Return eps / 2 (n - 1) |x|, n the count of each x in its row: equal terms of a float32 sum are rounded alike each time.

    Added one after the other they are off by up to n / 2 eps of their sum; `accumulated` has half of that.
    """
    return (neighbours(x, EPS * x.shape[-1] / 2) - 1).mul_(x.abs()).mul_(EPS / 2)


def at_least_one(x: Steps) -> Steps:
    """Return max(1, x)."""
    return x.clamp(min=1.0) if isinstance(x, torch.Tensor) else max(1.0, x)


def steps_of(n: Steps) -> Steps:
    """Return the matrix steps of 16 over `n` terms, and two more."""
    return (n / 16).ceil() + 2 if isinstance(n, torch.Tensor) else math.ceil(n / 16) + 2


def spread_of(sigma2: torch.Tensor, tau2: torch.Tensor | None) -> torch.Tensor:
    """Return 6 sigma + 4 tau."""
    spread = sigma2.sqrt().mul_(LAMBDA)
    return spread if tau2 is None else spread.add_(tau2.sqrt(), alpha=TIES)


def scores(placed: Placement, x: Loaded, deviations: Deviations, device: str, *, ties: bool = False) -> Scores:
    """Compute scores, probabilities and the budget of LSE.

    delta = eps (4 (c |s| + sqrt(c) A) + 4 |m|) + 4 tiny, A = |scale| |q| |k|^T, c = max(1, D / 16); masked: 0.
    With a score_mod f, delta = error of f(s) (tree_errors.py) where s is off by that without m, + eps (4 |f(s)| + 4 |m|) + 4 tiny
    Lambda = log sum P e^delta;  M_LSE = Lambda + eps (4 (|LSE| + |m|) + 8 (1 + log2 max(M, 2)))
    Equal P that one thread adds one after the other are rounded alike each time: with ties + eps / 8 sum_j P (n - 1).
    In a row with scores that mask_mod may or may not hide, all scores that may be seen have one delta (doubts.py).
    """
    q, d_o, dim_qk = x.q, x.d_o, x.q.shape[-1]
    values = torch.cat([x.v, x.v.abs(), x.v * x.v, x.k], -1)
    v, v_size, v2, k = values.split([*[x.v.shape[-1]] * 3, dim_qk], -1)
    visible, scale, form = placed.visible(), placed.scale, Format.of(placed.dtype)
    modifiers = placed.modifiers
    leaves = placed.leaves() if modifiers.score is not None or modifiers.mask is not None else {}
    doubtful = None
    if leaves and (unmasked := modifiers.unmasked(leaves)) is not None:
        if (doubtful := modifiers.doubtful(leaves)) is not None:
            doubtful = visible & doubtful
        visible = visible & unmasked
    unseen = ~visible
    q_size, k_size, d_size = q.abs(), k.abs(), d_o.abs()
    rounding = Rounding(form, placed.dtype != "float32", placed.dtype == "float32" and device in deviations.tf32_on)
    # Scaled afterwards: sums of products of half-precision numbers are mostly exact, in any order.
    s = (q @ k.mT).mul_(scale)
    k_sum = k_size.sum(1, keepdim=True)
    sum_k = k_size.sum(-1)[:, None, :] if deviations.prescaled_q else None
    k_size.mul_(abs(scale))
    size = q_size @ k_size.mT
    steps, k2 = max(1.0, dim_qk / 16), k_size * k_size
    s_size = s.abs()
    delta = (s_size * (4 * EPS * steps)).add_(size, alpha=4 * EPS * math.sqrt(steps))
    if rounding.tf32:
        delta += TF32 * size
    if sum_k is not None:
        random = 2.12 * form.u * torch.sqrt((q * q) @ k2.mT)
        delta += torch.minimum(form.u * size, random + form.u * s_size) + 0.7 * form.eta * sum_k
    changed = None
    if modifiers.score is not None:
        changed = modifiers.with_error(s, delta, leaves)
        s, s_size = changed.after, changed.after.abs()
        delta = changed.after_error + 4 * EPS * s_size
    hidden = s.masked_fill(unseen, -torch.inf)
    m = hidden.amax(-1, keepdim=True)
    dead = m == -torch.inf
    m.masked_fill_(dead, 0.0)
    m_size = m.abs()
    below = on_grid(hidden - m, delta)
    delta.add_(m_size * (4 * EPS) + 4 * TINY)
    top = below == 0
    e = below.exp_()
    total = e.sum(-1, keepdim=True).masked_fill_(dead, 1.0)
    # So fine that P adds up to 1 within what `difference` leaves out.
    total = on_grid(total, EPS / 256 * total)
    lse = m + torch.log(total)
    doubt = None if doubtful is None else Doubt.of(s, m, visible, doubtful)
    if doubt is not None:
        delta = doubt.widest(delta, s_size)
    delta.masked_fill_(unseen if doubt is None else ~doubt.reach, 0.0)
    # Lambda is computed from logarithms: for huge scores e^delta itself would overflow.
    shift = (torch.logsumexp(hidden + delta, -1, keepdim=True) - lse).clamp_(min=0.0)
    keys = placed.n_k.clamp(min=2).log2() if isinstance(placed.n_k, torch.Tensor) else math.log2(max(placed.n_k, 2))
    m_lse = (lse.abs() + m_size).mul_(4 * EPS).add_(shift).add_(8 * EPS * (1 + keys))
    if deviations.lazy_rescale or rounding.tf32:
        top.zero_()
    else:
        top &= delta < form.u / 8
    if doubt is not None:
        top &= ~doubt.rows
    p = e / total
    result = Scores(
        rounding=rounding, form=form, scale=scale, q=q, k=k, v=v, d_o=d_o, d_lse=x.d_lse, q_size=q_size, k_size=k_size,
        v_size=v_size, d_size=d_size, k2=k2, v2=v2, d2=d_o * d_o, values=values, unseen=unseen, dead=dead, s_size=s_size,
        top=top, m=m, e=e, l=total, p=p, lse=lse, delta=delta, lost_rows=delta.amax(-1, keepdim=True) > 1.0, m_lse=m_lse,
        shift=shift, l_error=None, n_k=placed.n_k,
        terms_q=placed.terms_q, terms_k=placed.terms_k, rows=placed.rows_of_head, part=placed.part, k_sum=k_sum,
        touched=1.0 - unseen.expand(s.shape).all(1)[..., None].to(torch.float64), changed=changed,
        doubt=doubt,
    )  # fmt: skip
    if ties:
        # A unit of a sum of n terms is n of theirs: so far apart they may be and still be rounded alike.
        m_lse += (p * (neighbours(e, EPS / 2 * placed.n_k) - 1)).sum(-1, keepdim=True).mul_(EPS / 8)
    if deviations.l_from_rounded_p:
        result.l_error = _rounded_sum(result)
        m_lse += result.l_error
    m_lse.masked_fill_(dead, 0.0)
    return result


def _rounded_sum(t: Scores) -> torch.Tensor:
    """Return the relative error of a row sum of rounded P: at most u, and mostly that of a random walk.

    Ties always count here: a sum of equal P is off by all of one rounding.
    """
    random = t.rounding.variance(t.e, t.form.eta, t.top)
    random = (
        LAMBDA * random.sum(-1, keepdim=True).sqrt()
        + TIES * (random * (neighbours(t.e, t.form.u / 16) - 1)).sum(-1, keepdim=True).sqrt()
    )
    return (
        torch.minimum(random / t.l, torch.full_like(t.l, t.form.u * 1.01))
        + t.rounding.flushed(t.e, None, t.form.eta).sum(-1, keepdim=True) / t.l
    )


def forward(t: Scores, *, ties: bool, lean: bool = False) -> tuple[Forward, OfP]:
    """Compute the budget of O and the roundings in it; `lean` leaves out the parts for statistics over a whole output.

    pi = P l, e_f = (e^delta - 1) e^Lambda;  where pi is the row's maximum, it is exactly 1
    sigma^2 = var(pi) / l^2 @ v^2;  tau^2 = ((n - 1) var(pi)) / l^2 @ v^2, n the number of equal P in the row
    H = cap(pi) / l @ |v|
    B = min( sqrt(sum P e_f^2) sqrt(P @ v^2 - O^2), max|v| + |O| ) + acc(M / 16 + 2, O, P @ |v|) + flushed @ |v| + lost(v, P)
        with ties, in float32, + repeated_sum(P) @ |v|
    """
    eta, l2 = t.form.eta, t.l * t.l
    e_f = torch.expm1(t.delta.clamp(max=80.0)).mul_(torch.exp(t.shift.clamp(max=80.0)))
    e_f2 = (t.p * e_f).mul_(e_f).sum(-1, keepdim=True).clamp_(max=_HUGE)
    v_f = t.rounding.variance(t.e, eta, t.top)
    c_f = t.rounding.worst(t.e, eta).masked_fill_(t.top, 0.0)
    h_f = torch.where(t.top, 8 * EPS * (1 + t.m.abs()), t.rounding.flushed(t.e, None, eta))
    v_size, v2 = t.v_size, t.v2
    pv, size, mean2, pk = (t.p @ t.values).split([*[t.v.shape[-1]] * 3, t.k.shape[-1]], -1)
    hard, sigma2 = (c_f @ v_size).div_(t.l), (v_f @ v2).div_(l2)
    flush, noise = (h_f @ v_size).div_(t.l), None
    if not lean:
        noise = (t.rounding.true_variance(t.e, v_f) @ v2).div_(l2)
    tau2 = t_f = None
    if ties and t.rounding.half:
        t_f = (neighbours(t.e, t.form.u / 16, eta / 8) - 1).mul_(v_f)
        tau2 = (t_f @ v2).div_(l2)
    variance = difference(mean2, pv * pv).mul_(e_f2).sqrt_()
    reorder = accumulated(steps_of(t.n_k), pv, size, t.form)
    o = on_grid(pv.clone(), reorder)
    b = torch.minimum(variance, v_size.amax(1, keepdim=True) + o.abs()).add_(reorder).add_(flush)
    b += lost(v_size.sum(1, keepdim=True), 1.0, t.terms_k)
    if ties and not t.rounding.half:
        b += (repeated_sum(t.e) @ v_size).div_(t.l)
    if t.l_error is not None:
        b += o.abs() * t.l_error
    m_o = least(hard, sigma2, tau2, t).add_(b).masked_fill_(t.dead, 0.0)
    m_o.masked_fill_(t.lost_rows, torch.inf)
    result = Forward(
        o=o, pv=pv, pk=pk, sigma2=sigma2, tau2=tau2, hard=hard, b=b, flush=flush, reorder=reorder, noise=noise, m_o=m_o, e_f2=e_f2
    )
    return result, OfP(variance=v_f, repeated=t_f, worst=c_f, flushed=h_f)


def difference(mean_square: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """Return the variance as the mean square less the square of the mean: 0 where it is float64's error alone.

    The root of such an error, 2**-52 of the mean square, would be 2**-26 of the mean: near an error of float32.
    """
    return on_grid(mean_square - square, mean_square * (EPS / 16)).clamp_(min=0)


def lost(size_x: torch.Tensor, size_y: torch.Tensor | float, terms: Steps) -> torch.Tensor:
    """Return the loss of sum x y by flushing below the smallest normal float32: tiny (sum |x| + sum |y| + terms + 1).

    A flushed operand loses tiny times the other one, a flushed product or sum tiny.
    """
    return (size_x + (size_y + (terms + 1))).mul_(TINY)


def least(hard: torch.Tensor, sigma2: torch.Tensor, tau2: torch.Tensor | None, t: Scores) -> torch.Tensor:
    """Return min(H, 6 sigma + 4 tau), or H for tf32, whose truncation is not random."""
    return torch.minimum(hard, spread_of(sigma2, tau2)) if t.rounding.half else hard.clone()
