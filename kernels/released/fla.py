"""`released.fla.*`: parallel softmax attention of flash-linear-attention (package fla-core, MIT licence)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.released.subject import Package, released

if TYPE_CHECKING:
    import torch

__all__ = ["PARALLEL", "PARALLEL_VARLEN"]

_FLA: Final = Package("fla-core", "fla", needs=("einops",))
_FILES: Final = ("ops/attn/parallel.py", "ops/utils/op.py")
_DIMS: Final = ((64, 64), (16, 16), (32, 32), (128, 128), (64, 128), (128, 64), (40, 40), (96, 96), (256, 256))


def _parallel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call `parallel_attn`, which is always causal; its window counts the query's own key."""
    from fla.ops.attn.parallel import parallel_attn

    _check_causal(causal)
    left = window_size[0]
    return parallel_attn(q, k, v, scale=softmax_scale, window_size=None if left < 0 else left + 1, sink_bias=sinks)


def _parallel_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,  # noqa: ARG001 - queries and keys have the same lengths
    max_seqlen_q: int,  # noqa: ARG001
    max_seqlen_k: int,  # noqa: ARG001
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call `parallel_attn` for one batch of ragged sequences; it documents int64 offsets."""
    from fla.ops.attn.parallel import parallel_attn

    _check_causal(causal)
    left = window_size[0]
    window = None if left < 0 else left + 1
    batch = [x.unsqueeze(0) for x in (q, k, v)]
    options = {"window_size": window, "cu_seqlens": cu_seqlens_q.long(), "sink_bias": sinks}
    return parallel_attn(*batch, scale=softmax_scale, **options).squeeze(0)


def _check_causal(causal: bool) -> None:
    if not causal:
        raise ValueError("causal=False: parallel_attn is always causal")


_WIDEST_ROW: Final = 768
"""Bytes that a row of Q and one of V may have as tiles. With 1,024 the forward's 128 queries and its three stages of 64 keys
need 256 KiB of shared memory, of which a block has 227 KiB on an H100."""


def _does_not_fit(problem: Problem) -> str | None:
    """Tiles that exceed the shared memory of a GPU: the package chooses them by the GPU alone, and launching them fails."""
    width = sum(1 << (dim - 1).bit_length() for dim in (problem.dim_qk, problem.dim_v))
    if width * (4 if problem.dtype == "float32" else 2) <= _WIDEST_ROW:
        return None
    dims = f"dims={problem.dim_qk} x {problem.dim_v}, dtype={problem.dtype!r}"
    return f"{dims}: the tiles that parallel_attn chooses exceed the shared memory of a GPU (docs/findings.md)"


_DECLARED: Final[dict[str, Any]] = {
    "dims": _DIMS,
    "groups": None,
    "causal": ("bottom_right",),
    "dtypes": ("float16", "bfloat16", "float32"),
    "zero_q": True,
    "zero_k": True,
    "deviations": Deviations(tf32_on=("cuda",)),
    "deterministic": ("o", "dq", "dk", "dv"),
    "scale_any": True,
    "layouts": True,
    # A window ends at the diagonal: only its left side can be given.
    "window_forms": ("left",),
    "gpu_limits": _does_not_fit,
    # Batch, heads and the window are constants of its functions.
    "compiles_each_shape": True,
    "package": _FLA,
    "files": _FILES,
    # On a GPU of this generation the package prefers kernels in TileLang, where that is installed.
    "environment": {"FLA_TILELANG": "0"},
}

PARALLEL: Final = released(_parallel, name="released.fla.parallel", like="dense", **_DECLARED)
PARALLEL_VARLEN: Final = released(_parallel_varlen, name="released.fla.parallel_varlen", like="varlen", **_DECLARED)
