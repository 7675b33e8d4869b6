"""Budgets of dQ and dK: the roundings of dS on its way into them. Notation as in oracles/budgets/bounds.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnfuzz.kernels.contract import Deviations
from attnfuzz.oracles.budgets import backward_formulas as formulas
from attnfuzz.oracles.budgets.delta import Delta
from attnfuzz.oracles.budgets.forward import Forward
from attnfuzz.oracles.budgets.forward_formulas import limited
from attnfuzz.oracles.budgets.roundings import VARIANCE, direction, near, neighbours, repeated_sum
from attnfuzz.oracles.budgets.scores import Scores
from attnfuzz.oracles.budgets.sums import Sums, add_partials, beyond, elsewhere
from attnfuzz.oracles.formats import half_ulp, half_ulp_of_sum, on_grid
from attnfuzz.oracles.frames import Steps

__all__ = ["Gradients", "ScoreGradient", "dq_dk", "errors_of_rounded_p"]


@dataclass(slots=True, eq=False)
class ScoreGradient:
    """dS of a frame and its errors before its own rounding, each `(Z, rows, keys)` where nothing else is said."""

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


def dq_dk(
    t: Scores, f: Forward, delta: Delta, x: ScoreGradient, dk: Sums, deviations: Deviations, *, ties: bool, lean: bool
) -> Gradients:
    """Compute the budget of dQ and add to the sums of dK, by the formulas of `backward`."""
    scale, u = abs(t.scale), t.form.u
    r = _roundings_of_ds(t, x, delta, deviations, own=ties and t.rounding.half)
    if not lean:
        lost_ds = formulas.lost_ds(x.d_s, t.p)
        r.flushed, r.flushed_dk = r.flushed + lost_ds, r.flushed_dk + lost_ds
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
        dq, b, r.size @ k_size, t.k_sum, r.size.sum(-1, keepdim=True), t.terms_k, t.n_k, t.scale, t.rounding
    )
    tau2 = row_ties = known_k = None
    if ties and not t.rounding.half:
        b.baddbmm_(repeated_sum(x.d_s), k_size)
        dk.b.baddbmm_(repeated_sum(x.d_s.mT.contiguous()), t.q_size, alpha=abs(t.only_scale) / t.part)
    if ties and t.rounding.half:
        assert r.own is not None
        r.repeated = t.rounding.repeated_ds(r.size, r.own, _not_zero(scale))
        tau2 = (neighbours(x.d_s, u / 16, x.eta / 8) - 1).mul_(r.repeated) @ k2
        if r.of_p is not None:
            tau2 += (neighbours(t.p, u / 16) - 1).mul_(r.of_p) @ k2
        if delta.tau2 is not None:
            tau2 += delta.tau2 * (x.pk * scale).square_()
        if deviations.half_scaled_k:
            equal = neighbours(t.k.mT.contiguous(), u / 16).mT
            tau2 += formulas.of_scaled_k(x.d_s, r.size, t.rounding)[0] @ ((equal - 1) * k2)
        known_q, known_k = _known_of_ds(t, f, delta, deviations)
        tau2 = torch.maximum(tau2, beyond(known_q, sigma2))
        row_ties = _equal_rows(t, f)
    over = r.size >= 0.999 * t.form.largest / _at_least_one(scale)
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
    """Flushed values, here and in D. For statistics both have what is lost below the smallest normal float32."""
    own: torch.Tensor | None = None
    """The mean square of its own rounding, if it was asked for."""
    repeated: torch.Tensor | None = None
    """As `own`, of values that repeat."""
    of_p: torch.Tensor | None = None
    """The part of `random` from P's rounding, where dS is taken from rounded P."""


def _roundings_of_ds(t: Scores, x: ScoreGradient, delta: Delta, deviations: Deviations, *, own: bool) -> _Roundings:
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
    worst_p, of_p, systematic_p = errors_of_rounded_p(t, x)
    slack = slack + worst_p
    flushed = t.rounding.flushed(d_size, slack, x.eta) + systematic_p
    systematic = x.e_s + flushed
    return _Roundings(
        size=size, random=random + of_p, worst=t.rounding.worst(d_size + slack, x.eta) + worst_p, flushed=flushed,
        of_dq=torch.addcmul(systematic, x.pe, delta.b), of_dk=torch.addcmul(systematic, grown, delta.b),
        flushed_dk=torch.addcmul(flushed, x.weight, delta.flush), own=alone, of_p=of_p,
    )  # fmt: skip


def errors_of_rounded_p(t: Scores, x: ScoreGradient) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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


def _dk(
    t: Scores,
    delta: Delta,
    x: ScoreGradient,
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
        assert r.repeated is not None
        n = neighbours(x.d_s.mT.contiguous(), t.form.u / 16, x.eta / 8).mT
        sums.tau2.baddbmm_(elsewhere(n, t).mul_(r.repeated).mT, q2)
        if r.of_p is not None:
            n = neighbours(t.p.mT.contiguous(), t.form.u / 16).mT
            sums.tau2.baddbmm_(elsewhere(n, t).mul_(r.of_p).mT, q2)
        carried = delta.tau2 + elsewhere(row_ties, t) * (delta.sigma2 + delta.tau2)
        sums.tau2.baddbmm_(p2.mT, carried * q2)
        if known is not None and t.whole:
            sums.tau2.copy_(torch.maximum(sums.tau2, beyond(known, sums.sigma2)))
    if deviations.half_partials:
        add_partials(t, sums, x.d_s, t.q, abs(t.scale))
    return of_d


def _known_of_ds(t: Scores, f: Forward, delta: Delta, deviations: Deviations) -> tuple[torch.Tensor, torch.Tensor]:
    """Return |sum of dS's roundings @ k| and |their sum^T @ q| times |scale|, each the largest over what a kernel may do.

    A kernel may take D from the exact O, from the rounded one or from rounded products, and round dS before or after scaling.
    Where dS is taken from rounded P, that rounding is known as well: equal queries have nearly equal P, rounded alike (measured
    with 186 queries: 7.5 sigma in dK).
    """
    unit = 2 * half_ulp(f.o, t.form)
    of_rounded = delta.d + (t.d_o * (torch.round(f.o / unit) * unit - f.o)).sum(-1, keepdim=True)
    ways = (delta.d, of_rounded) if delta.products is None else (delta.d, of_rounded, of_rounded + delta.products)
    scale = abs(t.scale)
    largest_q, largest_k = torch.zeros_like(t.q), torch.zeros_like(t.k)
    d_p = t.d_o @ t.v.mT
    rounded_p = None
    if deviations.ds_from_rounded_p:
        unit = 2 * half_ulp(t.p, t.form)
        rounded_p = torch.round(t.p / unit).mul_(unit)
    for d in ways:
        gap = on_grid(d_p - d, delta.b)
        if t.changed is not None:
            gap *= t.changed.slope
        exact = gap * t.p
        start = exact if rounded_p is None else gap.mul_(rounded_p)
        for factor in (1.0, _not_zero(scale)):
            steps = 2 * half_ulp(start * factor, t.form) / factor
            error = torch.round(start / steps).mul_(steps).sub_(exact)
            largest_q = torch.maximum(largest_q, (error @ t.k).abs_().mul_(scale))
            largest_k = torch.maximum(largest_k, (error.mT @ t.q).abs_().mul_(scale))
    return largest_q, largest_k


def _at_least_one(x: Steps) -> Steps:
    """Return max(1, x)."""
    return x.clamp(min=1.0) if isinstance(x, torch.Tensor) else max(1.0, x)


def _not_zero(scale: Steps) -> Steps:
    """Return the scale, 1 where it is 0: nothing is rounded after it then."""
    return scale.masked_fill(scale == 0, 1.0) if isinstance(scale, torch.Tensor) else scale or 1.0


def _equal_rows(t: Scores, f: Forward) -> torch.Tensor:
    """Count the rows of the key/value head that share this row's q, or its O, (Z, rows, 1): their errors in D are equal too.

    Rows are compared by a random projection, within (u / 16) |q| and (u / 8) |O|.
    """
    counts = []
    for rows, window in ((t.q, t.form.u / 16), (f.o, t.form.u / 8)):
        # Padding is placed at infinity, so that it is not counted.
        place = (rows @ direction(rows.shape[-1], rows.device)).masked_fill_(t.dead[..., 0] != 0, torch.inf)
        distance = window * torch.linalg.vector_norm(rows, dim=-1)
        counts.append(near(place, distance))
    return torch.maximum(*counts)[..., None]
