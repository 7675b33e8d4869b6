"""Ragged GQA attention for Hopper as TileLang PrimFuncs: pad, forward, preprocess, backward, finish.

Shapes (all sizes are dynamic; `total_q` and `total_k` include slack rows): Q (total_q, heads, dim_qk); O, dO (total_q, heads,
dim_v); LSE (heads, total_q) fp32; cu_q, cu_k (batch + 1,) int32. The formulae are those of dense_device.py, with offset =
n_k - n_q, or 0 where `bottom` is 0.

A tile that reaches beyond its sequence would read the next one, or slack rows, which may be NaN: 0 * NaN is NaN. Tensors that are
read by tiles are therefore padded first, names with a P: sequence i begins at row `padded(cu, i)`, and zeros follow it to the
next multiple of PAD rows, which every tile divides. PQ, PdQ (rows_q, heads, dim_qk); PdO (rows_q, heads, dim_v); PK (rows_k,
kv_heads, dim_qk); PV (rows_k, kv_heads, dim_v); PLSE2, PDelta (heads, rows_q) fp32, with rows = (total // PAD + batch) PAD. Whole
tiles are copied, stored and added, on sm_90 by the tensor memory accelerator; `finish` extracts each sequence's own rows.
"""

# No `from __future__ import annotations`: TileLang evaluates the annotations of a PrimFunc as it builds it.
import math
from typing import Any, Literal

from attnfuzz.kernels.tilelang.dense_device import PRODUCER_REGISTERS, block_threads, by_wgmma, consumer_registers
from attnfuzz.kernels.tilelang.hopper import PAD

try:
    import tilelang.language as T
except ImportError:  # a machine without TileLang can still import this module and read its source
    T = None

__all__ = ["backward", "block_threads", "finish", "forward", "pad", "preprocess"]

LOG2_E = math.log2(math.e)
ACC = "float32"
Reduction = Literal["atomic", "split"]
ROWS, PARTS = 16, 16
"""Rows of a block of the preprocess, and threads per row."""
BY_TMA = {"use_tma": 1}
"""An atomic addition of a tile by the tensor memory accelerator: sm_90 and later; ignored on the CPU."""


def padded(cu: Any, seq: Any) -> Any:
    """The row where a sequence begins, with room for its length rounded up, and for at least one row, before the next."""
    return (cu[seq] // PAD + seq) * PAD


def padded_rows(n: Any) -> Any:
    """Rows of a sequence of `n` tokens with its padding; at least one tile, since every loop has at least one step."""
    return T.max(1, T.ceildiv(n, PAD)) * PAD


def pad(*, dim: int, dtype: str) -> Any:
    """PrimFunc (X, cu, longest, PX): copy sequences of X (total, heads, dim) to PX (rows, heads, dim), zeros after each."""
    batch_1, total, heads, rows = (T.dynamic(n) for n in ("batch_1", "total", "heads", "rows"))

    @T.prim_func
    def ragged_pad(
        X: T.Tensor((total, heads, dim), dtype),
        cu: T.Tensor((batch_1,), "int32"),
        longest: T.int32,
        PX: T.Tensor((rows, heads, dim), dtype),
    ):
        with T.Kernel(T.max(1, T.ceildiv(longest, PAD)) * (PAD // ROWS), heads, batch_1 - 1, threads=128) as (block, head, seq):
            start = cu[seq]
            n = cu[seq + 1] - start
            row_0 = block * ROWS
            if row_0 < padded_rows(n):
                for i, d in T.Parallel(ROWS, dim):
                    PX[padded(cu, seq) + row_0 + i, head, d] = T.if_then_else(
                        row_0 + i < n, X[start + row_0 + i, head, d], T.cast(0, dtype)
                    )

    return ragged_pad


def forward(*, dim_qk: int, dim_v: int, causal: bool, dtype: str, tile_m: int, tile_n: int, threads: int, stages: int) -> Any:
    """PrimFunc (Q, PK, PV, cu_q, cu_k, max_q, groups, bottom, exponent, O, LSE): one block per query tile, head and sequence.

    Blocks with most keys come first. Where WGMMA takes both products, P V of a tile overlaps the softmax of the next one.
    """
    threads = min(threads, 2 * tile_m)
    ahead = by_wgmma(dtype, threads)
    # a tf32 product takes its left operand in another register layout than a product leaves behind: by way of shared memory
    alloc_operand = T.alloc_shared if dtype == "float32" else T.alloc_fragment
    batch_1, total_q, rows_k, heads, kv_heads = (T.dynamic(n) for n in ("batch_1", "total_q", "rows_k", "heads", "kv_heads"))

    @T.prim_func
    def ragged_forward(
        Q: T.Tensor((total_q, heads, dim_qk), dtype),
        PK: T.Tensor((rows_k, kv_heads, dim_qk), dtype),
        PV: T.Tensor((rows_k, kv_heads, dim_v), dtype),
        cu_q: T.Tensor((batch_1,), "int32"),
        cu_k: T.Tensor((batch_1,), "int32"),
        max_q: T.int32,
        groups: T.int32,
        bottom: T.int32,
        exponent: T.float32,
        O: T.Tensor((total_q, heads, dim_v), dtype),  # noqa: E741
        LSE: T.Tensor((heads, total_q), ACC),
    ):
        with T.Kernel(T.ceildiv(max_q, tile_m), heads, batch_1 - 1, threads=threads) as (block, head, seq):
            if threads >= 128:
                T.annotate_producer_reg_dealloc(PRODUCER_REGISTERS)
                T.annotate_consumer_reg_alloc(consumer_registers(threads))
            q_tile = T.alloc_shared((tile_m, dim_qk), dtype)
            k_tile = T.alloc_shared((tile_n, dim_qk), dtype)
            v_tile = T.alloc_shared((tile_n, dim_v), dtype)
            v_last = T.alloc_shared((tile_n, dim_v), dtype) if ahead else v_tile
            s = T.alloc_fragment((tile_m, tile_n), ACC)
            p = alloc_operand((tile_m, tile_n), dtype)
            acc = T.alloc_fragment((tile_m, dim_v), ACC)
            m = T.alloc_fragment((tile_m,), ACC)
            m_old = T.alloc_fragment((tile_m,), ACC)
            rescale = T.alloc_fragment((tile_m,), ACC)
            row_sum = T.alloc_fragment((tile_m,), ACC)
            total = T.alloc_fragment((tile_m,), ACC)
            last_read = T.alloc_var(dtype)
            # a variable: lengths written out in a condition are taken for ones that threads differ in
            edge = T.alloc_var("int32")
            q_start = cu_q[seq]
            k_start = padded(cu_k, seq)
            n_q = cu_q[seq + 1] - q_start
            n_k = cu_k[seq + 1] - cu_k[seq]
            kv_head = T.alloc_var("int32")
            kv_head = head // groups
            scale_log2 = T.alloc_var(ACC)
            scale_log2 = exponent * LOG2_E
            row_0 = (T.ceildiv(max_q, tile_m) - 1 - block) * tile_m
            # row i of the tile sees key j where j <= last_0 + i; a variable like `edge`, without which some tiles do not lower
            last_0 = row_0 + bottom * (n_k - n_q)
            if not ahead:
                last_0 = T.alloc_var("int32")
                last_0 = row_0 + bottom * (n_k - n_q)
            if row_0 < n_q:
                # rows beyond the sequence are another sequence's: their results are not stored
                T.copy(Q[q_start + row_0 : q_start + row_0 + tile_m, head, 0:dim_qk], q_tile)
                T.fill(acc, 0)
                T.fill(total, 0)
                T.fill(m, -T.infinity(ACC))
                end = T.max(0, T.min(n_k, last_0 + tile_m)) if causal else n_k
                # at least one step: the wait for q_tile is in the loop
                steps = T.max(1, T.ceildiv(end, tile_n))
                if ahead:
                    T.fill(p, 0)
                    T.copy(PV[k_start + (steps - 1) * tile_n : k_start + steps * tile_n, kv_head, 0:dim_v], v_last)
                for step in T.Pipelined(steps, num_stages=stages):
                    key_0 = step * tile_n
                    T.copy(PK[k_start + key_0 : k_start + key_0 + tile_n, kv_head, 0:dim_qk], k_tile)
                    if ahead:
                        # of the previous tile; before the first one P is 0
                        before = k_start + T.max(0, key_0 - tile_n)
                        T.copy(PV[before : before + tile_n, kv_head, 0:dim_v], v_tile)
                        T.wgmma_gemm(q_tile, k_tile, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                        T.wgmma_gemm(p, v_tile, acc, policy=T.GemmWarpPolicy.FullRow)
                        T.wait_wgmma(1)
                        # a tile is released after the last statement that reads it, even if products it started still run
                        last_read = q_tile[0, 0] + k_tile[0, 0] + v_last[0, 0]
                    else:
                        # the product is added to the mask
                        T.clear(s)
                    # only in tiles that the mask's edge crosses, where that lowers: in single precision it does not always
                    edge = T.min(n_k, last_0 + 1) if causal else n_k
                    if not ahead or key_0 + tile_n > edge:
                        if causal:
                            for i, j in T.Parallel(tile_m, tile_n):
                                s[i, j] = T.if_then_else(key_0 + j < n_k and key_0 + j <= last_0 + i, s[i, j], -T.infinity(ACC))
                        else:
                            for i, j in T.Parallel(tile_m, tile_n):
                                s[i, j] = T.if_then_else(key_0 + j < n_k, s[i, j], -T.infinity(ACC))
                    if not ahead:
                        T.gemm(q_tile, k_tile, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                        T.copy(PV[k_start + key_0 : k_start + key_0 + tile_n, kv_head, 0:dim_v], v_tile)
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
                    if ahead:
                        T.wait_wgmma(0)
                        last_read = v_tile[0, 0]  # noqa: F841
                    for i, d in T.Parallel(tile_m, dim_v):
                        acc[i, d] = acc[i, d] * rescale[i]
                    T.copy(s, p)
                    if not ahead:
                        T.gemm(p, v_tile, acc, policy=T.GemmWarpPolicy.FullRow)
                if ahead:
                    T.gemm(p, v_last, acc, policy=T.GemmWarpPolicy.FullRow)
                for i, d in T.Parallel(tile_m, dim_v):
                    if row_0 + i < n_q:
                        O[q_start + row_0 + i, head, d] = T.if_then_else(total[i] > 0, acc[i, d] / total[i], 0.0)
                for i in T.Parallel(tile_m):
                    if row_0 + i < n_q:
                        LSE[head, q_start + row_0 + i] = T.if_then_else(
                            total[i] > 0, m[i] * exponent + T.log(total[i]), -T.infinity(ACC)
                        )

    return ragged_forward


def preprocess(*, dim_v: int, dtype: str) -> Any:
    """PrimFunc (O, dO, LSE, cu_q, max_q, PDelta, PLSE2): products and sums in fp32, one block per 16 rows, head and sequence.

    After a sequence's end Delta is 0 and LSE2 is +inf, so that P is 0 there.
    """
    batch_1, total_q, heads, rows_q = (T.dynamic(n) for n in ("batch_1", "total_q", "heads", "rows_q"))

    @T.prim_func
    def ragged_preprocess(
        O: T.Tensor((total_q, heads, dim_v), dtype),  # noqa: E741
        dO: T.Tensor((total_q, heads, dim_v), dtype),
        LSE: T.Tensor((heads, total_q), ACC),
        cu_q: T.Tensor((batch_1,), "int32"),
        max_q: T.int32,
        PDelta: T.Tensor((heads, rows_q), ACC),
        PLSE2: T.Tensor((heads, rows_q), ACC),
    ):
        with T.Kernel(T.max(1, T.ceildiv(max_q, PAD)) * (PAD // ROWS), heads, batch_1 - 1, threads=ROWS * PARTS) as (
            block, head, seq,
        ):  # fmt: skip
            product = T.alloc_fragment((ROWS, PARTS), ACC)
            delta = T.alloc_fragment((ROWS,), ACC)
            start = cu_q[seq]
            n_q = cu_q[seq + 1] - start
            row_0 = block * ROWS
            if row_0 < padded_rows(n_q):
                T.clear(product)
                for part in T.serial(dim_v // PARTS):
                    for i, d in T.Parallel(ROWS, PARTS):
                        if row_0 + i < n_q:
                            product[i, d] += T.cast(O[start + row_0 + i, head, part * PARTS + d], ACC) * T.cast(
                                dO[start + row_0 + i, head, part * PARTS + d], ACC
                            )
                T.reduce_sum(product, delta, dim=1)
                for i in T.Parallel(ROWS):
                    PDelta[head, padded(cu_q, seq) + row_0 + i] = delta[i]
                    PLSE2[head, padded(cu_q, seq) + row_0 + i] = T.if_then_else(
                        row_0 + i < n_q and LSE[head, start + row_0 + i] > -T.infinity(ACC),
                        LSE[head, start + row_0 + i] * LOG2_E,
                        T.infinity(ACC),
                    )

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
    """PrimFunc (PQ, PK, PV, PdO, PLSE2, PDelta, cu_q, cu_k, max_k, groups, bottom, exponent, scale, PdQ, PdK, PdV).

    One block per key tile, query head and sequence.

    PdQ / scale is fp32 and starts as zeros: blocks add to it. PdK and PdV are fp32; the shares of a group's query heads are

        atomic  added to zeros, once for each block, (rows_k, kv_heads, dim)
        split   stored, one per query head, (rows_k, heads, dim), for `finish` to sum

    Where WGMMA takes all products, they are waited for only where their results are used.
    """
    threads = min(threads, 2 * tile_n)
    pipelined = by_wgmma(dtype, threads)
    # a tf32 product takes its left operand in another register layout than a product leaves behind: by way of shared memory
    alloc_operand = T.alloc_shared if dtype == "float32" else T.alloc_fragment
    batch_1, rows_q, rows_k, heads, kv_heads = (T.dynamic(n) for n in ("batch_1", "rows_q", "rows_k", "heads", "kv_heads"))
    key_heads = kv_heads if reduction == "atomic" else heads

    @T.prim_func
    def ragged_backward(
        PQ: T.Tensor((rows_q, heads, dim_qk), dtype),
        PK: T.Tensor((rows_k, kv_heads, dim_qk), dtype),
        PV: T.Tensor((rows_k, kv_heads, dim_v), dtype),
        PdO: T.Tensor((rows_q, heads, dim_v), dtype),
        PLSE2: T.Tensor((heads, rows_q), ACC),
        PDelta: T.Tensor((heads, rows_q), ACC),
        cu_q: T.Tensor((batch_1,), "int32"),
        cu_k: T.Tensor((batch_1,), "int32"),
        max_k: T.int32,
        groups: T.int32,
        bottom: T.int32,
        exponent: T.float32,
        scale: T.float32,
        PdQ: T.Tensor((rows_q, heads, dim_qk), ACC),
        PdK: T.Tensor((rows_k, key_heads, dim_qk), ACC),
        PdV: T.Tensor((rows_k, key_heads, dim_v), ACC),
    ):
        with T.Kernel(heads, T.ceildiv(max_k, tile_n), batch_1 - 1, threads=threads) as (head, block, seq):
            if threads < 128:
                # registers can only be moved between whole warpgroups
                T.disable_warp_group_reg_alloc()
            else:
                # not left to the compiler: with a variable such as `offset` it moves none, for half the speed
                T.annotate_producer_reg_dealloc(PRODUCER_REGISTERS)
                T.annotate_consumer_reg_alloc(consumer_registers(threads))
            k_tile = T.alloc_shared((tile_n, dim_qk), dtype)
            v_tile = T.alloc_shared((tile_n, dim_v), dtype)
            q_tile = T.alloc_shared((tile_m, dim_qk), dtype)
            do_tile = T.alloc_shared((tile_m, dim_v), dtype)
            lse2 = T.alloc_shared((tile_m,), ACC)
            delta = T.alloc_shared((tile_m,), ACC)
            ds_tile = T.alloc_shared((tile_n, tile_m), dtype)
            # transposed: keys are rows, so that P and dS feed the dV and dK products from registers
            p = T.alloc_fragment((tile_n, tile_m), ACC)
            p_half = alloc_operand((tile_n, tile_m), dtype)
            ds = T.alloc_fragment((tile_n, tile_m), ACC)
            ds_half = alloc_operand((tile_n, tile_m), dtype)
            dq_tile = T.alloc_shared((tile_m, dim_qk), ACC)
            dk_tile = T.alloc_shared((tile_n, dim_qk), ACC)
            # one tile if possible: under the condition below it shares no memory with the tiles of the loop
            dv_tile = dk_tile if dim_v == dim_qk else T.alloc_shared((tile_n, dim_v), ACC)
            dq_acc = T.alloc_fragment((tile_m, dim_qk), ACC)
            dk_acc = T.alloc_fragment((tile_n, dim_qk), ACC)
            dv_acc = T.alloc_fragment((tile_n, dim_v), ACC)
            last_read = T.alloc_var(dtype)
            # a variable: lengths written out in a condition are taken for ones that threads differ in
            edge = T.alloc_var("int32")
            q_start = padded(cu_q, seq)
            k_start = padded(cu_k, seq)
            n_q = cu_q[seq + 1] - cu_q[seq]
            n_k = cu_k[seq + 1] - cu_k[seq]
            kv_head = T.alloc_var("int32")
            kv_head = head // groups
            scale_log2 = T.alloc_var(ACC)
            scale_log2 = exponent * LOG2_E
            # a variable like `edge`: written out in the mask, tiles of 64 keys by 64 dims do not lower
            offset = T.alloc_var("int32")
            offset = bottom * (n_k - n_q)
            key_0 = block * tile_n
            if key_0 < n_k:
                T.copy(PK[k_start + key_0 : k_start + key_0 + tile_n, kv_head, 0:dim_qk], k_tile)
                T.copy(PV[k_start + key_0 : k_start + key_0 + tile_n, kv_head, 0:dim_v], v_tile)
                T.clear(dk_acc)
                T.clear(dv_acc)
                # at least one step, as the wait for k_tile is in the loop: dk_tile may lie in the same memory
                begin = T.max(0, T.min(key_0 - offset, n_q - 1)) // tile_m if causal else 0
                for step in T.Pipelined(begin, T.max(1, T.ceildiv(n_q, tile_m)), num_stages=stages):
                    row_0 = step * tile_m
                    T.copy(PQ[q_start + row_0 : q_start + row_0 + tile_m, head, 0:dim_qk], q_tile)
                    T.copy(PLSE2[head, q_start + row_0 : q_start + row_0 + tile_m], lse2)
                    T.copy(PDelta[head, q_start + row_0 : q_start + row_0 + tile_m], delta)
                    T.copy(PdO[q_start + row_0 : q_start + row_0 + tile_m, head, 0:dim_v], do_tile)
                    if pipelined:
                        T.wgmma_gemm(k_tile, q_tile, p, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                        T.wgmma_gemm(v_tile, do_tile, ds, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                        T.wait_wgmma(1)
                    else:
                        T.clear(p)
                    # only in tiles that the mask's edge crosses
                    edge = T.min(n_k, row_0 + offset + 1) if causal else n_k
                    if key_0 + tile_n > edge:
                        if causal:
                            for j, i in T.Parallel(tile_n, tile_m):
                                p[j, i] = T.if_then_else(
                                    key_0 + j < n_k and key_0 + j <= row_0 + i + offset, p[j, i], -T.infinity(ACC)
                                )
                        else:
                            for j, i in T.Parallel(tile_n, tile_m):
                                p[j, i] = T.if_then_else(key_0 + j < n_k, p[j, i], -T.infinity(ACC))
                    if not pipelined:
                        T.gemm(k_tile, q_tile, p, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                        T.gemm(v_tile, do_tile, ds, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                    for j, i in T.Parallel(tile_n, tile_m):
                        p[j, i] = T.exp2(p[j, i] * scale_log2 - lse2[i])
                    T.copy(p, p_half)
                    if pipelined:
                        T.wgmma_gemm(p_half, do_tile, dv_acc, policy=T.GemmWarpPolicy.FullRow)
                        T.wait_wgmma(1)
                    else:
                        T.gemm(p_half, do_tile, dv_acc, policy=T.GemmWarpPolicy.FullRow)
                    for j, i in T.Parallel(tile_n, tile_m):
                        ds_half[j, i] = p[j, i] * (ds[j, i] - delta[i])
                    if pipelined:
                        T.wgmma_gemm(ds_half, q_tile, dk_acc, policy=T.GemmWarpPolicy.FullRow)
                        T.copy(ds_half, ds_tile)
                        T.wgmma_gemm(ds_tile, k_tile, dq_acc, transpose_A=True, clear_accum=True)
                        T.wait_wgmma(0)
                        last_read = q_tile[0, 0] + do_tile[0, 0]  # noqa: F841
                    else:
                        T.gemm(ds_half, q_tile, dk_acc, policy=T.GemmWarpPolicy.FullRow)
                        T.copy(ds_half, ds_tile)
                        T.gemm(ds_tile, k_tile, dq_acc, transpose_A=True, clear_accum=True)
                    T.copy(dq_acc, dq_tile)
                    T.atomic_add(PdQ[q_start + row_0 : q_start + row_0 + tile_m, head, 0:dim_qk], dq_tile, annotations=BY_TMA)
                for j, d in T.Parallel(tile_n, dim_qk):
                    dk_acc[j, d] = dk_acc[j, d] * scale
                if reduction == "atomic":
                    T.copy(dk_acc, dk_tile)
                    T.atomic_add(PdK[k_start + key_0 : k_start + key_0 + tile_n, kv_head, 0:dim_qk], dk_tile, annotations=BY_TMA)
                    T.copy(dv_acc, dv_tile)
                    T.atomic_add(PdV[k_start + key_0 : k_start + key_0 + tile_n, kv_head, 0:dim_v], dv_tile, annotations=BY_TMA)
                else:
                    T.copy(dk_acc, PdK[k_start + key_0 : k_start + key_0 + tile_n, head, 0:dim_qk])
                    T.copy(dv_acc, PdV[k_start + key_0 : k_start + key_0 + tile_n, head, 0:dim_v])

    return ragged_backward


def finish(*, dim: int, dtype: str) -> Any:
    """PrimFunc (PX, cu, longest, groups, scale, X): each sequence's rows of `scale * PX`, groups summed in fp32, in `dtype`.

    PX (rows, heads * groups, dim) fp32; X (total, heads, dim).
    """
    batch_1, total, heads, of_heads, rows = (T.dynamic(n) for n in ("batch_1", "total", "heads", "of_heads", "rows"))

    @T.prim_func
    def ragged_finish(
        PX: T.Tensor((rows, of_heads, dim), ACC),
        cu: T.Tensor((batch_1,), "int32"),
        longest: T.int32,
        groups: T.int32,
        scale: T.float32,
        X: T.Tensor((total, heads, dim), dtype),
    ):
        with T.Kernel(T.ceildiv(longest, ROWS) * (batch_1 - 1), heads, threads=128) as (place, head):
            share = T.alloc_fragment((ROWS, dim), ACC)
            seq = place % (batch_1 - 1)
            block = place // (batch_1 - 1)
            start = cu[seq]
            n = cu[seq + 1] - start
            row_0 = block * ROWS
            if row_0 < n:
                T.clear(share)
                for group in T.serial(groups):
                    for i, d in T.Parallel(ROWS, dim):
                        share[i, d] += PX[padded(cu, seq) + row_0 + i, head * groups + group, d]
                for i, d in T.Parallel(ROWS, dim):
                    if row_0 + i < n:
                        X[start + row_0 + i, head, d] = share[i, d] * scale

    return ragged_finish
