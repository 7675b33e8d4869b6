"""Device code of attention over a paged key/value cache: forward only, for prefill and decoding.

q and o are contiguous `(tokens, heads, dim)`, the caches contiguous `(pages, PAGE, kv_heads, dim)`. Token j of sequence b is row
j % PAGE of page `page_table[b, j // PAGE]`; nothing of a page beyond a sequence's length is read. The arithmetic is that of
varlen_device.py.
"""

try:
    import triton
    import triton.language as tl
except ImportError:
    from attnfuzz.kernels.triton.absent import tl, triton

from attnfuzz.kernels.triton.varlen_device import (
    LN_2,
    _diagonal,
    _inside,
    _kv_head,
    _last_key,
    _offsets,
    _scores,
    _sequence,
)

_SCALARS = ["scale", "heads", "kv_heads", "lse_stride", "table_stride"]


@triton.jit
def _cached(page_table, seq, cols, seqlen_k, table_stride, PAGE: tl.constexpr):
    """Rows of the cache, in int64, of a tile of keys of a sequence; row 0 for keys beyond it."""
    inside = cols < seqlen_k
    page = tl.load(page_table + seq.to(tl.int64) * table_stride + cols // PAGE, mask=inside, other=0)
    return tl.where(inside, page.to(tl.int64) * PAGE + cols % PAGE, 0)


@triton.jit(do_not_specialize=_SCALARS)
def forward(
    q,
    k_pages,
    v_pages,
    o,
    lse,
    cu_seqlens_q,
    seqlens_k,
    page_table,
    scale,
    heads,
    kv_heads,
    lse_stride,
    table_stride,
    DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr,
    PAD_QK: tl.constexpr,
    PAD_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    PAGE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """O and LSE of one tile of queries. Grid (query tiles, heads, sequences)."""
    seq = tl.program_id(2)
    begin_q, seqlen_q = _sequence(cu_seqlens_q, seq)
    start_m = tl.program_id(0) * TILE_M
    if start_m >= seqlen_q:
        return
    seqlen_k = tl.load(seqlens_k + seq)
    head = tl.program_id(1)
    kv_head = _kv_head(head, heads, kv_heads)
    dims_qk = tl.arange(0, PAD_QK)
    dims_v = tl.arange(0, PAD_V)
    rows = start_m + tl.arange(0, TILE_M)
    last = _last_key(rows, seqlen_q, seqlen_k, CAUSAL)
    q_inside = _inside(rows, seqlen_q, dims_qk, DIM_QK, PAD_QK)
    q_tile = tl.load(q + _offsets(begin_q, rows, dims_qk, head, heads, DIM_QK), mask=q_inside, other=0.0)

    acc = tl.zeros([TILE_M, PAD_V], tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    end_n = seqlen_k
    if CAUSAL:
        end_n = tl.minimum(seqlen_k, start_m + TILE_M + _diagonal(seqlen_q, seqlen_k))
    for start_n in range(0, end_n, TILE_N):
        cols = start_n + tl.arange(0, TILE_N)
        cached = _cached(page_table, seq, cols, seqlen_k, table_stride, PAGE)
        k_inside = _inside(cols, seqlen_k, dims_qk, DIM_QK, PAD_QK)
        k_tile = tl.load(k_pages + _offsets(0, cached, dims_qk, kv_head, kv_heads, DIM_QK), mask=k_inside, other=0.0)
        s = _scores(q_tile, k_tile, last, cols, scale)
        new_max = tl.maximum(row_max, tl.max(s, 1))
        # A row that has seen no key yet: -inf - -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.math.exp2(row_max - shift)
        p = tl.math.exp2(s - shift[:, None])
        row_sum = row_sum * alpha + tl.sum(p, 1)
        row_max = new_max
        v_inside = _inside(cols, seqlen_k, dims_v, DIM_V, PAD_V)
        v_tile = tl.load(v_pages + _offsets(0, cached, dims_v, kv_head, kv_heads, DIM_V), mask=v_inside, other=0.0)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    row_lse = (row_max + tl.math.log2(row_sum)) * LN_2
    o_inside = _inside(rows, seqlen_q, dims_v, DIM_V, PAD_V)
    tl.store(o + _offsets(begin_q, rows, dims_v, head, heads, DIM_V), acc.to(o.dtype.element_ty), mask=o_inside)
    tl.store(lse + head.to(tl.int64) * lse_stride + begin_q + rows, row_lse, mask=rows < seqlen_q)
