# ruff: noqa: N803
"""Device code of support/adapted.py. Imported in child processes only: compiled Triton."""

import triton
import triton.language as tl


@triton.jit
def scaled(x, y, factor, n, CAUSAL: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    values = tl.load(x + at, mask=at < n)
    if CAUSAL:
        values = -values
    tl.store(y + at, values * factor, mask=at < n)


tuned = triton.autotune(configs=[triton.Config({"TILE": tile}, num_warps=1) for tile in (32, 128)], key=["n"])(scaled)
