"""Budgets of dQ, dK and dV from float64 quantities of a frame. Notation as in oracles/budgets/bounds.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnfuzz.kernels.contract import Deviations
from attnfuzz.oracles.budgets.captured import CapturedSums
from attnfuzz.oracles.budgets.forward import (
    TIES,
    Forward,
    OfP,
    Scores,
    accumulated,
    at_least_one,
    difference,
    least,
    lost,
    repeated_sum,
    spread_of,
    steps_of,
)
from attnfuzz.oracles.budgets.roundings import VARIANCE, direction, near, neighbours
from attnfuzz.oracles.formats import EPS, TF32, TINY, half_ulp, half_ulp_of_sum, on_grid
from attnfuzz.oracles.frames import Steps

__all__ = ["Delta", "Gradients", "Sums", "backward", "delta_error"]


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

    def move(self, moved: torch.Tensor, gap: torch.Tensor, c_size: torch.Tensor) -> None:
        """Add the error of D where a mask_mod in doubt moves P by up to `moved`: sum moved (|dP - D| + |dO| |v|^T / 64).

        P adds up to 1 under every mask, so that |dP - D| bounds a change; the second part is for roundings.
        """
        off = (moved * torch.add(gap, c_size, alpha=1 / 64)).sum(-1, keepdim=True)
        self.b, self.flush = self.b + off, self.flush + off


@dataclass(slots=True, eq=False)
class Sums:
    """The parts of dK or dV that are sums over rows, `(Z, keys, dim)`: each frame of a long sequence adds to them in place.

    `sigma2` to `flush` as for O; `result` the gradient, `size` the sum of its terms' sizes, `noise` sigma^2 by P's true units.
    """

    result: torch.Tensor
    size: torch.Tensor
    sigma2: torch.Tensor
    hard: torch.Tensor
    b: torch.Tensor
    tau2: torch.Tensor | None = None
    flush: torch.Tensor | None = None
    noise: torch.Tensor | None = None

    @staticmethod
    def within(whole: torch.Tensor, names: Sequence[str]) -> Sums:
        """Return views of `whole (Z, keys, n dim)`, one for each name, side by side; all zero before the first frame."""
        return Sums(**dict(zip(names, whole.chunk(len(names), -1), strict=True)))


@dataclass(slots=True, eq=False)
class Gradients:
    """dQ's budget; where dS may overflow, `m_dq` and dK's `b` are infinite. The last four only if not lean."""

    m_dq: torch.Tensor
    sigma2: torch.Tensor
    tau2: torch.Tensor | None
    hard: torch.Tensor
    b: torch.Tensor
    reorder: torch.Tensor
    flush: torch.Tensor | None = None
    d_s: torch.Tensor | None = None
    carried: torch.Tensor | None = None
    """V_D sum_j P^2 |q|^2 of each row, (Z, rows): how the errors of D spread over dK."""
    of_d: torch.Tensor | None = None
    sigma2_dk: torch.Tensor | None = None
    """The part of dK's sigma^2 from the errors of D, and all of it, each summed, (Z,). A row's error of D is in all keys that it
    sees, so not independent there."""


def delta_error(t: Scores, f: Forward, p: OfP) -> Delta:
    """Compute D and its error, for kernels that take D from the rounded O or from an fp32 one.

    res = |rd(O) - O|, h = half ulp of O, r = min(h, res + M_O), S = sigma^2 + tau^2 + B^2 of O, f = 1 - exp(-4 S / h^2)
    E2 = min(res^2 (1 - f) + f h^2 / 3, r^2);  det = sum_d dO (rd(O) - O) exp(-2 S / h^2)
    V_D = max(sum_d dO^2 E2, det^2) + sum_j v_f dP^2;  T_D = sum_d (n_d - 1) dO^2 E2 + sum_j (n - 1) v_f dP^2
    H_D = sum_d |dO| r + sum_j c_f |dP|, by tf32 c_f C with C = |dO| |v|^T: every entry of v is truncated separately
    B_D = sqrt(sum P e_f^2) sqrt(sum P dP^2 - D^2) + sum_d |dO| acc(O) + eps (6 + Dv / 16) sum_d |dO O| + flushed @ |dP|
          + lost(dO, O)
    """
    d_p = t.d_o @ t.v.mT
    h = half_ulp(f.o, t.form)
    unit = 2 * h
    error = torch.round(f.o / unit).mul_(unit).sub_(f.o)
    o_size = f.o.abs()
    error.masked_fill_(o_size > t.form.largest, 0.0)
    res2, h2 = error * error, h * h
    r = torch.minimum(h, error.abs() + f.m_o)
    s = torch.addcmul(f.sigma2, f.b, f.b)
    if f.tau2 is not None:
        s += f.tau2
    certain = torch.exp(s.mul_(-4).div_(h2))
    e2 = torch.minimum(torch.lerp(h2.div_(3), res2, certain), r * r)
    det = (t.d_o * error).mul_(certain.sqrt()).sum(-1, keepdim=True)
    d_size, dp2 = t.d_size, d_p * d_p
    do_e2 = t.d2 * e2
    l2 = t.l * t.l
    sigma2 = torch.maximum(do_e2.sum(-1, keepdim=True), det * det) + (p.variance * dp2).sum(-1, keepdim=True) / l2
    tau2 = None
    if p.repeated is not None:
        tau2 = (do_e2 * (neighbours(f.o, t.form.u / 16) - 1)).sum(-1, keepdim=True) + (p.repeated * dp2).sum(
            -1, keepdim=True
        ) / l2
    d = (t.d_o * f.pv).sum(-1, keepdim=True)
    dp_size = d_p.abs()
    moved = d_size @ t.v_size.mT if t.rounding.tf32 else dp_size
    hard = (d_size * r).sum(-1, keepdim=True) + (p.worst * moved).sum(-1, keepdim=True) / t.l
    variance = difference((t.p * dp2).sum(-1, keepdim=True), d * d)
    b = (variance * f.e_f2).sqrt_() + (d_size * f.reorder.add(o_size, alpha=EPS * (6 + t.v.shape[-1] / 16))).sum(-1, keepdim=True)
    flush = (p.flushed * dp_size).sum(-1, keepdim=True) / t.l
    b += flush
    b += lost(d_size.sum(-1, keepdim=True), o_size.sum(-1, keepdim=True), t.v.shape[-1])
    if t.l_error is not None:
        b += t.l_error * d.abs()
    if t.d_lse is not None:
        d, b = d - t.d_lse, b + 2 * EPS * t.d_lse.abs()
    for each in (hard, sigma2, b, flush):
        each.masked_fill_(t.dead, 0.0)
    return Delta(d_p=d_p, d=d, hard=hard, sigma2=sigma2, tau2=tau2, b=b, flush=flush)


def backward(
    t: Scores,
    f: Forward,
    delta: Delta,
    dk: Sums,
    dv: Sums,
    deviations: Deviations,
    *,
    ties: bool,
    lean: bool = False,
    captured: CapturedSums | None = None,
) -> Gradients:
    """Compute the budget of dQ (overwrites dP), and add to the sums of dK and dV; `lean` leaves out parts for statistics.

    e = exp(delta + M_LSE + 4 eps (|s| + |LSE|)) - 1 bounds the recomputed P's relative error.
    dV: sigma^2 = v_b^T @ dO^2, tau^2 = ((n - 1) v_b)^T @ dO^2, H = (c_b (1 + e))^T |dO|
        B = (P e + flushed)^T |dO| + acc + lost(dO, P)
    E  = P ((1 + e) eps (4 (c' |dP| + sqrt(c') C) + 4 |dP - D|) + e |dP - D|) + flushed P,  C = |dO| |v|^T, c' = max(1, Dv / 16)
    p  = E + (1 + e) P (B_D + min(H_D, 6 sqrt(V_D) + 4 sqrt(T_D))), the error of dS; v_x = 0.18 u^2 p^2 its own rounding
    dQ: sigma^2 = scale^2 ((v_S + v_x) @ k^2 + V_D (P k)^2);  H = |scale| (c_S @ |k| + H_D |P k|)
        B = |scale| ((E + flushed) @ |k| + B_D (|P k| + (P e) @ |k|)) + acc + lost(k, dS)
        tau^2 as sigma^2 with (n - 1) v_S and T_D
    dK: sigma^2 = scale^2 ((v_S + v_x)^T @ q^2 + (P^2)^T @ (V_D q^2));  H = |scale| (c_S^T |q| + P^T (H_D |q|))
        B = |scale| (E + flushed + (1 + e) P B_D)^T |q| + acc + lost(q, dS)
        tau^2 = scale^2 (((n - 1) v_S)^T @ q^2 + (P^2)^T @ ((T_D + (n_i - 1) (V_D + T_D)) q^2)), n_i the rows with equal q or O

    With a score_mod f, P in dS and wherever D's errors enter is P f'(s), and E grows by |P (dP - D)| times the error of f'(s).

    flushed P in E is (1 + |dP - D|) tiny, and the bracket of E also has lost(dO, v). With ties, 6 sigma + 4 tau is at least
    3 sigma + the known sum of P's or dS's roundings (`_known_roundings`, `_known_of_ds`). Declared deviations: dS from rounded P
    adds P's rounding to v_S, c_S and flushed (`_rounded_p`), partial sums add theirs to sigma^2 and H (`_add_partials`). Rows
    whose scores are lost, and dS beyond the dtype, have an infinite budget. In float32, ties add the error of equal terms to B.
    Where mask_mod is in doubt, P e grows by how far P may move (doubts.py), and B_D by the effect on D (`Delta.move`). Neither
    averages out: for the statistics they count as flushed.
    """
    d_p = delta.d_p
    e = torch.add(t.delta, t.s_size, alpha=4 * EPS).add_(t.lse.abs() * (4 * EPS) + t.m_lse).clamp_(max=80.0)
    e = torch.expm1(e).masked_fill_(t.unseen if t.doubt is None else t.unseen & t.doubt.hidden, 0.0)
    pe = t.p * e
    moved = None
    if t.doubt is not None:
        moved = t.doubt.moved(t.p, e, t.rounding.worst(t.doubt.high, t.form.eta))
        pe += moved
    lost_keys = t.lost_keys
    _dv(t, dv, e, pe, moved, lost_keys, deviations, ties=ties)
    del e
    gap = on_grid(d_p - delta.d, delta.b)
    d_s = t.p * gap
    gap.abs_()
    steps = max(1.0, t.v.shape[-1] / 16)
    c_size = t.d_size @ t.v_size.mT
    inner = d_p.abs_().mul_(4 * EPS * steps).add_(c_size, alpha=4 * EPS * math.sqrt(steps) + (TF32 if t.rounding.tf32 else 0.0))
    inner.add_(gap, alpha=4 * EPS).add_(lost(t.d_size.sum(-1, keepdim=True), 0.0, t.v.shape[-1]))
    inner.add_(t.v_size.sum(-1)[:, None, :], alpha=TINY)
    if moved is not None:
        delta.move(moved, gap, c_size)
        moved = moved * (gap + delta.flush)
    del c_size
    grown, weight = t.p + pe, t.p
    flushed = (gap + 1).mul_(TINY).masked_fill_(t.unseen, 0.0)
    e_s = inner.mul_(grown).addcmul_(pe, gap).add_(flushed)
    del flushed
    around = delta.b + (torch.minimum(delta.hard, spread_of(delta.sigma2, delta.tau2)) if t.rounding.half else delta.hard)
    slack = torch.addcmul(e_s, grown, around)
    eta = _unit_of_ds(t)
    pk = f.pk
    if t.changed is not None:
        if captured is not None:
            captured.add(t.changed, d_s, slack, None if t.doubt is None else t.doubt.endless & t.doubt.reach)
        # dS of the score before score_mod: times its derivative there, which has an error too
        slope, off = t.changed.slope, t.changed.slope_error
        size, steep = slope.abs(), slope.abs() + off
        e_s = (e_s * steep).addcmul_(d_s.abs(), off + 2 * EPS * size)
        slack = (slack * steep).addcmul_(d_s.abs(), off + 2 * EPS * size)
        pe, grown = (pe * steep).addcmul_(t.p, off), grown * steep
        moved = None if moved is None else moved * steep
        d_s, gap, weight = d_s * slope, gap * size, t.p * size
        pk = (t.p * slope) @ t.k
    x = _Ds(d_s, slack, pe, grown, e_s, gap, lost_keys, eta, weight, pk, moved)
    return _dq_dk(t, f, delta, x, dk, deviations, ties=ties, lean=lean)


def _unit_of_ds(t: Scores) -> Steps:
    """Return half a subnormal unit of dS where a kernel scales it before its rounding, at least that of the dtype."""
    if isinstance(t.scale, torch.Tensor):
        return t.scale.abs().reciprocal().masked_fill(t.scale == 0, 1.0).clamp_(min=1.0).mul_(t.form.eta)
    return t.form.eta * max(1.0, 1 / abs(t.scale) if t.scale else 1.0)


@dataclass(slots=True, eq=False)
class _Ds:
    d_s: torch.Tensor
    slack: torch.Tensor
    """p: the error of dS before it is rounded."""
    pe: torch.Tensor
    grown: torch.Tensor
    """P e and P (1 + e)."""
    e_s: torch.Tensor
    """E: the part of the error from the arithmetic of this entry alone."""
    gap: torch.Tensor
    """|dP - D|."""
    lost_keys: torch.Tensor
    """(Z, keys, 1): whether some row that may see the key has unbounded errors."""
    eta: Steps
    """Half a subnormal unit of dS: a kernel may scale dS before its rounding, so that it grows by 1 / scale."""
    weight: torch.Tensor
    """Factor of an error of D in dS: P, times |d score_mod / d score|."""
    pk: torch.Tensor
    """Factor of an error of D in dQ, (Z, rows, dim_qk): P @ k, P times that derivative."""
    moved: torch.Tensor | None
    """The part of the error of dS from a mask_mod in doubt."""


def _dv(
    t: Scores,
    sums: Sums,
    e: torch.Tensor,
    pe: torch.Tensor,
    moved: torch.Tensor | None,
    lost_keys: torch.Tensor,
    deviations: Deviations,
    *,
    ties: bool,
) -> None:
    u, eta = t.form.u, t.form.eta
    rest = 1 - t.p
    one = (rest < u / 8).logical_and_(e < u / 8)
    if t.rounding.tf32:
        one.zero_()
    if t.doubt is not None:
        one &= ~t.doubt.rows
    exact = rest if t.rounding.half else torch.zeros_like(rest)
    v_b = t.rounding.variance(t.p, eta, one)
    c_b = torch.where(one, exact, t.rounding.worst(t.p, eta))
    h_b = torch.where(one, exact, t.rounding.flushed(t.p, pe, eta))
    d_size, d2 = t.d_size, t.d2
    sums.result.baddbmm_(t.p.mT, t.d_o)
    sums.size.baddbmm_(t.p.mT, d_size)
    flush = h_b.mT @ d_size
    sums.b.baddbmm_(pe.mT, d_size).add_(flush)
    sums.b.addcmul_(t.touched, lost(d_size.sum(1, keepdim=True), 0.0, 2 * t.terms_q)).masked_fill_(lost_keys, torch.inf)
    sums.sigma2.baddbmm_(v_b.mT, d2)
    sums.hard.baddbmm_(torch.addcmul(c_b, c_b, e).mT, d_size)
    if sums.flush is not None:
        sums.flush.add_(flush)
        if moved is not None:
            sums.flush.baddbmm_(moved.mT, d_size)
    if sums.noise is not None:
        sums.noise.baddbmm_(t.rounding.true_variance(t.p, v_b).mT, d2)
    if ties and t.rounding.half:
        assert sums.tau2 is not None
        n = neighbours(t.p.mT.contiguous(), u / 16, eta / 8).mT
        # Equal rows in other parts of the sequence are unknown here: assume as many in each part.
        sums.tau2.baddbmm_(_elsewhere(n, t).mul_(v_b).mT, d2)
        if t.whole:
            sums.tau2.copy_(torch.maximum(sums.tau2, _known_roundings(t, v_b > 0, sums.sigma2)))
    if ties and not t.rounding.half:
        sums.b.baddbmm_(repeated_sum(t.p.mT.contiguous()), d_size, alpha=1 / t.part)
    if deviations.half_partials:
        _add_partials(t, sums, t.p, t.d_o, 1.0)


def _rounded_p(t: Scores, x: _Ds) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the errors of dS = rounded(P) (dP - D) by the rounding of P: worst case, mean square, and the coherent part.

    The coherent part is from P that may be flushed, and from P next to 1, which becomes 1.
    """
    u, eta = t.form.u, t.form.eta
    rest, flushed = 1 - t.p, t.rounding.flushed(t.p, x.pe, eta)
    top = rest < u
    units = half_ulp_of_sum(t.p, t.form).square_().mul_(1 / 3).masked_fill_(top | (flushed > 0), 0.0)
    coherent = torch.where(top, rest.clamp(max=u / 2), flushed)
    return t.rounding.worst(t.p, eta) * x.gap, units * x.gap * x.gap, coherent * x.gap


def _elsewhere(n: torch.Tensor, t: Scores) -> torch.Tensor:
    """Return how many others are equal where `n` rows of this frame are: as many are assumed in each other part of the rows."""
    return (n / t.part - 1).masked_fill_(n == 1, 0.0)


def _known_of_ds(t: Scores, f: Forward, delta: Delta) -> tuple[torch.Tensor, torch.Tensor]:
    """Return |sum of dS's roundings @ k| and |their sum^T @ q| times |scale|, each the largest over what a kernel may do.

    A kernel may take D from the exact O or from the rounded one, and round dS before or after scaling.
    """
    unit = 2 * half_ulp(f.o, t.form)
    of_rounded = delta.d + (t.d_o * (torch.round(f.o / unit) * unit - f.o)).sum(-1, keepdim=True)
    scale = abs(t.scale)
    # Where the scale is 0, nothing is rounded after it.
    of_scale = scale.masked_fill(scale == 0, 1.0) if isinstance(scale, torch.Tensor) else scale or 1.0
    largest_q, largest_k = torch.zeros_like(t.q), torch.zeros_like(t.k)
    d_p = t.d_o @ t.v.mT
    for d in (delta.d, of_rounded):
        exact = on_grid(d_p - d, delta.b).mul_(t.p)
        if t.changed is not None:
            exact *= t.changed.slope
        for factor in (1.0, of_scale):
            steps = 2 * half_ulp(exact * factor, t.form) / factor
            error = torch.round(exact / steps).mul_(steps).sub_(exact)
            largest_q = torch.maximum(largest_q, (error @ t.k).abs_().mul_(scale))
            largest_k = torch.maximum(largest_k, (error.mT @ t.q).abs_().mul_(scale))
    return largest_q, largest_k


def _beyond(known: torch.Tensor, sigma2: torch.Tensor) -> torch.Tensor:
    """Return tau^2 such that 6 sigma + 4 tau is at least 3 sigma + `known`."""
    return (known - 3 * sigma2.sqrt()).clamp_(min=0.0).div_(TIES).square_()


def _known_roundings(t: Scores, random: torch.Tensor, sigma2: torch.Tensor) -> torch.Tensor:
    """Return tau^2 such that 6 sigma + 4 tau is at least 3 sigma + |the sum of P's roundings|, for sums that are large.

    The kernel's P is exact to float32, so its rounding is known except next to a tie. For example, equal rows under a causal
    mask have P in equal steps, which are rounded alike though no two P are equal (measured: 6.4 sigma in dV).
    """
    unit = 2 * half_ulp(t.p, t.form)
    error = torch.round(t.p / unit).mul_(unit).sub_(t.p).masked_fill_(~random, 0.0)
    known = (error.mT @ t.d_o).abs_()
    return _beyond(known, sigma2)


def _dq_dk(t: Scores, f: Forward, delta: Delta, x: _Ds, dk: Sums, deviations: Deviations, *, ties: bool, lean: bool) -> Gradients:
    scale, u = abs(t.scale), t.form.u
    r = _roundings_of_ds(t, x, deviations)
    k_size, k2, pk = t.k_size, t.k2, x.pk.abs() * scale
    pk2 = pk * pk
    dq, reach = (x.d_s @ t.k).mul_(t.scale), r.size @ k_size
    sigma2 = torch.baddbmm(delta.sigma2 * pk2, r.random, k2)
    hard = torch.baddbmm(delta.hard * pk, r.worst, k_size)
    b = torch.baddbmm(delta.b * pk, torch.addcmul(r.systematic, x.pe, delta.b), k_size)
    n_k = t.n_k
    halves = (n_k / 32).ceil() if isinstance(n_k, torch.Tensor) else math.ceil(n_k / 32)
    reorder = accumulated(steps_of(n_k) + halves, dq, reach, t.form)
    b += reorder
    b += lost(t.k_sum, r.size.sum(-1, keepdim=True), t.terms_k).mul_(1 + scale)
    tau2 = row_ties = known_k = None
    if ties and not t.rounding.half:
        b.baddbmm_(repeated_sum(x.d_s), k_size)
        dk.b.baddbmm_(repeated_sum(x.d_s.mT.contiguous()), t.q_size, alpha=abs(t.only_scale) / t.part)
    if ties and t.rounding.half:
        tau2 = (neighbours(x.d_s, u / 16, x.eta / 8) - 1).mul_(r.own) @ k2
        if r.of_p is not None:
            tau2 += (neighbours(t.p, u / 16) - 1).mul_(r.of_p) @ k2
        if delta.tau2 is not None:
            tau2 += delta.tau2 * pk2
        known_q, known_k = _known_of_ds(t, f, delta)
        tau2 = torch.maximum(tau2, _beyond(known_q, sigma2))
        row_ties = _equal_rows(t, f)
    over = r.size >= 0.999 * t.form.largest / at_least_one(scale)
    m_dq = least(hard, sigma2, tau2, t).add_(b).masked_fill_(t.dead, 0.0)
    m_dq.masked_fill_(over.any(-1, keepdim=True).logical_or_(t.lost_rows), torch.inf)
    dk.b.addcmul_(t.touched, lost(t.q_size.sum(1, keepdim=True), r.size.sum(1)[..., None], t.terms_q).mul_(1 + scale))
    dk.b.masked_fill_(over.any(1)[..., None].logical_or_(x.lost_keys), torch.inf)
    of_d = _dk(t, delta, x, r, dk, row_ties, known_k, deviations)
    gradients = Gradients(m_dq=m_dq, sigma2=sigma2, tau2=tau2, hard=hard, b=b, reorder=reorder)
    if not lean:
        p2, q2 = (x.weight * x.weight).sum(-1, keepdim=True), (t.q * t.q).sum(-1, keepdim=True)
        # A flushed P moves D, and with it its whole row: a coherent error too.
        gradients.flush = torch.addcmul(r.flushed @ k_size, delta.flush, pk)
        gradients.d_s, gradients.carried = x.d_s, (delta.sigma2 * p2 * q2)[..., 0]
        gradients.of_d, gradients.sigma2_dk = of_d.sum((1, 2)), dk.sigma2.sum((1, 2))
    return gradients


@dataclass(slots=True, eq=False)
class _Roundings:
    """Errors of dS on its way into dQ and dK, each `(Z, rows, keys)`."""

    size: torch.Tensor
    """|dS| plus its error before it is rounded."""
    own: torch.Tensor
    """The mean square of its own rounding."""
    random: torch.Tensor
    """`own` plus the mean squares of the roundings of its inputs."""
    of_p: torch.Tensor | None
    """The part of `random` from P's rounding, where dS is taken from rounded P."""
    worst: torch.Tensor
    flushed: torch.Tensor
    systematic: torch.Tensor
    """Errors that do not average out: the arithmetic of this entry, and flushed values."""


def _roundings_of_ds(t: Scores, x: _Ds, deviations: Deviations) -> _Roundings:
    d_size, slack, of_p = x.d_s.abs(), x.slack, None
    size = d_size + slack
    own = random = t.rounding.variance(d_size, x.eta)
    if t.rounding.half:
        random = torch.addcmul(own, slack, slack, value=VARIANCE * t.form.u**2)
    if deviations.ds_from_rounded_p:
        worst_p, of_p, systematic_p = _rounded_p(t, x)
        random, slack = random + of_p, slack + worst_p
        flushed = t.rounding.flushed(d_size, slack, x.eta) + systematic_p
        worst = t.rounding.worst(d_size + slack, x.eta) + worst_p
    else:
        flushed, worst = t.rounding.flushed(d_size, slack, x.eta), t.rounding.worst(size, x.eta)
    return _Roundings(
        size=size, own=own, random=random, of_p=of_p, worst=worst, flushed=flushed, systematic=x.e_s + flushed
    )  # fmt: skip


def _dk(
    t: Scores,
    delta: Delta,
    x: _Ds,
    r: _Roundings,
    sums: Sums,
    row_ties: torch.Tensor | None,
    known: torch.Tensor | None,
    deviations: Deviations,
) -> torch.Tensor:
    """Add to the sums of dK, except overflow and flushing below tiny; return the part of sigma^2 from D's errors."""
    scale, p2 = abs(t.scale), x.weight * x.weight
    q_size, q2 = t.q_size * scale, (t.q * scale).square_()
    sums.result.baddbmm_(x.d_s.mT, t.q * t.scale)
    sums.size.baddbmm_(r.size.mT, q_size)
    of_d = p2.mT @ (delta.sigma2 * q2)
    sums.sigma2.baddbmm_(r.random.mT, q2).add_(of_d)
    sums.hard.baddbmm_(r.worst.mT, q_size).baddbmm_(x.weight.mT, delta.hard * q_size)
    sums.b.baddbmm_(torch.addcmul(r.systematic, x.grown, delta.b).mT, q_size)
    if sums.flush is not None:
        sums.flush.baddbmm_(torch.addcmul(r.flushed, x.weight, delta.flush).mT, q_size)
        if x.moved is not None:
            sums.flush.baddbmm_(x.moved.mT, q_size)
    if row_ties is not None and delta.tau2 is not None:
        assert sums.tau2 is not None
        n = neighbours(x.d_s.mT.contiguous(), t.form.u / 16, x.eta / 8).mT
        sums.tau2.baddbmm_(_elsewhere(n, t).mul_(r.own).mT, q2)
        if r.of_p is not None:
            n = neighbours(t.p.mT.contiguous(), t.form.u / 16).mT
            sums.tau2.baddbmm_(_elsewhere(n, t).mul_(r.of_p).mT, q2)
        carried = delta.tau2 + _elsewhere(row_ties, t) * (delta.sigma2 + delta.tau2)
        sums.tau2.baddbmm_(p2.mT, carried * q2)
        if known is not None and t.whole:
            sums.tau2.copy_(torch.maximum(sums.tau2, _beyond(known, sums.sigma2)))
    if deviations.half_partials:
        _add_partials(t, sums, x.d_s, t.q, scale)
    return of_d


def _equal_rows(t: Scores, f: Forward) -> torch.Tensor:
    """Count the rows of the key/value head that share this row's q, or its O, (Z, rows, 1): their errors in D are equal too.

    Rows are compared by a random projection, within (u / 16) |q| and (u / 8) |O|.
    """
    counts = []
    for rows, window in ((t.q, t.form.u / 16), (f.o, t.form.u / 8)):
        # Padding is placed at infinity, so that it is not counted.
        place = (rows @ direction(rows.shape[-1], rows.device)).masked_fill_(t.dead[..., 0], torch.inf)
        distance = window * rows.norm(dim=-1)
        counts.append(near(place, distance))
    return torch.maximum(*counts)[..., None]


def _add_partials(t: Scores, sums: Sums, x: torch.Tensor, y: torch.Tensor, scale: Steps) -> None:
    """Add one rounding of each query head's share of x^T y, before the group is summed, to the sums of dK or dV.

    A frame with part of the rows has only parts of the shares: u sum_g |share| then bounds their roundings.
    """
    shares = (x.unflatten(1, (-1, t.rows)).mT @ y.unflatten(1, (-1, t.rows))).abs_()
    shares.mul_(scale[:, None] if isinstance(scale, torch.Tensor) else scale)
    worst = t.rounding.worst(shares, t.form.eta).sum(1).mul_(1.01)
    if not t.whole:
        sums.b.add_(worst)
        # A share may overflow where their sum does not; a part of the rows may use that part of the range.
        sums.b.masked_fill_((shares >= 0.999 * t.form.largest * t.part).any(1), torch.inf)
        return
    # By their true units: over a whole output the mean square of 0.18 u^2 x^2 is off by more than the statistics allow.
    random = half_ulp_of_sum(shares, t.form).square_().mul_(1 / 3).sum(1)
    sums.hard.add_(worst)
    sums.sigma2.add_(random)
    # A share may overflow where their sum does not.
    sums.b.masked_fill_((shares + (sums.hard + sums.b)[:, None] >= 0.999 * t.form.largest).any(1), torch.inf)
    sums.b.add_(t.rounding.flushed(shares, None, t.form.eta).sum(1))
    if sums.noise is not None:
        sums.noise.add_(random)
