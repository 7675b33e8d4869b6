# ruff: noqa: N803, N812
"""Two products by tcgen05, right and with what must not pass. Imported in child processes only."""

import tilelang.language as T

from attnfuzz.kernels.lowering import Required

ROLES_BY_HAND = True
REQUIRED = {"products": Required(products=2, left=frozenset({"shared"}))}


def products(plant: str, threads: int = 128):
    """C = A B^T and D = A A^T, float32 of (128, 64) float16; how, `plant` says.

    fallback    the second product is one on fragments, which becomes mma.sync
    unfreed     some blocks leave before tensor memory is freed
    operand     the second product takes its left operand from tensor memory
    one         the second product is not there
    """

    @T.prim_func
    def main(
        A: T.Tensor((128, 64), "float16"),
        B: T.Tensor((128, 64), "float16"),
        n: T.int32,
        C: T.Tensor((128, 128), "float32"),
        D: T.Tensor((128, 128), "float32"),
    ):
        with T.Kernel(1, threads=threads):
            a_tile = T.alloc_shared((128, 64), "float16")
            b_tile = T.alloc_shared((128, 64), "float16")
            c_acc = T.alloc_tmem((128, 128), "float32")
            d_acc = T.alloc_tmem((128, 128), "float32")
            done = T.alloc_barrier([1, 1])
            c = T.alloc_fragment((128, 128), "float32")
            d = T.alloc_fragment((128, 128), "float32")
            T.copy(A, a_tile)
            T.copy(B, b_tile)
            T.fence_proxy_async()
            T.sync_threads()
            T.tcgen05_gemm(a_tile, b_tile, c_acc, transpose_B=True, clear_accum=True, mbar=done[0])
            if plant == "fallback":
                T.gemm(a_tile, a_tile, d, transpose_B=True, clear_accum=True)
            elif plant == "operand":
                half = T.alloc_fragment((128, 64), "float16")
                a_left = T.alloc_tmem((128, 64), "float16")
                T.copy(A, half)
                T.copy(half, a_left)
                T.sync_threads()
                T.tcgen05_gemm(a_left, a_tile, d_acc, transpose_B=True, clear_accum=True, mbar=done[1])
            elif plant != "one":
                T.tcgen05_gemm(a_tile, a_tile, d_acc, transpose_B=True, clear_accum=True, mbar=done[1])
            T.mbarrier_wait_parity(done[0], 0)
            T.copy(c_acc, c)
            T.copy(c, C)
            if plant == "unfreed":  # noqa: SIM102 (one is known as it is traced, the other as it runs)
                if n == 0:
                    T.thread_return()
            if plant not in ("fallback", "one"):
                T.mbarrier_wait_parity(done[1], 0)
                T.copy(d_acc, d)
            T.copy(d, D)
            T.sync_threads()

    return main
