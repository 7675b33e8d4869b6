"""Ragged GQA attention for Hopper as TileLang PrimFuncs: forward, preprocess, backward.

Shapes (`total_q`, `total_k` include slack rows; all of `total_q`, `total_k`, `heads`, `kv_heads` and the batch are dynamic):
Q, dQ (total_q, heads, dim_qk); O, dO (total_q, heads, dim_v); K (total_k, kv_heads, dim_qk); V (total_k, kv_heads, dim_v);
LSE, Delta (heads, total_q) fp32; cu_q, cu_k (batch + 1,) int32. The formulae are those of dense_device.py, with offset =
n_k - n_q, or 0 where `bottom` is 0.

A tile that reaches beyond its sequence would read the next one, or slack rows, which may be NaN: 0 * NaN is NaN. So whole tiles
are copied, which on sm_90 the tensor memory accelerator does, and the last one of a sequence is loaded row by row, zeros beyond
the end. Only a sequence's own rows are ever stored.
"""

# No `from __future__ import annotations`: TileLang evaluates the annotations of a PrimFunc as it builds it.
import math
from typing import Any, Literal

try:
    import tilelang.language as T
except ImportError:  # a machine without TileLang can still import this module and read its source
    T = None

__all__ = ["backward", "forward", "preprocess"]

LOG2_E = math.log2(math.e)
ACC = "float32"
Reduction = Literal["atomic", "split"]


def forward(*, dim_qk: int, dim_v: int, causal: bool, dtype: str, tile_m: int, tile_n: int, threads: int, stages: int) -> Any:
    """PrimFunc (Q, K, V, cu_q, cu_k, max_q, groups, bottom, exponent, O, LSE): one block per query tile, head and sequence."""
    # a tf32 product takes its left operand in another register layout than a product leaves behind: by way of shared memory
    alloc_operand = T.alloc_shared if dtype == "float32" else T.alloc_fragment
    batch_1, total_q, total_k, heads, kv_heads = (T.dynamic(n) for n in ("batch_1", "total_q", "total_k", "heads", "kv_heads"))

    @T.macro
    def attend(q_tile, k_tile, v_tile, s, p, acc, m, m_old, rescale, row_sum, total, scale_log2, key_0, n_k, last_0):
        """One tile of keys: row i of the query tile sees key j where key_0 + j <= last_0 + i, all of them without a mask."""
        if causal:
            for i, j in T.Parallel(tile_m, tile_n):
                s[i, j] = T.if_then_else(key_0 + j < n_k and key_0 + j <= last_0 + i, T.cast(0, ACC), -T.infinity(ACC))
        else:
            for i, j in T.Parallel(tile_m, tile_n):
                s[i, j] = T.if_then_else(key_0 + j < n_k, T.cast(0, ACC), -T.infinity(ACC))
        T.gemm(q_tile, k_tile, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
        T.copy(m, m_old)
        T.reduce_max(s, m, dim=1, clear=False)
        # a row that has seen no key yet has m = -inf, and -inf - -inf is NaN
        for i in T.Parallel(tile_m):
            rescale[i] = T.if_then_else(m_old[i] == -T.infinity(ACC), 0.0, T.exp2((m_old[i] - m[i]) * scale_log2))
        for i, j in T.Parallel(tile_m, tile_n):
            s[i, j] = T.exp2(s[i, j] * scale_log2 - T.if_then_else(m[i] == -T.infinity(ACC), 0.0, m[i] * scale_log2))
        T.reduce_sum(s, row_sum, dim=1)
        for i in T.Parallel(tile_m):
            total[i] = total[i] * rescale[i] + row_sum[i]
        for i, d in T.Parallel(tile_m, dim_v):
            acc[i, d] = acc[i, d] * rescale[i]
        T.copy(s, p)
        T.gemm(p, v_tile, acc, policy=T.GemmWarpPolicy.FullRow)

    @T.prim_func
    def ragged_forward(
        Q: T.Tensor((total_q, heads, dim_qk), dtype),
        K: T.Tensor((total_k, kv_heads, dim_qk), dtype),
        V: T.Tensor((total_k, kv_heads, dim_v), dtype),
        cu_q: T.Tensor((batch_1,), "int32"),
        cu_k: T.Tensor((batch_1,), "int32"),
        max_q: T.int32,
        groups: T.int32,
        bottom: T.int32,
        exponent: T.float32,
        O: T.Tensor((total_q, heads, dim_v), dtype),  # noqa: E741
        LSE: T.Tensor((heads, total_q), ACC),
    ):
        with T.Kernel(T.ceildiv(max_q, tile_m), heads, batch_1 - 1, threads=min(threads, 2 * tile_m)) as (block, head, seq):
            q_tile = T.alloc_shared((tile_m, dim_qk), dtype)
            k_tile = T.alloc_shared((tile_n, dim_qk), dtype)
            v_tile = T.alloc_shared((tile_n, dim_v), dtype)
            # of their own: a pipelined buffer has one version for each stage
            k_last = T.alloc_shared((tile_n, dim_qk), dtype)
            v_last = T.alloc_shared((tile_n, dim_v), dtype)
            s = T.alloc_fragment((tile_m, tile_n), ACC)
            p = alloc_operand((tile_m, tile_n), dtype)
            acc = T.alloc_fragment((tile_m, dim_v), ACC)
            m = T.alloc_fragment((tile_m,), ACC)
            m_old = T.alloc_fragment((tile_m,), ACC)
            rescale = T.alloc_fragment((tile_m,), ACC)
            row_sum = T.alloc_fragment((tile_m,), ACC)
            total = T.alloc_fragment((tile_m,), ACC)
            q_start = cu_q[seq]
            k_start = cu_k[seq]
            n_q = cu_q[seq + 1] - q_start
            n_k = cu_k[seq + 1] - k_start
            kv_head = T.alloc_var("int32")
            kv_head = head // groups
            scale_log2 = T.alloc_var(ACC)
            scale_log2 = exponent * LOG2_E
            row_0 = block * tile_m
            last_0 = row_0 + bottom * (n_k - n_q)
            if row_0 < n_q:
                # rows beyond the sequence are somebody else's: what becomes of them is not stored
                T.copy(Q[q_start + row_0 : q_start + row_0 + tile_m, head, 0:dim_qk], q_tile)
                T.fill(acc, 0)
                T.fill(total, 0)
                T.fill(m, -T.infinity(ACC))
                end = T.max(0, T.min(n_k, last_0 + tile_m)) if causal else n_k
                whole = end // tile_n
                for step in T.Pipelined(whole, num_stages=stages):
                    key_0 = step * tile_n
                    T.copy(K[k_start + key_0 : k_start + key_0 + tile_n, kv_head, 0:dim_qk], k_tile)
                    T.copy(V[k_start + key_0 : k_start + key_0 + tile_n, kv_head, 0:dim_v], v_tile)
                    attend(q_tile, k_tile, v_tile, s, p, acc, m, m_old, rescale, row_sum, total, scale_log2, key_0, n_k, last_0)
                if whole * tile_n < end:
                    for j, d in T.Parallel(tile_n, dim_qk):
                        k_last[j, d] = T.if_then_else(
                            whole * tile_n + j < n_k, K[k_start + whole * tile_n + j, kv_head, d], T.cast(0, dtype)
                        )
                    for j, d in T.Parallel(tile_n, dim_v):
                        v_last[j, d] = T.if_then_else(
                            whole * tile_n + j < n_k, V[k_start + whole * tile_n + j, kv_head, d], T.cast(0, dtype)
                        )
                    attend(
                        q_tile, k_last, v_last, s, p, acc, m, m_old, rescale, row_sum, total, scale_log2,
                        whole * tile_n, n_k, last_0,
                    )  # fmt: skip
                for i, d in T.Parallel(tile_m, dim_v):
                    if row_0 + i < n_q:
                        O[q_start + row_0 + i, head, d] = T.if_then_else(total[i] > 0, acc[i, d] / total[i], 0.0)
                for i in T.Parallel(tile_m):
                    if row_0 + i < n_q:
                        LSE[head, q_start + row_0 + i] = T.if_then_else(
                            total[i] > 0, m[i] * exponent + T.log(total[i]), -T.infinity(ACC)
                        )

    return ragged_forward


def preprocess(*, dim_v: int, dtype: str, tile_m: int, threads: int) -> Any:
    """PrimFunc (O, dO, cu_q, max_q, Delta): products and sums in fp32, one block per query tile, head and sequence."""
    batch_1, total_q, heads = (T.dynamic(n) for n in ("batch_1", "total_q", "heads"))

    @T.prim_func
    def ragged_preprocess(
        O: T.Tensor((total_q, heads, dim_v), dtype),  # noqa: E741
        dO: T.Tensor((total_q, heads, dim_v), dtype),
        cu_q: T.Tensor((batch_1,), "int32"),
        max_q: T.int32,
        Delta: T.Tensor((heads, total_q), ACC),
    ):
        with T.Kernel(T.ceildiv(max_q, tile_m), heads, batch_1 - 1, threads=threads) as (block, head, seq):
            o_rows = T.alloc_fragment((tile_m, dim_v), dtype)
            do_rows = T.alloc_fragment((tile_m, dim_v), dtype)
            product = T.alloc_fragment((tile_m, dim_v), ACC)
            delta = T.alloc_fragment((tile_m,), ACC)
            q_start = cu_q[seq]
            n_q = cu_q[seq + 1] - q_start
            row_0 = block * tile_m
            if row_0 < n_q:
                # rows beyond the sequence are somebody else's: their sums are not stored
                T.copy(O[q_start + row_0 : q_start + row_0 + tile_m, head, 0:dim_v], o_rows)
                T.copy(dO[q_start + row_0 : q_start + row_0 + tile_m, head, 0:dim_v], do_rows)
                for i, d in T.Parallel(tile_m, dim_v):
                    product[i, d] = T.cast(o_rows[i, d], ACC) * T.cast(do_rows[i, d], ACC)
                T.reduce_sum(product, delta, dim=1)
                for i in T.Parallel(tile_m):
                    if row_0 + i < n_q:
                        Delta[head, q_start + row_0 + i] = delta[i]

    return ragged_preprocess


def backward(
    *,
    dim_qk: int,
    dim_v: int,
    causal: bool,
    dtype: str,
    tile_m: int,
    tile_n: int,
    threads: int,
    stages: int,
    reduction: Reduction,
) -> Any:
    """PrimFunc (Q, K, V, dO, LSE, Delta, cu_q, cu_k, max_k, groups, bottom, exponent, scale, dQ, dK, dV).

    One block per key tile, query head and sequence.

    dQ is fp32 and starts as zeros: blocks add to it. dK and dV are fp32, the shares of a group's query heads being

        atomic  added to zeros, once for each block, (total_k, kv_heads, dim)
        split   stored, one of each query head, (total_k, heads, dim), for the caller to sum
    """
    # a tf32 product takes its left operand in another register layout than a product leaves behind: by way of shared memory
    alloc_operand = T.alloc_shared if dtype == "float32" else T.alloc_fragment
    batch_1, total_q, total_k, heads, kv_heads = (T.dynamic(n) for n in ("batch_1", "total_q", "total_k", "heads", "kv_heads"))
    key_heads = kv_heads if reduction == "atomic" else heads

    @T.macro
    def share(
        q_tile, do_tile, k_tile, v_tile, lse_log2, delta, p, p_half, ds, ds_half, ds_tile, dq_acc, dk_acc, dv_acc,
        LSE, Delta, dQ, head, q_start, row_0, n_q, key_0, n_k, offset, scale_log2, scale,
    ):  # fmt: skip
        """What one tile of queries adds to dK and dV of a tile of keys, and gets for its dQ."""
        # a row that sees no key, or is none, has P = 0
        for i in T.Parallel(tile_m):
            lse_log2[i] = T.if_then_else(row_0 + i < n_q, LSE[head, q_start + row_0 + i] * LOG2_E, T.infinity(ACC))
        for i in T.Parallel(tile_m):
            delta[i] = T.if_then_else(row_0 + i < n_q, Delta[head, q_start + row_0 + i], 0.0)
        if causal:
            for j, i in T.Parallel(tile_n, tile_m):
                p[j, i] = T.if_then_else(key_0 + j < n_k and key_0 + j <= row_0 + i + offset, T.cast(0, ACC), -T.infinity(ACC))
        else:
            for j, i in T.Parallel(tile_n, tile_m):
                p[j, i] = T.if_then_else(key_0 + j < n_k, T.cast(0, ACC), -T.infinity(ACC))
        T.gemm(k_tile, q_tile, p, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
        T.clear(ds)
        T.gemm(v_tile, do_tile, ds, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
        for j, i in T.Parallel(tile_n, tile_m):
            p[j, i] = T.if_then_else(lse_log2[i] == -T.infinity(ACC), 0.0, T.exp2(p[j, i] * scale_log2 - lse_log2[i]))
        T.copy(p, p_half)
        T.gemm(p_half, do_tile, dv_acc, policy=T.GemmWarpPolicy.FullRow)
        for j, i in T.Parallel(tile_n, tile_m):
            ds_half[j, i] = p[j, i] * (ds[j, i] - delta[i])
        T.gemm(ds_half, q_tile, dk_acc, policy=T.GemmWarpPolicy.FullRow)
        T.copy(ds_half, ds_tile)
        T.clear(dq_acc)
        T.gemm(ds_tile, k_tile, dq_acc, transpose_A=True)
        for i, d in T.Parallel(tile_m, dim_qk):
            if row_0 + i < n_q:
                T.atomic_add(dQ[q_start + row_0 + i, head, d], dq_acc[i, d] * scale)

    @T.prim_func
    def ragged_backward(
        Q: T.Tensor((total_q, heads, dim_qk), dtype),
        K: T.Tensor((total_k, kv_heads, dim_qk), dtype),
        V: T.Tensor((total_k, kv_heads, dim_v), dtype),
        dO: T.Tensor((total_q, heads, dim_v), dtype),
        LSE: T.Tensor((heads, total_q), ACC),
        Delta: T.Tensor((heads, total_q), ACC),
        cu_q: T.Tensor((batch_1,), "int32"),
        cu_k: T.Tensor((batch_1,), "int32"),
        max_k: T.int32,
        groups: T.int32,
        bottom: T.int32,
        exponent: T.float32,
        scale: T.float32,
        dQ: T.Tensor((total_q, heads, dim_qk), ACC),
        dK: T.Tensor((total_k, key_heads, dim_qk), ACC),
        dV: T.Tensor((total_k, key_heads, dim_v), ACC),
    ):
        with T.Kernel(heads, T.ceildiv(max_k, tile_n), batch_1 - 1, threads=min(threads, 2 * tile_n)) as (head, block, seq):
            k_tile = T.alloc_shared((tile_n, dim_qk), dtype)
            v_tile = T.alloc_shared((tile_n, dim_v), dtype)
            q_tile = T.alloc_shared((tile_m, dim_qk), dtype)
            do_tile = T.alloc_shared((tile_m, dim_v), dtype)
            # of their own: a pipelined buffer has one version for each stage
            q_last = T.alloc_shared((tile_m, dim_qk), dtype)
            do_last = T.alloc_shared((tile_m, dim_v), dtype)
            lse_log2 = T.alloc_shared((tile_m,), ACC)
            delta = T.alloc_shared((tile_m,), ACC)
            lse_last = T.alloc_shared((tile_m,), ACC)
            delta_last = T.alloc_shared((tile_m,), ACC)
            ds_tile = T.alloc_shared((tile_n, tile_m), dtype)
            # transposed: keys are rows, so that P and dS feed the dV and dK products from registers
            p = T.alloc_fragment((tile_n, tile_m), ACC)
            p_half = alloc_operand((tile_n, tile_m), dtype)
            ds = T.alloc_fragment((tile_n, tile_m), ACC)
            ds_half = alloc_operand((tile_n, tile_m), dtype)
            dq_acc = T.alloc_fragment((tile_m, dim_qk), ACC)
            dk_acc = T.alloc_fragment((tile_n, dim_qk), ACC)
            dv_acc = T.alloc_fragment((tile_n, dim_v), ACC)
            q_start = cu_q[seq]
            k_start = cu_k[seq]
            n_q = cu_q[seq + 1] - q_start
            n_k = cu_k[seq + 1] - k_start
            kv_head = T.alloc_var("int32")
            kv_head = head // groups
            scale_log2 = T.alloc_var(ACC)
            scale_log2 = exponent * LOG2_E
            offset = bottom * (n_k - n_q)
            key_0 = block * tile_n
            if key_0 < n_k:
                for j, d in T.Parallel(tile_n, dim_qk):
                    k_tile[j, d] = T.if_then_else(key_0 + j < n_k, K[k_start + key_0 + j, kv_head, d], T.cast(0, dtype))
                for j, d in T.Parallel(tile_n, dim_v):
                    v_tile[j, d] = T.if_then_else(key_0 + j < n_k, V[k_start + key_0 + j, kv_head, d], T.cast(0, dtype))
                T.clear(dk_acc)
                T.clear(dv_acc)
                begin = T.max(0, key_0 - offset) // tile_m if causal else 0
                whole = n_q // tile_m
                for step in T.Pipelined(begin, whole, num_stages=stages):
                    row_0 = step * tile_m
                    T.copy(Q[q_start + row_0 : q_start + row_0 + tile_m, head, 0:dim_qk], q_tile)
                    T.copy(dO[q_start + row_0 : q_start + row_0 + tile_m, head, 0:dim_v], do_tile)
                    share(
                        q_tile, do_tile, k_tile, v_tile, lse_log2, delta, p, p_half, ds, ds_half, ds_tile, dq_acc, dk_acc, dv_acc,
                        LSE, Delta, dQ, head, q_start, row_0, n_q, key_0, n_k, offset, scale_log2, scale,
                    )  # fmt: skip
                if whole * tile_m < n_q:
                    for i, d in T.Parallel(tile_m, dim_qk):
                        q_last[i, d] = T.if_then_else(
                            whole * tile_m + i < n_q, Q[q_start + whole * tile_m + i, head, d], T.cast(0, dtype)
                        )
                    for i, d in T.Parallel(tile_m, dim_v):
                        do_last[i, d] = T.if_then_else(
                            whole * tile_m + i < n_q, dO[q_start + whole * tile_m + i, head, d], T.cast(0, dtype)
                        )
                    share(
                        q_last, do_last, k_tile, v_tile, lse_last, delta_last, p, p_half, ds, ds_half, ds_tile, dq_acc, dk_acc,
                        dv_acc, LSE, Delta, dQ, head, q_start, whole * tile_m, n_q, key_0, n_k, offset, scale_log2, scale,
                    )  # fmt: skip
                for j, d in T.Parallel(tile_n, dim_qk):
                    if key_0 + j < n_k:
                        if reduction == "atomic":
                            T.atomic_add(dK[k_start + key_0 + j, kv_head, d], dk_acc[j, d] * scale)
                        else:
                            dK[k_start + key_0 + j, head, d] = dk_acc[j, d] * scale
                for j, d in T.Parallel(tile_n, dim_v):
                    if key_0 + j < n_k:
                        if reduction == "atomic":
                            T.atomic_add(dV[k_start + key_0 + j, kv_head, d], dv_acc[j, d])
                        else:
                            dV[k_start + key_0 + j, head, d] = dv_acc[j, d]

    return ragged_backward
