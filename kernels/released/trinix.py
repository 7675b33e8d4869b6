"""`released.trinix.attention`: attention of trinix (Apache-2.0) in Triton, dense, forward only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnfuzz.kernels.released.subject import Package, released

if TYPE_CHECKING:
    import torch

__all__ = ["ATTENTION"]

_TRINIX: Final = Package("trinix", "trinix")


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Call `TritonAttentionKernel.apply`: a window has two sides; one without a limit is as long as the sequence."""
    from trinix.kernels.attention_kernel import TritonAttentionKernel

    left, right = (q.shape[1] if side < 0 else side for side in window_size)
    window = None if window_size == (-1, -1) else (left, right)
    return TritonAttentionKernel.apply(q, k, v, causal=causal, scale=scale, window_size=window)


ATTENTION: Final = released(
    _attention,
    name="released.trinix.attention",
    package=_TRINIX,
    like="dense",
    files=("kernels/attention_kernel.py", "kernels/utils.py"),
    dims=((64, 64), (16, 16), (32, 32), (128, 128), (40, 40), (96, 96)),
    causal=(None, "bottom_right"),
    gradients=False,
    layouts=True,
    scale_any=True,
    deterministic=("o",),
)
