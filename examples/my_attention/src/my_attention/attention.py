"""The kernels as one differentiable function, with flash-attention's signature."""

import torch
import triton

from my_attention import kernels


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, causal, tile_m, tile_n):
        q, k, v = (x.contiguous() for x in (q, k, v))
        batch, seqlen_q, heads, dim = q.shape
        o = torch.empty_like(q)
        lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
        sizes = (scale, seqlen_q, k.shape[1], heads, k.shape[2])
        constants = {"CAUSAL": causal, "DIM": dim, "TILE_M": tile_m, "TILE_N": tile_n}
        kernels.forward[(triton.cdiv(seqlen_q, tile_m), heads, batch)](q, k, v, o, lse, *sizes, **constants)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.sizes, ctx.constants = sizes, constants
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        q, k, v, o, lse = ctx.saved_tensors
        do = do.contiguous()
        delta = (o.float() * do.float()).sum(-1).transpose(1, 2).contiguous()
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        inputs, constants = (q, k, v, do, lse, delta), ctx.constants
        batch, seqlen_q, heads, _ = q.shape
        tiles_q, tiles_k = triton.cdiv(seqlen_q, constants["TILE_M"]), triton.cdiv(k.shape[1], constants["TILE_N"])
        kernels.backward_queries[(tiles_q, heads, batch)](*inputs, dq, *ctx.sizes, **constants)
        kernels.backward_keys[(tiles_k, k.shape[2], batch)](*inputs, dk, dv, *ctx.sizes, **constants)
        return dq, dk, dv, None, None, None, None


def my_attention(q, k, v, softmax_scale=None, causal=False, return_lse=False, tile_m=32, tile_n=32):
    """o (batch, seqlen_q, heads, dim) of q and of k, v (batch, seqlen_k, kv_heads, dim); with LSE (batch, heads, seqlen_q)."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    o, lse = _Attention.apply(q, k, v, scale, causal, tile_m, tile_n)
    return (o, lse) if return_lse else o
