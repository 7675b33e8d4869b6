# ruff: noqa: N803
"""A product in Triton, right and with what a compiler stumbles over. Imported in child processes only: compiled Triton."""

import triton
import triton.language as tl


@triton.jit
def product(a, b, c, steps, PLANT: tl.constexpr, TILE: tl.constexpr):
    rows = tl.arange(0, TILE)
    tile = rows[:, None] * TILE + rows[None, :]
    acc = tl.zeros([TILE, TILE], tl.float32)
    more = tl.zeros([TILE, TILE], tl.float32)
    for step in range(steps):
        x = tl.load(a + step * TILE * TILE + tile)
        y = tl.load(b + step * TILE * TILE + tile)
        if PLANT == "sum":
            acc += x.to(tl.float32) * tl.sum(y.to(tl.float32), 0)[None, :]
        elif PLANT == "api":
            acc += tl.no_such_product(x, y)
        else:
            acc = tl.dot(x, y, acc)
        if PLANT == "spill":
            more += x * y
    tl.store(c + tile, acc + more)
