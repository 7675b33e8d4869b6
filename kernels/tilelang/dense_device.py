"""Dense attention as TileLang PrimFuncs: forward, preprocess, backward. MHA and GQA share them.

Shapes (batch, n_q, n_k, heads and kv_heads are dynamic): Q, dQ (batch, n_q, heads, dim_qk); O, dO (batch, n_q, heads, dim_v);
K (batch, n_k, kv_heads, dim_qk); V (batch, n_k, kv_heads, dim_v); LSE, LSE2, Delta (batch, heads, n_q) fp32. On CUDA every
tensor has its own strides, the last one 1, so that other orders of dimensions and rows beyond n_q and n_k cost nothing. Tiles
that reach beyond a sequence are read as zeros and clipped when they are stored; on sm_90 the tensor memory accelerator does both.
With `visible(i, j)` = j < n_k, and under `causal` also j <= i + offset,

    s_ij = scale * q_i . k_j        LSE_i = log sum_{visible j} exp(s_ij)       P_ij = exp(s_ij - LSE_i)
    O_i = sum_j P_ij v_j            Delta_i = sum_d O_id dO_id                  dS_ij = P_ij (dO_i . v_j - Delta_i)
    dQ_i = scale sum_j dS_ij k_j    dK_j = scale sum_{group, i} dS_ij q_i       dV_j = sum_{group, i} P_ij dO_i

LSE2_i is LSE_i log2(e), or +inf for a row that sees no key, so that P_ij = exp2(s_ij log2(e) - LSE2_i) is 0 there.

`exponent` is scale, but greater than 0 where scale is 0: masked scores are -inf, and -inf * 0 is NaN. A row that sees no key
has O = 0 and LSE = -inf. `offset` is n_k - n_q for a mask aligned at the bottom right, 0 at the top left.

`score` and `mask`, trees as a Problem holds them, are compiled in: s_ij becomes f(s_ij), dS_ij is multiplied by f'(s_ij), and
`visible(i, j)` is j < n_k and the mask. The mask must then include the causal one, since `causal` only bounds the loops.
"""

# No `from __future__ import annotations`: TileLang evaluates the annotations of a PrimFunc as it builds it.
import math
from typing import Any, Literal

from attnfuzz.kernels.expressions.tree import Data
from attnfuzz.kernels.tilelang.printer import printed

try:
    import tilelang.language as T
except ImportError:  # a machine without TileLang can still import this module and read its source
    T = None

__all__ = ["backward", "block_threads", "forward", "preprocess"]

LOG2_E = math.log2(math.e)
ACC = "float32"
BY_TMA = {"use_tma": 1}
"""An atomic addition of a tile by the tensor memory accelerator: sm_90 and later; ignored on the CPU."""
Reduction = Literal["none", "atomic", "split"]
PRODUCER_REGISTERS = 24
HEADS_TOGETHER = 4
ROWS, PARTS = 16, 16
"""Rows of a block of the preprocess, and threads per row."""


def block_threads(options: dict[str, Any]) -> int:
    """Threads of a block: a warp has 16 rows of its tile, so that a small tile has fewer than `threads`."""
    rows = options.get("tile_n" if "reduction" in options else "tile_m")
    return options.get("threads", 128) if rows is None else min(options["threads"], 2 * rows)


def by_wgmma(dtype: str, threads: int) -> bool:
    """Whether all products can be asynchronous ones of whole warpgroups, which take no single precision from registers."""
    return dtype != "float32" and threads >= 128


def consumer_registers(threads: int) -> int:
    """Registers per computing thread, next to a loading warpgroup with PRODUCER_REGISTERS: 65,536 in all."""
    return 240 if threads <= 256 else 160


def _tensor(name: str, shape: tuple[Any, ...], dtype: str, strided: bool) -> Any:
    """A parameter; with `strided`, every stride but the last is dynamic and may exceed 2^31 elements."""
    if not strided:
        return T.Tensor(shape, dtype)
    strides = tuple(T.dynamic(f"{name}_stride_{axis}", "int64") for axis in range(len(shape) - 1))
    return T.StridedTensor(shape, (*strides, 1), dtype)


def forward(
    *,
    dim_qk: int,
    dim_v: int,
    causal: bool,
    dtype: str,
    tile_m: int,
    tile_n: int,
    threads: int,
    stages: int,
    strided: bool,
    score: Data | None = None,
    mask: Data | None = None,
) -> Any:
    """PrimFunc (Q, K, V, groups, offset, exponent, O, LSE): one block per query tile, head and sequence.

    Blocks with most keys come first. Where WGMMA takes both products (`by_wgmma`), a tile's P V overlaps the next one's softmax.
    """
    threads = min(threads, 2 * tile_m)
    ahead = by_wgmma(dtype, threads)
    trees = printed(score, mask)
    changed = trees is not None
    # a tf32 product takes its left operand in another register layout than a product leaves behind: by way of shared memory
    alloc_operand = T.alloc_shared if dtype == "float32" else T.alloc_fragment
    batch, n_q, n_k, heads, kv_heads = (T.dynamic(n) for n in ("batch", "n_q", "n_k", "heads", "kv_heads"))

    @T.prim_func
    def dense_forward(
        Q: _tensor("q", (batch, n_q, heads, dim_qk), dtype, strided),
        K: _tensor("k", (batch, n_k, kv_heads, dim_qk), dtype, strided),
        V: _tensor("v", (batch, n_k, kv_heads, dim_v), dtype, strided),
        groups: T.int32,
        offset: T.int32,
        exponent: T.float32,
        O: _tensor("o", (batch, n_q, heads, dim_v), dtype, strided),  # noqa: E741
        LSE: _tensor("lse", (batch, heads, n_q), ACC, strided),
    ):
        with T.Kernel(T.ceildiv(n_q, tile_m), heads, batch, threads=threads) as (block, head, seq):
            if threads >= 128:
                T.annotate_producer_reg_dealloc(PRODUCER_REGISTERS)
                T.annotate_consumer_reg_alloc(consumer_registers(threads))
            q_tile = T.alloc_shared((tile_m, dim_qk), dtype)
            k_tile = T.alloc_shared((tile_n, dim_qk), dtype)
            v_tile = T.alloc_shared((tile_n, dim_v), dtype)
            v_last = T.alloc_shared((tile_n, dim_v), dtype) if ahead else v_tile
            s = T.alloc_fragment((tile_m, tile_n), ACC)
            p = alloc_operand((tile_m, tile_n), dtype)
            o_tile = T.alloc_shared((tile_m, dim_v), dtype)
            acc = T.alloc_fragment((tile_m, dim_v), ACC)
            m = T.alloc_fragment((tile_m,), ACC)
            m_old = T.alloc_fragment((tile_m,), ACC)
            rescale = T.alloc_fragment((tile_m,), ACC)
            row_sum = T.alloc_fragment((tile_m,), ACC)
            total = T.alloc_fragment((tile_m,), ACC)
            last_read = T.alloc_var(dtype)
            kv_head = T.alloc_var("int32")
            kv_head = head // groups
            scale_log2 = T.alloc_var(ACC)
            # scores changed by a tree are scaled already
            scale_log2 = (1.0 if changed else exponent) * LOG2_E
            row_0 = (T.ceildiv(n_q, tile_m) - 1 - block) * tile_m
            T.copy(Q[seq, row_0 : row_0 + tile_m, head, 0:dim_qk], q_tile)
            T.fill(acc, 0)
            T.fill(total, 0)
            T.fill(m, -T.infinity(ACC))
            end = T.max(0, T.min(n_k, row_0 + tile_m + offset)) if causal else n_k
            # at least one, as the wait for q_tile is in the loop: o_tile may lie in the same memory
            steps = T.max(1, T.ceildiv(end, tile_n))
            if ahead:
                T.fill(p, 0)
                T.copy(V[seq, (steps - 1) * tile_n : steps * tile_n, kv_head, 0:dim_v], v_last)
            for step in T.Pipelined(steps, num_stages=stages):
                key_0 = step * tile_n
                T.copy(K[seq, key_0 : key_0 + tile_n, kv_head, 0:dim_qk], k_tile)
                if ahead:
                    # of the previous tile; before the first one P is 0
                    T.copy(V[seq, T.max(0, key_0 - tile_n) : T.max(0, key_0 - tile_n) + tile_n, kv_head, 0:dim_v], v_tile)
                    T.wgmma_gemm(q_tile, k_tile, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                    T.wgmma_gemm(p, v_tile, acc, policy=T.GemmWarpPolicy.FullRow)
                    T.wait_wgmma(1)
                    # a tile is released after the last statement that reads it, even if products it started still run
                    last_read = q_tile[0, 0] + k_tile[0, 0] + v_last[0, 0]
                else:
                    T.gemm(q_tile, k_tile, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                    T.copy(V[seq, key_0 : key_0 + tile_n, kv_head, 0:dim_v], v_tile)
                # only in tiles that the mask's edge crosses
                if changed:
                    for i, j in T.Parallel(tile_m, tile_n):
                        s[i, j] = trees.changed(s[i, j] * exponent, (seq, head, row_0 + i, key_0 + j, n_q, n_k))
                elif causal:
                    if key_0 + tile_n > T.min(n_k, row_0 + offset + 1):
                        for i, j in T.Parallel(tile_m, tile_n):
                            s[i, j] = T.if_then_else(
                                key_0 + j < n_k and key_0 + j <= row_0 + i + offset, s[i, j], -T.infinity(ACC)
                            )
                else:
                    if key_0 + tile_n > n_k:
                        for i, j in T.Parallel(tile_m, tile_n):
                            s[i, j] = T.if_then_else(key_0 + j < n_k, s[i, j], -T.infinity(ACC))
                T.copy(m, m_old)
                T.reduce_max(s, m, dim=1, clear=False)
                # a row that has seen no key yet has m = -inf, and -inf - -inf is NaN
                for i in T.Parallel(tile_m):
                    rescale[i] = T.if_then_else(m_old[i] == -T.infinity(ACC), 0.0, T.exp2((m_old[i] - m[i]) * scale_log2))
                if changed:
                    # not as below: one rounding of a product and a difference leaves 1e30 of the maximum itself, if that is -1e38
                    for i, j in T.Parallel(tile_m, tile_n):
                        s[i, j] = T.exp2((s[i, j] - T.if_then_else(m[i] == -T.infinity(ACC), 0.0, m[i])) * scale_log2)
                else:
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
                acc[i, d] = T.if_then_else(total[i] > 0, acc[i, d] / total[i], 0.0)
            T.copy(acc, o_tile)
            T.copy(o_tile, O[seq, row_0 : row_0 + tile_m, head, 0:dim_v])
            for i in T.Parallel(tile_m):
                if row_0 + i < n_q:
                    LSE[seq, head, row_0 + i] = T.if_then_else(
                        total[i] > 0, m[i] * (1.0 if changed else exponent) + T.log(total[i]), -T.infinity(ACC)
                    )

    return dense_forward


def preprocess(*, dim_v: int, dtype: str, strided: bool) -> Any:
    """PrimFunc (O, dO, LSE, Delta, LSE2): products and sums in fp32, one block per 16 rows, head and sequence."""
    batch, n_q, heads = (T.dynamic(n) for n in ("batch", "n_q", "heads"))

    @T.prim_func
    def dense_preprocess(
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

    return dense_preprocess


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
    pipelined: bool,
    strided: bool,
    score: Data | None = None,
    mask: Data | None = None,
) -> Any:
    """PrimFunc (Q, K, V, dO, LSE2, Delta, groups, offset, exponent, scale, dQ, dK, dV), a block per key tile, head and sequence.

    dQ / scale is fp32 and starts as zeros: blocks add whole tiles to it. `reduction` is what happens to the shares
    of dK and dV of a group's query heads:

        none    the only ones (groups = 1): stored in `dtype`, (batch, n_k, heads, dim)
        atomic  added to fp32 zeros, (batch, n_k, kv_heads, dim)
        split   stored in fp32, one per query head, (batch, n_k, heads, dim), for the caller to sum

    `pipelined`: products are only waited for where their results are used, so that P is computed during dO V^T, and dS during
    P^T dO. Only where WGMMA takes them (`by_wgmma`), and without trees, which need both products at once.
    """
    threads = min(threads, 2 * tile_n)
    trees = printed(score, mask)
    changed = trees is not None
    pipelined = pipelined and by_wgmma(dtype, threads) and not changed
    # a tf32 product takes its left operand in another register layout than a product leaves behind: by way of shared memory
    alloc_operand = T.alloc_shared if dtype == "float32" else T.alloc_fragment
    batch, n_q, n_k, heads, kv_heads = (T.dynamic(n) for n in ("batch", "n_q", "n_k", "heads", "kv_heads"))
    key_heads = kv_heads if reduction == "atomic" else heads
    key_dtype = dtype if reduction == "none" else ACC

    @T.prim_func
    def dense_backward(
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
        with T.Kernel(heads, T.ceildiv(n_k, tile_n), batch, threads=threads) as (x, y, seq):
            if threads < 128:
                # registers can only be moved between whole warpgroups
                T.disable_warp_group_reg_alloc()
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
            dk_tile = T.alloc_shared((tile_n, dim_qk), key_dtype)
            dv_tile = T.alloc_shared((tile_n, dim_v), key_dtype)
            dq_acc = T.alloc_fragment((tile_m, dim_qk), ACC)
            dq_tile = T.alloc_shared((tile_m, dim_qk), ACC)
            dk_acc = T.alloc_fragment((tile_n, dim_qk), ACC)
            dv_acc = T.alloc_fragment((tile_n, dim_v), ACC)
            last_read = T.alloc_var(dtype)
            head = T.alloc_var("int32")
            block = T.alloc_var("int32")
            kv_head = T.alloc_var("int32")
            # blocks run a few heads after another: their Q, dO and dQ fit the L2 cache
            blocks = T.ceildiv(n_k, tile_n)
            number = y * heads + x
            first_head = number // (HEADS_TOGETHER * blocks) * HEADS_TOGETHER
            together = T.min(HEADS_TOGETHER, heads - first_head)
            block = (number - first_head * blocks) // together
            head = first_head + (number - first_head * blocks) % together
            kv_head = head // groups
            scale_log2 = T.alloc_var(ACC)
            scale_log2 = (1.0 if changed else exponent) * LOG2_E
            key_0 = block * tile_n
            T.copy(K[seq, key_0 : key_0 + tile_n, kv_head, 0:dim_qk], k_tile)
            T.copy(V[seq, key_0 : key_0 + tile_n, kv_head, 0:dim_v], v_tile)
            T.clear(dk_acc)
            T.clear(dv_acc)
            # at least one step, as the wait for k_tile is in the loop: dk_tile may lie in the same memory
            begin = T.min(T.max(0, key_0 - offset), n_q - 1) // tile_m if causal else 0
            for step in T.Pipelined(begin, T.ceildiv(n_q, tile_m), num_stages=stages):
                row_0 = step * tile_m
                T.copy(Q[seq, row_0 : row_0 + tile_m, head, 0:dim_qk], q_tile)
                # rows beyond n_q are all 0, and so is their share
                T.copy(LSE2[seq, head, row_0 : row_0 + tile_m], lse2)
                T.copy(Delta[seq, head, row_0 : row_0 + tile_m], delta)
                T.copy(dO[seq, row_0 : row_0 + tile_m, head, 0:dim_v], do_tile)
                if pipelined:
                    T.wgmma_gemm(k_tile, q_tile, p, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                    T.wgmma_gemm(v_tile, do_tile, ds, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                    T.wait_wgmma(1)
                else:
                    T.gemm(k_tile, q_tile, p, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                    T.gemm(v_tile, do_tile, ds, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                # only in tiles that the mask's edge crosses
                if changed:
                    for j, i in T.Parallel(tile_n, tile_m):
                        ds[j, i] = trees.sloped(
                            ds[j, i] - delta[i], p[j, i] * exponent, (seq, head, row_0 + i, key_0 + j, n_q, n_k)
                        )
                    for j, i in T.Parallel(tile_n, tile_m):
                        p[j, i] = trees.changed(p[j, i] * exponent, (seq, head, row_0 + i, key_0 + j, n_q, n_k))
                elif causal:
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
                if pipelined:
                    T.wgmma_gemm(p_half, do_tile, dv_acc, policy=T.GemmWarpPolicy.FullRow)
                    T.wait_wgmma(1)
                else:
                    T.gemm(p_half, do_tile, dv_acc, policy=T.GemmWarpPolicy.FullRow)
                for j, i in T.Parallel(tile_n, tile_m):
                    ds_half[j, i] = p[j, i] * (ds[j, i] if changed else ds[j, i] - delta[i])
                if pipelined:
                    T.wgmma_gemm(ds_half, q_tile, dk_acc, policy=T.GemmWarpPolicy.FullRow)
                    T.copy(ds_half, ds_tile)
                    T.wgmma_gemm(ds_tile, k_tile, dq_acc, transpose_A=True, clear_accum=True)
                    T.wait_wgmma(0)
                    # a tile is released after the last statement that reads it, even if products it started still run
                    last_read = q_tile[0, 0] + do_tile[0, 0]  # noqa: F841
                else:
                    T.gemm(ds_half, q_tile, dk_acc, policy=T.GemmWarpPolicy.FullRow)
                    T.copy(ds_half, ds_tile)
                    T.gemm(ds_tile, k_tile, dq_acc, transpose_A=True, clear_accum=True)
                T.copy(dq_acc, dq_tile)
                T.atomic_add(dQ[seq, row_0 : row_0 + tile_m, head, 0:dim_qk], dq_tile, annotations=BY_TMA)
            for j, d in T.Parallel(tile_n, dim_qk):
                dk_acc[j, d] = dk_acc[j, d] * scale
            if reduction == "atomic":
                T.copy(dk_acc, dk_tile)
                T.atomic_add(dK[seq, key_0 : key_0 + tile_n, kv_head, 0:dim_qk], dk_tile, annotations=BY_TMA)
                T.copy(dv_acc, dv_tile)
                T.atomic_add(dV[seq, key_0 : key_0 + tile_n, kv_head, 0:dim_v], dv_tile, annotations=BY_TMA)
            elif reduction == "none":
                T.copy(dk_acc, dk_tile)
                T.copy(dk_tile, dK[seq, key_0 : key_0 + tile_n, head, 0:dim_qk])
                T.copy(dv_acc, dv_tile)
                T.copy(dv_tile, dV[seq, key_0 : key_0 + tile_n, head, 0:dim_v])
            else:
                T.copy(dk_acc, dK[seq, key_0 : key_0 + tile_n, head, 0:dim_qk])
                T.copy(dv_acc, dV[seq, key_0 : key_0 + tile_n, head, 0:dim_v])

    return dense_backward
