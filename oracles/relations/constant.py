"""V constant over the keys of each sequence: O is that constant, dS is 0, and P's rows sum to 1, which shows in dV."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch

from attnfuzz.kernels.contract import Outputs
from attnfuzz.oracles.attention import SequenceData, sequences
from attnfuzz.oracles.formats import CUT_OF_TF32X3, EPS, TF32, Format
from attnfuzz.oracles.relations import constant_formulas as formulas
from attnfuzz.oracles.relations.constant_formulas import Roundings
from attnfuzz.oracles.relations.difference import Difference, Related, Setup, exactly
from attnfuzz.oracles.relations.sizes import Noise
from attnfuzz.oracles.relations.tensors import output, packed

__all__ = ["constant_v"]


def constant_v(setup: Setup) -> Related:
    """Compare a launch with the first key's V for all keys and one with V unchanged: LSE and dV do not depend on V.

    With c that row of V, u the dtype's unit roundoff, p_i as in `sizes`:

        |O_i - c| <= M_i = |c| min(u, 5 u hypot(p_i, min(1, 4 u / sigma_i))) + fp32 terms, before its rounding (P is rounded,
                           its row sum is not; P that hardly differ are rounded alike); by tf32 2 u |c|, as P and c are truncated;
                           by tf32x3 eps (24 + 21 n / 16) |c| more, as sums are, of n keys (`OF_TF32X3`, `CUT_OF_TF32X3`);
                           in other float32 sums eps n / 2 min(1, n eps / sigma_i) |c| more, as equal terms are rounded alike,
                           and eps n / 16 |c| of the part of P that is below the sum's last bits
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


def _roundings(setup: Setup, noise: Noise) -> Roundings:
    form = Format.of(setup.problems[0].dtype)
    u = noise.u if noise.half or noise.u > form.u else 0.0
    return Roundings(
        u=u, form=form, truncates=noise.half or u > 0, tf32=noise.tf32, tf32x3=noise.tf32x3, splits=noise.errors.splits
    )


def _constant_o(setup: Setup, part: SequenceData, noise: Noise, outputs: Outputs) -> Iterator[Difference]:
    (problem,) = setup.problems
    of, groups, counts = _roundings(setup, noise), problem.groups, noise.seeing.counts
    got = output(problem, outputs, "o", part.index)
    if not part.v.shape[1]:
        yield exactly("o", part.index, got, torch.zeros_like(got))
        return
    c = noise.v[:, :1].repeat_interleave(groups, 0)
    of_d = EPS * (8 + problem.dim_v / 8)
    expected, allowed, terms = formulas.of_o(got, c, noise.d_o, noise.p, noise.sigma, counts, of_d, of)
    yield Difference("o", part.index, got, expected, allowed)
    needs = problem.needs.outputs
    if not {"dq", "dk"} & set(needs):
        return
    scale, off = abs(problem.scale), terms.sum(2, keepdim=True)
    if "dq" in needs:
        largest = noise.k.abs().amax(1, keepdim=True).repeat_interleave(groups, 0)
        d_q = output(problem, outputs, "dq", part.index)
        limit = formulas.of_dq(off, largest, counts, scale, of.form.eta)
        yield Difference("dq", part.index, d_q, torch.zeros_like(d_q), limit)
    if "dk" in needs:
        longest = noise.k_size.amax(1, keepdim=True).repeat_interleave(groups, 0)
        lse = _lse(setup, part, outputs)[..., None]
        rowwise = formulas.rows_of_dk(off, noise.q, noise.q_size, longest, lse, scale)
        total = noise.seeing.sums(rowwise.unflatten(0, (-1, groups)).sum(1))
        d_k = output(problem, outputs, "dk", part.index)
        limit = formulas.of_dk(total, noise.seeing.touched, scale, of.form.eta)
        yield Difference("dk", part.index, d_k, torch.zeros_like(d_k), limit)


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
    of, counts = _roundings(setup, noise), noise.seeing.counts
    d_v = output(problem, outputs, "dv", part.index)

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, problem.groups)).sum((1, 2))[:, None]

    d_o, d_size, variance = formulas.of_rows(noise.d_o, noise.p, noise.sigma, noise.exponent, counts, of)
    expected = grouped(d_o)
    alike = formulas.alike_of_live(noise.sigma, counts, of)
    same = alike.amax() if alike.numel() else alike.new_zeros(())
    terms = problem.groups * part.q.shape[1]
    # Tensor cores truncate the sum at each step of 16 rows, and truncate equal parts of the keys' sums alike.
    by_row = 1 / 16 if of.truncates else CUT_OF_TF32X3 if of.tf32x3 else 0.0
    own, squares = formulas.of_keys(d_v, same, EPS * terms * by_row, of.form)
    truncated = own.sum(1, keepdim=True)
    if noise.tf32:
        truncated = truncated + TF32 * grouped(d_size)
    carried, flushed = of.form.u + EPS * math.sqrt(terms), of.form.eta * math.sqrt(d_v.shape[1])
    allowed = formulas.of_sum(expected, grouped(variance), squares.sum(1, keepdim=True), truncated, carried, flushed)
    return Difference("dv", part.index, d_v.sum(1, keepdim=True), expected, allowed, what="the sum of dV over all keys")
