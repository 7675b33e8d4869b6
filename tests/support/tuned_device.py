"""A Triton function with an autotuner, for a GPU."""

import triton
import triton.language as tl


@triton.autotune([triton.Config({"block": size}, num_warps=4) for size in (64, 16, 32)], key=["n"])
@triton.jit
def tuned_kernel(x, n, block: tl.constexpr, most: tl.constexpr):
    """Store the block's size in each element; blocks above `most` do not compile."""
    tl.static_assert(block <= most)
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(x + at, block, mask=at < n)
