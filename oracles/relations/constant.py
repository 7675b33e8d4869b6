"""V constant over the keys of each sequence: O is that constant, dS is 0, and P's rows sum to 1, which shows in dV."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch

from attnfuzz.kernels.contract import Outputs
from attnfuzz.oracles.attention import SequenceData, sequences
from attnfuzz.oracles.formats import EPS, TF32, Format, half_ulp, rounded
from attnfuzz.oracles.relations.difference import Difference, Related, Setup, exactly
from attnfuzz.oracles.relations.sizes import Noise, sum_of_seeing
from attnfuzz.oracles.relations.tensors import output, packed

__all__ = ["constant_v"]


def constant_v(setup: Setup) -> Related:
    """Compare a launch with the first key's V for all keys and one with V unchanged: LSE and dV do not depend on V.

    With c that row of V, u the dtype's unit roundoff, p_i as in `sizes`:

        |O_i - c| <= M_i = |c| min(u, 5 u hypot(p_i, min(1, 4 u / sigma_i))) + fp32 terms, before its rounding (P is rounded,
                           its row sum is not; P that hardly differ are rounded alike); by tf32 2 u |c|, as P and c are truncated
        |dS_ij| <= P_ij B_i,   B_i = sum_d |dO| (|O_i - c| + M_i) + eps (8 + dim_v / 8) sum_d |dO c|
        |dQ_i| <= |scale| B_i max_j |k_j|
        |dK_j| <= |scale| sum_i B_i |q_i| min(1, exp(|scale| |q_i| max_j |k_j| - LSE_i))
        sum_j dV_j = sum of dO over the rows that see a key, for every V

    O in B_i is the kernel's own, so that a wrong O alone is not reported twice.
    """
    (problem,) = setup.problems
    parts = list(sequences(setup.inputs))
    constant = [dataclasses.replace(part, v=part.v[:, :1].expand_as(part.v)) for part in parts]

    def differences(outputs: Sequence[Outputs]) -> Iterator[Difference]:
        needs = problem.needs.outputs
        for part in constant:
            noise = Noise(problem, part, setup.deviations, setup.device)
            for name in (each for each in ("lse", "dv") if each in needs):
                expected = output(problem, outputs[0], name, part.index)
                got = output(problem, outputs[1], name, part.index)
                exact = name in setup.deterministic
                yield exactly(name, part.index, got, expected) if exact else noise.difference(name, got, expected)
            if "o" in needs:
                yield from _constant_o(setup, part, noise, outputs[1])
            if "dv" in needs and part.v.shape[1]:
                yield _sums(setup, part, noise, outputs[0])

    return Related((setup.inputs, packed(problem, constant)), differences)


def _constant_o(setup: Setup, part: SequenceData, noise: Noise, outputs: Outputs) -> Iterator[Difference]:
    (problem,) = setup.problems
    form, groups = Format.of(problem.dtype), problem.groups
    heads, rows = part.q.shape[:2]
    got = output(problem, outputs, "o", part.index)
    if not part.v.shape[1]:
        yield exactly("o", part.index, got, torch.zeros_like(got))
        return
    c = part.v[:, :1].double().repeat_interleave(groups, 0)
    live = noise.live[:, None]
    expected = torch.where(live, c.expand(heads, rows, -1), 0.0)
    u = noise.u if noise.half or noise.u > form.u else 0.0
    alike = torch.hypot(noise.p, _alike(noise, u))
    relative = (5 * torch.hypot(torch.full_like(noise.p, u), form.eta * noise.n) * alike).clamp(max=u + form.eta)
    if noise.tf32:
        # P and c are truncated, not rounded: always toward zero.
        relative = torch.full_like(relative, TF32)
    # The terms of O have one sign: tensor cores truncate their sum at each step of 16 keys.
    steps = noise.n / 8 if noise.half or u else 0.0
    relative = relative + EPS * (8 + 2 * noise.n.sqrt() + steps)
    before = relative[..., None] * expected.abs()
    top, bottom = rounded(expected + before, form), rounded(expected - before, form)
    allowed = torch.maximum(top - expected, expected - bottom)
    yield Difference("o", part.index, got, expected, torch.where(live, allowed, 0.0))
    needs = problem.needs.outputs
    if not {"dq", "dk"} & set(needs):
        return
    scale, d_o, q, k = abs(problem.scale), part.d_o.double(), part.q.double(), part.k.double()
    off = (d_o.abs() * ((got - expected).abs().nan_to_num(nan=0.0, posinf=0.0) + before)).sum(2)
    off = off + EPS * (8 + problem.dim_v / 8) * (d_o * expected).abs().sum(2)
    off = torch.where(noise.live, off, 0.0)
    least = torch.where(live, form.eta, 0.0)
    if "dq" in needs:
        largest = k.abs().amax(1, keepdim=True).repeat_interleave(groups, 0)
        d_q = output(problem, outputs, "dq", part.index)
        yield Difference("dq", part.index, d_q, torch.zeros_like(d_q), 1.1 * scale * off[..., None] * largest + least)
    if "dk" in needs:
        longest = k.norm(dim=2).amax(1).repeat_interleave(groups)[:, None]
        p = torch.exp((scale * q.norm(dim=2) * longest - _lse(setup, part, outputs)).clamp(max=0.0)).nan_to_num(nan=1.0)
        rowwise = ((off * p)[..., None] * q.abs()).unflatten(0, (-1, groups)).sum(1)
        allowed = 1.1 * scale * sum_of_seeing(noise.first, rowwise)
        least = torch.where(noise.touched[:, None], form.eta, 0.0)
        d_k = output(problem, outputs, "dk", part.index)
        yield Difference("dk", part.index, d_k, torch.zeros_like(d_k), allowed + least)


def _alike(noise: Noise, u: float) -> torch.Tensor:
    """Return the share of P's roundings that does not average out: P within 4 u, as with a scale of 0, are rounded alike."""
    return (4 * u / noise.sigma.clamp(min=1e-300)).clamp(max=1.0) if u else torch.zeros_like(noise.sigma)


def _lse(setup: Setup, part: SequenceData, outputs: Outputs) -> torch.Tensor:
    """Return LSE in natural logarithms; -inf where the kernel returns none, since then only P <= 1 is known."""
    (problem,) = setup.problems
    if outputs.lse is None:
        return torch.full(part.q.shape[:2], -torch.inf, dtype=torch.float64, device=part.q.device)
    base = math.log(2.0) if setup.deviations.lse_base2 else 1.0
    return output(problem, outputs, "lse", part.index) * base


def _sums(setup: Setup, part: SequenceData, noise: Noise, outputs: Outputs) -> Difference:
    """Compare the sum of dV over the keys with that of dO over the rows that see a key: `(kv_heads, 1, dim_v)`."""
    (problem,) = setup.problems
    form = Format.of(problem.dtype)
    d_v = output(problem, outputs, "dv", part.index)
    d_o = torch.where(noise.live[:, None], part.d_o.double(), 0.0)

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, problem.groups)).sum((1, 2))[:, None]

    expected = grouped(d_o)
    u = noise.u if noise.half or noise.u > form.u else 0.0
    alike = _alike(noise, u)
    by_row = torch.hypot(u * torch.hypot(noise.p, alike), form.eta * torch.hypot(noise.n.sqrt(), noise.n * alike)) + EPS * (
        8 + 2 * noise.exponent
    )
    by_row = torch.hypot(by_row, noise.of_splits)
    terms = problem.groups * part.q.shape[1]
    carried = form.u + EPS * math.sqrt(terms)
    # Tensor cores truncate the sum at each step of 16 rows, and truncate equal parts of the keys' sums alike.
    truncated = EPS * terms / 16 * d_v.abs().sum(1, keepdim=True) if noise.half or u else 0.0
    if noise.tf32:
        truncated = truncated + TF32 * grouped(d_o.abs())
    # The keys' own roundings are equal where some row weighs all its keys alike, or where dV is close to 0.
    same = torch.where(noise.live, alike, 0.0).amax() if alike.numel() else 0.0
    size = d_v.abs()
    own = same * half_ulp(size, form) + torch.where(size < 32 * form.eta, form.eta, 0.0)
    # Subnormal P have a few hundred values, and so have their products: their roundings do not average out.
    own = own + torch.where((size >= 32 * form.eta) & (size < 2.0**form.min_exponent), form.eta / 4, 0.0)
    truncated = truncated + own.sum(1, keepdim=True)
    spread = (grouped((d_o * by_row[..., None]).square()) + carried**2 * d_v.square().sum(1, keepdim=True)).sqrt()
    spread = spread + form.eta * math.sqrt(d_v.shape[1]) + carried * expected.abs() / 8
    return Difference(
        "dv", part.index, d_v.sum(1, keepdim=True), expected, 7 * spread + truncated, what="the sum of dV over all keys"
    )
