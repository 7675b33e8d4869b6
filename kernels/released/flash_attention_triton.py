"""`released.flash_attention_triton.v2`: flash_attention_triton (MIT licence), dense, with gradients, float16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.released.subject import Package, released

if TYPE_CHECKING:
    import torch

__all__ = ["V2"]

_PACKAGE: Final = Package("flash-attention-triton", "flash_attention_triton")


def _v2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    deterministic: bool = False,
) -> torch.Tensor:
    """Call `flash_attention_v2`, which is always causal."""
    from flash_attention_triton import flash_attention_v2

    if not causal:
        raise ValueError("causal=False: flash_attention_v2 is always causal")
    return flash_attention_v2(q, k, v, softmax_scale, deterministic)


V2: Final = released(
    _v2,
    name="released.flash_attention_triton.v2",
    package=_PACKAGE,
    like="dense",
    layout="bhsd",
    files=("_triton_kernels_v2.py", "flash_attention_2.py", "_configurators_v2.py"),
    configs=({"deterministic": False}, {"deterministic": True}),
    # Other dtypes are computed in float16.
    dtypes=("float16",),
    dims=((64, 64), (16, 16), (32, 32), (128, 128), (40, 40), (96, 96)),
    causal=("top_left",),
    unequal=True,
    layouts=True,
    # Of its long lists of arguments, lengths and strides are specialised on.
    compiles_each_shape=True,
    deterministic=("o",),
    # Rows are rescaled by their LSE so far, not by their maximum.
    deviations=Deviations(normalised_p=True),
)
