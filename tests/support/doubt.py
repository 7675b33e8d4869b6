"""Masks that float32 may answer either way, and what a kernel returns that answers them at random."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest

from attnfuzz.kernels.contract import Inputs, Outputs
from attnfuzz.kernels.expressions.tree import KV, Q, absolute, exp, to_float, whole
from attnfuzz.kernels.modified import tensors_of
from attnfuzz.oracles.attention import differentiable, leaves_within, sequences, visible_keys

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

TIES = to_float(Q) * 0.1 <= to_float(KV) * 0.3
"""Equal, as real numbers, where q_idx is 3 kv_idx."""
FEW = to_float(Q * 11) * 0.1 <= to_float(KV + 4) * 0.7
"""Equal where q_idx is 7 n and kv_idx 11 n - 4."""
ALL = to_float(Q + 1) * 0.1 <= to_float(Q + 1) * 0.1
ONE = (to_float(Q + 1) * 0.1).equals(to_float(KV + 1) * 0.3)
"""Seen are no keys but such as are in doubt."""
MASKS_IN_DOUBT = {
    "ties": TIES,
    "few": FEW,
    "all": ALL,
    "one": ONE,
    "all but one": ~ONE,
    "band": to_float(absolute(Q - KV)) * 0.1 <= to_float(whole(12)) * 0.1,
    "exponential": exp(to_float(Q - KV) * 0.0625) <= 1.0,
}


def answered(inputs: Inputs, seed: int) -> Outputs:
    """Of one sequence, by the definition in float64: the forward and the backward each answer every doubt for themselves."""
    p = inputs.problem
    (data,) = sequences(inputs)
    modifiers, tensors = differentiable(p, data)
    (n_q,), (n_k,) = p.seqlens_q, p.seqlens_k
    leaves = leaves_within(data, torch.arange(p.heads)[:, None, None], range(n_q), range(n_k))
    unmasked, doubt, band = (
        x.expand(p.heads, n_q, n_k) for x in (modifiers.unmasked(leaves), modifiers.doubtful(leaves), visible_keys(p, 0))
    )
    share, generator = random.Random(seed).choice([0.0, 0.5, 1.0]), torch.Generator().manual_seed(seed)
    forward, backward = (band & torch.where(doubt, torch.rand(doubt.shape, generator=generator) < share, unmasked) for _ in "fb")
    q, k, v, d_o = (x.double() for x in (data.q, data.k, data.v, data.d_o))
    k, v = (x.repeat_interleave(p.groups, 0) for x in (k, v))
    raw = (p.scale * (q @ k.mT)).requires_grad_()
    s = modifiers.changed(raw, leaves)
    lse = torch.logsumexp(s.masked_fill(~forward, -math.inf), -1)
    blind = (lse == -math.inf)[..., None]
    weights = (s - lse.masked_fill(blind[..., 0], 0.0)[..., None]).detach()
    p_f, p_b = (weights.masked_fill(~seen, -math.inf).exp().masked_fill(blind, 0.0) for seen in (forward, backward))
    o = p_f @ v
    of_row = (d_o * o).sum(-1, keepdim=True) - (0.0 if data.d_lse is None else data.d_lse.double()[..., None])
    d_s = p_b * (d_o @ v.mT - of_row)
    d_raw, *rest = torch.autograd.grad(s * 1.0, (raw, *tensors.values()), d_s, allow_unused=True, materialize_grads=True)

    def of_keys(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, p.groups)).sum(1)

    found = (o, p.scale * (d_raw @ k), p.scale * of_keys(d_raw.mT @ q), of_keys(p_b.mT @ d_o))
    o, dq, dk, dv = (x.transpose(0, 1).to(data.q.dtype) for x in found)
    taken = dict(zip(tensors, rest, strict=True))
    captured = tuple(taken[each.name].float() if each.gradient else None for each in tensors_of(p))
    return Outputs(o=o, lse=lse.detach().float(), dq=dq, dk=dk, dv=dv, d_captured=captured)
