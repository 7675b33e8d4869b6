"""Dense attention forward for Blackwell as TileLang PrimFuncs: products by tcgen05, their results in tensor memory.

Shapes and mathematics are those of `dense_device`: Q, O (batch, n_q, heads, dim), K, V (batch, n_k, kv_heads, dim), LSE (batch,
heads, n_q) fp32; batch, n_q, n_k, heads and kv_heads are dynamic. With `visible(i, j)` = j < n_k, and under `causal` also
j <= i + offset,

    s_ij = scale * q_i . k_j        LSE_i = log sum_{visible j} exp(s_ij)       O_i = sum_j exp(s_ij - LSE_i) v_j

A row that sees no key has O = 0 and LSE = -inf. `exponent` is scale, but greater than 0 where scale is 0.

Three variants compute this. In all of them S = Q K^T and the sum O are in tensor memory, one lane per query row, and O is
rescaled there before a tile's P V is added to it:

    forward_ss    128 threads do everything in turn; P goes through shared memory
    forward_ts    256 threads do everything in turn; P goes through tensor memory
    forward_wasp  four warps compute the softmax, one warp copies tiles, one warp issues products; P goes through tensor memory

A product of tcgen05 is asynchronous: each one completes on an mbarrier, and its result, and the memory of its operands, is used
only after a wait for that. The n-th completion of an mbarrier, counted from 0, ends the phase of parity n % 2.
"""

# No `from __future__ import annotations`: TileLang evaluates the annotations of a PrimFunc as it builds it.
import math
from typing import Any, NamedTuple

from attnfuzz.kernels.lowering import Required

try:
    import tilelang.language as T
except ImportError:  # a machine without TileLang can still import this module and read its source
    T = None

__all__ = ["BY_ROLES", "ROLES_BY_HAND", "STAGES", "forward_ss", "forward_ts", "forward_wasp"]

LOG2_E = math.log2(math.e)
ACC = "float32"
STAGES = 2
"""Tiles of K, of V and of S that `forward_wasp` has at once."""
SOFTMAX, DMA, MMA = 128, 160, 192
"""Ends of the thread ranges of `forward_wasp`'s roles: four warps, one warp, one warp."""
WARP = 32
SS_THREADS, TS_THREADS = 128, 256
"""Threads of `forward_ss`, of which each has a row, and of `forward_ts`, of which two share a row."""
PIECE = 32
"""Columns of O that a thread has in registers at once."""
ROLES_BY_HAND = True
"""Whether roles and waits are written out here, so that TileLang must not divide the warps itself."""
REQUIRED = {
    "forward_ss": Required(products=2, left=frozenset({"shared"})),
    "forward_ts": Required(products=2, left=frozenset({"shared", "tensor"})),
    "forward_wasp": Required(products=2, left=frozenset({"shared", "tensor"})),
}
"""What the machine code must have: a product of another family would be a fallback."""
BY_ROLES = ("forward_wasp",)
"""Functions whose branches on the thread's index are roles: on the CPU they run in the executor of `roles`."""


def _tensor(name: str, shape: tuple[Any, ...], dtype: str, strided: bool) -> Any:
    """A parameter; with `strided`, every stride but the last is dynamic and may exceed 2^31 elements."""
    if not strided:
        return T.Tensor(shape, dtype)
    strides = tuple(T.dynamic(f"{name}_stride_{axis}", "int64") for axis in range(len(shape) - 1))
    return T.StridedTensor(shape, (*strides, 1), dtype)


class _Steps(NamedTuple):
    """Macros that the variants share; tiles are fragments of the calling threads, with a row per lane of tensor memory."""

    softmax: Any
    """(s, m, m_old, rescale, row_sum, total, row_0, key_0, n_k, offset, exponent): mask S; S becomes P, m and total follow."""
    rescaled: Any
    """(o_tmem, acc, rescale): multiply the rows of O, piece by piece."""
    written: Any
    """(o_tmem, acc, m, total, O, LSE, seq, head, row_0, n_q, exponent): divide by the total; rows beyond n_q are not stored."""


def _steps(dim_v: int, causal: bool, tile_m: int, tile_n: int) -> _Steps:
    """Make the macros for tiles of one size."""
    part = math.gcd(dim_v, PIECE)

    @T.macro
    def softmax(s, m, m_old, rescale, row_sum, total, row_0, key_0, n_k, offset, exponent):
        # only in tiles that the mask's edge crosses
        if causal:
            if key_0 + tile_n > T.min(n_k, row_0 + offset + 1):
                for i, j in T.Parallel(tile_m, tile_n):
                    s[i, j] = T.if_then_else(key_0 + j < n_k and key_0 + j <= row_0 + i + offset, s[i, j], -T.infinity(ACC))
        else:
            if key_0 + tile_n > n_k:
                for i, j in T.Parallel(tile_m, tile_n):
                    s[i, j] = T.if_then_else(key_0 + j < n_k, s[i, j], -T.infinity(ACC))
        T.copy(m, m_old)
        T.reduce_max(s, m, dim=1, clear=False)
        # a row that has seen no key yet has m = -inf, and -inf - -inf is NaN
        for i in T.Parallel(tile_m):
            rescale[i] = T.if_then_else(m_old[i] == -T.infinity(ACC), 0.0, T.exp2((m_old[i] - m[i]) * (exponent * LOG2_E)))
        for i, j in T.Parallel(tile_m, tile_n):
            s[i, j] = T.exp2(
                s[i, j] * (exponent * LOG2_E) - T.if_then_else(m[i] == -T.infinity(ACC), 0.0, m[i] * (exponent * LOG2_E))
            )
        T.reduce_sum(s, row_sum, dim=1)
        for i in T.Parallel(tile_m):
            total[i] = total[i] * rescale[i] + row_sum[i]

    @T.macro
    def rescaled(o_tmem, acc, rescale):
        for piece in T.serial(dim_v // part):
            T.copy(o_tmem[:, piece * part : (piece + 1) * part], acc)
            for i, d in T.Parallel(tile_m, part):
                acc[i, d] = acc[i, d] * rescale[i]
            T.copy(acc, o_tmem[:, piece * part : (piece + 1) * part])

    @T.macro
    def written(o_tmem, acc, m, total, O, LSE, seq, head, row_0, n_q, exponent):  # noqa: E741
        for piece in T.serial(dim_v // part):
            T.copy(o_tmem[:, piece * part : (piece + 1) * part], acc)
            for i, d in T.Parallel(tile_m, part):
                if row_0 + i < n_q:
                    O[seq, row_0 + i, head, piece * part + d] = T.if_then_else(total[i] > 0, acc[i, d] / total[i], 0.0)
        for i in T.Parallel(tile_m):
            if row_0 + i < n_q:
                LSE[seq, head, row_0 + i] = T.if_then_else(total[i] > 0, m[i] * exponent + T.log(total[i]), -T.infinity(ACC))

    return _Steps(softmax, rescaled, written)


def forward_ss(*, dim_qk: int, dim_v: int, causal: bool, dtype: str, tile_m: int, tile_n: int, strided: bool) -> Any:
    """PrimFunc (Q, K, V, groups, offset, exponent, O, LSE): one block of 128 threads per query tile, head and sequence."""
    batch, n_q, n_k, heads, kv_heads = (T.dynamic(n) for n in ("batch", "n_q", "n_k", "heads", "kv_heads"))
    steps_of = _steps(dim_v, causal, tile_m, tile_n)

    @T.prim_func
    def sm100_forward_ss(
        Q: _tensor("q", (batch, n_q, heads, dim_qk), dtype, strided),
        K: _tensor("k", (batch, n_k, kv_heads, dim_qk), dtype, strided),
        V: _tensor("v", (batch, n_k, kv_heads, dim_v), dtype, strided),
        groups: T.int32,
        offset: T.int32,
        exponent: T.float32,
        O: _tensor("o", (batch, n_q, heads, dim_v), dtype, strided),  # noqa: E741
        LSE: _tensor("lse", (batch, heads, n_q), ACC, strided),
    ):
        with T.Kernel(T.ceildiv(n_q, tile_m), heads, batch, threads=SS_THREADS) as (block, head, seq):
            q_tile = T.alloc_shared((tile_m, dim_qk), dtype)
            k_tile = T.alloc_shared((tile_n, dim_qk), dtype)
            v_tile = T.alloc_shared((tile_n, dim_v), dtype)
            p_tile = T.alloc_shared((tile_m, tile_n), dtype)
            s_tmem = T.alloc_tmem((tile_m, tile_n), ACC)
            o_tmem = T.alloc_tmem((tile_m, dim_v), ACC)
            q_full = T.alloc_barrier(SS_THREADS)
            k_full = T.alloc_barrier(SS_THREADS)
            v_full = T.alloc_barrier(SS_THREADS)
            s_full = T.alloc_barrier(1)
            o_full = T.alloc_barrier(1)
            s = T.alloc_fragment((tile_m, tile_n), ACC)
            acc = T.alloc_fragment((tile_m, math.gcd(dim_v, PIECE)), ACC)
            m = T.alloc_fragment((tile_m,), ACC)
            m_old = T.alloc_fragment((tile_m,), ACC)
            rescale = T.alloc_fragment((tile_m,), ACC)
            row_sum = T.alloc_fragment((tile_m,), ACC)
            total = T.alloc_fragment((tile_m,), ACC)
            row_0 = (T.ceildiv(n_q, tile_m) - 1 - block) * tile_m
            T.tma_copy(Q[seq, row_0 : row_0 + tile_m, head, 0:dim_qk], q_tile, barrier=q_full)
            T.mbarrier_arrive(q_full)
            T.mbarrier_wait_parity(q_full, 0)
            T.fill(total, 0)
            T.fill(m, -T.infinity(ACC))
            end = T.max(0, T.min(n_k, row_0 + tile_m + offset)) if causal else n_k
            # at least one, so that O is written
            for step in T.serial(T.max(1, T.ceildiv(end, tile_n))):
                key_0 = step * tile_n
                T.tma_copy(K[seq, key_0 : key_0 + tile_n, head // groups, 0:dim_qk], k_tile, barrier=k_full)
                T.mbarrier_arrive(k_full)
                T.tma_copy(V[seq, key_0 : key_0 + tile_n, head // groups, 0:dim_v], v_tile, barrier=v_full)
                T.mbarrier_arrive(v_full)
                T.mbarrier_wait_parity(k_full, step % 2)
                T.tcgen05_gemm(q_tile, k_tile, s_tmem, transpose_B=True, mbar=s_full, clear_accum=True)
                T.mbarrier_wait_parity(s_full, step % 2)
                T.copy(s_tmem, s)
                steps_of.softmax(s, m, m_old, rescale, row_sum, total, row_0, key_0, n_k, offset, exponent)
                if step > 0:
                    steps_of.rescaled(o_tmem, acc, rescale)
                T.copy(s, p_tile)
                # every thread has read S, rescaled its part of O and stored its part of P before one warp goes on
                T.tcgen05_before_thread_sync()
                T.fence_proxy_async()
                T.sync_threads()
                T.tcgen05_after_thread_sync()
                T.mbarrier_wait_parity(v_full, step % 2)
                T.tcgen05_gemm(p_tile, v_tile, o_tmem, mbar=o_full, clear_accum=step == 0)
                T.mbarrier_wait_parity(o_full, step % 2)
                T.tcgen05_after_thread_sync()
            steps_of.written(o_tmem, acc, m, total, O, LSE, seq, head, row_0, n_q, exponent)
            # the first warp frees tensor memory after this: not while another one still reads O
            T.sync_threads()

    return sm100_forward_ss


def forward_ts(*, dim_qk: int, dim_v: int, causal: bool, dtype: str, tile_m: int, tile_n: int, strided: bool) -> Any:
    """As `forward_ss`, with 256 threads, of which two share a row, and P in tensor memory."""
    batch, n_q, n_k, heads, kv_heads = (T.dynamic(n) for n in ("batch", "n_q", "n_k", "heads", "kv_heads"))
    steps_of = _steps(dim_v, causal, tile_m, tile_n)

    @T.prim_func
    def sm100_forward_ts(
        Q: _tensor("q", (batch, n_q, heads, dim_qk), dtype, strided),
        K: _tensor("k", (batch, n_k, kv_heads, dim_qk), dtype, strided),
        V: _tensor("v", (batch, n_k, kv_heads, dim_v), dtype, strided),
        groups: T.int32,
        offset: T.int32,
        exponent: T.float32,
        O: _tensor("o", (batch, n_q, heads, dim_v), dtype, strided),  # noqa: E741
        LSE: _tensor("lse", (batch, heads, n_q), ACC, strided),
    ):
        with T.Kernel(T.ceildiv(n_q, tile_m), heads, batch, threads=TS_THREADS) as (block, head, seq):
            q_tile = T.alloc_shared((tile_m, dim_qk), dtype)
            k_tile = T.alloc_shared((tile_n, dim_qk), dtype)
            v_tile = T.alloc_shared((tile_n, dim_v), dtype)
            p_tmem = T.alloc_tmem((tile_m, tile_n), dtype)
            s_tmem = T.alloc_tmem((tile_m, tile_n), ACC)
            o_tmem = T.alloc_tmem((tile_m, dim_v), ACC)
            q_full = T.alloc_barrier(TS_THREADS)
            k_full = T.alloc_barrier(TS_THREADS)
            v_full = T.alloc_barrier(TS_THREADS)
            s_full = T.alloc_barrier(1)
            o_full = T.alloc_barrier(1)
            s = T.alloc_fragment((tile_m, tile_n), ACC)
            p = T.alloc_fragment((tile_m, tile_n), dtype)
            acc = T.alloc_fragment((tile_m, math.gcd(dim_v, PIECE)), ACC)
            m = T.alloc_fragment((tile_m,), ACC)
            m_old = T.alloc_fragment((tile_m,), ACC)
            rescale = T.alloc_fragment((tile_m,), ACC)
            row_sum = T.alloc_fragment((tile_m,), ACC)
            total = T.alloc_fragment((tile_m,), ACC)
            row_0 = (T.ceildiv(n_q, tile_m) - 1 - block) * tile_m
            T.tma_copy(Q[seq, row_0 : row_0 + tile_m, head, 0:dim_qk], q_tile, barrier=q_full)
            T.mbarrier_arrive(q_full)
            T.mbarrier_wait_parity(q_full, 0)
            T.fill(total, 0)
            T.fill(m, -T.infinity(ACC))
            end = T.max(0, T.min(n_k, row_0 + tile_m + offset)) if causal else n_k
            # at least one, so that O is written
            for step in T.serial(T.max(1, T.ceildiv(end, tile_n))):
                key_0 = step * tile_n
                T.tma_copy(K[seq, key_0 : key_0 + tile_n, head // groups, 0:dim_qk], k_tile, barrier=k_full)
                T.mbarrier_arrive(k_full)
                T.tma_copy(V[seq, key_0 : key_0 + tile_n, head // groups, 0:dim_v], v_tile, barrier=v_full)
                T.mbarrier_arrive(v_full)
                T.mbarrier_wait_parity(k_full, step % 2)
                T.tcgen05_gemm(q_tile, k_tile, s_tmem, transpose_B=True, mbar=s_full, clear_accum=True)
                T.mbarrier_wait_parity(s_full, step % 2)
                T.copy(s_tmem, s)
                steps_of.softmax(s, m, m_old, rescale, row_sum, total, row_0, key_0, n_k, offset, exponent)
                if step > 0:
                    steps_of.rescaled(o_tmem, acc, rescale)
                T.copy(s, p)
                T.copy(p, p_tmem)
                # every thread has read S, rescaled its part of O and stored its part of P before one warp goes on
                T.tcgen05_before_thread_sync()
                T.sync_threads()
                T.tcgen05_after_thread_sync()
                T.mbarrier_wait_parity(v_full, step % 2)
                T.tcgen05_gemm(p_tmem, v_tile, o_tmem, mbar=o_full, clear_accum=step == 0)
                T.mbarrier_wait_parity(o_full, step % 2)
                T.tcgen05_after_thread_sync()
            steps_of.written(o_tmem, acc, m, total, O, LSE, seq, head, row_0, n_q, exponent)
            # the first warp frees tensor memory after this: not while another one still reads O
            T.sync_threads()

    return sm100_forward_ts


def forward_wasp(
    *,
    dim_qk: int,
    dim_v: int,
    causal: bool,
    dtype: str,
    tile_m: int,
    tile_n: int,
    strided: bool,
) -> Any:
    """PrimFunc (Q, K, V, groups, offset, exponent, O, LSE): one block per query tile, head and sequence; roles by warps.

    Barriers, the number of arrivals that complete each, and what a completion says:

        q_full, k_full, v_full    32    a tile has been copied: the DMA warp's threads, and the bytes of the copy
        k_free, v_free             1    the product that read the tile has finished, so that the next copy may overwrite it
        s_full, o_full             1    the product that writes S, or adds to O, has finished
        s_free                   128    every softmax thread has read S, so that the next product may overwrite it
        p_full                   128    every softmax thread has stored P and rescaled O

    Those that say "free" are primed once per stage before the loops, since all stages are free then. o_full also says that P
    may be overwritten.
    """
    batch, n_q, n_k, heads, kv_heads = (T.dynamic(n) for n in ("batch", "n_q", "n_k", "heads", "kv_heads"))
    steps_of = _steps(dim_v, causal, tile_m, tile_n)

    @T.prim_func
    def sm100_forward_wasp(
        Q: _tensor("q", (batch, n_q, heads, dim_qk), dtype, strided),
        K: _tensor("k", (batch, n_k, kv_heads, dim_qk), dtype, strided),
        V: _tensor("v", (batch, n_k, kv_heads, dim_v), dtype, strided),
        groups: T.int32,
        offset: T.int32,
        exponent: T.float32,
        O: _tensor("o", (batch, n_q, heads, dim_v), dtype, strided),  # noqa: E741
        LSE: _tensor("lse", (batch, heads, n_q), ACC, strided),
    ):
        with T.Kernel(T.ceildiv(n_q, tile_m), heads, batch, threads=MMA) as (block, head, seq):
            q_tile = T.alloc_shared((tile_m, dim_qk), dtype)
            k_tile = T.alloc_shared((STAGES, tile_n, dim_qk), dtype)
            v_tile = T.alloc_shared((STAGES, tile_n, dim_v), dtype)
            s_tmem = T.alloc_tmem((STAGES, tile_m, tile_n), ACC)
            p_tmem = T.alloc_tmem((tile_m, tile_n), dtype)
            o_tmem = T.alloc_tmem((tile_m, dim_v), ACC)
            q_full = T.alloc_barrier(WARP)
            k_full = T.alloc_barrier([WARP] * STAGES)
            v_full = T.alloc_barrier([WARP] * STAGES)
            k_free = T.alloc_barrier([1] * STAGES)
            v_free = T.alloc_barrier([1] * STAGES)
            s_full = T.alloc_barrier([1] * STAGES)
            s_free = T.alloc_barrier([SOFTMAX] * STAGES)
            p_full = T.alloc_barrier(SOFTMAX)
            o_full = T.alloc_barrier(1)
            s = T.alloc_fragment((tile_m, tile_n), ACC)
            p = T.alloc_fragment((tile_m, tile_n), dtype)
            acc = T.alloc_fragment((tile_m, math.gcd(dim_v, PIECE)), ACC)
            m = T.alloc_fragment((tile_m,), ACC)
            m_old = T.alloc_fragment((tile_m,), ACC)
            rescale = T.alloc_fragment((tile_m,), ACC)
            row_sum = T.alloc_fragment((tile_m,), ACC)
            total = T.alloc_fragment((tile_m,), ACC)
            thread = T.get_thread_binding()
            row_0 = (T.ceildiv(n_q, tile_m) - 1 - block) * tile_m
            end = T.max(0, T.min(n_k, row_0 + tile_m + offset)) if causal else n_k
            # at least one, so that O is written
            steps = T.max(1, T.ceildiv(end, tile_n))

            if thread < SOFTMAX:
                for stage in T.serial(STAGES):
                    T.mbarrier_arrive(s_free[stage])
                T.fill(total, 0)
                T.fill(m, -T.infinity(ACC))
                for step in T.serial(steps):
                    T.mbarrier_wait_parity(s_full[step % STAGES], (step // STAGES) % 2)
                    T.copy(s_tmem[step % STAGES, :, :], s)
                    T.mbarrier_arrive(s_free[step % STAGES])
                    steps_of.softmax(s, m, m_old, rescale, row_sum, total, row_0, step * tile_n, n_k, offset, exponent)
                    T.copy(s, p)
                    if step > 0:
                        T.mbarrier_wait_parity(o_full, (step - 1) % 2)
                        steps_of.rescaled(o_tmem, acc, rescale)
                    T.copy(p, p_tmem)
                    T.mbarrier_arrive(p_full)
                T.mbarrier_wait_parity(o_full, (steps - 1) % 2)
                steps_of.written(o_tmem, acc, m, total, O, LSE, seq, head, row_0, n_q, exponent)
            elif thread < DMA:
                T.tma_copy(Q[seq, row_0 : row_0 + tile_m, head, 0:dim_qk], q_tile, barrier=q_full)
                T.mbarrier_arrive(q_full)
                for step in T.serial(steps):
                    T.mbarrier_wait_parity(k_free[step % STAGES], (step // STAGES) % 2)
                    T.tma_copy(
                        K[seq, step * tile_n : (step + 1) * tile_n, head // groups, 0:dim_qk],
                        k_tile[step % STAGES, :, :],
                        barrier=k_full[step % STAGES],
                    )
                    T.mbarrier_arrive(k_full[step % STAGES])
                    T.mbarrier_wait_parity(v_free[step % STAGES], (step // STAGES) % 2)
                    T.tma_copy(
                        V[seq, step * tile_n : (step + 1) * tile_n, head // groups, 0:dim_v],
                        v_tile[step % STAGES, :, :],
                        barrier=v_full[step % STAGES],
                    )
                    T.mbarrier_arrive(v_full[step % STAGES])
                # no block may end before all products have arrived at its barriers: the last ones free tiles that stay free
                for unused in T.serial(steps, steps + STAGES):
                    T.mbarrier_wait_parity(k_free[unused % STAGES], (unused // STAGES) % 2)
                    T.mbarrier_wait_parity(v_free[unused % STAGES], (unused // STAGES) % 2)
            else:
                if thread == DMA:
                    for stage in T.serial(STAGES):
                        T.mbarrier_arrive(k_free[stage])
                        T.mbarrier_arrive(v_free[stage])
                T.mbarrier_wait_parity(q_full, 0)
                # the first product of a step goes before the second one of the previous step: it runs during that one's softmax
                for step in T.serial(steps + 1):
                    if step < steps:
                        T.mbarrier_wait_parity(k_full[step % STAGES], (step // STAGES) % 2)
                        T.mbarrier_wait_parity(s_free[step % STAGES], (step // STAGES) % 2)
                        T.tcgen05_gemm(
                            q_tile,
                            k_tile[step % STAGES, :, :],
                            s_tmem[step % STAGES, :, :],
                            transpose_B=True,
                            mbar=s_full[step % STAGES],
                            clear_accum=True,
                        )
                        T.tcgen05_mma_arrive(k_free[step % STAGES])
                    if step > 0:
                        T.mbarrier_wait_parity(v_full[(step - 1) % STAGES], ((step - 1) // STAGES) % 2)
                        T.mbarrier_wait_parity(p_full, (step - 1) % 2)
                        T.tcgen05_gemm(p_tmem, v_tile[(step - 1) % STAGES, :, :], o_tmem, mbar=o_full, clear_accum=step == 1)
                        T.tcgen05_mma_arrive(v_free[(step - 1) % STAGES])
            # the first warp frees tensor memory after this: not while another one still reads O
            T.sync_threads()

    return sm100_forward_wasp
