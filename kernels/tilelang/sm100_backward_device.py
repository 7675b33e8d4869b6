"""The backward of dense attention for Blackwell (sm_100a) as TileLang PrimFuncs. MHA and GQA share them.

Shapes (batch, n_q, n_k, heads and kv_heads are dynamic): Q, dQ (batch, n_q, heads, dim_qk); O, dO (batch, n_q, heads, dim_v);
K (batch, n_k, kv_heads, dim_qk); V (batch, n_k, kv_heads, dim_v); LSE, LSE2, Delta (batch, heads, n_q) fp32. On CUDA every
tensor has its own strides, the last one 1. With `visible(i, j)` = j < n_k, and under `causal` also j <= i + offset,

    LSE_i = log sum_{visible j} exp(scale q_i . k_j)        P_ij = exp(scale q_i . k_j - LSE_i), 0 where not visible
    Delta_i = sum_d O_id dO_id                              dS_ij = P_ij (dO_i . v_j - Delta_i)
    dQ_i = scale sum_j dS_ij k_j    dK_j = scale sum_{group, i} dS_ij q_i       dV_j = sum_{group, i} P_ij dO_i

LSE2_i is LSE_i log2(e), or +inf for a row that sees no key, so that P_ij = exp2(s_ij log2(e) - LSE2_i) is 0 there.
`exponent` is scale, but greater than 0 where scale is 0: masked scores are -inf, and -inf * 0 is NaN. `offset` is n_k - n_q for a
mask aligned at the bottom right.

A block has one tile of keys and goes through the tiles of queries that see it. All five products are tcgen05 products with
accumulators in tensor memory, transposed (keys are rows) but dQ:

    S = K Q^T    dP = V dO^T    dV += P dO    dK += dS Q    dQ = dS^T K

Each product has an mbarrier of its own and completes on it once per step, so that step t (from 0) waits for parity t % 2. What a
product reads or writes is touched again only behind that wait, as the comments at the waits say. Threads store operands and
results by the generic proxy, which `_publish` orders before the products and copies that take them. `ss`: P and dS in shared
memory. `ts`: P and dS as left operands in tensor memory; dQ takes dS transposed, which only shared memory can give.
"""

# No `from __future__ import annotations`: TileLang evaluates the annotations of a PrimFunc as it builds it.
import math
from typing import Any

from attnfuzz.kernels.lowering import Required
from attnfuzz.kernels.tilelang.sm100_tiles import Operands

try:
    import tilelang.language as T
except ImportError:  # a machine without TileLang can still import this module and read its source
    T = None

__all__ = ["backward_ss", "backward_ts", "postprocess", "preprocess"]

LOG2_E = math.log2(math.e)
ACC = "float32"
ROLES_BY_HAND = True
"""Copies wait for barriers that are written out: TileLang's own warp specialisation must not move them."""
BY_TMA = {"use_tma": 1}
"""An atomic addition of a tile by the tensor memory accelerator; ignored on the CPU."""
ROWS, PARTS = 16, 16
"""Rows of a block of the preprocess and the postprocess, and threads per row."""
REQUIRED = {
    "backward_ss": Required(products=5, left=frozenset({"shared"})),
    "backward_ts": Required(products=5, left=frozenset({"shared", "tensor"})),
}
"""What the machine code must have: `T.gemm` on fragments would become mma.sync without a word."""


def _tensor(name: str, shape: tuple[Any, ...], dtype: str, strided: bool) -> Any:
    """A parameter; with `strided`, every stride but the last is dynamic and may exceed 2^31 elements."""
    if not strided:
        return T.Tensor(shape, dtype)
    strides = tuple(T.dynamic(f"{name}_stride_{axis}", "int64") for axis in range(len(shape) - 1))
    return T.StridedTensor(shape, (*strides, 1), dtype)


def preprocess(*, dim_v: int, dtype: str, strided: bool) -> Any:
    """PrimFunc (O, dO, LSE, Delta, LSE2): products and sums in fp32, one block per 16 rows, head and sequence."""
    batch, n_q, heads = (T.dynamic(n) for n in ("batch", "n_q", "heads"))

    @T.prim_func
    def sm100_preprocess(
        O: _tensor("o", (batch, n_q, heads, dim_v), dtype, strided),  # noqa: E741
        dO: _tensor("do", (batch, n_q, heads, dim_v), dtype, strided),
        LSE: _tensor("lse", (batch, heads, n_q), ACC, strided),
        Delta: _tensor("delta", (batch, heads, n_q), ACC, strided),
        LSE2: _tensor("lse2", (batch, heads, n_q), ACC, strided),
    ):
        with T.Kernel(T.ceildiv(n_q, ROWS), heads, batch, threads=ROWS * PARTS) as (block, head, seq):
            product = T.alloc_fragment((ROWS, PARTS), ACC)
            delta = T.alloc_fragment((ROWS,), ACC)
            row_0 = block * ROWS
            T.clear(product)
            for part in T.serial(dim_v // PARTS):
                for i, d in T.Parallel(ROWS, PARTS):
                    if row_0 + i < n_q:
                        product[i, d] += T.cast(O[seq, row_0 + i, head, part * PARTS + d], ACC) * T.cast(
                            dO[seq, row_0 + i, head, part * PARTS + d], ACC
                        )
            T.reduce_sum(product, delta, dim=1)
            for i in T.Parallel(ROWS):
                if row_0 + i < n_q:
                    Delta[seq, head, row_0 + i] = delta[i]
                    LSE2[seq, head, row_0 + i] = T.if_then_else(
                        LSE[seq, head, row_0 + i] == -T.infinity(ACC), T.infinity(ACC), LSE[seq, head, row_0 + i] * LOG2_E
                    )

    return sm100_preprocess


def postprocess(*, dim: int, dtype: str, strided: bool) -> Any:
    """PrimFunc (Sum, factor, Out): Out = factor * Sum in `dtype`, both (batch, n, heads, dim), Sum fp32."""
    batch, n, heads = (T.dynamic(name) for name in ("batch", "n", "heads"))

    @T.prim_func
    def sm100_postprocess(
        Sum: _tensor("sum", (batch, n, heads, dim), ACC, strided),
        factor: T.float32,
        Out: _tensor("out", (batch, n, heads, dim), dtype, strided),
    ):
        with T.Kernel(T.ceildiv(n, ROWS), heads, batch, threads=ROWS * PARTS) as (block, head, seq):
            for part in T.serial(dim // PARTS):
                for i, d in T.Parallel(ROWS, PARTS):
                    if block * ROWS + i < n:
                        Out[seq, block * ROWS + i, head, part * PARTS + d] = T.cast(
                            Sum[seq, block * ROWS + i, head, part * PARTS + d] * factor, dtype
                        )

    return sm100_postprocess


def backward_ss(**options: Any) -> Any:
    """PrimFunc of `_backward` with P and dS in shared memory; its options but `operands`."""
    return _backward("ss", **options)


def backward_ts(**options: Any) -> Any:
    """PrimFunc of `_backward` with P and dS as left operands in tensor memory; its options but `operands`."""
    return _backward("ts", **options)


def _backward(
    operands: Operands,
    *,
    dim_qk: int,
    dim_v: int,
    causal: bool,
    dtype: str,
    tile_m: int,
    tile_n: int,
    threads: int,
    grouped: bool,
    strided: bool,
) -> Any:
    """PrimFunc (Q, K, V, dO, LSE2, Delta, groups, offset, exponent, scale, dQ, dK, dV), a block per key tile, head and sequence.

    dQ / scale is fp32 and starts as zeros: blocks add whole tiles to it. dK and dV are stored in `dtype`, (batch, n_k, heads,
    dim); with `grouped`, each query head's share is added to fp32 zeros, (batch, n_k, kv_heads, dim). n_q and n_k are at least 1.
    """
    in_tensor_memory = operands == "ts"
    batch, n_q, n_k, heads, kv_heads = (T.dynamic(n) for n in ("batch", "n_q", "n_k", "heads", "kv_heads"))
    key_heads, key_dtype = (kv_heads, ACC) if grouped else (heads, dtype)

    @T.macro
    def _publish():
        """Make what all threads stored or read visible to the products and copies that follow, which one thread issues."""
        T.fence_proxy_async()
        T.tcgen05_before_thread_sync()
        T.sync_threads()
        T.tcgen05_after_thread_sync()

    @T.macro
    def _wait(done, step):
        T.mbarrier_wait_parity(done, step % 2)
        T.tcgen05_after_thread_sync()

    @T.prim_func
    def sm100_backward(
        Q: _tensor("q", (batch, n_q, heads, dim_qk), dtype, strided),
        K: _tensor("k", (batch, n_k, kv_heads, dim_qk), dtype, strided),
        V: _tensor("v", (batch, n_k, kv_heads, dim_v), dtype, strided),
        dO: _tensor("do", (batch, n_q, heads, dim_v), dtype, strided),
        LSE2: _tensor("lse2", (batch, heads, n_q), ACC, strided),
        Delta: _tensor("delta", (batch, heads, n_q), ACC, strided),
        groups: T.int32,
        offset: T.int32,
        exponent: T.float32,
        scale: T.float32,
        dQ: _tensor("dq", (batch, n_q, heads, dim_qk), ACC, strided),
        dK: _tensor("dk", (batch, n_k, key_heads, dim_qk), key_dtype, strided),
        dV: _tensor("dv", (batch, n_k, key_heads, dim_v), key_dtype, strided),
    ):
        with T.Kernel(T.ceildiv(n_k, tile_n), heads, batch, threads=threads) as (block, head, seq):
            k_tile = T.alloc_shared((tile_n, dim_qk), dtype)
            v_tile = T.alloc_shared((tile_n, dim_v), dtype)
            q_tile = T.alloc_shared((tile_m, dim_qk), dtype)
            do_tile = T.alloc_shared((tile_m, dim_v), dtype)
            lse2 = T.alloc_shared((tile_m,), ACC)
            delta = T.alloc_shared((tile_m,), ACC)
            p_tile = T.alloc_tmem((tile_n, tile_m), dtype) if in_tensor_memory else T.alloc_shared((tile_n, tile_m), dtype)
            ds_left = T.alloc_tmem((tile_n, tile_m), dtype) if in_tensor_memory else None
            ds_tile = T.alloc_shared((tile_n, tile_m), dtype)
            dq_tile = T.alloc_shared((tile_m, dim_qk), ACC)
            dk_tile = T.alloc_shared((tile_n, dim_qk), key_dtype)
            dv_tile = T.alloc_shared((tile_n, dim_v), key_dtype)
            s_acc = T.alloc_tmem((tile_n, tile_m), ACC)
            dp_acc = T.alloc_tmem((tile_n, tile_m), ACC)
            dv_acc = T.alloc_tmem((tile_n, dim_v), ACC)
            dk_acc = T.alloc_tmem((tile_n, dim_qk), ACC)
            dq_acc = T.alloc_tmem((tile_m, dim_qk), ACC)
            kv_full = T.alloc_barrier(threads)
            q_full = T.alloc_barrier(threads)
            s_done = T.alloc_barrier(1)
            dp_done = T.alloc_barrier(1)
            dv_done = T.alloc_barrier(1)
            dk_done = T.alloc_barrier(1)
            dq_done = T.alloc_barrier(1)
            p = T.alloc_fragment((tile_n, tile_m), ACC)
            p_half = T.alloc_fragment((tile_n, tile_m), dtype)
            ds = T.alloc_fragment((tile_n, tile_m), ACC)
            ds_half = T.alloc_fragment((tile_n, tile_m), dtype)
            dq = T.alloc_fragment((tile_m, dim_qk), ACC)
            dk = T.alloc_fragment((tile_n, dim_qk), ACC)
            dv = T.alloc_fragment((tile_n, dim_v), ACC)
            kv_head = head // groups
            scale_log2 = exponent * LOG2_E
            key_0 = block * tile_n
            T.tma_copy(K[seq, key_0 : key_0 + tile_n, kv_head, 0:dim_qk], k_tile, barrier=kv_full)
            T.tma_copy(V[seq, key_0 : key_0 + tile_n, kv_head, 0:dim_v], v_tile, barrier=kv_full)
            T.mbarrier_arrive(kv_full)
            T.mbarrier_wait_parity(kv_full, 0)
            # at least one step, in which the accumulators of dK and dV begin: a tile that no query sees has P = 0
            begin = T.min(T.max(0, key_0 - offset), n_q - 1) // tile_m if causal else 0
            for step in T.serial(T.ceildiv(n_q, tile_m) - begin):
                row_0 = (begin + step) * tile_m
                T.tma_copy(Q[seq, row_0 : row_0 + tile_m, head, 0:dim_qk], q_tile, barrier=q_full)
                T.tma_copy(dO[seq, row_0 : row_0 + tile_m, head, 0:dim_v], do_tile, barrier=q_full)
                T.mbarrier_arrive(q_full)
                # row by row: as a tile, the pitch of a head's row would have to be a multiple of 16 bytes
                for i in T.Parallel(tile_m):
                    row = T.min(row_0 + i, n_q - 1)
                    lse2[i] = T.if_then_else(row_0 + i < n_q, LSE2[seq, head, row], T.infinity(ACC))
                    delta[i] = T.if_then_else(row_0 + i < n_q, Delta[seq, head, row], 0.0)
                T.mbarrier_wait_parity(q_full, step % 2)
                _publish()
                T.tcgen05_gemm(k_tile, q_tile, s_acc, transpose_B=True, clear_accum=True, mbar=s_done)
                T.tcgen05_gemm(v_tile, do_tile, dp_acc, transpose_B=True, clear_accum=True, mbar=dp_done)
                _wait(s_done, step)
                T.copy(s_acc, p)
                # only in tiles that the mask's edge crosses
                if causal:
                    if key_0 + tile_n > T.min(n_k, row_0 + offset + 1):
                        for j, i in T.Parallel(tile_n, tile_m):
                            p[j, i] = T.if_then_else(
                                key_0 + j < n_k and key_0 + j <= row_0 + i + offset, p[j, i], -T.infinity(ACC)
                            )
                else:
                    if key_0 + tile_n > n_k:
                        for j, i in T.Parallel(tile_n, tile_m):
                            p[j, i] = T.if_then_else(key_0 + j < n_k, p[j, i], -T.infinity(ACC))
                for j, i in T.Parallel(tile_n, tile_m):
                    p[j, i] = T.exp2(p[j, i] * scale_log2 - lse2[i])
                T.copy(p, p_half)
                # p_tile is free: the last step ended behind the wait for dV
                T.copy(p_half, p_tile)
                _publish()
                T.tcgen05_gemm(p_tile, do_tile, dv_acc, clear_accum=step == 0, mbar=dv_done)
                _wait(dp_done, step)
                T.copy(dp_acc, ds)
                for j, i in T.Parallel(tile_n, tile_m):
                    ds_half[j, i] = p[j, i] * (ds[j, i] - delta[i])
                # ds_tile and ds_left are free: the last step ended behind the waits for dK and dQ
                T.copy(ds_half, ds_tile)
                if in_tensor_memory:
                    T.copy(ds_half, ds_left)
                _publish()
                if in_tensor_memory:
                    T.tcgen05_gemm(ds_left, q_tile, dk_acc, clear_accum=step == 0, mbar=dk_done)
                else:
                    T.tcgen05_gemm(ds_tile, q_tile, dk_acc, clear_accum=step == 0, mbar=dk_done)
                T.tcgen05_gemm(ds_tile, k_tile, dq_acc, transpose_A=True, clear_accum=True, mbar=dq_done)
                _wait(dq_done, step)
                T.copy(dq_acc, dq)
                T.copy(dq, dq_tile)
                _publish()
                T.atomic_add(dQ[seq, row_0 : row_0 + tile_m, head, 0:dim_qk], dq_tile, annotations=BY_TMA)
                # q_tile, do_tile and both operands are overwritten in the next step, the accumulators read after the last
                _wait(dv_done, step)
                _wait(dk_done, step)
            T.copy(dv_acc, dv)
            T.copy(dv, dv_tile)
            T.copy(dk_acc, dk)
            for j, d in T.Parallel(tile_n, dim_qk):
                dk[j, d] = dk[j, d] * scale
            T.copy(dk, dk_tile)
            _publish()
            if grouped:
                T.atomic_add(dK[seq, key_0 : key_0 + tile_n, kv_head, 0:dim_qk], dk_tile, annotations=BY_TMA)
                T.atomic_add(dV[seq, key_0 : key_0 + tile_n, kv_head, 0:dim_v], dv_tile, annotations=BY_TMA)
            else:
                T.copy(dk_tile, dK[seq, key_0 : key_0 + tile_n, head, 0:dim_qk])
                T.copy(dv_tile, dV[seq, key_0 : key_0 + tile_n, head, 0:dim_v])
            # the first warp frees tensor memory after this: not while another one still reads it
            T.sync_threads()

    return sm100_backward
