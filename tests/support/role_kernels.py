"""Small PrimFuncs whose warps have roles, right and with faults that an argument plants; and what tests do with them."""

# No `from __future__ import annotations`: TileLang evaluates the annotations of a PrimFunc as it builds it.
from typing import Any

import tilelang.language as T  # noqa: N812
import torch

from attnfuzz.kernels.tilelang.roles.executor import Executable, executable
from attnfuzz.kernels.tilelang.roles.steps import BlockProgram

BY_HAND = {"tl.disable_warp_specialized": True, "tl.force_let_inline": True}
COMPUTE, ALL = 128, 160
ROWS = 32
STAGES = 2


def doubled(
    *,
    wait_full: bool = True,
    wait_free: bool = True,
    shift: int = 0,
    arrivals: int = COMPUTE,
    filled: int = 32,
    more_bytes: int = 0,
    joined: bool = False,
    halves: bool = False,
    unused: bool = False,
) -> Any:
    """PrimFunc (x, y) with y = 2 x, (rows, 32) float32: one warp copies tiles of 32 rows, four warps double them.

    Args:
        wait_full: whether the computing warps wait for a tile.
        wait_free: whether the copying warp waits until a stage is free.
        shift: added to the phase that is waited for.
        arrivals: those that make a stage free.
        filled: those that make a stage full, beside its bytes.
        more_bytes: bytes that no copy has, expected at each tile.
        joined: whether one thread more arrives, by the operation that expects bytes as well (none here).
        halves: whether the second half of each tile is copied behind the arrivals.
        unused: whether a last tile is copied that nobody waits for.
    """
    rows = T.dynamic("rows")

    @T.prim_func
    def main(x: T.Tensor((rows, 32), "float32"), y: T.Tensor((rows, 32), "float32")):
        with T.Kernel(1, threads=ALL) as _:
            tile = T.alloc_shared((STAGES, ROWS, 32), "float32")
            own = T.alloc_fragment((ROWS, 32), "float32")
            full = T.alloc_barrier([filled] * STAGES)
            free = T.alloc_barrier([arrivals] * STAGES)
            thread = T.get_thread_binding()
            steps = T.ceildiv(rows, ROWS)
            if thread < COMPUTE:
                for step in T.serial(steps):
                    if wait_full:
                        T.mbarrier_wait_parity(full[step % STAGES], (step // STAGES + shift) % 2)
                    T.copy(tile[step % STAGES, :, :], own)
                    T.mbarrier_arrive(free[step % STAGES])
                    for i, j in T.Parallel(ROWS, 32):
                        own[i, j] = 2 * own[i, j]
                    T.copy(own, y[step * ROWS : (step + 1) * ROWS, :])
            else:
                for step in T.serial(steps + 1 if unused else steps):
                    if wait_free:
                        T.mbarrier_wait_parity(free[step % STAGES], (step // STAGES + 1) % 2)
                    if more_bytes:  # noqa: SIM102
                        # one condition is of Python, the other of the device
                        if thread == COMPUTE:
                            T.mbarrier_expect_tx(full[step % STAGES], more_bytes)
                    if joined:  # noqa: SIM102
                        if thread == COMPUTE:
                            T.mbarrier_arrive_expect_tx(full[step % STAGES], 0)
                    if halves:
                        T.tma_copy(
                            x[step * ROWS : step * ROWS + 16, :], tile[step % STAGES, 0:16, :], barrier=full[step % STAGES]
                        )
                        T.mbarrier_arrive(full[step % STAGES])
                        T.tma_copy(
                            x[step * ROWS + 16 : (step + 1) * ROWS, :],
                            tile[step % STAGES, 16:ROWS, :],
                            barrier=full[step % STAGES],
                        )
                    else:
                        T.tma_copy(x[step * ROWS : (step + 1) * ROWS, :], tile[step % STAGES, :, :], barrier=full[step % STAGES])
                        T.mbarrier_arrive(full[step % STAGES])

    return main


def exchanged(*, signals: bool = True) -> Any:
    """PrimFunc (x, y): one half of the block stores x to shared memory, the other half reads it behind a named barrier."""

    @T.prim_func
    def main(x: T.Tensor((ROWS, 32), "float32"), y: T.Tensor((ROWS, 32), "float32")):
        with T.Kernel(1, threads=256) as _:
            tile = T.alloc_shared((ROWS, 32), "float32")
            own = T.alloc_fragment((ROWS, 32), "float32")
            thread = T.get_thread_binding()
            if thread < 128:
                T.copy(x, tile)
                if signals:
                    T.named_barrier_arrive(3, 256)
            else:
                if signals:
                    T.sync_threads(3, 256)
                T.copy(tile, own)
                T.copy(own, y)

    return main


def cut(dtype: str = "int32") -> Any:
    """PrimFunc (x, length, y): as many rows of x as a tensor of integers says, and zeros after them."""

    @T.prim_func
    def main(x: T.Tensor((ROWS, 32), "float32"), length: T.Tensor((1,), dtype), y: T.Tensor((ROWS, 32), "float32")):
        with T.Kernel(1, threads=128) as _:
            own = T.alloc_fragment((ROWS, 32), "float32")
            rows = T.alloc_var("int32")
            rows = T.cast(length[0], "int32")
            T.copy(x, own)
            for i, j in T.Parallel(ROWS, 32):
                if i >= rows:
                    own[i, j] = 0.0
            if rows > 0:
                T.copy(own, y)

    return main


def summed() -> Any:
    """PrimFunc (x, N, y): control flow that depends on what a buffer holds."""

    @T.prim_func
    def main(x: T.Tensor((ROWS, 32), "float32"), y: T.Tensor((ROWS, 32), "float32")):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_shared((ROWS, 32), "float32")
            T.copy(x, tile)
            if tile[0, 0] > 0:
                T.copy(tile, y)

    return main


def accumulated() -> Any:
    """PrimFunc (x, y) with an operation that the executor does not know."""

    @T.prim_func
    def main(x: T.Tensor((ROWS, 32), "float32"), y: T.Tensor((ROWS, 32), "float32")):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_shared((ROWS, 32), "float32")
            T.copy(x, tile)
            T.cumsum(tile, dim=1)
            T.copy(tile, y)

    return main


def made(func: Any) -> Executable:
    """The executable of a PrimFunc of this module."""
    return executable(func, BY_HAND)


def tensors(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An input, and an output without values."""
    x = torch.arange(rows * 32, dtype=torch.float32).reshape(rows, 32) / 7
    return x, torch.full_like(x, torch.nan)


def program(tiles: int = 4, **fault: Any) -> BlockProgram:
    """The only block of `doubled`."""
    (block,) = made(doubled(**fault)).programs(tensors(tiles * ROWS))
    return block
