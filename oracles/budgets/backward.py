"""Budgets of dQ, dK and dV from float64 quantities of a frame. Notation as in oracles/budgets/bounds.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnfuzz.kernels.contract import Deviations
from attnfuzz.oracles.budgets import backward_formulas as formulas
from attnfuzz.oracles.budgets.captured import CapturedSums
from attnfuzz.oracles.budgets.forward import Forward, OfP, Scores, at_least_one, repeated_sum
from attnfuzz.oracles.budgets.forward_formulas import TIES, difference, limited, lost
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
    """dQ's budget; where dS may overflow, `m_dq` and dK's `b` are infinite. The last four only if not lean.

    `random`: 6 sigma + 4 tau where that is the limit, else 0.
    """

    m_dq: torch.Tensor
    random: torch.Tensor
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
    over: torch.Tensor | None = None
    """As of `Delta`."""
    sinks: tuple[torch.Tensor, torch.Tensor] | None = None
    """(Z, rows, 1): dS of the sink and its error, in kernels that do not round it."""


def delta_error(t: Scores, f: Forward, p: OfP, deviations: Deviations) -> Delta:
    """Compute D and its error, for kernels that take D from the rounded O or from an fp32 one.

    res = |rd(O) - O|, h = half ulp of O, r = min(h, res + M_O), S = sigma^2 + tau^2 + B^2 of O, f = 1 - exp(-4 S / h^2)
    E2 = min(res^2 (1 - f) + f h^2 / 3, r^2), h^2 in place of h^2 / 3 where res <= h / 64
    det = sum_d dO (rd(O) - O) exp(-2 S / h^2)
    V_D = max(sum_d dO^2 E2, det^2) + sum_j v_f dP^2;  T_D = sum_d (n_d - 1) dO^2 E2 + sum_j (n - 1) v_f dP^2
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
    by_o, det, hard_o, arithmetic, d, sizes = (x.sum(-1, keepdim=True) for x in of_o)
    moved = t.d_size @ t.v_size.mT if t.rounding.tf32 else None
    of_p = formulas.of_d_p(d_p, t.p, p.variance, p.worst, p.flushed, moved)
    by_p, hard_p, mean2, flush = (x.sum(-1, keepdim=True) for x in of_p)
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
    """Compute the budget of dQ, and add to the sums of dK and dV; `lean` leaves out parts for statistics.

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
    adds P's rounding to v_S, c_S and flushed (`_rounded_p`), partial sums add theirs to sigma^2 and H
    (`_add_partials`), K rounded after its scaling counts in delta as a scaled Q does, and in dQ (`of_scaled_k`). Rows
    whose scores are lost, and dS beyond the dtype, have an infinite budget. In float32, ties add the error of equal terms to B.
    Where mask_mod is in doubt, P e grows by how far P may move (doubts.py), and B_D by the effect on D (`Delta.move`). Neither
    averages out: for the statistics they count as flushed, as do lost(dO, P) of dV and lost(q, dS) of dK, and what rows share of
    the roundings of K.
    """
    lost_keys = t.lost_keys
    pe, moved = _dv(t, dv, lost_keys, deviations, ties=ties)
    steps = max(1.0, t.v.shape[-1] / 16)
    of_c = 4 * EPS * math.sqrt(steps) + (TF32 if t.rounding.tf32 else 0.0)
    c_size = t.d_size @ t.v_size.mT
    of_row, of_key = lost(t.d_size.sum(-1, keepdim=True), 0.0, t.v.shape[-1]), t.v_size.sum(-1)[:, None, :] * TINY
    wants_gap = moved is not None or t.changed is not None or deviations.ds_from_rounded_p
    d_s, e_s, *gaps = formulas.of_ds(
        delta.d_p, delta.d, delta.b, t.p, pe, c_size, of_row, of_key, 4 * EPS * steps, of_c, wants_gap
    )
    delta.d_p = delta.d
    gap = gaps[0] if gaps else None
    if moved is not None and gap is not None:
        delta.move(moved, gap, c_size)
        moved = moved * (gap + delta.flush)
    del c_size, gaps
    around = formulas.around_d(delta.b, delta.hard, delta.sigma2, delta.tau2, t.rounding.half)
    x = _Ds(
        d_s=d_s, e_s=e_s, pe=pe, around=around, gap=gap, lost_keys=lost_keys, eta=_unit_of_ds(t), weight=t.p, pk=f.pk,
        moved=moved, over=delta.over,
    )  # fmt: skip
    if delta.over is not None:
        # An infinite D times a P of 0 is NaN, also where the key is hidden.
        x.lost_keys = lost_keys | delta.over.any(1, keepdim=True)
    sinks = _of_sinks(t, x) if t.sunk else None
    if t.changed is not None:
        _through_score_mod(t, x, captured)
    if t.shared is not None:
        x.shared = x.d_s.abs() * t.shared
    gradients = _dq_dk(t, f, delta, x, dk, deviations, ties=ties, lean=lean)
    gradients.sinks, gradients.over = sinks, delta.over
    return gradients


def _of_sinks(t: Scores, x: _Ds) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dS of the sink and its error, infinite in rows without bounds."""
    at = slice(-1, None)
    slack = torch.addcmul(x.e_s[..., at], t.p[..., at] + x.pe[..., at], x.around)
    endless = t.lost_rows if t.doubt is None else t.lost_rows | t.doubt.endless
    if x.over is not None:
        endless = endless | x.over
    return x.d_s[..., at].clone(), slack.masked_fill(endless, torch.inf)


def _through_score_mod(t: Scores, x: _Ds, captured: CapturedSums | None) -> None:
    """Make dS that of the score before score_mod: times its derivative there, which has an error too."""
    assert t.changed is not None
    assert x.gap is not None
    grown = t.p + x.pe
    slack = torch.addcmul(x.e_s, grown, x.around)
    if captured is not None:
        d_s, of_slack = x.d_s, slack
        if t.sunk:
            # A sink reads no tensor.
            d_s, of_slack = d_s.clone(), slack.clone()
            d_s[..., -1], of_slack[..., -1] = 0.0, 0.0
        endless = None if t.doubt is None else t.doubt.endless & t.doubt.reach
        if x.over is not None:
            endless = x.over.expand_as(d_s) if endless is None else endless | x.over
        captured.add(t.changed, d_s, of_slack, endless)
    slope, off = t.changed.slope, t.changed.slope_error
    size, steep = slope.abs(), slope.abs() + off
    x.e_s = (x.e_s * steep).addcmul_(x.d_s.abs(), off + 2 * EPS * size)
    x.slack = (slack * steep).addcmul_(x.d_s.abs(), off + 2 * EPS * size)
    x.pe, x.grown = (x.pe * steep).addcmul_(t.p, off), grown * steep
    x.moved = None if x.moved is None else x.moved * steep
    x.d_s, x.gap, x.weight = x.d_s * slope, x.gap * size, t.p * size
    x.pk = (t.p * slope) @ t.k


def _unit_of_ds(t: Scores) -> Steps:
    """Return half a subnormal unit of dS where a kernel scales it before its rounding, at least that of the dtype."""
    if isinstance(t.scale, torch.Tensor):
        return formulas.unit_of_ds(t.scale, t.form.eta)
    return t.form.eta * max(1.0, 1 / abs(t.scale) if t.scale else 1.0)


@dataclass(slots=True, eq=False)
class _Ds:
    d_s: torch.Tensor
    e_s: torch.Tensor
    """E: the part of its error from the arithmetic of this entry alone."""
    pe: torch.Tensor
    """P e."""
    around: torch.Tensor
    """(Z, rows, 1): the error of D."""
    gap: torch.Tensor | None
    """|dP - D|, where it is needed."""
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
    shared: torch.Tensor | None = None
    """The part of the error of dS that rows share (`Scores.shared`)."""
    over: torch.Tensor | None = None
    """As of `Delta`."""
    slack: torch.Tensor | None = None
    """p: the error of dS before it is rounded; None: E + P (1 + e) `around`."""
    grown: torch.Tensor | None = None
    """P (1 + e) with score_mod; None: P + P e."""


def _dv(
    t: Scores, sums: Sums, lost_keys: torch.Tensor, deviations: Deviations, *, ties: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add to the sums of dV; return P e, and the part of it from a mask_mod in doubt."""
    u, eta, noise = t.form.u, t.form.eta, sums.noise is not None
    moved = None
    if t.doubt is None:
        pe, bound, h_b, v_b, c_b, *exact_units = formulas.of_dv(t.p, t.delta_again, t.s, t.lse, t.m_lse, t.rounding, noise)
    else:
        e = formulas.recomputed(t.delta_again, t.s, t.lse, t.m_lse).masked_fill_(~t.visible & t.doubt.hidden, 0.0)
        moved = t.doubt.moved(t.p, e, t.rounding.worst(t.doubt.high, eta))
        pe = t.p * e + moved
        bound, h_b, v_b, c_b, *exact_units = formulas.of_dv_in_doubt(t.p, e, pe, t.doubt.rows, t.rounding, noise)
    d_size, d2 = t.d_size, t.d2
    sums.result.baddbmm_(t.p.mT, t.d_o)
    sums.size.baddbmm_(t.p.mT, d_size)
    loss = lost(d_size.sum(1, keepdim=True), 0.0, 2 * t.terms_q)
    sums.b.baddbmm_(bound.mT, d_size).addcmul_(t.touched, loss)
    sums.b.masked_fill_(lost_keys, torch.inf)
    sums.sigma2.baddbmm_(v_b.mT, d2)
    sums.hard.baddbmm_(c_b.mT, d_size)
    if sums.flush is not None:
        # What is flushed below the smallest normal float32 is lost as a whole too.
        sums.flush.baddbmm_((h_b if moved is None else h_b + moved).mT, d_size).addcmul_(t.touched, loss)
        if t.shared is not None:
            sums.flush.baddbmm_((t.p * t.shared).mT, d_size)
    if sums.noise is not None:
        sums.noise.baddbmm_(exact_units[0].mT, d2)
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
    return pe, moved


def _rounded_p(t: Scores, x: _Ds) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the errors of dS = rounded(P) (dP - D) by the rounding of P: worst case, mean square, and the coherent part.

    The coherent part is from P that may be flushed, and from P next to 1, which becomes 1.
    """
    u, eta = t.form.u, t.form.eta
    assert x.gap is not None
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

    A kernel may take D from the exact O, from the rounded one or from rounded products, and round dS before or after scaling.
    """
    unit = 2 * half_ulp(f.o, t.form)
    of_rounded = delta.d + (t.d_o * (torch.round(f.o / unit) * unit - f.o)).sum(-1, keepdim=True)
    ways = (delta.d, of_rounded) if delta.products is None else (delta.d, of_rounded, of_rounded + delta.products)
    scale = abs(t.scale)
    # Where the scale is 0, nothing is rounded after it.
    of_scale = scale.masked_fill(scale == 0, 1.0) if isinstance(scale, torch.Tensor) else scale or 1.0
    largest_q, largest_k = torch.zeros_like(t.q), torch.zeros_like(t.k)
    d_p = t.d_o @ t.v.mT
    for d in ways:
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
    r = _roundings_of_ds(t, x, delta, deviations, own=ties and t.rounding.half)
    k_size, k2 = t.k_size, t.k2
    p2 = x.weight * x.weight
    dq, b, flush = formulas.dq_sums(x.d_s @ t.k, x.pk, r.of_dq @ k_size, r.flushed @ k_size, delta.b, delta.flush, t.scale)
    sigma2, hard = formulas.spread_of_d(r.random @ k2, r.worst @ k_size, x.pk, delta.sigma2, delta.hard, t.scale)
    if deviations.half_scaled_k and t.rounding.half:
        of_k, worst_k, flushed_k = formulas.of_scaled_k(x.d_s, r.size, t.rounding)
        sigma2, hard = sigma2 + of_k @ k2, hard + worst_k @ k_size
        lost_k = flushed_k.sum(-1, keepdim=True)
        b, flush = b + lost_k, flush + lost_k + 2 * (of_k @ k2).sqrt_()
    if x.shared is not None:
        flush = flush + x.shared @ k_size
    reorder, b = formulas.dq_bound(
        dq, b, r.size @ k_size, t.k_sum, r.size.sum(-1, keepdim=True), t.terms_k, t.n_k, t.scale, t.form
    )
    tau2 = row_ties = known_k = None
    if ties and not t.rounding.half:
        b.baddbmm_(repeated_sum(x.d_s), k_size)
        dk.b.baddbmm_(repeated_sum(x.d_s.mT.contiguous()), t.q_size, alpha=abs(t.only_scale) / t.part)
    if ties and t.rounding.half:
        assert r.own is not None
        tau2 = (neighbours(x.d_s, u / 16, x.eta / 8) - 1).mul_(r.own) @ k2
        if r.of_p is not None:
            tau2 += (neighbours(t.p, u / 16) - 1).mul_(r.of_p) @ k2
        if delta.tau2 is not None:
            tau2 += delta.tau2 * (x.pk * scale).square_()
        if deviations.half_scaled_k:
            equal = neighbours(t.k.mT.contiguous(), u / 16).mT
            tau2 += formulas.of_scaled_k(x.d_s, r.size, t.rounding)[0] @ ((equal - 1) * k2)
        known_q, known_k = _known_of_ds(t, f, delta)
        tau2 = torch.maximum(tau2, _beyond(known_q, sigma2))
        row_ties = _equal_rows(t, f)
    over = r.size >= 0.999 * t.form.largest / at_least_one(scale)
    endless = torch.maximum(over.any(-1, keepdim=True), t.lost_again)
    if delta.over is not None:
        endless = torch.maximum(endless, delta.over)
    b, m_dq, random = limited(hard, sigma2, tau2, b, None, t.dead, endless, t.rounding.half)
    loss = formulas.key_loss(t.q_size.sum(1, keepdim=True), r.size.sum(1)[..., None], t.terms_q, t.touched, 1 + scale)
    dk.b.add_(loss)
    if dk.flush is not None:
        dk.flush.add_(loss)
    del loss  # as large as dK
    dk.b.masked_fill_(over.any(1)[..., None].logical_or_(x.lost_keys), torch.inf)
    of_d = _dk(t, delta, x, r, p2, dk, row_ties, known_k, deviations)
    gradients = Gradients(m_dq=m_dq, random=random, sigma2=sigma2, tau2=tau2, hard=hard, b=b, reorder=reorder)
    if not lean:
        # A flushed P moves D, and with it its whole row: a coherent error too.
        gradients.flush = flush
        gradients.d_s = x.d_s
        gradients.carried = (delta.sigma2 * p2.sum(-1, keepdim=True) * (t.q * t.q).sum(-1, keepdim=True))[..., 0]
        gradients.of_d, gradients.sigma2_dk = of_d.sum((1, 2)), dk.sigma2.sum((1, 2))
    return gradients


@dataclass(slots=True, eq=False)
class _Roundings:
    """Errors of dS on its way into dQ and dK, each `(Z, rows, keys)`."""

    size: torch.Tensor
    """|dS| plus its error before it is rounded."""
    random: torch.Tensor
    """The mean square of its own rounding, plus the mean squares of the roundings of its inputs."""
    worst: torch.Tensor
    flushed: torch.Tensor
    of_dq: torch.Tensor
    of_dk: torch.Tensor
    """Errors that do not average out: the arithmetic of this entry, flushed values, and the part of D's error."""
    flushed_dk: torch.Tensor
    """Flushed values, here and in D."""
    own: torch.Tensor | None = None
    """The mean square of its own rounding, if it was asked for."""
    of_p: torch.Tensor | None = None
    """The part of `random` from P's rounding, where dS is taken from rounded P."""


def _roundings_of_ds(t: Scores, x: _Ds, delta: Delta, deviations: Deviations, *, own: bool) -> _Roundings:
    if not deviations.ds_from_rounded_p and x.slack is None:
        return _Roundings(*formulas.parts_of_ds(x.d_s, x.e_s, t.p, x.pe, x.around, delta.b, delta.flush, x.eta, t.rounding, own))
    grown = t.p + x.pe if x.grown is None else x.grown
    slack = torch.addcmul(x.e_s, grown, x.around) if x.slack is None else x.slack
    if not deviations.ds_from_rounded_p:
        return _Roundings(
            *formulas.parts_of_own_ds(
                x.d_s, slack, x.e_s, x.pe, grown, x.weight, delta.b, delta.flush, x.eta, t.rounding, own
            )
        )  # fmt: skip
    d_size = x.d_s.abs()
    size = d_size + slack
    alone = t.rounding.variance(d_size, x.eta)
    random = torch.addcmul(alone, slack, slack, value=VARIANCE * t.form.u**2) if t.rounding.half else alone
    worst_p, of_p, systematic_p = _rounded_p(t, x)
    slack = slack + worst_p
    flushed = t.rounding.flushed(d_size, slack, x.eta) + systematic_p
    systematic = x.e_s + flushed
    return _Roundings(
        size=size, random=random + of_p, worst=t.rounding.worst(d_size + slack, x.eta) + worst_p, flushed=flushed,
        of_dq=torch.addcmul(systematic, x.pe, delta.b), of_dk=torch.addcmul(systematic, grown, delta.b),
        flushed_dk=torch.addcmul(flushed, x.weight, delta.flush), own=alone, of_p=of_p,
    )  # fmt: skip


def _dk(
    t: Scores,
    delta: Delta,
    x: _Ds,
    r: _Roundings,
    p2: torch.Tensor,
    sums: Sums,
    row_ties: torch.Tensor | None,
    known: torch.Tensor | None,
    deviations: Deviations,
) -> torch.Tensor:
    """Add to the sums of dK, except overflow and what is lost below tiny; return the part of sigma^2 from D's errors."""
    q, q_size, q2, sigma2_q, hard_q = formulas.of_q(t.q, t.scale, delta.sigma2, delta.hard)
    sums.result.baddbmm_(x.d_s.mT, q)
    sums.size.baddbmm_(r.size.mT, q_size)
    of_d = p2.mT @ sigma2_q
    sums.sigma2.baddbmm_(r.random.mT, q2).add_(of_d)
    sums.hard.baddbmm_(r.worst.mT, q_size).baddbmm_(x.weight.mT, hard_q)
    sums.b.baddbmm_(r.of_dk.mT, q_size)
    if sums.flush is not None:
        sums.flush.baddbmm_(r.flushed_dk.mT, q_size)
        for more in (x.moved, x.shared):
            if more is not None:
                sums.flush.baddbmm_(more.mT, q_size)
    if row_ties is not None and delta.tau2 is not None:
        assert sums.tau2 is not None
        assert r.own is not None
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
        _add_partials(t, sums, x.d_s, t.q, abs(t.scale))
    return of_d


def _equal_rows(t: Scores, f: Forward) -> torch.Tensor:
    """Count the rows of the key/value head that share this row's q, or its O, (Z, rows, 1): their errors in D are equal too.

    Rows are compared by a random projection, within (u / 16) |q| and (u / 8) |O|.
    """
    counts = []
    for rows, window in ((t.q, t.form.u / 16), (f.o, t.form.u / 8)):
        # Padding is placed at infinity, so that it is not counted.
        place = (rows @ direction(rows.shape[-1], rows.device)).masked_fill_(t.dead[..., 0] != 0, torch.inf)
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
