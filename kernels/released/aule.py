"""`released.aule.flash`: attention of aule-attention (MIT licence) in Triton, dense, with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.released.subject import Package, released

if TYPE_CHECKING:
    import torch

__all__ = ["FLASH"]

_AULE: Final = Package("aule-attention", "aule")


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Call `flash_attention_triton`: its window is the number of keys before the query, and without a causal mask after it too."""
    from aule.triton_flash import flash_attention_triton

    return flash_attention_triton(q, k, v, causal=causal, scale=scale, window_size=window_size[0])


def _refuses(problem: Problem) -> str | None:
    """One number stands for both sides of a window, and 0 or less for none."""
    left, right = problem.window or (None, None)
    if problem.window is None or problem.window == (None, None):
        return None
    if left is None or left < 1:
        return f"window={problem.window}: a window reaches at least one key to the left"
    if problem.causal is None and right != left:
        return f"window={problem.window}: without a causal mask a window is as wide on both sides"
    if right is not None and right < 0:
        return f"window={problem.window}: the query's own key is in every window"
    return None


FLASH: Final = released(
    _flash,
    name="released.aule.flash",
    package=_AULE,
    like="dense",
    layout="bhsd",
    files=("triton_flash.py",),
    refuses=_refuses,
    dtypes=("float32", "float16", "bfloat16"),
    # Triton's interpreter has no atomic sums of bfloat16.
    dtypes_on={"cpu": ("float32", "float16")},
    dims=((64, 64), (16, 16), (32, 32), (128, 128), (40, 40), (96, 96)),
    groups=None,
    causal=(None, "top_left"),
    unequal=True,
    layouts=True,
    scale_any=True,
    deterministic=("o",),
    # The atomic sums of dQ are in the input dtype, and those of dK and dV for grouped heads.
    deviations=Deviations(half_partials=True),
)
