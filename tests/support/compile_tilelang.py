# ruff: noqa: N803, N812
"""Small TileLang functions, right and with what a compiler stumbles over. Imported in child processes only."""

import tilelang.language as T


def copied(plant: str, threads: int = 128):
    """(128, 64) float16 through shared memory; how, `plant` says."""
    rows = 4096 if plant == "shared" else 128

    @T.prim_func
    def main(A: T.Tensor((rows, 64), "float16"), B: T.Tensor((rows, 64), "float16")):
        with T.Kernel(1, threads=threads):
            tile = T.alloc_shared((rows, 64), "float16")
            T.copy(A, tile)
            T.copy(tile, B)

    @T.prim_func
    def racing(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=threads):
            for i in T.Parallel(128):
                B[i // 2] = A[i]

    @T.prim_func
    def calling(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=threads):
            for i in T.Parallel(128):
                B[i] = T.call_extern("float32", "no_such_function", A[i])

    def early():
        @T.prim_func
        def blackwell(A: T.Tensor((128, 128), "float16"), B: T.Tensor((128, 128), "float32")):
            with T.Kernel(1, threads=threads):
                tile = T.alloc_shared((128, 128), "float16")
                T.copy(A, tile)
                product = T.alloc_fragment((128, 128), "float32")
                T.tcgen05_gemm(tile, tile, product)
                T.copy(product, B)

        return blackwell

    if plant == "api":
        return early()
    return {"race": racing, "extern": calling}.get(plant, main)
