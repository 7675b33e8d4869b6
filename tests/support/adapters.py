"""Functions with flash-attention's signature in plain torch, right and wrong, and adapters of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

INFINITY = float("inf")


def attended(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0):
    """o (rows, heads, dim) in float32 and lse (heads, rows) of one sequence; +inf for rows without keys, as flash-attention."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(groups, 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q.float(), k) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    n, m = s.shape[-2:]
    at = torch.arange(m, device=q.device) - torch.arange(n, device=q.device)[:, None] - (m - n)
    left, right = window
    hidden = torch.zeros_like(at, dtype=torch.bool)
    if causal:
        hidden |= at > 0
    if right >= 0:
        hidden |= at > right
    if left >= 0:
        hidden |= at < -left
    s = s.masked_fill(hidden, -INFINITY)
    alone = hidden.all(-1)
    lse = s.masked_fill(alone[:, None], 0.0).logsumexp(-1) if m else s.new_zeros(s.shape[:-1])
    p = (s - lse[..., None]).exp()
    o = torch.einsum("hij,jhd->ihd", p, v)
    return o, lse.masked_fill(alone, INFINITY) if m else torch.full_like(lse, INFINITY)


def flash(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, return_attn_probs=False):
    assert dropout_p == 0.0
    found = [attended(*each, softmax_scale, causal, window_size, softcap) for each in zip(q, k, v, strict=True)]
    o, lse = torch.stack([o for o, _ in found]).to(q.dtype), torch.stack([lse for _, lse in found])
    return (o, lse, None) if return_attn_probs else o


def flash_bhsd(q, k, v, scale=None, is_causal=False):
    assert all(x.is_contiguous() for x in (q, k, v))
    o = flash(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), softmax_scale=scale, causal=is_causal)
    return o.transpose(1, 2)


def flash_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False, return_lse=False
):
    ends = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    parts = [attended(q[a:b], k[c:d], v[c:d], softmax_scale, causal) for (a, b), (c, d) in ends]
    rest = q.shape[0] - int(cu_seqlens_q[-1])
    o = torch.cat([*(o for o, _ in parts), q.new_zeros(rest, q.shape[1], v.shape[2])]).to(q.dtype)
    lse = torch.cat([*(lse for _, lse in parts), torch.zeros(q.shape[1], rest, device=q.device)], 1)
    return (o, lse) if return_lse else o


def only_forward(q, k, v, causal=False):
    with torch.no_grad():
        return flash(q, k, v, causal=causal)


def given_backward(d_o, q, k, v, o, lse, causal=False, **_: Any):
    assert lse is None or lse.shape[-1] == q.shape[1]
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(flash(*leaves, causal=causal), leaves, d_o)
