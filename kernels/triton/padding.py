"""Head dims of tiles: powers of two, as Triton's products take them."""

from __future__ import annotations

from attnfuzz.kernels.problem import Problem

__all__ = ["padded", "padded_dims"]

_ROW = 128
"""Bytes of a row of shared memory that products of warp groups swizzle at most."""


def padded(dim: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def padded_dims(problem: Problem, *, exact: bool = False) -> tuple[int, int]:
    """The dims of tiles of q and k, and of v and dO; `exact`: products of float32 are exact, so that no warp group makes them.

    V has at least the row of shared memory that K has, up to the widest: where it is narrower and rows are not aligned, ptxas
    12.8 (of Triton 3.6, for Hopper) loses the descriptors of products. O was wrong on an H100, or an access illegal, for dims
    of 33/15, 115/31 and 255/15, and is right without optimisation and with CUDA 13's ptxas.
    """
    dim_qk, dim_v = padded(problem.dim_qk), padded(problem.dim_v)
    if problem.dtype == "float32" and exact:
        return dim_qk, dim_v
    return dim_qk, max(dim_v, min(dim_qk, _ROW // (4 if problem.dtype == "float32" else 2)))
