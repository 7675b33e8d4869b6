"""`released.fasterkernels.fa2`: attention of fasterkernels (MIT licence) in Triton, dense, forward only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnfuzz.kernels.released.subject import Package, released

if TYPE_CHECKING:
    import torch

__all__ = ["FA2"]

_FASTERKERNELS: Final = Package("fasterkernels", "fskernels")


def _fa2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float | None = None) -> torch.Tensor:
    """Call `flash_attention_2_fwd`, which has no causal mask."""
    from fskernels.triton.triton_fa2 import flash_attention_2_fwd

    return flash_attention_2_fwd(q, k, v, sm_scale)


FA2: Final = released(
    _fa2,
    name="released.fasterkernels.fa2",
    package=_FASTERKERNELS,
    like="dense",
    layout="bhsd",
    files=("triton/triton_fa2.py",),
    dtypes=("float16", "bfloat16"),
    dims=((64, 64), (16, 16), (32, 32), (128, 128)),
    unequal=True,
    layouts=True,
    scale_any=True,
    gradients=False,
    deterministic=("o",),
)
