"""How far off a kernel's dQ, dK and dV may be, from float64 quantities of a frame. Notation as in oracles/bounds.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnfuzz.kernels.contract import Deviations
from attnfuzz.oracles.formats import EPS, TF32, TINY, half_ulp
from attnfuzz.oracles.forward import TIES, Forward, Scores, accumulated, least, spread_of, steps_of
from attnfuzz.oracles.roundings import VARIANCE, near, neighbours

__all__ = ["Delta", "Gradients", "Sums", "backward", "delta_error"]


@dataclass(slots=True, eq=False)
class Delta:
    """D = rowsum(dO * O) (- dLSE) and its error, each (Z, rows, 1): H_D, V_D = sigma^2, T_D = tau^2, B_D."""

    d: torch.Tensor
    hard: torch.Tensor
    sigma2: torch.Tensor
    tau2: torch.Tensor | None
    b: torch.Tensor


@dataclass(slots=True, eq=False)
class Sums:
    """What of dK or dV is a sum over rows, `(Z, keys, dim)`: added up over the frames of a long sequence.

    `sigma2` to `flush` as for O; `result` the gradient, `size` the sum of its terms' sizes, `noise` sigma^2 by P's true units.
    """

    result: torch.Tensor
    size: torch.Tensor
    sigma2: torch.Tensor
    tau2: torch.Tensor
    hard: torch.Tensor
    b: torch.Tensor
    flush: torch.Tensor
    noise: torch.Tensor

    def stacked(self, names: Sequence[str]) -> torch.Tensor:
        """Some of them side by side, (Z, keys, n dim)."""
        return torch.cat([getattr(self, name) for name in names], -1)


@dataclass(slots=True, eq=False)
class Gradients:
    """dQ's budget and the sums of dK and dV; where dS may overflow, `allowed` is infinite (dQ), or `hard` and `b` are (dK)."""

    dq: torch.Tensor
    m_dq: torch.Tensor
    sigma2: torch.Tensor
    tau2: torch.Tensor | None
    hard: torch.Tensor
    b: torch.Tensor
    flush: torch.Tensor
    reorder: torch.Tensor
    dk: Sums
    dv: Sums
    d_s: torch.Tensor
    carried: torch.Tensor
    """V_D sum_j P^2 |q|^2 of each row, (Z, rows): how the errors of D spread over dK."""
    share: torch.Tensor
    """The errors of D in dK's sigma^2, as a share: one row's error of D is in all keys that it sees, not independent there."""


def delta_error(t: Scores, f: Forward, d_p: torch.Tensor) -> Delta:
    """The error of D, whether it is taken from the rounded O or an fp32 one.

    res = |rd(O) - O|, h = half ulp of O, r = min(h, res + M_O), S = sigma^2 + tau^2 + B^2 of O, f = 1 - exp(-4 S / h^2)
    E2 = min(res^2 (1 - f) + f h^2 / 3, r^2);  det = sum_d dO (rd(O) - O) exp(-2 S / h^2)
    V_D = max(sum_d dO^2 E2, det^2) + sum_j v_f dP^2;  T_D = sum_d (n_d - 1) dO^2 E2 + sum_j (n - 1) v_f dP^2
    H_D = sum_d |dO| r + sum_j c_f |dP|
    B_D = sqrt(sum P e_f^2) sqrt(sum P dP^2 - D^2) + sum_d |dO| acc(O) + eps (6 + Dv / 16) sum_d |dO O| + flushed @ |dP| + lost
    """
    h = half_ulp(f.o, t.form)
    unit = 2 * h
    error = torch.round(f.o / unit).mul_(unit).sub_(f.o)
    error.masked_fill_(f.o.abs() > t.form.largest, 0.0)
    res2, h2 = error * error, h * h
    r = torch.minimum(h, error.abs() + f.m_o)
    s = f.sigma2 + f.b * f.b
    if f.tau2 is not None:
        s = s + f.tau2
    certain = torch.exp(s.mul_(-4).div_(h2))
    e2 = torch.minimum(res2.mul_(certain).add_((1 - certain).mul_(h2 / 3)), r * r)
    det = (t.d_o * error).mul_(certain.sqrt()).sum(-1, keepdim=True)
    d_size, dp2 = t.d_size, d_p * d_p
    do_e2 = t.d2 * e2
    l2 = t.l * t.l
    sigma2 = torch.maximum(do_e2.sum(-1, keepdim=True), det * det) + (f.v_f * dp2).sum(-1, keepdim=True) / l2
    tau2 = None
    if f.t_f is not None:
        tau2 = (do_e2 * (neighbours(f.o, t.form.u / 16) - 1)).sum(-1, keepdim=True) + (f.t_f * dp2).sum(-1, keepdim=True) / l2
    d = (t.d_o * f.o).sum(-1, keepdim=True)
    dp_size = d_p.abs()
    hard = (d_size * r).sum(-1, keepdim=True) + (f.c_f * dp_size).sum(-1, keepdim=True) / t.l
    variance = ((t.p * dp2).sum(-1, keepdim=True) - d * d).clamp_(min=0)
    b = (variance * f.e_f2).sqrt_() + (d_size * (f.reorder + EPS * (6 + t.v.shape[-1] / 16) * f.o.abs())).sum(-1, keepdim=True)
    b += ((f.h_f * dp_size).sum(-1, keepdim=True) / t.l).add_(t.lost)
    if t.l_error is not None:
        b += t.l_error * d.abs()
    if t.d_lse is not None:
        d, b = d - t.d_lse, b + 2 * EPS * t.d_lse.abs()
    for each in (hard, sigma2, b):
        each.masked_fill_(t.dead, 0.0)
    return Delta(d=d, hard=hard, sigma2=sigma2, tau2=tau2, b=b)


def backward(t: Scores, f: Forward, deviations: Deviations, *, ties: bool) -> Gradients:
    """The budgets of dQ, dK and dV.

    e = exp(delta + M_LSE + 4 eps (|s| + |LSE|)) - 1 bounds the recomputed P's relative error.
    dV: sigma^2 = v_b^T @ dO^2, tau^2 = ((n - 1) v_b)^T @ dO^2, H = (c_b (1 + e))^T |dO|, B = (P e + flushed)^T |dO| + acc + lost
    E  = P ((1 + e) eps (4 (c' |dP| + sqrt(c') C) + 4 |dP - D|) + e |dP - D|) + flushed P,  C = |dO| |v|^T, c' = max(1, Dv / 16)
    p  = E + (1 + e) P (B_D + min(H_D, 6 sqrt(V_D) + 4 sqrt(T_D))), the error of dS; v_x = 0.18 u^2 p^2 its own rounding
    dQ: sigma^2 = scale^2 ((v_S + v_x) @ k^2 + V_D (P k)^2);  H = |scale| (c_S @ |k| + H_D |P k|)
        B = |scale| ((E + flushed) @ |k| + B_D (|P k| + (P e) @ |k|)) + acc + lost;  tau^2 as sigma^2 with (n - 1) v_S and T_D
    dK: sigma^2 = scale^2 ((v_S + v_x)^T @ q^2 + (P^2)^T @ (V_D q^2));  H = |scale| (c_S^T |q| + P^T (H_D |q|))
        B = |scale| (E + flushed + (1 + e) P B_D)^T |q| + acc + lost
        tau^2 = scale^2 (((n - 1) v_S)^T @ q^2 + (P^2)^T @ ((T_D + (n_i - 1) (V_D + T_D)) q^2)), n_i the rows with equal q or O
    """
    d_p = t.d_o @ t.v.mT
    delta = delta_error(t, f, d_p)
    exponent = (t.s.abs() + t.lse.abs()).mul_(4 * EPS).add_(t.delta).add_(t.m_lse).clamp_(max=80.0)
    e = torch.expm1(exponent).masked_fill_(t.unseen, 0.0)
    dv = _dv(t, e, deviations, ties=ties)
    dim_v = t.v.shape[-1]
    gap = d_p - delta.d
    d_s = t.p * gap
    gap.abs_()
    steps = max(1.0, dim_v / 16)
    c_size = t.d_size @ t.v_size.mT
    inner = d_p.abs_().mul_(steps).add_(c_size, alpha=math.sqrt(steps)).add_(gap).mul_(4 * EPS)
    if t.rounding.tf32:
        inner.add_(c_size, alpha=TF32)
    inner += t.lost
    grown = e + 1
    e_s = inner.mul_(grown).addcmul_(e, gap).mul_(t.p).add_((gap + 1).mul_(TINY).masked_fill_(t.unseen, 0.0))
    around = delta.b + (torch.minimum(delta.hard, spread_of(delta.sigma2, delta.tau2)) if t.rounding.half else delta.hard)
    slack = (t.p * around).mul_(grown).add_(e_s)
    eta = t.form.eta * max(1.0, 1 / abs(t.scale) if t.scale else 1.0)
    return _dq_dk(t, f, delta, _Ds(d_s, slack, e, e_s, gap, eta), dv, deviations, ties=ties)


@dataclass(slots=True, eq=False)
class _Ds:
    d_s: torch.Tensor
    slack: torch.Tensor
    """p: the error of dS before it is rounded."""
    e: torch.Tensor
    e_s: torch.Tensor
    """E: the part of it that is arithmetic of this entry alone."""
    gap: torch.Tensor
    """|dP - D|."""
    eta: float
    """Half a subnormal unit of dS: a kernel may scale dS before its rounding, so that it grows by 1 / scale."""


def _dv(t: Scores, e: torch.Tensor, deviations: Deviations, *, ties: bool) -> Sums:
    u, eta = t.form.u, t.form.eta
    rest = 1 - t.p
    one = (rest < u / 8) & (e < u / 8)
    if t.rounding.tf32:
        one = torch.zeros_like(one)
    exact = rest if t.rounding.half else torch.zeros_like(rest)
    pe = t.p * e
    v_b = t.rounding.variance(t.p, eta, one)
    c_b = torch.where(one, exact, t.rounding.worst(t.p, eta))
    h_b = torch.where(one, exact, t.rounding.flushed(t.p, pe, eta))
    d_size, d2, dim = t.d_size, t.d2, t.d_o.shape[-1]
    result, size = (t.p.mT @ torch.cat([t.d_o, d_size], -1)).split(dim, -1)
    flush = h_b.mT @ d_size
    b = pe.mT @ d_size + flush
    b += t.touched * t.lost
    units = half_ulp(t.p, t.form).square_().mul_(1 / 3).masked_fill_(v_b == 0, 0.0) if t.rounding.half else v_b
    sigma2, noise = v_b.mT @ d2, units.mT @ d2
    tau2 = torch.zeros_like(sigma2)
    if ties and t.rounding.half:
        n = neighbours(t.p.mT.contiguous(), u / 16, eta / 8).mT
        # Of a part of the rows the equal ones elsewhere are not seen: taken for as many in each part.
        tau2 = (_elsewhere(n, t).mul_(v_b)).mT @ d2
        if t.whole:
            tau2 = torch.maximum(tau2, _known_roundings(t, v_b > 0, sigma2))
    hard = c_b.mul_(e + 1).mT @ d_size
    b.masked_fill_((t.lost_rows & ~t.unseen).any(1)[..., None], torch.inf)
    found = Sums(result=result, size=size, sigma2=sigma2, tau2=tau2, hard=hard, b=b, flush=flush, noise=noise)
    if deviations.half_partials:
        _add_partials(t, found, t.p, t.d_o, 1.0)
    return found


def _rounded_p(t: Scores, x: _Ds) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the rounding of P does to dS = rounded(P) (dP - D): worst case, mean square, and what of it is no random error.

    That is P which may be flushed, and P next to 1, which becomes 1.
    """
    u, eta = t.form.u, t.form.eta
    rest, flushed = 1 - t.p, t.rounding.flushed(t.p, t.p * x.e, eta)
    top = rest < u
    units = half_ulp(t.p, t.form).square_().mul_(1 / 3).masked_fill_(top | (flushed > 0), 0.0)
    coherent = torch.where(top, rest.clamp(max=u / 2), flushed)
    return t.rounding.worst(t.p, eta) * x.gap, units * x.gap * x.gap, coherent * x.gap


def _elsewhere(n: torch.Tensor, t: Scores) -> torch.Tensor:
    """How many others are equal, where `n` are so among the rows that are here: as many again in each other part of the rows."""
    return (n / t.part - 1).masked_fill_(n == 1, 0.0)


def _known_of_ds(t: Scores, f: Forward, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """|sum of dS's roundings @ k| and |their sum^T @ q|, the largest of what a kernel may do, times |scale|.

    dS is known where D is: taken from the exact O or from the rounded one, and rounded before or after it is scaled.
    """
    unit = 2 * half_ulp(f.o, t.form)
    of_rounded = d + (t.d_o * (torch.round(f.o / unit) * unit - f.o)).sum(-1, keepdim=True)
    scale = abs(t.scale)
    found_q, found_k = torch.zeros_like(t.q), torch.zeros_like(t.k)
    d_p = t.d_o @ t.v.mT
    for delta in (d, of_rounded):
        exact = t.p * (d_p - delta)
        for factor in {1.0, scale} - {0.0}:
            steps = 2 * half_ulp(exact * factor, t.form) / factor
            error = torch.round(exact / steps).mul_(steps).sub_(exact)
            found_q = torch.maximum(found_q, (error @ t.k).abs_().mul_(scale))
            found_k = torch.maximum(found_k, (error.mT @ t.q).abs_().mul_(scale))
    return found_q, found_k


def _beyond(known: torch.Tensor, sigma2: torch.Tensor) -> torch.Tensor:
    """tau^2 such that 6 sigma + 4 tau is at least 3 sigma + `known`."""
    return (known - 3 * sigma2.sqrt()).clamp_(min=0.0).div_(TIES).square_()


def _known_roundings(t: Scores, random: torch.Tensor, sigma2: torch.Tensor) -> torch.Tensor:
    """tau^2 such that 6 sigma + 4 tau is at least 3 sigma + |the sum of P's roundings|, where that sum is known to be large.

    The kernel's P is the exact one to float32, so its rounding is known but for what lies next to a tie. Equal rows under a
    causal mask, say, have P in steps of an even size, which are rounded alike though no two are equal (seen: 6.4 sigma in dV).
    """
    unit = 2 * half_ulp(t.p, t.form)
    error = torch.round(t.p / unit).mul_(unit).sub_(t.p).masked_fill_(~random, 0.0)
    known = (error.mT @ t.d_o).abs_()
    return _beyond(known, sigma2)


def _dq_dk(t: Scores, f: Forward, delta: Delta, x: _Ds, dv: Sums, deviations: Deviations, *, ties: bool) -> Gradients:
    scale, u = abs(t.scale), t.form.u
    eta = x.eta
    d_size = x.d_s.abs()
    size = d_size + x.slack
    over = (size >= 0.999 * t.form.largest / max(1.0, scale)) | (t.lost_rows & ~t.unseen)
    v_s = t.rounding.variance(d_size, eta)
    slack, rounding2, of_p, random2 = x.slack, v_s, None, torch.zeros_like(v_s)
    if t.rounding.half:
        rounding2 = v_s + x.slack.square().mul_(VARIANCE * u * u)
    if deviations.ds_from_rounded_p:
        worst, random2, of_p = _rounded_p(t, x)
        slack, rounding2 = slack + worst, rounding2 + random2
    h_s = t.rounding.flushed(d_size, slack, eta).masked_fill_(t.unseen, 0.0)
    c_s = t.rounding.worst(d_size + slack, eta)
    if of_p is not None:
        c_s, h_s = c_s + worst, h_s + of_p
    w = x.e_s + h_s
    s2 = scale * scale
    k_size, k2 = t.k_size, t.k2

    pk = f.pk.abs()
    dq, reach = (x.d_s @ t.k).mul_(t.scale), (size @ k_size).mul_(scale)
    sigma2 = (rounding2 @ k2).add_(delta.sigma2 * pk * pk).mul_(s2)
    hard = (c_s @ k_size).add_(delta.hard * pk).mul_(scale)
    flush = (h_s @ k_size).mul_(scale)
    pe = t.p * x.e
    b = ((w + pe * delta.b) @ k_size).add_(delta.b * pk).mul_(scale)
    n_k = t.n_k
    halves = (n_k / 32).ceil() if isinstance(n_k, torch.Tensor) else math.ceil(n_k / 32)
    reorder = accumulated(steps_of(n_k) + halves, dq, reach, t.form)
    more = (size.sum().mul_(TINY).add_(t.lost)).mul_(1 + scale)
    b += reorder.add(more)
    tau2 = row_ties = known_k = None
    if ties and t.rounding.half:
        tau2 = ((neighbours(x.d_s, u / 16, eta / 8) - 1).mul_(v_s) @ k2).mul_(s2)
        if deviations.ds_from_rounded_p:
            tau2 += ((neighbours(t.p, u / 16) - 1).mul_(random2) @ k2).mul_(s2)
        if delta.tau2 is not None:
            tau2 += s2 * delta.tau2 * pk * pk
        known_q, known_k = _known_of_ds(t, f, delta.d)
        tau2 = torch.maximum(tau2, _beyond(known_q, sigma2))
        row_ties = _equal_rows(t, f)
    m_dq = least(hard, sigma2, tau2, t).add_(b).masked_fill_(t.dead, 0.0)
    m_dq.masked_fill_(over.any(-1, keepdim=True), torch.inf)
    p2, q2 = t.p * t.p, t.q * t.q
    dk, share = _dk(
        t, delta, x, (size, c_s, w, h_s, rounding2, v_s, over, pe, more, p2, q2, random2), row_ties, known_k, deviations
    )
    carried = (delta.sigma2 * p2.sum(-1, keepdim=True) * q2.sum(-1, keepdim=True))[..., 0]
    return Gradients(
        dq=dq, m_dq=m_dq, sigma2=sigma2, tau2=tau2, hard=hard, b=b, flush=flush, reorder=reorder, dk=dk, dv=dv, d_s=x.d_s,
        carried=carried, share=share,
    )  # fmt: skip


def _dk(
    t: Scores,
    delta: Delta,
    x: _Ds,
    parts: tuple[torch.Tensor, ...],
    row_ties: torch.Tensor | None,
    known: torch.Tensor | None,
    deviations: Deviations,
) -> tuple[Sums, torch.Tensor]:
    size, c_s, w, h_s, rounding2, v_s, over, pe, more, p2, q2, random2 = parts
    scale = abs(t.scale)
    s2, q_size = scale * scale, t.q_size
    result, reach = (x.d_s.mT @ t.q).mul_(t.scale), (size.mT @ q_size).mul_(scale)
    of_d = p2.mT @ (delta.sigma2 * q2)
    sigma2 = (rounding2.mT @ q2).add_(of_d).mul_(s2)
    share = of_d.sum().mul_(s2) / sigma2.sum().clamp(min=1e-300)
    hard = (c_s.mT @ q_size).add_(t.p.mT @ (delta.hard * q_size)).mul_(scale)
    flush = (h_s.mT @ q_size).mul_(scale)
    b = ((t.p + pe).mul_(delta.b).add_(w).mT @ q_size).mul_(scale)
    b += t.touched * more
    b.masked_fill_(over.any(1)[..., None], torch.inf)
    tau2 = torch.zeros_like(sigma2)
    if row_ties is not None and delta.tau2 is not None:
        n = neighbours(x.d_s.mT.contiguous(), t.form.u / 16, x.eta / 8).mT
        tau2 = (_elsewhere(n, t).mul_(v_s)).mT @ q2
        if deviations.ds_from_rounded_p:
            n = neighbours(t.p.mT.contiguous(), t.form.u / 16).mT
            tau2 += (_elsewhere(n, t).mul_(random2)).mT @ q2
        carried = delta.tau2 + _elsewhere(row_ties, t) * (delta.sigma2 + delta.tau2)
        tau2 = tau2.add_(p2.mT @ (carried * q2)).mul_(s2)
        if known is not None and t.whole:
            tau2 = torch.maximum(tau2, _beyond(known, sigma2))
    found = Sums(result=result, size=reach, sigma2=sigma2, tau2=tau2, hard=hard, b=b, flush=flush, noise=sigma2)
    if deviations.half_partials:
        _add_partials(t, found, x.d_s, t.q, scale)
    return found, share


def _equal_rows(t: Scores, f: Forward) -> torch.Tensor:
    """How many rows of the key/value head have this row's q, or its O, (Z, rows, 1): their errors in D are equal too.

    Told by a random projection, within (u / 16) |q| and (u / 8) |O|.
    """
    generator = torch.Generator().manual_seed(1)
    counts = []
    for rows, window in ((t.q, t.form.u / 16), (f.o, t.form.u / 8)):
        along = torch.randn(rows.shape[-1], generator=generator, dtype=torch.float64).to(rows.device)
        # Padding is beyond everything, so that it is nobody's neighbour.
        place = (rows @ along).masked_fill_(t.dead[..., 0], torch.inf)
        distance = window * rows.norm(dim=-1)
        counts.append(near(place, distance))
    return torch.maximum(*counts)[..., None]


def _add_partials(t: Scores, sums: Sums, x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
    """One rounding of each query head's share of x^T y before the group is summed, added to the sums of dK or dV.

    Of a frame that has not all rows, the shares are not whole: u sum_g |share| then stands for their roundings.
    """
    shares = (x.unflatten(1, (-1, t.rows)).mT @ y.unflatten(1, (-1, t.rows))).abs_().mul_(scale)
    worst = t.rounding.worst(shares, t.form.eta).sum(1).mul_(1.01)
    if not t.whole:
        sums.b.add_(worst)
        # A share may overflow where their sum does not; of a part of the rows it may have that part of the range.
        sums.b.masked_fill_((shares >= 0.999 * t.form.largest * t.part).any(1), torch.inf)
        return
    # With their true units: over all of an output the mean square of 0.18 u^2 x^2 is off by more than the statistics allow.
    random = half_ulp(shares, t.form).square_().mul_(1 / 3).sum(1)
    sums.hard.add_(worst)
    sums.sigma2.add_(random)
    # A share may overflow where their sum does not.
    sums.b.masked_fill_((shares + (sums.hard + sums.b)[:, None] >= 0.999 * t.form.largest).any(1), torch.inf)
    sums.b.add_(t.rounding.flushed(shares, None, t.form.eta).sum(1))
    if sums.noise is not sums.sigma2:
        sums.noise.add_(random)
