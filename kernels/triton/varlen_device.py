"""Device code of ragged attention with grouped heads: forward, Delta, and a backward without atomics.

Token tensors are `(tokens, heads, dim)`. The kernel's outputs (o, dq, dk, dv) are contiguous, and so are q, k, v and do unless
STRIDED: then their strides are used; the last one is 1 except for do. `lse` is `(heads, lse_stride)` fp32, natural log;
`delta` is `(total_q, heads)` fp32. Sequence b has the rows `cu_seqlens[b] <= row < cu_seqlens[b + 1]`: nothing outside them
is read or written. With c = scale * log2(e), per query row i and key j,

    s_ij = c * q_i . k_j   (-inf where j is hidden)      m_i = max_j s_ij      l_i = sum_j 2^(s_ij - m_i)
    o_i = sum_j 2^(s_ij - m_i) v_j / l_i                 lse_i = (m_i + log2 l_i) * ln 2
    p_ij = 2^(s_ij - lse_i * log2(e))                    delta_i = o_i . do_i
    ds_ij = p_ij * (do_i . v_j - delta_i)
    dq_i = scale * sum_j ds_ij k_j      dk_j = scale * sum_i ds_ij q_i      dv_j = sum_i p_ij do_i

Scores, sums and accumulators are fp32; P and dS are rounded once, to the input dtype. Scores are scaled before their
maximum is taken, so that a negative scale is right and the largest p is exactly 1. A row that sees no key has o = 0,
lse = -inf and no gradient.

With SINKS, `sinks` and `d_sinks` are `(heads,)` fp32: the row's sum has exp(sink) too, which is in lse, so that the rest of the
backward is the same; m_i is then the larger of the keys' maximum and the sink. d_sink = -sum_i exp(sink - lse_i) delta_i, of
which `sink_gradient` makes a share for each tile of rows: they are added outside, always in one order.
"""

import types

try:
    import triton
    import triton.language as tl
except ImportError:
    from attnfuzz.kernels.triton.absent import tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

_KEY_STEPS = ["q_token", "q_head", "k_token", "k_head", "v_token", "v_head"]
_GRADIENT_STEPS = ["do_token", "do_head", "do_dim"]
_FORWARD_SCALARS = ["scale", "heads", "kv_heads", "lse_stride", *_KEY_STEPS]
_PREPROCESS_SCALARS = ["rows_total", "heads", *_GRADIENT_STEPS]
_SINK_SCALARS = ["rows_total", "heads", "lse_stride"]
_BACKWARD_SCALARS = ["scale", "heads", "kv_heads", "lse_stride", "q_tiles", "k_tiles", *_KEY_STEPS, *_GRADIENT_STEPS]


@triton.jit
def _sequence(cu_seqlens, seq):
    """First row and length of sequence `seq`."""
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    return begin, end - begin


@triton.jit
def _kv_head(head, heads, kv_heads):
    """The key/value head that query head `head` reads: consecutive query heads form a group."""
    return head // (heads // kv_heads)


@triton.jit
def _diagonal(seqlen_q, seqlen_k):
    """Bottom-right alignment: query i sees the keys up to i + this."""
    return seqlen_k - seqlen_q


@triton.jit
def _last_key(rows, seqlen_q, seqlen_k, CAUSAL: tl.constexpr):
    """The last key that each row sees, negative where it sees none; rows beyond the sequence see none."""
    last = seqlen_k - 1
    if CAUSAL:
        last = rows + _diagonal(seqlen_q, seqlen_k)
    return tl.where(rows < seqlen_q, last, -1)


@triton.jit
def _inside(rows, length, dims, DIM: tl.constexpr, PAD: tl.constexpr):
    """Mask of a tile's elements that belong to the sequence and the head: (rows, PAD), or (rows, 1) without padding."""
    inside = rows[:, None] < length
    if DIM != PAD:
        inside = inside & (dims[None, :] < DIM)
    return inside


@triton.jit
def _offsets(begin, rows, dims, head, heads, DIM: tl.constexpr):
    """Element offsets (rows, dims) of a head's rows in a contiguous (tokens, heads, dim) tensor, in int64."""
    tokens = (begin + rows).to(tl.int64)
    return ((tokens * heads + head) * DIM)[:, None] + dims[None, :]


@triton.jit
def _input_offsets(begin, rows, dims, head, heads, steps, DIM: tl.constexpr, STRIDED: tl.constexpr):
    """Element offsets (rows, dims) of a head's rows in an input of strides `steps` (token, head, dim), in int64."""
    offsets = _offsets(begin, rows, dims, head, heads, DIM)
    if STRIDED:
        tokens = (begin + rows).to(tl.int64) * steps[0] + head.to(tl.int64) * steps[1]
        offsets = tokens[:, None] + dims.to(tl.int64)[None, :] * steps[2]
    return offsets


@triton.jit
def _scores(q, k, last, cols, scale):
    """Masked scores in base 2: (rows, cols) fp32."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
    return tl.where(cols[None, :] <= last[:, None], s, float("-inf"))


@triton.jit
def _with_sink(acc, row_sum, row_max, sinks, head):
    """The sums of a row, and its maximum, with the sink of a head, whose value is 0."""
    sink = tl.load(sinks + head) * LOG2_E
    with_sink = tl.maximum(row_max, sink)
    of_keys = tl.math.exp2(row_max - with_sink)
    row_sum = row_sum * of_keys + tl.math.exp2(sink - with_sink)
    return acc * of_keys[:, None], row_sum, with_sink


@triton.jit(do_not_specialize=_FORWARD_SCALARS)
def forward(
    q,
    k,
    v,
    o,
    lse,
    sinks,
    cu_seqlens_q,
    cu_seqlens_k,
    scale,
    heads,
    kv_heads,
    lse_stride,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr,
    PAD_QK: tl.constexpr,
    PAD_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    SINKS: tl.constexpr,
    STRIDED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """O and LSE of one tile of queries. Grid (query tiles, heads, sequences)."""
    seq = tl.program_id(2)
    begin_q, seqlen_q = _sequence(cu_seqlens_q, seq)
    start_m = tl.program_id(0) * TILE_M
    if start_m >= seqlen_q:
        return
    begin_k, seqlen_k = _sequence(cu_seqlens_k, seq)
    head = tl.program_id(1)
    kv_head = _kv_head(head, heads, kv_heads)
    q_steps = (q_token, q_head, 1)
    k_steps = (k_token, k_head, 1)
    v_steps = (v_token, v_head, 1)

    dims_qk = tl.arange(0, PAD_QK)
    dims_v = tl.arange(0, PAD_V)
    rows = start_m + tl.arange(0, TILE_M)
    last = _last_key(rows, seqlen_q, seqlen_k, CAUSAL)
    q_offsets = _input_offsets(begin_q, rows, dims_qk, head, heads, q_steps, DIM_QK, STRIDED)
    q_tile = tl.load(q + q_offsets, mask=_inside(rows, seqlen_q, dims_qk, DIM_QK, PAD_QK), other=0.0)

    acc = tl.zeros([TILE_M, PAD_V], tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    end_n = seqlen_k
    if CAUSAL:
        end_n = tl.minimum(seqlen_k, start_m + TILE_M + _diagonal(seqlen_q, seqlen_k))
    for start_n in range(0, end_n, TILE_N):
        cols = start_n + tl.arange(0, TILE_N)
        k_offsets = _input_offsets(begin_k, cols, dims_qk, kv_head, kv_heads, k_steps, DIM_QK, STRIDED)
        k_tile = tl.load(k + k_offsets, mask=_inside(cols, seqlen_k, dims_qk, DIM_QK, PAD_QK), other=0.0)
        s = _scores(q_tile, k_tile, last, cols, scale)
        new_max = tl.maximum(row_max, tl.max(s, 1))
        # A row that has seen no key yet: -inf - -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.math.exp2(row_max - shift)
        p = tl.math.exp2(s - shift[:, None])
        row_sum = row_sum * alpha + tl.sum(p, 1)
        row_max = new_max
        v_offsets = _input_offsets(begin_k, cols, dims_v, kv_head, kv_heads, v_steps, DIM_V, STRIDED)
        v_tile = tl.load(v + v_offsets, mask=_inside(cols, seqlen_k, dims_v, DIM_V, PAD_V), other=0.0)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")

    if SINKS:
        acc, row_sum, row_max = _with_sink(acc, row_sum, row_max, sinks, head)
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    row_lse = (row_max + tl.math.log2(row_sum)) * LN_2
    o_inside = _inside(rows, seqlen_q, dims_v, DIM_V, PAD_V)
    tl.store(o + _offsets(begin_q, rows, dims_v, head, heads, DIM_V), acc.to(o.dtype.element_ty), mask=o_inside)
    lse_offsets = head.to(tl.int64) * lse_stride + begin_q + rows
    tl.store(lse + lse_offsets, row_lse, mask=rows < seqlen_q)


@triton.jit(do_not_specialize=_PREPROCESS_SCALARS)
def preprocess(
    o,
    do,
    delta,
    rows_total,
    heads,
    do_token,
    do_head,
    do_dim,
    DIM_V: tl.constexpr,
    PAD_V: tl.constexpr,
    STRIDED: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Delta of `rows_total` = total_q * heads rows. Grid (row tiles,)."""
    rows = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    dims = tl.arange(0, PAD_V)
    offsets = rows[:, None] * DIM_V + dims[None, :]
    do_offsets = offsets
    if STRIDED:
        do_rows = rows // heads * do_token + rows % heads * do_head
        do_offsets = do_rows[:, None] + dims.to(tl.int64)[None, :] * do_dim
    inside = _inside(rows, rows_total, dims, DIM_V, PAD_V)
    o_tile = tl.load(o + offsets, mask=inside, other=0.0).to(tl.float32)
    do_tile = tl.load(do + do_offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + rows, tl.sum(o_tile * do_tile, 1), mask=rows < rows_total)


@triton.jit(do_not_specialize=_SINK_SCALARS)
def sink_gradient(sinks, lse, delta, shares, rows_total, heads, lse_stride, TILE_M: tl.constexpr):
    """The share of a tile of rows in the gradient of one head's sink. Grid (row tiles, heads); `shares` (row tiles, heads)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    rows = tile * TILE_M + tl.arange(0, TILE_M)
    inside = rows < rows_total
    logit = LOG2_E * tl.load(sinks + head)
    lse_base2 = LOG2_E * tl.load(lse + head.to(tl.int64) * lse_stride + rows, mask=inside, other=0.0)
    delta_row = tl.load(delta + rows.to(tl.int64) * heads + head, mask=inside, other=0.0)
    p = tl.where(inside, tl.math.exp2(logit - lse_base2), 0.0)
    tl.store(shares + tile * heads + head, -tl.sum(p * delta_row, 0))


@triton.jit
def _row_statistics(lse, delta, begin_q, rows, seqlen_q, head, heads, lse_stride):
    """LSE in base 2 and Delta of a tile of queries; LSE is 0 for rows without keys, whose scores are all -inf."""
    inside = rows < seqlen_q
    row_lse = tl.load(lse + head.to(tl.int64) * lse_stride + begin_q + rows, mask=inside, other=0.0)
    row_lse = tl.where(row_lse == float("-inf"), 0.0, row_lse * LOG2_E)
    row_delta = tl.load(delta + (begin_q + rows).to(tl.int64) * heads + head, mask=inside, other=0.0)
    return row_lse, row_delta


@triton.jit
def _p_ds(q, k, v, do, row_lse, row_delta, last, cols, scale):
    """P and dS of one tile: (rows, cols) fp32."""
    p = tl.math.exp2(_scores(q, k, last, cols, scale) - row_lse[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    ds = p * (dp - row_delta[:, None])
    return p, ds


@triton.jit
def _backward_queries(
    q,
    k,
    v,
    do,
    lse,
    delta,
    dq,
    begin_q,
    seqlen_q,
    begin_k,
    seqlen_k,
    start_m,
    head,
    scale,
    heads,
    kv_heads,
    lse_stride,
    q_steps,
    k_steps,
    v_steps,
    do_steps,
    DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr,
    PAD_QK: tl.constexpr,
    PAD_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    STRIDED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """dQ of one tile of queries of one head."""
    kv_head = _kv_head(head, heads, kv_heads)
    dims_qk = tl.arange(0, PAD_QK)
    dims_v = tl.arange(0, PAD_V)
    rows = start_m + tl.arange(0, TILE_M)
    last = _last_key(rows, seqlen_q, seqlen_k, CAUSAL)
    q_offsets = _input_offsets(begin_q, rows, dims_qk, head, heads, q_steps, DIM_QK, STRIDED)
    q_inside = _inside(rows, seqlen_q, dims_qk, DIM_QK, PAD_QK)
    q_tile = tl.load(q + q_offsets, mask=q_inside, other=0.0)
    do_offsets = _input_offsets(begin_q, rows, dims_v, head, heads, do_steps, DIM_V, STRIDED)
    do_tile = tl.load(do + do_offsets, mask=_inside(rows, seqlen_q, dims_v, DIM_V, PAD_V), other=0.0)
    row_lse, row_delta = _row_statistics(lse, delta, begin_q, rows, seqlen_q, head, heads, lse_stride)

    acc = tl.zeros([TILE_M, PAD_QK], tl.float32)
    end_n = seqlen_k
    if CAUSAL:
        end_n = tl.minimum(seqlen_k, start_m + TILE_M + _diagonal(seqlen_q, seqlen_k))
    for start_n in range(0, end_n, TILE_N):
        cols = start_n + tl.arange(0, TILE_N)
        k_offsets = _input_offsets(begin_k, cols, dims_qk, kv_head, kv_heads, k_steps, DIM_QK, STRIDED)
        k_tile = tl.load(k + k_offsets, mask=_inside(cols, seqlen_k, dims_qk, DIM_QK, PAD_QK), other=0.0)
        v_offsets = _input_offsets(begin_k, cols, dims_v, kv_head, kv_heads, v_steps, DIM_V, STRIDED)
        v_tile = tl.load(v + v_offsets, mask=_inside(cols, seqlen_k, dims_v, DIM_V, PAD_V), other=0.0)
        _p, ds = _p_ds(q_tile, k_tile, v_tile, do_tile, row_lse, row_delta, last, cols, scale)
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision="ieee")
    dq_offsets = _offsets(begin_q, rows, dims_qk, head, heads, DIM_QK)
    tl.store(dq + dq_offsets, (acc * scale).to(dq.dtype.element_ty), mask=q_inside)


@triton.jit
def _backward_keys(
    q,
    k,
    v,
    do,
    lse,
    delta,
    dk,
    dv,
    begin_q,
    seqlen_q,
    begin_k,
    seqlen_k,
    start_n,
    kv_head,
    scale,
    heads,
    kv_heads,
    lse_stride,
    q_steps,
    k_steps,
    v_steps,
    do_steps,
    DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr,
    PAD_QK: tl.constexpr,
    PAD_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    STRIDED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """dK and dV of one tile of keys of one head, summed over the query heads of its group."""
    dims_qk = tl.arange(0, PAD_QK)
    dims_v = tl.arange(0, PAD_V)
    cols = start_n + tl.arange(0, TILE_N)
    k_offsets = _input_offsets(begin_k, cols, dims_qk, kv_head, kv_heads, k_steps, DIM_QK, STRIDED)
    k_inside = _inside(cols, seqlen_k, dims_qk, DIM_QK, PAD_QK)
    k_tile = tl.load(k + k_offsets, mask=k_inside, other=0.0)
    v_offsets = _input_offsets(begin_k, cols, dims_v, kv_head, kv_heads, v_steps, DIM_V, STRIDED)
    v_inside = _inside(cols, seqlen_k, dims_v, DIM_V, PAD_V)
    v_tile = tl.load(v + v_offsets, mask=v_inside, other=0.0)

    acc_dk = tl.zeros([TILE_N, PAD_QK], tl.float32)
    acc_dv = tl.zeros([TILE_N, PAD_V], tl.float32)
    begin_m = 0
    if CAUSAL:
        # The first query that sees key start_n, rounded down to a whole tile.
        begin_m = tl.maximum(0, start_n - _diagonal(seqlen_q, seqlen_k)) // TILE_M * TILE_M
    groups = heads // kv_heads
    for member in range(groups):
        head = kv_head * groups + member
        for start_m in range(begin_m, seqlen_q, TILE_M):
            rows = start_m + tl.arange(0, TILE_M)
            last = _last_key(rows, seqlen_q, seqlen_k, CAUSAL)
            q_offsets = _input_offsets(begin_q, rows, dims_qk, head, heads, q_steps, DIM_QK, STRIDED)
            q_tile = tl.load(q + q_offsets, mask=_inside(rows, seqlen_q, dims_qk, DIM_QK, PAD_QK), other=0.0)
            do_offsets = _input_offsets(begin_q, rows, dims_v, head, heads, do_steps, DIM_V, STRIDED)
            do_tile = tl.load(do + do_offsets, mask=_inside(rows, seqlen_q, dims_v, DIM_V, PAD_V), other=0.0)
            row_lse, row_delta = _row_statistics(lse, delta, begin_q, rows, seqlen_q, head, heads, lse_stride)
            p, ds = _p_ds(q_tile, k_tile, v_tile, do_tile, row_lse, row_delta, last, cols, scale)
            acc_dv = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, acc_dv, input_precision="ieee")
            acc_dk = tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile, acc_dk, input_precision="ieee")
    dk_offsets = _offsets(begin_k, cols, dims_qk, kv_head, kv_heads, DIM_QK)
    tl.store(dk + dk_offsets, (acc_dk * scale).to(dk.dtype.element_ty), mask=k_inside)
    dv_offsets = _offsets(begin_k, cols, dims_v, kv_head, kv_heads, DIM_V)
    tl.store(dv + dv_offsets, acc_dv.to(dv.dtype.element_ty), mask=v_inside)


@triton.jit(do_not_specialize=_BACKWARD_SCALARS)
def backward(
    q,
    k,
    v,
    do,
    lse,
    delta,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    scale,
    heads,
    kv_heads,
    lse_stride,
    q_tiles,
    k_tiles,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    do_token,
    do_head,
    do_dim,
    DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr,
    PAD_QK: tl.constexpr,
    PAD_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    STRIDED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """dQ, dK and dV. Grid (k_tiles * kv_heads + q_tiles * heads, sequences): key tiles first, then query tiles."""
    program = tl.program_id(0)
    seq = tl.program_id(1)
    begin_q, seqlen_q = _sequence(cu_seqlens_q, seq)
    begin_k, seqlen_k = _sequence(cu_seqlens_k, seq)
    q_steps = (q_token, q_head, 1)
    k_steps = (k_token, k_head, 1)
    v_steps = (v_token, v_head, 1)
    do_steps = (do_token, do_head, do_dim)
    key_programs = k_tiles * kv_heads
    if program < key_programs:
        start_n = program % k_tiles * TILE_N
        if start_n < seqlen_k:
            _backward_keys(
                q, k, v, do, lse, delta, dk, dv, begin_q, seqlen_q, begin_k, seqlen_k,
                start_n, program // k_tiles, scale, heads, kv_heads, lse_stride,
                q_steps, k_steps, v_steps, do_steps, DIM_QK, DIM_V, PAD_QK, PAD_V, CAUSAL, STRIDED, TILE_M, TILE_N,
            )  # fmt: skip
    else:
        start_m = (program - key_programs) % q_tiles * TILE_M
        if start_m < seqlen_q:
            _backward_queries(
                q, k, v, do, lse, delta, dq, begin_q, seqlen_q, begin_k, seqlen_k,
                start_m, (program - key_programs) // q_tiles, scale, heads, kv_heads, lse_stride,
                q_steps, k_steps, v_steps, do_steps, DIM_QK, DIM_V, PAD_QK, PAD_V, CAUSAL, STRIDED, TILE_M, TILE_N,
            )  # fmt: skip


def _strided(function, scalars, steps):
    """Return the function for strided inputs, with one compile for every alignment and for steps below and beyond 2^31."""
    # A copy: Triton reads the types of parameters, which would be int32 or int64 by their values, from its annotations.
    copy = types.FunctionType(function.fn.__code__, function.fn.__globals__)
    copy.__annotations__ = {**function.fn.__annotations__, **dict.fromkeys(steps, "int64")}
    return triton.jit(do_not_specialize=scalars, do_not_specialize_on_alignment=["q", "k", "v", "do"])(copy)


forward_strided = _strided(forward, _FORWARD_SCALARS, _KEY_STEPS)
preprocess_strided = _strided(preprocess, _PREPROCESS_SCALARS, _GRADIENT_STEPS)
backward_strided = _strided(backward, _BACKWARD_SCALARS, [*_KEY_STEPS, *_GRADIENT_STEPS])
