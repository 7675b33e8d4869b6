"""Which tiles of the Blackwell backward (`sm100_backward_device`) have products, and fit tensor memory and shared memory."""

from __future__ import annotations

from typing import Literal

__all__ = ["LANES", "SHARED_BYTES_MAX", "TENSOR_COLUMNS", "Operands", "fits", "shared_bytes", "tensor_columns"]

Operands = Literal["ss", "ts"]
"""Where P and dS are as left operands: in shared memory, or in tensor memory."""
LANES, TENSOR_COLUMNS = 128, 512
"""Rows of tensor memory, and its columns of 32 bits each. PTX ISA, "Tensor Memory"."""
SHARED_BYTES_MAX = 227 * 1024
OTHER_BYTES = 3 * 1024
"""The 1 KiB of a block that the system takes, barriers, and what aligning dynamic memory costs."""


def tensor_columns(operands: Operands, *, tile_m: int, tile_n: int, dim_qk: int, dim_v: int) -> int:
    """Upper bound on the columns of tensor memory that a block allocates: each tile's, as a power of two of at least 32.

    A tile of fewer than 128 rows is folded: PTX ISA, "Data path layout organization", layouts E and G.
    """
    tiles = [(tile_n, tile_m), (tile_n, tile_m), (tile_n, dim_qk), (tile_n, dim_v), (tile_m, dim_qk)]
    columns = [rows * width // LANES for rows, width in tiles] + ([tile_m // 2] * 2 if operands == "ts" else [])
    return sum(max(32, 1 << (each - 1).bit_length()) for each in columns)


def shared_bytes(operands: Operands, *, tile_m: int, tile_n: int, dim_qk: int, dim_v: int) -> int:
    """Upper bound on the shared memory of a block."""
    squares = 2 if operands == "ss" else 1
    halves = (tile_m + tile_n) * (dim_qk + dim_v) + squares * tile_m * tile_n
    loop = 2 * halves + 4 * tile_m * dim_qk
    leaving = 4 * tile_n * (dim_qk + dim_v)
    return max(loop, leaving) + 4 * 2 * tile_m + OTHER_BYTES


def fits(operands: Operands, *, tile_m: int, tile_n: int, dim_qk: int, dim_v: int) -> bool:
    """Whether tcgen05 has products of these shapes, and their tiles fit tensor memory and the shared memory of a block.

    An accumulator of fewer than 128 rows has a multiple of 64 columns; what is in tensor memory as an operand has 128 rows.
    """
    full, folded = tile_n == LANES, tile_n == LANES // 2 and operands == "ss"
    if (not full and not (folded and tile_m % 64 == dim_v % 64 == 0)) or tile_m not in (32, 64, LANES):
        return False
    if dim_qk % 16 or dim_v % 16 or ((tile_m < LANES or folded) and dim_qk % 64):
        return False
    if operands == "ts" and tile_m < LANES and dim_qk not in (64, 128):
        return False
    sizes = {"tile_m": tile_m, "tile_n": tile_n, "dim_qk": dim_qk, "dim_v": dim_v}
    return tensor_columns(operands, **sizes) <= TENSOR_COLUMNS and shared_bytes(operands, **sizes) <= SHARED_BYTES_MAX
