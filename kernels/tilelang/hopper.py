"""Common host code of the Hopper kernels: their Configs, which of them fit a block's shared memory, and the scale's sign."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from msgspec.structs import replace

from attnfuzz.kernels.contract import Config, Device, beyond_grid
from attnfuzz.kernels.problem import Causal, Dtype, Problem
from attnfuzz.kernels.support.installed_torch import gpu_capability
from attnfuzz.kernels.tilelang.subject import CAPABILITIES, SHARED_BYTES_MAX
from attnfuzz.kernels.tilelang.tuned import NAMES, config_of, tuned

if TYPE_CHECKING:
    import torch

__all__ = ["CONFIGS", "HOPPER", "PAD", "exponent_of", "fits", "fitting", "not_hopper", "options_of", "scaled", "signed", "unfit"]

PAD = 128
"""Rows to a multiple of which ragged sequences are padded; a multiple of all tiles."""
SCALE_MAX = (2 - 2.0**-23) * 2.0**127 / 1.4427
_SMALLEST_EXPONENT = 1e-30
"""Replaces a softmax_scale of 0: exp of a score times it is 1."""

HOPPER = replace(
    CAPABILITIES,
    causal=(None, "bottom_right", "top_left"),
    architectures=("sm_90a",),
)
"""Common capabilities of the dense and the ragged kernels."""


CONFIGS = (
    config_of((128, 128, 256, 2), (64, 128, 256, 2)),
    config_of((128, 128, 256, 1), (64, 128, 256, 1)),
    config_of((64, 64, 128, 1), (64, 64, 128, 1)),
    config_of((32, 32, 64, 1), (32, 32, 64, 1)),
)
"""Tiles (query rows x key rows), threads and pipeline stages of forward and backward, the default first."""


def unfit(problem: Problem, device: Device) -> str | None:
    """Why a GPU cannot take `problem` with any Config, or None."""
    if reason := beyond_grid(problem, device):
        return reason
    if abs(problem.scale) > SCALE_MAX:
        return f"softmax_scale={problem.scale}: times log2(e) it does not fit float32; give at most {SCALE_MAX:.4g}"
    return None


def not_hopper(device: Device) -> str | None:
    """Why these kernels are not made for this machine's GPU, or None."""
    if device != "cuda":
        return None
    major, minor = gpu_capability()
    needed = "sm_90, Hopper: they use its warpgroup products and its tensor memory accelerator"
    return None if major == 9 else f"this GPU is sm_{major}{minor}, and the kernel is made for {needed}"


def options_of(config: Config) -> tuple[dict[str, int], dict[str, int]]:
    """Options of the device code's forward and backward."""
    forward, backward = ({name: config.integer(part + name) for name in NAMES} for part in ("", "back_"))
    return forward, backward


def exponent_of(scale: float) -> float:
    """|scale|, but never 0: masked scores are -inf, and -inf * 0 is NaN."""
    return max(abs(scale), _SMALLEST_EXPONENT)


def signed(x: torch.Tensor, scale: float) -> torch.Tensor:
    """`x`, or -x for a negative scale: the largest product has the largest score only for a positive scale."""
    return -x if scale < 0 else x


def scaled(dq: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Scale the blocks' sum to dQ in `dtype`, in one pass."""
    import torch

    return torch.mul(dq, scale, out=torch.empty_like(dq, dtype=dtype))


def fitting(problem: Problem, table: str, *, beside: bool = False, part_of: int | None = None) -> tuple[Config, ...]:
    """The Configs that may be drawn: the measured one of `table`, where there is one, and those of CONFIGS that fit.

    Args:
        problem: its dims and dtype must fit the shared memory of a block.
        table: the backward's rows of the measured table, such as "dense atomic"; its first word is the forward's.
        beside: dK and dV are stored through fp32 tiles that do not share memory with those of the loop.
        part_of: for ragged sequences, rows that every tile must divide.
    """
    masked: Causal | None = None if problem.causal is None else "bottom_right"
    return _fitting(problem.dim_qk, problem.dim_v, problem.dtype, masked, table, beside, part_of)


@functools.cache
def _fitting(
    dim_qk: int, dim_v: int, dtype: Dtype, causal: Causal | None, table: str, beside: bool, part_of: int | None
) -> tuple[Config, ...]:
    problem = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=dim_qk, dim_v=dim_v, dtype=dtype, causal=causal)
    # Where one direction was not measured, the other is combined with the first of CONFIGS that fits.
    measured = [each for each in (tuned(table, problem, other) for other in CONFIGS) if fits(problem, each, beside=beside)]
    return tuple(
        config
        for config in dict.fromkeys((*measured[:1], *CONFIGS))
        if fits(problem, config, beside=beside) and (part_of is None or not any(part_of % tile for tile in _tiles(config)))
    )


def fits(problem: Problem, config: Config, *, beside: bool = False) -> bool:
    """Whether the tiles fit the shared memory of a block, and two warpgroups can share dQ."""
    shared = problem.dim_qk % 32 == 0 or config.integer("back_threads") <= 128
    return shared and _shared_bytes(problem, config, beside=beside) <= SHARED_BYTES_MAX


def _tiles(config: Config) -> tuple[int, ...]:
    return tuple(config.integer(part + name) for part in ("", "back_") for name in ("tile_m", "tile_n"))


def _shared_bytes(problem: Problem, config: Config, *, beside: bool) -> int:
    """Shared memory of forward or backward, whichever takes more."""
    size = 4 if problem.dtype == "float32" else 2
    dim_qk, dims = problem.dim_qk, problem.dim_qk + problem.dim_v
    forward, backward = options_of(config)
    single = problem.dtype == "float32"

    def tiles(options: dict[str, int], kept: int, moving: int, squares: int) -> int:
        """Bytes of `kept` elements, of `moving` rows per stage, and of squares of the product's shape."""
        return size * (kept + max(1, options["stages"]) * moving * dims + squares * options["tile_m"] * options["tile_n"])

    # in half precision a second tile of V, the previous one
    ahead = 0 if single else size * forward["tile_n"] * problem.dim_v
    tile_m, tile_n = backward["tile_m"], backward["tile_n"]
    loop = tiles(backward, tile_n * dims, tile_m, 3 if single else 1) + 4 * tile_m * dim_qk
    leaving = 4 * tile_n * (dim_qk if dim_qk == problem.dim_v else dims)
    return max(
        tiles(forward, forward["tile_m"] * dim_qk, forward["tile_n"], 1 if single else 0) + ahead,
        loop + leaving if beside else max(loop, leaving),
    )
