"""Per-element error budgets from float64 quantities: how far off an output of a correct kernel may be.

Assumed of a kernel: P <= 1 against the true running maximum, the row sum from fp32 P, P and dS rounded once to the input
dtype, fp32 accumulation, one final rounding. What it does otherwise it declares (`Deviations`), and only that term grows.

The budget is M = H + B: H is the worst case of the roundings to the input dtype (of P, dS, and of O inside Delta), B the error of
fp32 arithmetic (scores, exponentials, accumulation) and of values that may be flushed to zero. For float32 kernels H is 0, but
for tf32 where it is declared. Notation: u = unit roundoff of the dtype, eta = half its smallest subnormal, eps = 2**-24.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.problem import Dtype, Problem, reject
from attnfuzz.oracles.attention import SequenceData, visible

__all__ = ["Budget", "Format", "budgets", "half_ulp", "rounded"]

EPS = 2.0**-24
TINY = 2.0**-126
"""The smallest normal float32: hardware may flush what is below it, operand, product or sum, to zero."""
_TF32 = 2.01 * 2.0**-10
"""Relative error of a product of two operands truncated to tf32's 10 mantissa bits."""
_CHUNK = 1 << 23
"""Scores handled at once: each float64 temporary stays under 64 MiB."""


@dataclass(frozen=True, slots=True)
class Format:
    """A floating-point dtype: u = 2**-(mantissa bits + 1), the exponent of its smallest normal, its largest finite value."""

    u: float
    min_exponent: int
    largest: float

    @property
    def eta(self) -> float:
        """Half the smallest subnormal."""
        return 2.0**self.min_exponent * self.u

    @staticmethod
    def of(dtype: Dtype) -> Format:
        """The format of a Problem's dtype."""
        return _FORMATS[dtype]


_FORMATS: dict[Dtype, Format] = {
    "float16": Format(2.0**-11, -14, 65504.0),
    "bfloat16": Format(2.0**-8, -126, float(torch.finfo(torch.bfloat16).max)),
    "float32": Format(2.0**-24, -126, float(torch.finfo(torch.float32).max)),
}


@dataclass(frozen=True, slots=True, eq=False)
class Budget:
    """Allowed absolute error M of each output of one sequence, float64, heads first; LSE's is `(heads, seqlen_q)`."""

    o: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    ds_overflows: torch.Tensor
    """0-d bool: dS may exceed the dtype's range, so dQ and dK of this sequence cannot be judged."""


def half_ulp(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Half a unit in the last place of `form` at |x|, at least half the smallest subnormal; float64."""
    exponent = torch.frexp(x)[1].to(torch.float64) - 1
    exponent = torch.where(x == 0, form.min_exponent, exponent).clamp(min=form.min_exponent)
    return torch.exp2(exponent) * form.u


def rounded(x: torch.Tensor, form: Format) -> torch.Tensor:
    """float64 -> `form` by one rounding to nearest even, overflow to infinity, kept in float64."""
    unit = 2 * half_ulp(x, form)
    y = torch.where(torch.isfinite(x), torch.round(x / unit) * unit, x)
    return torch.where(y.abs() > form.largest, torch.sign(y) * torch.inf, y)


def budgets(problem: Problem, data: SequenceData, deviations: Deviations, device: str) -> Budget:
    """The budget M of every output of one sequence, by the formulae at `_forward` and `_backward`.

    Raises:
        BadArgument: the problem has a modifier whose budget is not known yet.
    """
    for name in ("softcap", "score_mod", "mask_mod"):
        if getattr(problem, name):
            raise reject(f"problem.{name}", getattr(problem, name), "its error budget is not known yet", "leave it out")
    heads_at_once = max(1, _CHUNK // max(1, problem.groups * data.q.shape[1] * data.k.shape[1]))
    parts = [
        _one(problem, data, deviations, device, slice(start, start + heads_at_once))
        for start in range(0, problem.kv_heads, heads_at_once)
    ]
    overflows = torch.stack([part.ds_overflows for part in parts]).any()
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in ("o", "lse", "dq", "dk", "dv")}
    return Budget(**joined, ds_overflows=overflows)


@dataclass(slots=True, eq=False)
class _Terms:
    """float64 quantities of forward and backward: `[kv_heads, groups, seqlen_q, ...]`, keys `[kv_heads, 1, seqlen_k, ...]`."""

    form: Format
    half: bool
    tf32: bool
    scale: float
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_o: torch.Tensor
    seen: torch.Tensor
    live: torch.Tensor
    s: torch.Tensor
    m: torch.Tensor
    l: torch.Tensor  # noqa: E741
    lse: torch.Tensor
    p: torch.Tensor
    o: torch.Tensor
    delta_s: torch.Tensor


def _one(problem: Problem, data: SequenceData, deviations: Deviations, device: str, kv: slice) -> Budget:
    terms = _terms(problem, data, deviations, device, kv)
    d_lse = None if data.d_lse is None else data.d_lse.double().unflatten(0, (problem.kv_heads, problem.groups))[kv]
    return _backward(terms, _forward(terms, deviations), d_lse, deviations)


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """Of the forward: M of LSE and O; per score the relative error e_f, the rounding c_f of P, and what may be flushed of P."""

    m_lse: torch.Tensor
    m_o: torch.Tensor
    e_f: torch.Tensor
    c_f: torch.Tensor
    flushed: torch.Tensor


def _terms(problem: Problem, data: SequenceData, deviations: Deviations, device: str, kv: slice) -> _Terms:
    """Scores and probabilities, and delta_s = bound on the error of a score's exponent argument.

    delta = eps (4 (c |s| + sqrt(c) A) + 4 |m|) + 4 tiny, A = |scale| |q| |k|^T, c = max(1, D / 16); masked: 0.
    """
    shape = (problem.kv_heads, problem.groups)
    q, d_o = (x.double().unflatten(0, shape)[kv] for x in (data.q, data.d_o))
    k, v = (x.double()[kv].unsqueeze(1) for x in (data.k, data.v))
    seen = visible(problem, data.index, q.device)
    scale, form = problem.scale, Format.of(problem.dtype)
    live = seen.any(-1)
    s = scale * (q @ k.mT)
    hidden = s.masked_fill(~seen, -torch.inf)
    m = hidden.amax(-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
    m = m.masked_fill(~live, 0.0)
    e = torch.exp(hidden - m[..., None])
    total = e.sum(-1).masked_fill(~live, 1.0)
    p = e / total[..., None]
    tf32 = problem.dtype == "float32" and device in deviations.tf32_on
    size = abs(scale) * (q.abs() @ k.abs().mT)
    steps = max(1.0, problem.dim_qk / 16)
    delta = EPS * (4 * (steps * s.abs() + math.sqrt(steps) * size) + 4 * m.abs()[..., None]) + 4 * TINY
    if tf32:
        delta = delta + _TF32 * size
    if deviations.prescaled_q:
        spread = 2.12 * form.u * abs(scale) * torch.sqrt((q * q) @ (k * k).mT)
        delta = delta + torch.minimum(form.u * size, spread + form.u * s.abs()) + 0.7 * form.eta * k.abs().sum(-1)[:, :, None, :]
    return _Terms(
        form=form, half=problem.dtype != "float32", tf32=tf32, scale=scale, q=q, k=k, v=v, d_o=d_o, seen=seen, live=live,
        s=s, m=m, l=total, lse=m + torch.log(total), p=p, o=p @ v, delta_s=torch.where(seen, delta, 0.0),
    )  # fmt: skip


def _accumulated(steps: float, result: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """fp32 accumulation over `steps` matrix steps of 16: eps (4 n |x| + 6 sqrt(n) X), X the sum of the terms' sizes."""
    return EPS * (4 * steps * result.abs() + 6 * math.sqrt(steps) * size)


def _lost(x: torch.Tensor, y: torch.Tensor, terms: int) -> torch.Tensor:
    """What flushing of float32 may take from a product x @ y: operands below TINY times their partners, and each term.

    x are the sums of |x| over the inner dimension, y those of |y|, broadcast against each other.
    """
    return TINY * (x + y + terms)


def _rounding(t: _Terms, x: torch.Tensor, eta: float) -> torch.Tensor:
    """Worst case of what happens to a factor x >= 0 on its way into a product: one rounding to the dtype, or tf32 truncation."""
    if t.half:
        return torch.maximum(t.form.u * x, x.clamp(max=eta))
    return x * _TF32 if t.tf32 else torch.zeros_like(x)


def _flushed(t: _Terms, x: torch.Tensor, slack: torch.Tensor | float, eta: float) -> torch.Tensor:
    """min(|x| + slack, eta) where |x| is so small that hardware may flush it, else 0."""
    if not t.half:
        return torch.zeros_like(x)
    return torch.where(x.abs() <= 4 * eta, (x.abs() + slack).clamp(max=eta), 0.0)


def _forward(t: _Terms, deviations: Deviations) -> _Forward:
    """The budgets of LSE and O.

    Lambda = log sum P e^delta;  M_LSE = Lambda + eps (4 (|LSE| + |m|) + 8 (1 + log2 max(M, 2)))
    e_f = (e^delta - 1) e^Lambda;  H_O = c_f @ |v| with c_f the rounding of the unnormalised P (exact at the row's maximum)
    B_O = min( sqrt(sum P e_f^2) sqrt(P @ v^2 - O^2), max|v| + |O| )
          + acc(M / 16 + 2, O, P @ |v|) + flushed @ |v| + lost
    """
    keys = t.k.shape[2]
    # Lambda is taken from the logarithms: for huge scores e^delta itself would overflow.
    shift = torch.logsumexp(torch.log(t.p) + t.delta_s, -1) if keys else t.m
    shift = shift.clamp(min=0.0)
    m_lse = shift + EPS * (4 * (t.lse.abs() + t.m.abs()) + 8 * (1 + math.log2(max(keys, 2))))
    if deviations.l_from_rounded_p:
        m_lse = m_lse + t.form.u * 1.01
    m_lse = torch.where(t.live, m_lse, 0.0)
    e_f = torch.expm1(t.delta_s.clamp(max=80.0)) * torch.exp(shift.clamp(max=80.0))[..., None]
    unnormalised = t.p * t.l[..., None]
    top = (t.s == t.m[..., None]) & t.seen & (t.delta_s < t.form.u / 8)
    if deviations.lazy_rescale or t.tf32:
        top = torch.zeros_like(top)
    seen = t.seen & (t.p > 0)
    c_f = torch.where(top | ~seen, 0.0, _rounding(t, unnormalised, t.form.eta) / t.l[..., None])
    flushed = _flushed(t, unnormalised, 0.0, t.form.eta) / t.l[..., None]
    flushed = torch.where(top, t.p * EPS * 8 * (1 + t.m.abs()[..., None]), flushed)
    if deviations.l_from_rounded_p:
        c_f = c_f + t.form.u * t.p
    size = t.p @ t.v.abs()
    spread = torch.sqrt((t.p * e_f * e_f).sum(-1).clamp(max=1e60))[..., None] * torch.sqrt(
        (t.p @ (t.v * t.v) - t.o * t.o).clamp(min=0)
    )
    largest = t.v.abs().amax(2, keepdim=True) if keys else t.v.new_zeros(*t.v.shape[:2], 1, t.v.shape[3])
    b_o = torch.minimum(spread, largest + t.o.abs())
    b_o = b_o + _accumulated(-(-keys // 16) + 2, t.o, size) + flushed @ t.v.abs()
    b_o = b_o + _lost(torch.ones_like(t.o), t.v.abs().sum(2, keepdim=True), keys)
    m_o = c_f @ t.v.abs() + b_o
    return _Forward(m_lse, torch.where(t.live[:, None], m_o, 0.0), e_f, c_f, flushed)


def _backward(t: _Terms, forward: _Forward, d_lse: torch.Tensor | None, deviations: Deviations) -> Budget:
    """The budgets of dV, dQ, dK, with D = rowsum(dO * O) (- dLSE) and dS = P (dP - D).

    e = exp(delta + M_LSE + 4 eps (|s| + |LSE|)) - 1 bounds the recomputed P's relative error.
    dV: H = (c_b (1 + e))^T |dO|, B = (P e + flushed)^T |dO| + acc + lost, summed over the group
    E  = P ((1 + e) eps (4 (c' |dP| + sqrt(c') C) + 4 |dP - D|) + e |dP - D|) + flushed P,  C = |dO| |v|^T, c' = max(1, Dv / 16)
    p  = E + (1 + e) P (B_D + H_D), the error of dS;  c_S = its rounding, of |dS| + p
    dQ: H = |scale| (c_S @ |k| + H_D |P @ k|),  B = |scale| ((E + flushed) @ |k| + B_D (|P @ k| + (P e) @ |k|)) + acc + lost
    dK: H = |scale| (c_S^T |q| + P^T (H_D |q|)), B = |scale| (E + flushed + (1 + e) P B_D)^T |q| + acc + lost, over the group
    """
    rows, keys, dim_v = t.q.shape[2], t.k.shape[2], t.v.shape[3]
    groups, scale = t.q.shape[1], abs(t.scale)
    v_size, k_size, q_size, d_size = t.v.abs(), t.k.abs(), t.q.abs(), t.d_o.abs()
    exponent = t.delta_s + forward.m_lse[..., None] + 4 * EPS * (t.s.abs() + t.lse.abs()[..., None])
    e = torch.where(t.seen, torch.expm1(exponent.clamp(max=80.0)), 0.0)
    alive = t.p > 0

    def by_key(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x^T y, summed over the rows of all heads of the group: [kv_heads, seqlen_k, dim]."""
        return x.flatten(1, 2).mT @ y.flatten(1, 2)

    one = (1 - t.p < t.form.u / 8) & (e < t.form.u / 8) & t.seen & (not t.tf32)
    c_b = torch.where(alive, _rounding(t, t.p, t.form.eta), 0.0)
    c_b = torch.where(one, (1 - t.p) if t.half else 0.0, c_b)
    flushed_p = torch.where(one, (1 - t.p) if t.half else 0.0, _flushed(t, t.p, t.p * e, t.form.eta))
    dv = by_key(t.p, t.d_o)
    key_steps = groups * (-(-rows // 16) + 2)
    touched, terms = t.seen.any(0)[:, None], groups * rows
    m_dv = by_key(c_b * (1 + e) + t.p * e + flushed_p, d_size) + _accumulated(key_steps, dv, by_key(t.p, d_size))
    m_dv = m_dv + _lost(t.p.sum((1, 2))[..., None], d_size.sum((1, 2))[:, None], terms)

    d_p = t.d_o @ t.v.mT
    d = (t.d_o * t.o).sum(-1)
    h_d, b_d = _delta(t, forward, d_p, d)
    if d_lse is not None:
        d, b_d = d - d_lse, b_d + 2 * EPS * d_lse.abs()
    gap = (d_p - d[..., None]).abs()
    steps = max(1.0, dim_v / 16)
    c_size = d_size @ v_size.mT
    inner = 4 * EPS * (steps * d_p.abs() + math.sqrt(steps) * c_size + gap) + (_TF32 * c_size if t.tf32 else 0.0)
    inner = inner + _lost(d_size.sum(-1, keepdim=True), v_size.sum(-1)[:, :, None], dim_v)
    e_s = t.p * ((1 + e) * inner + e * gap) + torch.where(alive, TINY * (1 + gap), 0.0)
    slack = e_s + (1 + e) * t.p * (b_d + h_d)[..., None]
    d_s = t.p * (d_p - d[..., None])
    # A kernel may scale dS before its rounding, so that what is flushed of dS itself grows by 1 / scale.
    eta_s = t.form.eta * max(1.0, 1 / scale if scale else 1.0)
    c_s = torch.where(alive, _rounding(t, d_s.abs() + slack, eta_s), 0.0)
    flushed_s = torch.where(alive, _flushed(t, d_s, slack, eta_s), 0.0)

    pk = (t.p @ t.k).abs()
    size = d_s.abs() + slack
    dq = t.scale * (d_s @ t.k)
    m_dq = scale * ((c_s + e_s + flushed_s) @ k_size + (h_d + b_d)[..., None] * pk + b_d[..., None] * ((t.p * e) @ k_size))
    m_dq = m_dq + _accumulated(-(-keys // 16) + -(-keys // 32) + 2, dq, scale * (size @ k_size))
    m_dq = m_dq + (1 + scale) * _lost(size.sum(-1, keepdim=True), k_size.sum(2, keepdim=True), keys)
    dk = t.scale * by_key(d_s, t.q)
    m_dk = scale * by_key(c_s + e_s + flushed_s + t.p * (h_d + b_d)[..., None] * (1 + e), q_size)
    m_dk = m_dk + _accumulated(key_steps, dk, scale * by_key(size, q_size))
    m_dk = m_dk + (1 + scale) * _lost(size.sum((1, 2))[..., None], q_size.sum((1, 2))[:, None], terms)
    if deviations.half_partials:
        m_dk = m_dk + scale * _partials(t, d_s, t.q)
        m_dv = m_dv + _partials(t, t.p, t.d_o)
    return Budget(
        o=forward.m_o.flatten(0, 1),
        lse=forward.m_lse.flatten(0, 1),
        dq=torch.where(t.live[:, None], m_dq, 0.0).flatten(0, 1),
        dk=torch.where(touched, m_dk, 0.0),
        dv=torch.where(touched, m_dv, 0.0),
        ds_overflows=(size >= 0.999 * t.form.largest).any(),
    )


def _partials(t: _Terms, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One rounding of each query head's share of x^T y before the group is summed: u sum_g |x_g^T y_g| + eta per head."""
    return 1.01 * t.form.u * (x.mT @ y).abs().sum(1) + t.form.eta * t.q.shape[1]


def _delta(t: _Terms, forward: _Forward, d_p: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(H_D, B_D), the two parts of the error of D = rowsum(dO * O), whether it is taken from the rounded O or an fp32 one.

    H_D = sum_d |dO| r + sum_j c_f |dP|, r = min(half ulp of O, |rd(O) - O| + M_O)
    B_D = sqrt(sum P e_f^2) sqrt(sum P dP^2 - D^2) + sum_d |dO| acc(O)
          + eps (6 + Dv / 16) sum_d |dO O| + flushed @ |dP| + lost
    """
    d_size, keys, dim_v = t.d_o.abs(), t.k.shape[2], t.v.shape[3]
    nearest = rounded(t.o, t.form)
    r = torch.minimum(half_ulp(t.o, t.form), torch.where(torch.isfinite(nearest), (nearest - t.o).abs(), 0.0) + forward.m_o)
    h_d = (d_size * r).sum(-1) + (forward.c_f * d_p.abs()).sum(-1)
    spread = torch.sqrt((t.p * forward.e_f * forward.e_f).sum(-1).clamp(max=1e60))
    spread = spread * torch.sqrt(((t.p * d_p * d_p).sum(-1) - d * d).clamp(min=0))
    b_d = spread + (d_size * _accumulated(-(-keys // 16) + 2, t.o, t.p @ t.v.abs())).sum(-1)
    b_d = b_d + EPS * (6 + dim_v / 16) * (d_size * t.o.abs()).sum(-1) + (forward.flushed * d_p.abs()).sum(-1)
    b_d = b_d + _lost(d_size.sum(-1), t.o.abs().sum(-1), dim_v)
    return torch.where(t.live, h_d, 0.0), torch.where(t.live, b_d, 0.0)
