"""`released.aule.flash`: attention of aule-attention (MIT licence) in Triton, dense, with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.released.subject import Package, released

if TYPE_CHECKING:
    import torch

__all__ = ["ALL", "FLASH"]

_AULE: Final = Package("aule-attention", "aule")


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Call `flash_attention_triton`: its window counts the keys before the query, and without a causal mask those after it."""
    from aule.triton_flash import flash_attention_triton

    return flash_attention_triton(q, k, v, causal=causal, scale=scale, window_size=window_size[0])


def _refuses(problem: Problem) -> str | None:
    """The number of a window's sides is 1 or more: 0 stands for no window."""
    if problem.window is not None and problem.window[0] == 0:
        return f"window={problem.window}: a window reaches at least one key to the left"
    return None


_DECLARED: Final[dict[str, Any]] = {
    "package": _AULE,
    "like": "dense",
    "layout": "bhsd",
    "files": ("triton_flash.py",),
    "dims": ((64, 64), (16, 16), (32, 32), (128, 128), (40, 40), (96, 96)),
    "groups": None,
    "causal": (None, "top_left"),
    "scale_any": True,
    "deterministic": ("o",),
}

FLASH: Final = released(
    _flash,
    name="released.aule.flash",
    # In half precision dQ is summed in the input dtype; windows, unequal lengths and other layouts are known to be wrong: ALL.
    dtypes=("float32",),
    window=False,
    deviations=Deviations(tf32_on=("cuda",)),
    **_DECLARED,
)
ALL: Final = released(
    _flash,
    name="released.aule.flash_all",
    refuses=_refuses,
    window_forms=("equal",),
    dtypes=("float32", "float16", "bfloat16"),
    # Triton's interpreter has no atomic sums of bfloat16.
    dtypes_on={"cpu": ("float32", "float16")},
    unequal=True,
    layouts=True,
    deviations=Deviations(half_partials=True),
    **_DECLARED,
)
