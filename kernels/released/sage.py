"""`released.sageattention.*`: SageAttention 1 (BSD-3-Clause) in Triton: Q and K in 8 bits, forward only.

The contract has no deviation for quantised operands yet, so that no kernel of it is listed: Cases whose scores are exact in
spite of it show what else is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.released.subject import Package, released

if TYPE_CHECKING:
    import torch

__all__ = ["ALL"]

_SAGEATTENTION: Final = Package("sageattention", "sageattention")


def _sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float | None = None,
    is_causal: bool = False,
    smooth_k: bool = True,
) -> torch.Tensor:
    """Call `sageattn`, whose causal mask takes equal lengths only."""
    from sageattention import sageattn

    return sageattn(q, k, v, tensor_layout="NHD", is_causal=is_causal, sm_scale=sm_scale, smooth_k=smooth_k)


ALL: Final = released(
    _sageattn,
    name="released.sageattention.dense_all",
    package=_SAGEATTENTION,
    like="dense",
    files=("core.py", "quant_per_block.py", "attn_qk_int8_per_block.py", "attn_qk_int8_per_block_causal.py"),
    configs=({"smooth_k": True}, {"smooth_k": False}),
    dims=((64, 64), (128, 128), (96, 96)),
    groups=None,
    causal=(None, "bottom_right"),
    gradients=False,
    masked_loads="zero",
    deterministic=("o",),
    deviations=Deviations(lazy_rescale=True),
)
