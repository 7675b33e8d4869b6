"""Configs of `triton.flex`: tiles of the forward and of both roles of the backward, and blocks of the mask."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.expressions.derivative import by_score
from attnfuzz.kernels.expressions.tree import Data, Expression, parse, to_data
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.triton.padding import padded_dims

__all__ = ["configs_for", "shared"]

_SHARED: Final = 227 * 1024
"""Bytes that a block may have on sm_90."""
_STATISTICS: Final = 1024
"""Bytes for LSE and Delta."""


def _config(
    forward: tuple[int, int, int, int],
    dq: tuple[int, int],
    dkv: tuple[int, int],
    back: tuple[int, int],
    *,
    block: int = 128,
    split: int = 1,
) -> Config:
    """Make a Config.

    Args:
        forward: queries and keys of a tile, warps, stages.
        dq: queries and keys of a tile in the role that makes dQ.
        dkv: the same in the role that makes dK and dV.
        back: warps and stages of the backward.
        block: queries, and keys, of a block of the mask.
        split: parts of the keys in the forward, merged afterwards.
    """
    tile_m, tile_n, num_warps, num_stages = forward
    return Config(
        tile_m=tile_m, tile_n=tile_n, num_warps=num_warps, num_stages=num_stages,
        dq_tile_m=dq[0], dq_tile_n=dq[1], dkv_tile_m=dkv[0], dkv_tile_n=dkv[1], back_warps=back[0], back_stages=back[1],
        block=block, split=split,
    )  # fmt: skip


_HALF: Final = (
    _config((32, 32, 4, 2), (32, 32), (32, 32), (4, 2), block=32),
    _config((64, 64, 4, 2), (64, 32), (32, 64), (4, 2), block=64),
    _config((16, 32, 4, 1), (32, 16), (16, 32), (4, 1), block=64),
    _config((16, 64, 4, 2), (32, 64), (64, 32), (4, 1), block=128, split=4),
)
# Fastest of ten both ways on an H200 where nothing is hidden (dims 128), call by call.
_FASTEST_TO_128: Final = _config((64, 64, 4, 3), (64, 64), (64, 64), (4, 2))
# The same tiles in blocks of their own size, fastest with a mask: for a window of 1,024 keys a tile of queries visits 17 tiles
# instead of 18, and masks 2 instead of 4; causal (4,096 tokens) is 1.02 x as fast.
_SPARSE_TO_128: Final = _config((64, 64, 4, 3), (64, 64), (64, 64), (4, 2), block=64)
_HALF_TO_128: Final = (
    _config((128, 64, 8, 3), (128, 32), (32, 128), (8, 2)),
    _config((128, 128, 8, 2), (128, 64), (64, 128), (8, 2)),
    _config((64, 128, 4, 2), (128, 64), (64, 128), (8, 3)),
    _config((128, 64, 8, 2), (128, 32), (32, 128), (8, 3)),
    _config((16, 128, 4, 2), (64, 32), (32, 64), (4, 3), split=8),
)
_SINGLE: Final = (
    _config((32, 32, 4, 1), (32, 32), (32, 32), (4, 1), block=32),
    _config((16, 16, 4, 1), (16, 16), (16, 16), (4, 1), block=64, split=3),
)
# 32 x 32 takes 11 to 40 seconds to compile.
_SINGLE_BEYOND_128: Final = (_config((16, 16, 4, 1), (16, 16), (16, 16), (4, 1), block=32),)
_TF32: Final = (
    _config((32, 32, 4, 2), (32, 32), (32, 32), (4, 2), block=32),
    _config((64, 32, 4, 2), (64, 32), (32, 64), (4, 1), block=64),
)


def configs_for(problem: Problem, *, tf32: bool, prescaled: bool) -> tuple[Config, ...]:
    """The Configs for a problem, the default first; a prescaled kernel may also omit the guard of rows without keys."""
    configs = _by_dims(problem, tf32=tf32)
    if prescaled and _rows_safe(problem):
        configs += tuple(Config(each, rows_safe=True) for each in (configs[0], _HALF[1]))
    loads = _tile_loads(problem.score_mod, problem.mask_mod)
    if any(loads):
        configs = tuple(each for each in configs if shared(problem, each, loads) <= _SHARED) or (
            min(configs, key=lambda each: shared(problem, each, loads)),
        )
    return configs


def shared(problem: Problem, config: Config, loads: tuple[int, int]) -> int:
    """Upper bound in bytes on the shared memory of large tiles in Triton (3.6 to 3.9): resident and pipelined tiles, and loads.

    Args:
        problem: its dims and dtype count.
        config: tiles and stages.
        loads: number of loads of captured tensors with a value per score of a tile, in forward and backward; Triton pipelines
            them too. Loads with a value per query or key, some hundred bytes, do not count.
    """
    size = 4 if problem.dtype == "float32" else 2
    qk, v = (size * dim for dim in padded_dims(problem))
    integer = config.integer
    stages, back_stages = integer("num_stages"), integer("back_stages")
    scores = 4 * integer("tile_m") * integer("tile_n")
    forward = integer("tile_m") * qk + stages * integer("tile_n") * (qk + v) + max(0, stages - 1) * loads[0] * scores
    roles = ((integer("dq_tile_m"), integer("dq_tile_n")), (integer("dkv_tile_n"), integer("dkv_tile_m")))
    backward = max((m + back_stages * n) * (qk + v) + back_stages * loads[1] * 4 * m * n for m, n in roles)
    return max(forward, backward) + _STATISTICS


def _by_dims(problem: Problem, *, tf32: bool) -> tuple[Config, ...]:
    small = max(problem.dim_qk, problem.dim_v) <= 128
    if problem.dtype == "float32":
        if tf32:
            return _TF32 if small else _TF32[:1]
        return _SINGLE if small else _SINGLE_BEYOND_128
    if not small:
        return _HALF
    fastest = (_FASTEST_TO_128, _SPARSE_TO_128)
    return (*(reversed(fastest) if _sparse(problem) else fastest), *_HALF, *_HALF_TO_128)


@lru_cache(maxsize=1024)
def _tile_loads(score: Data | None, mask: Data | None) -> tuple[int, int]:
    """Numbers of loads of captured tensors that depend on both query and key, in forward and backward (with the slope's)."""
    tree = None if score is None else parse(score)
    forward = _loads(tree) | _loads(None if mask is None else parse(mask))
    return len(forward), len(forward) + len(_loads(None if tree is None else by_score(tree)))


def _loads(tree: Expression | None) -> set[Data]:
    nodes = () if tree is None else tree.walk()
    return {to_data(each) for each in nodes if each.op == "load" and {"q_idx", "kv_idx"} <= {x.op for x in each.walk()}}


def _sparse(problem: Problem) -> bool:
    """Whether scores may be hidden."""
    return problem.causal is not None or problem.window is not None or problem.mask_mod is not None


def _rows_safe(problem: Problem) -> bool:
    """Whether every tile of keys has one for every row."""
    free = problem.mask_mod is None and problem.causal is None and problem.window in (None, (None, None))
    return free and min(problem.seqlens_k) > 0
