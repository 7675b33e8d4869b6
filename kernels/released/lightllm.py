"""`released.lightllm.*`: prefill attention of LightLLM (package lightllm, Apache-2.0): ragged, forward only, default scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.released.subject import Package, released

if TYPE_CHECKING:
    import torch

__all__ = ["CONTEXT", "NO_CACHE", "SLIDING_WINDOW"]

_LIGHTLLM: Final = Package("lightllm", "lightllm", outside_extra=True)


def _context(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = True,
) -> torch.Tensor:
    """Call `context_attention_fwd`, which is always causal: keys before the queries are the cached prompt.

    Its table holds the place of each key in k and v; here these lie in order.
    """
    import torch
    from lightllm.models.llama.triton_kernel.context_flashattention_nopad import context_attention_fwd

    _check_causal(causal)
    o = torch.empty_like(q)
    lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    batch = torch.arange(len(lengths_q), dtype=torch.int32, device=q.device)
    table = cu_seqlens_k[:-1, None] + torch.arange(max_seqlen_k, dtype=torch.int32, device=q.device)
    cached = lengths_k - lengths_q
    context_attention_fwd(q, k, v, o, batch, cu_seqlens_q[:-1], lengths_k, cached, max_seqlen_q, table)
    return o


def _no_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,  # noqa: ARG001 - queries and keys have the same lengths
    max_seqlen_q: int,
    max_seqlen_k: int,  # noqa: ARG001
    causal: bool = True,
) -> torch.Tensor:
    """Call `context_attention_fwd_no_prompt_cache`, which is always causal."""
    import torch
    from lightllm.models.llama.triton_kernel.context_flashattention_nopad import context_attention_fwd_no_prompt_cache

    _check_causal(causal)
    o = torch.empty_like(q)
    context_attention_fwd_no_prompt_cache(q, k, v, o, cu_seqlens_q[:-1], cu_seqlens_q.diff(), max_seqlen_q)
    return o


def _sliding_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,  # noqa: ARG001 - queries and keys have the same lengths
    max_seqlen_q: int,
    max_seqlen_k: int,  # noqa: ARG001
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Call Mistral's `context_attention_fwd`, which is always causal; its window counts the query's own key."""
    import torch
    from lightllm.models.mistral.triton_kernel.context_flashattention_nopad import context_attention_fwd

    _check_causal(causal)
    o = torch.empty_like(q)
    left = window_size[0]
    window = max_seqlen_q if left < 0 else left + 1
    context_attention_fwd(q, k, v, o, cu_seqlens_q[:-1], cu_seqlens_q.diff(), max_seqlen_q, window)
    return o


def _check_causal(causal: bool) -> None:
    if not causal:
        raise ValueError("causal=False: these kernels are always causal")


def _refuses_fewer_keys(problem: Problem) -> str | None:
    """A sequence has at least as many keys as queries: those before are its cached prompt."""
    for queries, keys in zip(problem.seqlens_q, problem.seqlens_k, strict=True):
        if keys < queries:
            return f"seqlen_q={queries}, seqlen_k={keys}: each query of the prompt has a key of its own"
    return None


_DECLARED: Final[dict[str, Any]] = {
    "package": _LIGHTLLM,
    "like": "varlen",
    "dims": ((64, 64), (16, 16), (32, 32), (128, 128)),
    "groups": None,
    "causal": ("bottom_right",),
    "gradients": False,
    "layouts": True,
    "deterministic": ("o",),
    # P is divided by the row sum so far before it is rounded.
    "deviations": Deviations(normalised_p=True),
}
_LLAMA: Final = ("models/llama/triton_kernel/context_flashattention_nopad.py",)

CONTEXT: Final = released(
    _context, name="released.lightllm.context", files=_LLAMA, unequal=True, zero_q=True, refuses=_refuses_fewer_keys, **_DECLARED
)
NO_CACHE: Final = released(_no_cache, name="released.lightllm.no_cache", files=_LLAMA, **_DECLARED)
SLIDING_WINDOW: Final = released(
    _sliding_window,
    name="released.lightllm.sliding_window",
    files=("models/mistral/triton_kernel/context_flashattention_nopad.py",),
    window_forms=("left",),
    **_DECLARED,
)
