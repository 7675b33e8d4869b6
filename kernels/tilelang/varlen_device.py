"""Ragged GQA attention as TileLang PrimFuncs: forward, preprocess, backward.

Shapes (`total_q`, `total_k` include slack rows; all of `total_q`, `total_k`, `heads`, `kv_heads` and the batch are dynamic):
Q, dQ (total_q, heads, dim_qk); O, dO (total_q, heads, dim_v); K, dK (total_k, kv_heads, dim_qk); V, dV (total_k, kv_heads,
dim_v); LSE, Delta (heads, total_q) fp32; cu_q, cu_k (batch + 1,) int32. With `visible(i, j)` = j < n_k, and under `causal`
j <= i + n_k - n_q,

    s_ij = scale * q_i . k_j        LSE_i = log sum_{visible j} exp(s_ij)       P_ij = exp(s_ij - LSE_i)
    O_i = sum_j P_ij v_j            Delta_i = sum_d O_id dO_id                  dS_ij = P_ij (dO_i . v_j - Delta_i)
    dQ_i = scale sum_j dS_ij k_j    dK_j = scale sum_{group, i} dS_ij q_i       dV_j = sum_{group, i} P_ij dO_i

A row that sees no key has O = 0 and LSE = -inf. Rows beyond a sequence's end are read as zeros and never written. A warp
has at least 16 rows of a tile, so that `threads` is an upper limit.
"""

# No `from __future__ import annotations`: TileLang evaluates the annotations of a PrimFunc as it builds it.
import math
from typing import Any

try:
    import tilelang.language as T
except ImportError:  # a machine without TileLang can still import this module and read its source
    T = None

__all__ = ["backward", "forward", "preprocess"]

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
ACC = "float32"


def forward(*, dim_qk: int, dim_v: int, causal: bool, dtype: str, tile_m: int, tile_n: int, threads: int, stages: int) -> Any:
    """PrimFunc (Q, K, V, cu_q, cu_k, max_q, groups, scale, O, LSE): one block per query tile, head and sequence."""
    # a tf32 product takes its left operand in another register layout than a product leaves behind: by way of shared memory
    alloc_operand = T.alloc_shared if dtype == "float32" else T.alloc_fragment
    batch_1, total_q, total_k, heads, kv_heads = (T.dynamic(n) for n in ("batch_1", "total_q", "total_k", "heads", "kv_heads"))

    @T.prim_func
    def varlen_forward(
        Q: T.Tensor((total_q, heads, dim_qk), dtype),
        K: T.Tensor((total_k, kv_heads, dim_qk), dtype),
        V: T.Tensor((total_k, kv_heads, dim_v), dtype),
        cu_q: T.Tensor((batch_1,), "int32"),
        cu_k: T.Tensor((batch_1,), "int32"),
        max_q: T.int32,
        groups: T.int32,
        scale: T.float32,
        O: T.Tensor((total_q, heads, dim_v), dtype),  # noqa: E741
        LSE: T.Tensor((heads, total_q), ACC),
    ):
        with T.Kernel(T.ceildiv(max_q, tile_m), heads, batch_1 - 1, threads=min(threads, 2 * tile_m)) as (block, head, seq):
            q_tile = T.alloc_shared((tile_m, dim_qk), dtype)
            k_tile = T.alloc_shared((tile_n, dim_qk), dtype)
            v_tile = T.alloc_shared((tile_n, dim_v), dtype)
            s = T.alloc_fragment((tile_m, tile_n), ACC)
            p = alloc_operand((tile_m, tile_n), dtype)
            acc = T.alloc_fragment((tile_m, dim_v), ACC)
            m = T.alloc_fragment((tile_m,), ACC)
            m_old = T.alloc_fragment((tile_m,), ACC)
            m_safe = T.alloc_fragment((tile_m,), ACC)
            rescale = T.alloc_fragment((tile_m,), ACC)
            row_sum = T.alloc_fragment((tile_m,), ACC)
            total = T.alloc_fragment((tile_m,), ACC)
            q_start = cu_q[seq]
            k_start = cu_k[seq]
            n_q = cu_q[seq + 1] - q_start
            n_k = cu_k[seq + 1] - k_start
            offset = n_k - n_q
            kv_head = T.alloc_var("int32")
            kv_head = head // groups
            scale_log2 = T.alloc_var(ACC)
            scale_log2 = scale * LOG2_E
            row_0 = block * tile_m
            if row_0 < n_q:
                for i, d in T.Parallel(tile_m, dim_qk):
                    q_tile[i, d] = T.if_then_else(row_0 + i < n_q, Q[q_start + row_0 + i, head, d], T.cast(0, dtype))
                T.fill(acc, 0)
                T.fill(total, 0)
                T.fill(m, -T.infinity(ACC))
                end = T.max(0, T.min(n_k, row_0 + tile_m + offset)) if causal else n_k
                for step in T.Pipelined(T.ceildiv(end, tile_n), num_stages=stages):
                    key_0 = step * tile_n
                    for j, d in T.Parallel(tile_n, dim_qk):
                        k_tile[j, d] = T.if_then_else(key_0 + j < n_k, K[k_start + key_0 + j, kv_head, d], T.cast(0, dtype))
                    for j, d in T.Parallel(tile_n, dim_v):
                        v_tile[j, d] = T.if_then_else(key_0 + j < n_k, V[k_start + key_0 + j, kv_head, d], T.cast(0, dtype))
                    T.clear(s)
                    T.gemm(q_tile, k_tile, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    # scaled before the maximum is taken: the scale may be negative
                    for i, j in T.Parallel(tile_m, tile_n):
                        s[i, j] = T.if_then_else(key_0 + j < n_k, s[i, j] * scale_log2, -T.infinity(ACC))
                    if causal:
                        for i, j in T.Parallel(tile_m, tile_n):
                            s[i, j] = T.if_then_else(key_0 + j <= row_0 + i + offset, s[i, j], -T.infinity(ACC))
                    T.copy(m, m_old)
                    T.reduce_max(s, m, dim=1, clear=False)
                    # a row that has seen no key yet has m = -inf, and -inf - -inf is NaN
                    for i in T.Parallel(tile_m):
                        m_safe[i] = T.if_then_else(m[i] == -T.infinity(ACC), 0.0, m[i])
                    for i in T.Parallel(tile_m):
                        rescale[i] = T.exp2(m_old[i] - m_safe[i])
                    for i, j in T.Parallel(tile_m, tile_n):
                        s[i, j] = T.exp2(s[i, j] - m_safe[i])
                    T.reduce_sum(s, row_sum, dim=1)
                    for i in T.Parallel(tile_m):
                        total[i] = total[i] * rescale[i] + row_sum[i]
                    for i, d in T.Parallel(tile_m, dim_v):
                        acc[i, d] = acc[i, d] * rescale[i]
                    T.copy(s, p)
                    T.gemm(p, v_tile, acc, policy=T.GemmWarpPolicy.FullRow)
                for i, d in T.Parallel(tile_m, dim_v):
                    if row_0 + i < n_q:
                        O[q_start + row_0 + i, head, d] = T.if_then_else(total[i] > 0, acc[i, d] / total[i], 0.0)
                for i in T.Parallel(tile_m):
                    if row_0 + i < n_q:
                        LSE[head, q_start + row_0 + i] = T.if_then_else(
                            total[i] > 0, m[i] * LN_2 + T.log(total[i]), -T.infinity(ACC)
                        )

    return varlen_forward


def preprocess(*, dim_v: int, dtype: str, tile_m: int, threads: int) -> Any:
    """PrimFunc (O, dO, cu_q, max_q, Delta): products and sums in fp32, one block per query tile, head and sequence."""
    batch_1, total_q, heads = (T.dynamic(n) for n in ("batch_1", "total_q", "heads"))

    @T.prim_func
    def varlen_preprocess(
        O: T.Tensor((total_q, heads, dim_v), dtype),  # noqa: E741
        dO: T.Tensor((total_q, heads, dim_v), dtype),
        cu_q: T.Tensor((batch_1,), "int32"),
        max_q: T.int32,
        Delta: T.Tensor((heads, total_q), ACC),
    ):
        with T.Kernel(T.ceildiv(max_q, tile_m), heads, batch_1 - 1, threads=threads) as (block, head, seq):
            delta = T.alloc_fragment((tile_m,), ACC)
            q_start = cu_q[seq]
            n_q = cu_q[seq + 1] - q_start
            row_0 = block * tile_m
            if row_0 < n_q:
                T.clear(delta)
                for i in T.Parallel(tile_m):
                    if row_0 + i < n_q:
                        for d in T.serial(dim_v):
                            delta[i] += T.cast(O[q_start + row_0 + i, head, d], ACC) * T.cast(
                                dO[q_start + row_0 + i, head, d], ACC
                            )
                for i in T.Parallel(tile_m):
                    if row_0 + i < n_q:
                        Delta[head, q_start + row_0 + i] = delta[i]

    return varlen_preprocess


def backward(*, dim_qk: int, dim_v: int, causal: bool, dtype: str, tile_m: int, tile_n: int, threads: int, stages: int) -> Any:
    """PrimFunc (Q, K, V, dO, LSE, Delta, cu_q, cu_k, max_k, groups, scale, dQ, dK, dV): one block per key tile, query head
    and sequence, which adds its share to dQ, dK, dV; these are fp32 and start as zeros.
    """
    # a tf32 product takes its left operand in another register layout than a product leaves behind: by way of shared memory
    alloc_operand = T.alloc_shared if dtype == "float32" else T.alloc_fragment
    batch_1, total_q, total_k, heads, kv_heads = (T.dynamic(n) for n in ("batch_1", "total_q", "total_k", "heads", "kv_heads"))

    @T.prim_func
    def varlen_backward(
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
        scale: T.float32,
        dQ: T.Tensor((total_q, heads, dim_qk), ACC),
        dK: T.Tensor((total_k, kv_heads, dim_qk), ACC),
        dV: T.Tensor((total_k, kv_heads, dim_v), ACC),
    ):
        with T.Kernel(heads, T.ceildiv(max_k, tile_n), batch_1 - 1, threads=min(threads, 2 * tile_n)) as (head, block, seq):
            k_tile = T.alloc_shared((tile_n, dim_qk), dtype)
            v_tile = T.alloc_shared((tile_n, dim_v), dtype)
            q_tile = T.alloc_shared((tile_m, dim_qk), dtype)
            do_tile = T.alloc_shared((tile_m, dim_v), dtype)
            lse_log2 = T.alloc_shared((tile_m,), ACC)
            delta = T.alloc_shared((tile_m,), ACC)
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
            offset = n_k - n_q
            kv_head = T.alloc_var("int32")
            kv_head = head // groups
            scale_log2 = T.alloc_var(ACC)
            scale_log2 = scale * LOG2_E
            key_0 = block * tile_n
            if key_0 < n_k:
                for j, d in T.Parallel(tile_n, dim_qk):
                    k_tile[j, d] = T.if_then_else(key_0 + j < n_k, K[k_start + key_0 + j, kv_head, d], T.cast(0, dtype))
                for j, d in T.Parallel(tile_n, dim_v):
                    v_tile[j, d] = T.if_then_else(key_0 + j < n_k, V[k_start + key_0 + j, kv_head, d], T.cast(0, dtype))
                T.clear(dk_acc)
                T.clear(dv_acc)
                begin = T.max(0, key_0 - offset) // tile_m if causal else 0
                for step in T.Pipelined(begin, T.ceildiv(n_q, tile_m), num_stages=stages):
                    row_0 = step * tile_m
                    for i, d in T.Parallel(tile_m, dim_qk):
                        q_tile[i, d] = T.if_then_else(row_0 + i < n_q, Q[q_start + row_0 + i, head, d], T.cast(0, dtype))
                    for i, d in T.Parallel(tile_m, dim_v):
                        do_tile[i, d] = T.if_then_else(row_0 + i < n_q, dO[q_start + row_0 + i, head, d], T.cast(0, dtype))
                    for i in T.Parallel(tile_m):
                        lse_log2[i] = T.if_then_else(row_0 + i < n_q, LSE[head, q_start + row_0 + i] * LOG2_E, 0.0)
                    for i in T.Parallel(tile_m):
                        delta[i] = T.if_then_else(row_0 + i < n_q, Delta[head, q_start + row_0 + i], 0.0)
                    T.clear(p)
                    T.gemm(k_tile, q_tile, p, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    for j, i in T.Parallel(tile_n, tile_m):
                        p[j, i] = T.if_then_else(
                            key_0 + j < n_k and row_0 + i < n_q,
                            T.exp2(p[j, i] * scale_log2 - lse_log2[i]),
                            0.0,
                        )
                    if causal:
                        for j, i in T.Parallel(tile_n, tile_m):
                            p[j, i] = T.if_then_else(key_0 + j <= row_0 + i + offset, p[j, i], 0.0)
                    T.copy(p, p_half)
                    T.gemm(p_half, do_tile, dv_acc, policy=T.GemmWarpPolicy.FullRow)
                    T.clear(ds)
                    T.gemm(v_tile, do_tile, ds, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    for j, i in T.Parallel(tile_n, tile_m):
                        ds_half[j, i] = p[j, i] * (ds[j, i] - delta[i])
                    T.gemm(ds_half, q_tile, dk_acc, policy=T.GemmWarpPolicy.FullRow)
                    T.copy(ds_half, ds_tile)
                    T.clear(dq_acc)
                    T.gemm(ds_tile, k_tile, dq_acc, transpose_A=True)
                    for i, d in T.Parallel(tile_m, dim_qk):
                        if row_0 + i < n_q:
                            T.atomic_add(dQ[q_start + row_0 + i, head, d], dq_acc[i, d] * scale)
                for j, d in T.Parallel(tile_n, dim_qk):
                    if key_0 + j < n_k:
                        T.atomic_add(dK[k_start + key_0 + j, kv_head, d], dk_acc[j, d] * scale)
                for j, d in T.Parallel(tile_n, dim_v):
                    if key_0 + j < n_k:
                        T.atomic_add(dV[k_start + key_0 + j, kv_head, d], dv_acc[j, d])

    return varlen_backward
