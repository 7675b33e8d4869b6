"""`released.liger.neighborhood`: fused neighborhood attention of Liger-Kernel (BSD-2-Clause), dense, with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.released.subject import Package, released

if TYPE_CHECKING:
    import torch

__all__ = ["NEIGHBORHOOD"]

_LIGER: Final = Package("liger-kernel", "liger_kernel")


def _neighborhood(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Call the neighborhood attention: a kernel size of 2 w + 1 is a window of w keys on both sides."""
    from liger_kernel.ops.fused_neighborhood_attention import LigerFusedNeighborhoodAttentionFunction

    half = q.shape[2] if window_size[0] < 0 else window_size[0]
    return LigerFusedNeighborhoodAttentionFunction.apply(q, k, v, 2 * half + 1, 1, scale)


NEIGHBORHOOD: Final = released(
    _neighborhood,
    name="released.liger.neighborhood",
    package=_LIGER,
    like="dense",
    layout="bhsd",
    files=("ops/fused_neighborhood_attention.py", "ops/softmax.py"),
    # Scores and P are kept in the input dtype: only in single precision are they what the verdict assumes.
    dtypes=("float32",),
    dims=((64, 64), (16, 16), (32, 32), (128, 128), (40, 40)),
    layouts=True,
    window_forms=("equal",),
    scale_any=True,
    # Its products say nothing of their precision, which is tf32 on a GPU.
    deviations=Deviations(tf32_on=("cuda",)),
    # Everything but values and strides is a constant of its functions.
    compiles_each_shape=True,
    deterministic=("o", "dq", "dk", "dv"),
)
