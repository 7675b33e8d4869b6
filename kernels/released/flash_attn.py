"""`released.flash_attn.*`: flash-attention 2 (package flash-attn, BSD-3-Clause), dense and ragged, with gradients; CUDA only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnfuzz.kernels.released.subject import Package, released

if TYPE_CHECKING:
    import torch

__all__ = ["DENSE", "VARLEN"]

_FLASH_ATTN: Final = Package("flash-attn", "flash_attn", needs=("einops",), outside_extra=True, options="--no-build-isolation")


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Call `flash_attn_func`: O, or O, LSE `(batch, heads, seqlen_q)` and probabilities that are for its own tests."""
    from flash_attn import flash_attn_func

    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    return flash_attn_func(q, k, v, **options, deterministic=deterministic, return_attn_probs=return_attn_probs)


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Call `flash_attn_varlen_func`: O, or O, LSE `(heads, total_q)` and probabilities that are for its own tests."""
    from flash_attn import flash_attn_varlen_func

    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    options |= {"deterministic": deterministic, "return_attn_probs": return_attn_probs}
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)


_DECLARED: Final[dict[str, Any]] = {
    "package": _FLASH_ATTN,
    "files": ("flash_attn_interface.py",),
    "backend": "torch",
    "devices": ("cuda",),
    # The forward is deterministic; the backward adds to dQ by atomics, unless it is asked for.
    "configs": ({"deterministic": False}, {"deterministic": True}),
    "deterministic": ("o", "lse"),
    "dims": ((64, 64), (128, 128), (32, 32), (96, 96), (192, 192), (256, 256), (40, 40)),
    "groups": None,
    "unequal": True,
}

DENSE: Final = released(_dense, name="released.flash_attn.dense", like="dense", **_DECLARED)
VARLEN: Final = released(_varlen, name="released.flash_attn.varlen", like="varlen", zero_q=True, zero_k=True, **_DECLARED)
