"""`released.xformers.*`: memory-efficient attention of xformers (BSD-3-Clause), dense and ragged, with gradients; CUDA only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.released.subject import Package, released

if TYPE_CHECKING:
    import torch

__all__ = ["DENSE", "VARLEN"]

_XFORMERS: Final = Package("xformers", "xformers", outside_extra=True)


def _bias(causal: bool, window_size: tuple[int, int]) -> Any:
    """Return the attention bias of a dense batch: its windows and causal masks are those of flash-attention."""
    from xformers.ops.fmha import attn_bias

    left, right = window_size
    if causal:
        mask = attn_bias.LowerTriangularFromBottomRightMask()
        # Its size counts the query's own key.
        return mask if left < 0 else mask.make_local_attention(left + 1)
    return None if window_size == (-1, -1) else attn_bias.LocalAttentionFromBottomRightMask(left, right)


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `memory_efficient_attention_forward_requires_grad`: LSE may have more rows than there are queries."""
    from xformers import ops

    options = {"attn_bias": _bias(causal, window_size), "scale": scale}
    o, lse = ops.memory_efficient_attention_forward_requires_grad(q, k, v, **options)
    return o, lse[..., : q.shape[1]]


def _dense_backward(
    d_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,  # noqa: ARG001 - the call that is differentiated makes its own
    lse: torch.Tensor | None,  # noqa: ARG001
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[torch.Tensor, ...]:
    """Differentiate `memory_efficient_attention`, which picks a backward that takes its forward's LSE."""
    return _differentiated(d_o, q, k, v, attn_bias=_bias(causal, window_size), scale=scale)


def _differentiated(d_o: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    import torch
    from xformers import ops

    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in tensors]
        o: torch.Tensor = ops.memory_efficient_attention(*leaves, **options)
        gradients: tuple[torch.Tensor, ...] = torch.autograd.grad(o, leaves, d_o)
    return gradients


def _blocks(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, causal: bool, window_size: tuple[int, int]) -> Any:
    """Return the attention bias of a ragged batch."""
    from xformers.ops.fmha import attn_bias

    lengths = [starts.diff().tolist() for starts in (cu_seqlens_q, cu_seqlens_k)]
    blocks = attn_bias.BlockDiagonalMask.from_seqlens(*lengths, device=cu_seqlens_q.device)
    if not causal:
        return blocks
    if window_size[0] < 0:
        return blocks.make_causal_from_bottomright()
    return blocks.make_local_attention_from_bottomright(window_size[0] + 1)


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,  # noqa: ARG001 - the bias has it
    max_seqlen_k: int,  # noqa: ARG001
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `memory_efficient_attention_forward_requires_grad` with all tokens as one sequence, and a mask of blocks.

    Its operators return LSE packed, `(1, heads, total_q or more)`, or padded, `(batch, heads, max_seqlen_q or more)`.
    """
    import torch
    from xformers import ops

    options = {"attn_bias": _blocks(cu_seqlens_q, cu_seqlens_k, causal, window_size), "scale": scale}
    o, lse = ops.memory_efficient_attention_forward_requires_grad(q[None], k[None], v[None], **options)
    if lse.shape[0] == 1 and lse.shape[-1] >= q.shape[0]:
        return o[0], lse[0, :, : q.shape[0]]
    rows = [each[:, :length] for each, length in zip(lse, cu_seqlens_q.diff().tolist(), strict=True)]
    return o[0], torch.cat(rows, dim=1)


def _varlen_backward(
    d_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,  # noqa: ARG001 - the call that is differentiated makes its own
    lse: torch.Tensor | None,  # noqa: ARG001
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,  # noqa: ARG001 - the bias has it
    max_seqlen_k: int,  # noqa: ARG001
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[torch.Tensor, ...]:
    """Differentiate `memory_efficient_attention` with all tokens as one sequence."""
    bias = _blocks(cu_seqlens_q, cu_seqlens_k, causal, window_size)
    return tuple(each[0] for each in _differentiated(d_o[None], q[None], k[None], v[None], attn_bias=bias, scale=scale))


def _refuses(problem: Problem) -> str | None:
    """A mask of which a row hides every key: the bias refuses it, or its softmax is not defined."""
    if problem.causal is None and problem.window in (None, (None, None)):
        return None
    for queries, keys in zip(problem.seqlens_q, problem.seqlens_k, strict=True):
        if keys < queries:
            return f"seqlen_q={queries}, seqlen_k={keys}: a query of a mask from the bottom right sees no key"
    return None


def _refuses_ragged(problem: Problem) -> str | None:
    """As a dense batch, and windows without a causal mask, of which a ragged batch has no bias."""
    if problem.causal is None and problem.window not in (None, (None, None)):
        return f"window={problem.window}: a ragged batch has windows beside a causal mask only"
    return _refuses(problem)


_DECLARED: Final[dict[str, Any]] = {
    "package": _XFORMERS,
    "files": ("ops/fmha/__init__.py", "ops/fmha/attn_bias.py", "ops/fmha/dispatch.py"),
    "backend": "torch",
    "devices": ("cuda",),
    "lse": True,
    "dims": ((64, 64), (128, 128), (32, 32), (96, 96), (256, 256)),
    "unequal": True,
    "deterministic": ("o", "lse"),
}

DENSE: Final = released(
    _dense,
    name="released.xformers.dense",
    like="dense",
    backward=_dense_backward,
    refuses=_refuses,
    window_forms=("both",),
    **_DECLARED,
)
VARLEN: Final = released(
    _varlen,
    name="released.xformers.varlen",
    like="varlen",
    backward=_varlen_backward,
    refuses=_refuses_ragged,
    window_forms=("left",),
    **_DECLARED,
)
