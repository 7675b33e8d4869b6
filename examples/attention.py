"""A Triton kernel in one file, as many are: `attnfuzz run attention.py:attention --like dense` fuzzes it as it stands."""

import torch
import triton
import triton.language as tl


@triton.jit
def forward(
    q, k, v, o, scale, seqlen_q, seqlen_k, heads,
    CAUSAL: tl.constexpr, DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head against all keys; q, k, v and o are contiguous (batch, seqlen, heads, DIM)."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows, dims = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M), tl.arange(0, DIM)
    at_q = ((batch * seqlen_q + rows[:, None]) * heads + head) * DIM + dims[None, :]
    q_tile = tl.load(q + at_q, mask=rows[:, None] < seqlen_q, other=0.0)
    largest = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, DIM], tl.float32)
    for begin in range(0, seqlen_k, TILE_N):
        keys = begin + tl.arange(0, TILE_N)
        at_k = ((batch * seqlen_k + keys[:, None]) * heads + head) * DIM + dims[None, :]
        k_tile = tl.load(k + at_k, mask=keys[:, None] < seqlen_k, other=0.0)
        v_tile = tl.load(v + at_k, mask=keys[:, None] < seqlen_k, other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        visible = keys[None, :] < seqlen_k
        if CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
        s = tl.where(visible, s, float("-inf"))
        new = tl.maximum(largest, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(s - base[:, None])
        shrink = tl.exp(largest - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        largest = new
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(o + at_q, result.to(o.dtype.element_ty), mask=rows[:, None] < seqlen_q)


def attention(q, k, v, softmax_scale=None, causal=False):
    """o (batch, seqlen_q, heads, dim) of q and of k, v (batch, seqlen_k, heads, dim); the mask is bottom-right aligned."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    batch, seqlen_q, heads, dim = q.shape
    o = torch.empty_like(q)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    grid = (triton.cdiv(seqlen_q, 32), batch * heads)
    forward[grid](q, k, v, o, scale, seqlen_q, k.shape[1], heads, CAUSAL=causal, DIM=dim, TILE_M=32, TILE_N=32)
    return o
