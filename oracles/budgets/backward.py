"""Budgets of dQ, dK and dV from float64 quantities of a frame. Notation as in oracles/budgets/bounds.py."""

from __future__ import annotations

import math

import torch

from attnfuzz.kernels.contract import Deviations
from attnfuzz.oracles.budgets import backward_formulas as formulas
from attnfuzz.oracles.budgets.captured import CapturedSums
from attnfuzz.oracles.budgets.delta import Delta
from attnfuzz.oracles.budgets.forward import Forward
from attnfuzz.oracles.budgets.forward_formulas import lost
from attnfuzz.oracles.budgets.roundings import neighbours, repeated_sum
from attnfuzz.oracles.budgets.score_gradient import Gradients, ScoreGradient, dq_dk, errors_of_rounded_p
from attnfuzz.oracles.budgets.scores import Scores
from attnfuzz.oracles.budgets.sums import Sums, add_partials, beyond, elsewhere
from attnfuzz.oracles.formats import EPS, TF32, TINY, half_ulp
from attnfuzz.oracles.frames import Steps

__all__ = ["backward"]


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
    Values that repeat are rounded by one unit: w_b = h^2 / 3 with that of P, w_S with that of dS (`Rounding.repeated_ds`).
    dV: sigma^2 = v_b^T @ dO^2, tau^2 = ((n - 1) w_b)^T @ dO^2, H = (c_b (1 + e))^T |dO|
        B = (P e + flushed)^T |dO| + acc + lost(dO, P)
    E  = P ((1 + e) eps (4 (c' |dP| + sqrt(c') C) + 4 |dP - D|) + e |dP - D|) + flushed P,  C = |dO| |v|^T, c' = max(1, Dv / 16)
    p  = E + (1 + e) P (B_D + min(H_D, 6 sqrt(V_D) + 4 sqrt(T_D))), the error of dS; v_x = 0.18 u^2 p^2 its own rounding
    dQ: sigma^2 = scale^2 ((v_S + v_x) @ k^2 + V_D (P k)^2);  H = |scale| (c_S @ |k| + H_D |P k|)
        B = |scale| ((E + flushed) @ |k| + B_D (|P k| + (P e) @ |k|)) + acc + lost(k, dS)
        tau^2 as sigma^2 with (n - 1) w_S and T_D
    dK: sigma^2 = scale^2 ((v_S + v_x)^T @ q^2 + (P^2)^T @ (V_D q^2));  H = |scale| (c_S^T |q| + P^T (H_D |q|))
        B = |scale| (E + flushed + (1 + e) P B_D)^T |q| + acc + lost(q, dS)
        tau^2 = scale^2 (((n - 1) w_S)^T @ q^2 + (P^2)^T @ ((T_D + (n_i - 1) (V_D + T_D)) q^2)), n_i the rows with equal q or O

    With a score_mod f, P in dS and wherever D's errors enter is P f'(s), and E grows by |P (dP - D)| times the error of f'(s).

    flushed P in E is (1 + |dP - D|) tiny, and the bracket of E also has lost(dO, v). With ties, 6 sigma + 4 tau is at least
    3 sigma + the known sum of P's or dS's roundings (`_known_roundings`, `_known_of_ds`). Declared deviations: dS from rounded P
    adds P's rounding to v_S, c_S and flushed (`errors_of_rounded_p`), partial sums add theirs to sigma^2 and H
    (`add_partials`), K rounded after its scaling counts in delta as a scaled Q does, and in dQ (`of_scaled_k`). Rows
    whose scores are lost, and dS beyond the dtype, have an infinite budget. In float32, ties add the error of equal terms to B.
    Where mask_mod is in doubt, P e grows by how far P may move (doubts.py), and B_D by the effect on D (`Delta.move`). Neither
    averages out: for the statistics they count as flushed, as do lost(dO, P) of dV and lost(q, dS) of dK, and what rows share of
    the roundings of K.
    """
    lost_keys = t.lost_keys
    pe, moved = _dv(t, dv, lost_keys, deviations, ties=ties)
    steps = t.rounding.steps(t.v.shape[-1])
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
    x = ScoreGradient(
        d_s=d_s, e_s=e_s, pe=pe, around=around, gap=gap, lost_keys=lost_keys, eta=_unit_of_ds(t), weight=t.p, pk=f.pk,
        moved=moved, over=delta.over,
    )  # fmt: skip
    if delta.over is not None:
        # An infinite D times a P of 0 is NaN, also where the key is hidden.
        x.lost_keys = lost_keys | delta.over.any(1, keepdim=True)
    sinks = _of_sinks(t, x) if t.sunk else None
    if t.changed is not None:
        _through_score_mod(t, x, captured, deviations)
    if t.shared is not None:
        x.shared = x.d_s.abs() * t.shared
    gradients = dq_dk(t, f, delta, x, dk, deviations, ties=ties, lean=lean)
    gradients.sinks, gradients.over = sinks, delta.over
    return gradients


def _of_sinks(t: Scores, x: ScoreGradient) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dS of the sink and its error, infinite in rows without bounds."""
    at = slice(-1, None)
    slack = torch.addcmul(x.e_s[..., at], t.p[..., at] + x.pe[..., at], x.around)
    endless = t.lost_rows if t.doubt is None else t.lost_rows | t.doubt.endless
    if x.over is not None:
        endless = endless | x.over
    return x.d_s[..., at].clone(), slack.masked_fill(endless, torch.inf)


def _through_score_mod(t: Scores, x: ScoreGradient, captured: CapturedSums | None, deviations: Deviations) -> None:
    """Make dS that of the score before score_mod: times its derivative there, which has an error too."""
    assert t.changed is not None
    assert x.gap is not None
    grown = t.p + x.pe
    slack = torch.addcmul(x.e_s, grown, x.around)
    if captured is not None:
        d_s, of_slack = x.d_s, slack
        if deviations.ds_from_rounded_p:
            worst_p, _, coherent_p = errors_of_rounded_p(t, x)
            of_slack = of_slack + worst_p + coherent_p
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
        sums.tau2.baddbmm_(elsewhere(n, t).mul_(t.rounding.true_variance(t.p, v_b)).mT, d2)
        if t.whole:
            sums.tau2.copy_(torch.maximum(sums.tau2, _known_roundings(t, v_b > 0, sums.sigma2)))
    if ties and not t.rounding.half:
        sums.b.baddbmm_(repeated_sum(t.p.mT.contiguous()), d_size, alpha=1 / t.part)
    if deviations.half_partials:
        add_partials(t, sums, t.p, t.d_o, 1.0)
    return pe, moved


def _known_roundings(t: Scores, random: torch.Tensor, sigma2: torch.Tensor) -> torch.Tensor:
    """Return tau^2 such that 6 sigma + 4 tau is at least 3 sigma + |the sum of P's roundings|, for sums that are large.

    The kernel's P is exact to float32, so its rounding is known except next to a tie. For example, equal rows under a causal
    mask have P in equal steps, which are rounded alike though no two P are equal (measured: 6.4 sigma in dV).
    """
    unit = 2 * half_ulp(t.p, t.form)
    error = torch.round(t.p / unit).mul_(unit).sub_(t.p).masked_fill_(~random, 0.0)
    known = (error.mT @ t.d_o).abs_()
    return beyond(known, sigma2)
