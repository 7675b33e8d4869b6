"""Device code of block-sparse attention with modifiers: forward, merge of parts, Delta, and a backward without atomics.

Dense tensors are `(batch, rows, heads, dim)`, rows = seqlen + slack; slack rows are neither read nor written. The kernel's
outputs (o, dq, dk, dv) are contiguous, and so are q, k, v and do unless STRIDED: then their strides are used; the last one is 1
except for do. `lse` is `(batch, heads, rows_q)` fp32, natural log; `row_lse` (base 2) and `delta` are `(batch, heads, seqlen_q)`.
Blocks of BLOCK_Q queries and BLOCK_K keys are those of kernels/triton/blockmask.py; tiles divide them. With f = score_mod and
the rows' dO and dLSE,

    x_ij = scale * q_i . k_j      s_ij = f(x_ij) log2(e)   (-inf where j is hidden)      m_i = max_j s_ij
    l_i = sum_j 2^(s_ij - m_i)    o_i = sum_j 2^(s_ij - m_i) v_j / l_i                   lse_i = (m_i + log2 l_i) * ln 2
    p_ij = 2^(s_ij - lse_i * log2(e))                    delta_i = o_i . do_i - dlse_i
    dx_ij = f'(x_ij) p_ij (do_i . v_j - delta_i)
    dq_i = scale * sum_j dx_ij k_j      dk_j = scale * sum_i dx_ij q_i      dv_j = sum_i p_ij do_i

Scores, sums and accumulators are fp32; P and dX are rounded once, to the input dtype. Scores are scaled before their maximum
is taken, so that a negative scale is right and the largest p is exactly 1. A list of `*_count` blocks begins with the `*_masked`
partial ones, which are masked; the full ones lie within both lengths. A row that sees no key has o = 0, lse = -inf and no
gradient. A PRESCALED kernel rounds q * scale * log2(e) to the input dtype before the first product.
"""

try:
    import triton
    import triton.language as tl
except ImportError:
    from attnfuzz.kernels.triton.absent import tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

_SIZES = ["batch", "heads", "kv_heads", "groups", "seqlen_q", "seqlen_k", "rows_q", "rows_k"]
_LISTS = ["list_batch", "list_head", "q_blocks", "k_blocks"]
_QKV_STEPS = ["q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "v_batch", "v_token", "v_head"]
_DO_STEPS = ["do_batch", "do_token", "do_head", "do_dim"]
_FORWARD_SCALARS = ["scale", "low", "high", *_SIZES, *_LISTS, *_QKV_STEPS]
_MERGE_SCALARS = ["batch", "heads", "seqlen_q", "rows_q"]
_PREPROCESS_SCALARS = ["heads", "seqlen_q", "rows_q", *_DO_STEPS]
_BACKWARD_SCALARS = [*_FORWARD_SCALARS, *_DO_STEPS]


@triton.jit
def _kv_head(head, groups):
    """The key/value head that query head `head` reads: consecutive query heads form a group."""
    return head // groups


@triton.jit
def _head_offset(b, head, rows, heads, steps, DIM: tl.constexpr, STRIDED: tl.constexpr):
    """Offset of a head's token 0, in elements, int64. `steps` are strides (batch, token, head, dim)."""
    offset = (b.to(tl.int64) * rows * heads + head) * DIM
    if STRIDED:
        offset = b.to(tl.int64) * steps[0] + head.to(tl.int64) * steps[2]
    return offset


@triton.jit
def _token_step(heads, steps, DIM: tl.constexpr, STRIDED: tl.constexpr):
    """Elements from a token to the next, int64."""
    step = heads.to(tl.int64) * DIM
    if STRIDED:
        step = steps[1].to(tl.int64)
    return step


@triton.jit
def _tile_offsets(heads, dims, steps, DIM: tl.constexpr, STRIDED: tl.constexpr, TILE: tl.constexpr):
    """Elements (TILE, dims) from a tile's first token on; a contiguous tile's fit int32."""
    tokens = tl.arange(0, TILE)[:, None]
    offsets = tokens * (heads * DIM) + dims[None, :]
    if STRIDED:
        offsets = tokens.to(tl.int64) * steps[1] + dims.to(tl.int64)[None, :] * steps[3]
    return offsets


@triton.jit
def _tile(pointer, rows, length, dims, DIM: tl.constexpr, PAD: tl.constexpr, CHECKED: tl.constexpr):
    """Load (rows, PAD), 0 beyond the head's dims and, if CHECKED, beyond `length` rows."""
    if CHECKED:
        inside = rows[:, None] < length
        if DIM != PAD:
            inside = inside & (dims[None, :] < DIM)
        tile = tl.load(pointer, mask=inside, other=0.0)
    elif DIM != PAD:
        tile = tl.load(pointer, mask=(dims < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointer)
    return tile


@triton.jit
def _store_tile(pointer, tile, rows, length, dims, DIM: tl.constexpr, PAD: tl.constexpr):
    """Store what lies within `length` rows and the head's dims, in the dtype of the target."""
    inside = rows[:, None] < length
    if DIM != PAD:
        inside = inside & (dims[None, :] < DIM)
    tl.store(pointer, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _list_row(b, h, block, blocks, list_batch, list_head):
    """The row of a block's lists, int64; both steps are 0 where all batches and heads share them."""
    return (b * list_batch + h * list_head).to(tl.int64) * blocks + block


@triton.jit
def _block_at(index, at, width, PER: tl.constexpr):
    """The block of tile `at` of a list; any block beyond the list's end."""
    return tl.load(index + tl.minimum(at // PER, width - 1))


@triton.jit
def _seen(
    b, h, q_idx, kv_idx, low, high, sizes, tensors,
    MASK: tl.constexpr, BAND: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Mask of the scores that count in a partial block: bool, of the shape to which q_idx and kv_idx broadcast."""
    if BAND:
        # low <= offset <= high, in one comparison: values below wrap around, and so may the sums.
        above_low = tl.sub(kv_idx, tl.add(q_idx, low, sanitize_overflow=False), sanitize_overflow=False)
        seen = above_low.to(tl.uint32) <= tl.sub(high, low, sanitize_overflow=False).to(tl.uint32)
        if not (EVEN_Q and EVEN_K):
            seen = seen & ((q_idx < sizes[3]) & (kv_idx < sizes[4]))
    else:
        seen = (q_idx < sizes[3]) & (kv_idx < sizes[4])
    if MASK is not None:
        seen = seen & MASK(b, h, _within(q_idx, sizes[3], EVEN_Q), _within(kv_idx, sizes[4], EVEN_K), sizes, tensors)
    return seen


@triton.jit
def _where_seen(
    x, other, at, masked, b, h, q_idx, kv_idx, low, high, sizes, tensors,
    MASK: tl.constexpr, BAND: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, FULL: tl.constexpr,
    MIXED: tl.constexpr,
):  # fmt: skip
    """`x` where a score counts and `other` where it is hidden, in tile `at` of a list."""
    if MIXED:
        if at < masked:
            x = tl.where(_seen(b, h, q_idx, kv_idx, low, high, sizes, tensors, MASK, BAND, EVEN_Q, EVEN_K), x, other)
    elif not FULL:
        x = tl.where(_seen(b, h, q_idx, kv_idx, low, high, sizes, tensors, MASK, BAND, EVEN_Q, EVEN_K), x, other)
    return x


@triton.jit
def _within(idx, length, EVEN: tl.constexpr):
    """Indices at which a modifier may read: lanes beyond the length use the last index."""
    if not EVEN:
        idx = tl.minimum(idx, length - 1)
    return idx


@triton.jit
def _scores(
    products, b, h, q_idx, kv_idx, scale, sizes, tensors,
    SCORE: tl.constexpr, PRESCALED: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """x and s (base 2) of q . k; x is score_mod's argument, and unused without one."""
    x = products
    if SCORE is None:
        s = products
        if not PRESCALED:
            s = products * (scale * LOG2_E)
    else:
        x = products * scale
        s = SCORE(x, b, h, _within(q_idx, sizes[3], EVEN_Q), _within(kv_idx, sizes[4], EVEN_K), sizes, tensors)
    return x, s


@triton.jit
def _prescaled(q_tile, scale, PRESCALED: tl.constexpr):
    """q as used in the first product."""
    if PRESCALED:
        q_tile = (q_tile.to(tl.float32) * (scale * LOG2_E)).to(q_tile.dtype)
    return q_tile


@triton.jit
def _forward_tiles(
    acc, row_sum, row_max, q_tile, k, v, k_offsets, v_offsets, k_step, v_step, dims_qk, dims_v,
    b, h, rows, index, block, begin, end, masked, width, scale, low, high, sizes, tensors,
    SCORE: tl.constexpr, MASK: tl.constexpr, BAND: tl.constexpr, PRESCALED: tl.constexpr, SAFE: tl.constexpr,
    FULL: tl.constexpr, MIXED: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr, PAD_QK: tl.constexpr, PAD_V: tl.constexpr, BLOCK_K: tl.constexpr, TILE_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Process tiles `begin` to `end` of a query block's list of key blocks: FULL, partial, or MIXED (partial before `masked`).

    `block` is the block of tile `begin`; also returns the block of tile `end`.
    """
    PER: tl.constexpr = BLOCK_K // TILE_N
    CHECKED: tl.constexpr = not (FULL or EVEN_K)
    for at in range(begin, end):
        start_n = block * BLOCK_K + at % PER * TILE_N
        # Loaded one tile ahead, so that the next loads wait for no index.
        block = _block_at(index, at + 1, width, PER)
        cols = start_n + tl.arange(0, TILE_N)
        k_tile = _tile(k + start_n.to(tl.int64) * k_step + k_offsets, cols, sizes[4], dims_qk, DIM_QK, PAD_QK, CHECKED)
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        q_idx, kv_idx = rows[:, None], cols[None, :]
        _x, s = _scores(
            products, b, h, q_idx, kv_idx, scale, sizes, tensors, SCORE, PRESCALED, FULL or EVEN_Q, FULL or EVEN_K
        )  # fmt: skip
        s = _where_seen(
            s, float("-inf"), at, masked, b, h, q_idx, kv_idx, low, high, sizes, tensors, MASK, BAND, EVEN_Q, EVEN_K, FULL, MIXED
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(s, 1))
        shift = new_max
        if not SAFE:
            # A row that has seen no key yet: -inf - -inf would be NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.math.exp2(row_max - shift)
        p = tl.math.exp2(s - shift[:, None])
        row_sum = row_sum * alpha + tl.sum(p, 1)
        row_max = new_max
        v_tile = _tile(v + start_n.to(tl.int64) * v_step + v_offsets, cols, sizes[4], dims_v, DIM_V, PAD_V, CHECKED)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return acc, row_sum, row_max, block


@triton.jit(do_not_specialize=_FORWARD_SCALARS)
def forward(
    q, k, v, o, lse, row_sums, keys_masked, keys_count, keys, tensors,
    scale, low, high, batch, heads, kv_heads, groups, seqlen_q, seqlen_k, rows_q, rows_k,
    list_batch, list_head, q_blocks, k_blocks,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    SCORE: tl.constexpr, MASK: tl.constexpr, BAND: tl.constexpr, PRESCALED: tl.constexpr, SAFE: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr, PAD_QK: tl.constexpr,
    PAD_V: tl.constexpr, STRIDED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O and LSE of one tile of queries. Grid (query tiles * SPLIT, heads, batch).

    Where SPLIT > 1, each of SPLIT parts of the keys has its own O, not divided by its sum, in `o (SPLIT, ...)` fp32, its
    maximum (base 2) in `lse (SPLIT, ...)` and its sum in `row_sums`, like lse.
    """
    part = tl.program_id(0) % SPLIT
    # Under a causal mask the last queries have the most keys: they begin first.
    tile = tl.num_programs(0) // SPLIT - 1 - tl.program_id(0) // SPLIT
    h = tl.program_id(1)
    b = tl.program_id(2)
    kv_head = _kv_head(h, groups)
    sizes = (batch, heads, kv_heads, seqlen_q, seqlen_k)
    q_steps = (q_batch, q_token, q_head, 1)
    k_steps = (k_batch, k_token, k_head, 1)
    v_steps = (v_batch, v_token, v_head, 1)
    dims_qk = tl.arange(0, PAD_QK)
    dims_v = tl.arange(0, PAD_V)
    start_m = tile * TILE_M
    # Before the tile of queries, so that the place of the keys is known when that arrives.
    PER: tl.constexpr = BLOCK_K // TILE_N
    row = _list_row(b, h, start_m // BLOCK_Q, q_blocks, list_batch, list_head)
    index = keys + row * k_blocks
    masked = tl.load(keys_masked + row) * PER
    tiles = tl.load(keys_count + row) * PER
    begin, end = tiles * part // SPLIT, tiles * (part + 1) // SPLIT
    block = _block_at(index, begin, k_blocks, PER)
    rows = start_m + tl.arange(0, TILE_M)
    q_begin = _head_offset(b, h, rows_q, heads, q_steps, DIM_QK, STRIDED)
    q_begin += start_m.to(tl.int64) * _token_step(heads, q_steps, DIM_QK, STRIDED)
    q_offsets = _tile_offsets(heads, dims_qk, q_steps, DIM_QK, STRIDED, TILE_M)
    q_tile = _tile(q + q_begin + q_offsets, rows, seqlen_q, dims_qk, DIM_QK, PAD_QK, not EVEN_Q)
    q_tile = _prescaled(q_tile, scale, PRESCALED)
    k += _head_offset(b, kv_head, rows_k, kv_heads, k_steps, DIM_QK, STRIDED)
    v += _head_offset(b, kv_head, rows_k, kv_heads, v_steps, DIM_V, STRIDED)
    k_offsets = _tile_offsets(kv_heads, dims_qk, k_steps, DIM_QK, STRIDED, TILE_N)
    v_offsets = _tile_offsets(kv_heads, dims_v, v_steps, DIM_V, STRIDED, TILE_N)
    k_step = _token_step(kv_heads, k_steps, DIM_QK, STRIDED)
    v_step = _token_step(kv_heads, v_steps, DIM_V, STRIDED)

    acc = tl.zeros([TILE_M, PAD_V], tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    if not (EVEN_Q and EVEN_K):
        # Separate: tiles that may reach beyond a length are loaded differently.
        middle = tl.minimum(tl.maximum(masked, begin), end)
        acc, row_sum, row_max, block = _forward_tiles(
            acc, row_sum, row_max, q_tile, k, v, k_offsets, v_offsets, k_step, v_step, dims_qk, dims_v,
            b, h, rows, index, block, begin, middle, masked, k_blocks, scale, low, high, sizes, tensors,
            SCORE, MASK, BAND, PRESCALED, SAFE, False, False, EVEN_Q, EVEN_K,
            DIM_QK, DIM_V, PAD_QK, PAD_V, BLOCK_K, TILE_N, PRECISION,
        )  # fmt: skip
        begin = middle
    acc, row_sum, row_max, block = _forward_tiles(
        acc, row_sum, row_max, q_tile, k, v, k_offsets, v_offsets, k_step, v_step, dims_qk, dims_v,
        b, h, rows, index, block, begin, end, masked, k_blocks, scale, low, high, sizes, tensors,
        SCORE, MASK, BAND, PRESCALED, SAFE, True, EVEN_Q and EVEN_K and (BAND or (MASK is not None)), EVEN_Q, EVEN_K,
        DIM_QK, DIM_V, PAD_QK, PAD_V, BLOCK_K, TILE_N, PRECISION,
    )  # fmt: skip

    own = (0, 0, 0, 1)
    o_begin = _head_offset(part * batch + b, h, rows_q, heads, own, DIM_V, False)
    o_begin += start_m.to(tl.int64) * _token_step(heads, own, DIM_V, False)
    o_pointer = o + o_begin + _tile_offsets(heads, dims_v, own, DIM_V, False, TILE_M)
    lse_offsets = ((part * batch + b).to(tl.int64) * heads + h) * rows_q + rows
    if SPLIT == 1:
        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
        acc = acc * (1.0 / row_sum)[:, None]
        row_lse = (row_max + tl.math.log2(row_sum)) * LN_2
        tl.store(lse + lse_offsets, row_lse, mask=rows < seqlen_q)
    else:
        tl.store(lse + lse_offsets, row_max, mask=rows < seqlen_q)
        tl.store(row_sums + lse_offsets, row_sum, mask=rows < seqlen_q)
    _store_tile(o_pointer, acc, rows, seqlen_q, dims_v, DIM_V, PAD_V)


@triton.jit(do_not_specialize=_MERGE_SCALARS)
def merge(
    parts, part_max, part_sum, o, lse, batch, heads, seqlen_q, rows_q,
    DIM_V: tl.constexpr, PAD_V: tl.constexpr, SPLIT: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """O and LSE from the parts that `forward` left. Grid (row tiles, heads, batch)."""
    h = tl.program_id(1)
    b = tl.program_id(2)
    start_m = tl.program_id(0) * TILE_M
    rows = start_m + tl.arange(0, TILE_M)
    dims_v = tl.arange(0, PAD_V)
    own = (0, 0, 0, 1)
    offsets = start_m.to(tl.int64) * _token_step(heads, own, DIM_V, False) + _tile_offsets(
        heads, dims_v, own, DIM_V, False, TILE_M
    )
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    for part in range(SPLIT):
        at = ((part * batch + b).to(tl.int64) * heads + h) * rows_q + rows
        row_max = tl.maximum(row_max, tl.load(part_max + at, mask=rows < seqlen_q, other=float("-inf")))
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    acc = tl.zeros([TILE_M, PAD_V], tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    for part in range(SPLIT):
        at = ((part * batch + b).to(tl.int64) * heads + h) * rows_q + rows
        factor = tl.math.exp2(tl.load(part_max + at, mask=rows < seqlen_q, other=float("-inf")) - shift)
        row_sum += tl.load(part_sum + at, mask=rows < seqlen_q, other=0.0) * factor
        begin = _head_offset(part * batch + b, h, rows_q, heads, own, DIM_V, False)
        acc += _tile(parts + begin + offsets, rows, seqlen_q, dims_v, DIM_V, PAD_V, True) * factor[:, None]
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    row_lse = (row_max + tl.math.log2(row_sum)) * LN_2
    tl.store(lse + (b.to(tl.int64) * heads + h) * rows_q + rows, row_lse, mask=rows < seqlen_q)
    o_pointer = o + _head_offset(b, h, rows_q, heads, own, DIM_V, False) + offsets
    _store_tile(o_pointer, acc / row_sum[:, None], rows, seqlen_q, dims_v, DIM_V, PAD_V)


@triton.jit(do_not_specialize=_PREPROCESS_SCALARS)
def preprocess(
    o, do, lse, d_lse, row_lse, delta, heads, seqlen_q, rows_q, do_batch, do_token, do_head, do_dim,
    DIM_V: tl.constexpr, PAD_V: tl.constexpr, STRIDED: tl.constexpr, DLSE: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """Delta minus dLSE, and LSE in base 2; both 0 for rows without keys, whose scores are all -inf.

    Grid (row tiles, heads, batch).
    """
    h = tl.program_id(1)
    b = tl.program_id(2)
    start_m = tl.program_id(0) * TILE_M
    rows = start_m + tl.arange(0, TILE_M)
    inside = rows < seqlen_q
    dims_v = tl.arange(0, PAD_V)
    own = (0, 0, 0, 1)
    do_steps = (do_batch, do_token, do_head, do_dim)
    o_begin = _head_offset(b, h, rows_q, heads, own, DIM_V, False)
    o_begin += start_m.to(tl.int64) * _token_step(heads, own, DIM_V, False)
    o_offsets = _tile_offsets(heads, dims_v, own, DIM_V, False, TILE_M)
    do_begin = _head_offset(b, h, rows_q, heads, do_steps, DIM_V, STRIDED)
    do_begin += start_m.to(tl.int64) * _token_step(heads, do_steps, DIM_V, STRIDED)
    do_offsets = _tile_offsets(heads, dims_v, do_steps, DIM_V, STRIDED, TILE_M)
    o_tile = _tile(o + o_begin + o_offsets, rows, seqlen_q, dims_v, DIM_V, PAD_V, True).to(tl.float32)
    do_tile = _tile(do + do_begin + do_offsets, rows, seqlen_q, dims_v, DIM_V, PAD_V, True).to(tl.float32)
    row_delta = tl.sum(o_tile * do_tile, 1)
    lse_offsets = (b.to(tl.int64) * heads + h) * rows_q + rows
    if DLSE:
        row_delta -= tl.load(d_lse + lse_offsets, mask=inside, other=0.0)
    natural = tl.load(lse + lse_offsets, mask=inside, other=0.0)
    dead = natural == float("-inf")
    offsets = (b.to(tl.int64) * heads + h) * seqlen_q + rows
    tl.store(row_lse + offsets, tl.where(dead, 0.0, natural * LOG2_E), mask=inside)
    tl.store(delta + offsets, tl.where(dead, 0.0, row_delta), mask=inside)


@triton.jit
def _rows_of(statistics, start, seqlen_q, TILE: tl.constexpr, CHECKED: tl.constexpr):
    """LSE or Delta of a tile of queries, from query `start` on."""
    # Each thread loads many. For indices that the mask needs too, the compiler computes each address separately; for others, such
    # as these from TILE on, fixed distances from one address.
    rows = tl.arange(TILE, 2 * TILE)
    start -= TILE
    if CHECKED:
        values = tl.load(statistics + start + rows, mask=rows < seqlen_q - start, other=0.0)
    else:
        values = tl.load(statistics + start + rows)
    return values


@triton.jit
def _query_tiles(
    dq, q_tile, do_tile, row_lse, row_delta, k, v, k_offsets, v_offsets, k_step, v_step, dims_qk, dims_v,
    b, h, rows, index, block, begin, end, masked, width, scale, low, high, sizes, tensors, gradients,
    SCORE: tl.constexpr, SLOPE: tl.constexpr, MASK: tl.constexpr, CAPTURED: tl.constexpr, BAND: tl.constexpr,
    PRESCALED: tl.constexpr, FULL: tl.constexpr, MIXED: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, PAD_QK: tl.constexpr, PAD_V: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ from tiles `begin` to `end` of a query block's list, as in the forward, and gradients of captured tensors."""
    PER: tl.constexpr = BLOCK_K // TILE_N
    CHECKED: tl.constexpr = not (FULL or EVEN_K)
    WITHIN_Q: tl.constexpr = FULL or EVEN_Q
    WITHIN_K: tl.constexpr = FULL or EVEN_K
    for at in range(begin, end):
        start_n = block * BLOCK_K + at % PER * TILE_N
        block = _block_at(index, at + 1, width, PER)
        cols = start_n + tl.arange(0, TILE_N)
        q_idx, kv_idx = rows[:, None], cols[None, :]
        k_tile = _tile(k + start_n.to(tl.int64) * k_step + k_offsets, cols, sizes[4], dims_qk, DIM_QK, PAD_QK, CHECKED)
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        x, s = _scores(products, b, h, q_idx, kv_idx, scale, sizes, tensors, SCORE, PRESCALED, WITHIN_Q, WITHIN_K)
        p = tl.math.exp2(s - row_lse[:, None])
        p = _where_seen(
            p, 0.0, at, masked, b, h, q_idx, kv_idx, low, high, sizes, tensors, MASK, BAND, EVEN_Q, EVEN_K, FULL, MIXED
        )
        v_tile = _tile(v + start_n.to(tl.int64) * v_step + v_offsets, cols, sizes[4], dims_v, DIM_V, PAD_V, CHECKED)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        ds = p * (dp - row_delta[:, None])
        if SCORE is not None:
            near_q, near_k = _within(q_idx, sizes[3], WITHIN_Q), _within(kv_idx, sizes[4], WITHIN_K)
            if CAPTURED is not None:
                inside = (q_idx >= 0) & (kv_idx >= 0)
                if not FULL:
                    inside = _seen(b, h, q_idx, kv_idx, low, high, sizes, tensors, MASK, BAND, EVEN_Q, EVEN_K)
                CAPTURED(ds, x, b, h, near_q, near_k, inside, sizes, tensors, gradients)
            ds = SLOPE(ds, x, b, h, near_q, near_k, sizes, tensors)
            if MIXED or not FULL:
                # Where a hidden score is infinite, its slope may be too.
                ds = tl.where(p == 0.0, 0.0, ds)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq, block


@triton.jit
def _key_tiles(
    dk, dv, k_tile, v_tile, q, do, row_lses, deltas, q_offsets, do_offsets, q_step, do_step, dims_qk, dims_v,
    b, h, cols, index, begin, end, masked, width, scale, low, high, sizes, tensors,
    SCORE: tl.constexpr, SLOPE: tl.constexpr, MASK: tl.constexpr, BAND: tl.constexpr,
    PRESCALED: tl.constexpr, FULL: tl.constexpr, MIXED: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, PAD_QK: tl.constexpr, PAD_V: tl.constexpr, BLOCK_Q: tl.constexpr,
    TILE_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one head from tiles `begin` to `end` of a key block's list; scores are (keys, queries)."""
    PER: tl.constexpr = BLOCK_Q // TILE_M
    CHECKED: tl.constexpr = not (FULL or EVEN_Q)
    WITHIN_Q: tl.constexpr = FULL or EVEN_Q
    WITHIN_K: tl.constexpr = FULL or EVEN_K
    block = _block_at(index, begin, width, PER)
    # Not pipelined: Triton (3.6 to 3.9) gives a tile that is first read into registers only one buffer. The product into dK
    # would still read it when the next tile is copied into it.
    STAGES: tl.constexpr = 1 if PRESCALED else None
    for at in tl.range(begin, end, num_stages=STAGES):
        start_m = block * BLOCK_Q + at % PER * TILE_M
        block = _block_at(index, at + 1, width, PER)
        rows = start_m + tl.arange(0, TILE_M)
        q_idx, kv_idx = rows[None, :], cols[:, None]
        q_tile = _tile(q + start_m.to(tl.int64) * q_step + q_offsets, rows, sizes[3], dims_qk, DIM_QK, PAD_QK, CHECKED)
        row_lse = _rows_of(row_lses, start_m, sizes[3], TILE_M, CHECKED)
        products = tl.dot(k_tile, tl.trans(_prescaled(q_tile, scale, PRESCALED)), input_precision=PRECISION)
        x, s = _scores(products, b, h, q_idx, kv_idx, scale, sizes, tensors, SCORE, PRESCALED, WITHIN_Q, WITHIN_K)
        p = tl.math.exp2(s - row_lse[None, :])
        p = _where_seen(
            p, 0.0, at, masked, b, h, q_idx, kv_idx, low, high, sizes, tensors, MASK, BAND, EVEN_Q, EVEN_K, FULL, MIXED
        )
        do_tile = _tile(do + start_m.to(tl.int64) * do_step + do_offsets, rows, sizes[3], dims_v, DIM_V, PAD_V, CHECKED)
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
        row_delta = _rows_of(deltas, start_m, sizes[3], TILE_M, CHECKED)
        dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
        ds = p * (dp - row_delta[None, :])
        if SCORE is not None:
            near_q, near_k = _within(q_idx, sizes[3], WITHIN_Q), _within(kv_idx, sizes[4], WITHIN_K)
            ds = SLOPE(ds, x, b, h, near_q, near_k, sizes, tensors)
            if MIXED or not FULL:
                ds = tl.where(p == 0.0, 0.0, ds)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _backward_queries(
    q, k, v, do, row_lse, delta, dq, keys_masked, keys_count, keys, tensors, gradients,
    b, h, kv_head, tile, scale, low, high, sizes, rows_q, rows_k, list_batch, list_head, q_blocks, k_blocks,
    q_steps, k_steps, v_steps, do_steps,
    SCORE: tl.constexpr, SLOPE: tl.constexpr, MASK: tl.constexpr, CAPTURED: tl.constexpr, BAND: tl.constexpr,
    PRESCALED: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    PAD_QK: tl.constexpr, PAD_V: tl.constexpr, STRIDED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries of one head."""
    heads, kv_heads, seqlen_q = sizes[1], sizes[2], sizes[3]
    dims_qk = tl.arange(0, PAD_QK)
    dims_v = tl.arange(0, PAD_V)
    start_m = tile * TILE_M
    PER: tl.constexpr = BLOCK_K // TILE_N
    row = _list_row(b, h, start_m // BLOCK_Q, q_blocks, list_batch, list_head)
    index = keys + row * k_blocks
    masked = tl.load(keys_masked + row) * PER
    begin, end = 0, tl.load(keys_count + row) * PER
    block = _block_at(index, begin, k_blocks, PER)
    rows = start_m + tl.arange(0, TILE_M)
    q_begin = _head_offset(b, h, rows_q, heads, q_steps, DIM_QK, STRIDED)
    q_begin += start_m.to(tl.int64) * _token_step(heads, q_steps, DIM_QK, STRIDED)
    q_offsets = _tile_offsets(heads, dims_qk, q_steps, DIM_QK, STRIDED, TILE_M)
    q_tile = _tile(q + q_begin + q_offsets, rows, seqlen_q, dims_qk, DIM_QK, PAD_QK, not EVEN_Q)
    q_tile = _prescaled(q_tile, scale, PRESCALED)
    do_begin = _head_offset(b, h, rows_q, heads, do_steps, DIM_V, STRIDED)
    do_begin += start_m.to(tl.int64) * _token_step(heads, do_steps, DIM_V, STRIDED)
    do_offsets = _tile_offsets(heads, dims_v, do_steps, DIM_V, STRIDED, TILE_M)
    do_tile = _tile(do + do_begin + do_offsets, rows, seqlen_q, dims_v, DIM_V, PAD_V, not EVEN_Q)
    at = (b.to(tl.int64) * heads + h) * seqlen_q
    lse_tile = _rows_of(row_lse + at, start_m, seqlen_q, TILE_M, not EVEN_Q)
    delta_tile = _rows_of(delta + at, start_m, seqlen_q, TILE_M, not EVEN_Q)
    k += _head_offset(b, kv_head, rows_k, kv_heads, k_steps, DIM_QK, STRIDED)
    v += _head_offset(b, kv_head, rows_k, kv_heads, v_steps, DIM_V, STRIDED)
    k_offsets = _tile_offsets(kv_heads, dims_qk, k_steps, DIM_QK, STRIDED, TILE_N)
    v_offsets = _tile_offsets(kv_heads, dims_v, v_steps, DIM_V, STRIDED, TILE_N)
    k_step = _token_step(kv_heads, k_steps, DIM_QK, STRIDED)
    v_step = _token_step(kv_heads, v_steps, DIM_V, STRIDED)

    acc = tl.zeros([TILE_M, PAD_QK], tl.float32)
    if not (EVEN_Q and EVEN_K and (CAPTURED is None)):
        acc, block = _query_tiles(
            acc, q_tile, do_tile, lse_tile, delta_tile, k, v, k_offsets, v_offsets, k_step, v_step, dims_qk, dims_v,
            b, h, rows, index, block, begin, masked, masked, k_blocks, scale, low, high, sizes, tensors, gradients,
            SCORE, SLOPE, MASK, CAPTURED, BAND, PRESCALED, False, False, EVEN_Q, EVEN_K,
            DIM_QK, DIM_V, PAD_QK, PAD_V, BLOCK_K, TILE_N, PRECISION,
        )  # fmt: skip
        begin = masked
    acc, block = _query_tiles(
        acc, q_tile, do_tile, lse_tile, delta_tile, k, v, k_offsets, v_offsets, k_step, v_step, dims_qk, dims_v,
        b, h, rows, index, block, begin, end, masked, k_blocks, scale, low, high, sizes, tensors, gradients,
        SCORE, SLOPE, MASK, CAPTURED, BAND, PRESCALED, True,
        EVEN_Q and EVEN_K and (CAPTURED is None) and (BAND or (MASK is not None)), EVEN_Q, EVEN_K,
        DIM_QK, DIM_V, PAD_QK, PAD_V, BLOCK_K, TILE_N, PRECISION,
    )  # fmt: skip
    own = (0, 0, 0, 1)
    dq_begin = _head_offset(b, h, rows_q, heads, own, DIM_QK, False)
    dq_begin += start_m.to(tl.int64) * _token_step(heads, own, DIM_QK, False)
    dq_pointer = dq + dq_begin + _tile_offsets(heads, dims_qk, own, DIM_QK, False, TILE_M)
    _store_tile(dq_pointer, acc * scale, rows, seqlen_q, dims_qk, DIM_QK, PAD_QK)


@triton.jit
def _backward_keys(
    q, k, v, do, row_lse, delta, dk, dv, queries_masked, queries_count, queries, tensors,
    b, kv_head, groups, tile, scale, low, high, sizes, rows_q, rows_k, list_batch, list_head, q_blocks, k_blocks,
    q_steps, k_steps, v_steps, do_steps,
    SCORE: tl.constexpr, SLOPE: tl.constexpr, MASK: tl.constexpr, BAND: tl.constexpr,
    PRESCALED: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    PAD_QK: tl.constexpr, PAD_V: tl.constexpr, STRIDED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys of one head, summed over the query heads of its group."""
    heads, kv_heads, seqlen_q, seqlen_k = sizes[1], sizes[2], sizes[3], sizes[4]
    dims_qk = tl.arange(0, PAD_QK)
    dims_v = tl.arange(0, PAD_V)
    start_n = tile * TILE_N
    cols = start_n + tl.arange(0, TILE_N)
    k_begin = _head_offset(b, kv_head, rows_k, kv_heads, k_steps, DIM_QK, STRIDED)
    k_begin += start_n.to(tl.int64) * _token_step(kv_heads, k_steps, DIM_QK, STRIDED)
    k_offsets = _tile_offsets(kv_heads, dims_qk, k_steps, DIM_QK, STRIDED, TILE_N)
    k_tile = _tile(k + k_begin + k_offsets, cols, seqlen_k, dims_qk, DIM_QK, PAD_QK, not EVEN_K)
    v_begin = _head_offset(b, kv_head, rows_k, kv_heads, v_steps, DIM_V, STRIDED)
    v_begin += start_n.to(tl.int64) * _token_step(kv_heads, v_steps, DIM_V, STRIDED)
    v_offsets = _tile_offsets(kv_heads, dims_v, v_steps, DIM_V, STRIDED, TILE_N)
    v_tile = _tile(v + v_begin + v_offsets, cols, seqlen_k, dims_v, DIM_V, PAD_V, not EVEN_K)
    q_offsets = _tile_offsets(heads, dims_qk, q_steps, DIM_QK, STRIDED, TILE_M)
    do_offsets = _tile_offsets(heads, dims_v, do_steps, DIM_V, STRIDED, TILE_M)
    q_step = _token_step(heads, q_steps, DIM_QK, STRIDED)
    do_step = _token_step(heads, do_steps, DIM_V, STRIDED)

    acc_dk = tl.zeros([TILE_N, PAD_QK], tl.float32)
    acc_dv = tl.zeros([TILE_N, PAD_V], tl.float32)
    PER: tl.constexpr = BLOCK_Q // TILE_M
    for member in range(groups):
        h = kv_head * groups + member
        q_head = q + _head_offset(b, h, rows_q, heads, q_steps, DIM_QK, STRIDED)
        do_head = do + _head_offset(b, h, rows_q, heads, do_steps, DIM_V, STRIDED)
        at = (b.to(tl.int64) * heads + h) * seqlen_q
        row = _list_row(b, h, start_n // BLOCK_K, k_blocks, list_batch, list_head)
        index = queries + row * q_blocks
        masked = tl.load(queries_masked + row) * PER
        begin, end = 0, tl.load(queries_count + row) * PER
        if not (EVEN_Q and EVEN_K):
            acc_dk, acc_dv = _key_tiles(
                acc_dk, acc_dv, k_tile, v_tile, q_head, do_head, row_lse + at, delta + at, q_offsets, do_offsets,
                q_step, do_step, dims_qk, dims_v,
                b, h, cols, index, begin, masked, masked, q_blocks, scale, low, high, sizes, tensors,
                SCORE, SLOPE, MASK, BAND, PRESCALED, False, False, EVEN_Q, EVEN_K,
                DIM_QK, DIM_V, PAD_QK, PAD_V, BLOCK_Q, TILE_M, PRECISION,
            )  # fmt: skip
            begin = masked
        acc_dk, acc_dv = _key_tiles(
            acc_dk, acc_dv, k_tile, v_tile, q_head, do_head, row_lse + at, delta + at, q_offsets, do_offsets,
            q_step, do_step, dims_qk, dims_v,
            b, h, cols, index, begin, end, masked, q_blocks, scale, low, high, sizes, tensors,
            SCORE, SLOPE, MASK, BAND, PRESCALED, True, EVEN_Q and EVEN_K and (BAND or (MASK is not None)), EVEN_Q, EVEN_K,
            DIM_QK, DIM_V, PAD_QK, PAD_V, BLOCK_Q, TILE_M, PRECISION,
        )  # fmt: skip
    own = (0, 0, 0, 1)
    dk_begin = _head_offset(b, kv_head, rows_k, kv_heads, own, DIM_QK, False)
    dk_begin += start_n.to(tl.int64) * _token_step(kv_heads, own, DIM_QK, False)
    dk_pointer = dk + dk_begin + _tile_offsets(kv_heads, dims_qk, own, DIM_QK, False, TILE_N)
    _store_tile(dk_pointer, acc_dk * scale, cols, seqlen_k, dims_qk, DIM_QK, PAD_QK)
    dv_begin = _head_offset(b, kv_head, rows_k, kv_heads, own, DIM_V, False)
    dv_begin += start_n.to(tl.int64) * _token_step(kv_heads, own, DIM_V, False)
    dv_pointer = dv + dv_begin + _tile_offsets(kv_heads, dims_v, own, DIM_V, False, TILE_N)
    _store_tile(dv_pointer, acc_dv, cols, seqlen_k, dims_v, DIM_V, PAD_V)


@triton.jit(do_not_specialize=_BACKWARD_SCALARS)
def backward(
    q, k, v, do, row_lse, delta, dq, dk, dv,
    keys_masked, keys_count, keys, queries_masked, queries_count, queries, tensors, gradients,
    scale, low, high, batch, heads, kv_heads, groups, seqlen_q, seqlen_k, rows_q, rows_k,
    list_batch, list_head, q_blocks, k_blocks,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head, do_dim,
    SCORE: tl.constexpr, SLOPE: tl.constexpr, MASK: tl.constexpr, CAPTURED: tl.constexpr, BAND: tl.constexpr,
    PRESCALED: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    PAD_QK: tl.constexpr, PAD_V: tl.constexpr, STRIDED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DQ_TILE_M: tl.constexpr, DQ_TILE_N: tl.constexpr, DKV_TILE_M: tl.constexpr, DKV_TILE_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV, and gradients of captured tensors. Grid (key tiles + query tiles * groups, kv_heads, batch): keys first."""
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    b = tl.program_id(2)
    sizes = (batch, heads, kv_heads, seqlen_q, seqlen_k)
    q_steps = (q_batch, q_token, q_head, 1)
    k_steps = (k_batch, k_token, k_head, 1)
    v_steps = (v_batch, v_token, v_head, 1)
    do_steps = (do_batch, do_token, do_head, do_dim)
    k_tiles = (seqlen_k + DKV_TILE_N - 1) // DKV_TILE_N
    if program < k_tiles:
        _backward_keys(
            q, k, v, do, row_lse, delta, dk, dv,
            queries_masked, queries_count, queries, tensors,
            b, kv_head, groups, program, scale, low, high, sizes, rows_q, rows_k, list_batch, list_head, q_blocks, k_blocks,
            q_steps, k_steps, v_steps, do_steps, SCORE, SLOPE, MASK, BAND, PRESCALED, EVEN_Q, EVEN_K,
            DIM_QK, DIM_V, PAD_QK, PAD_V, STRIDED, BLOCK_Q, BLOCK_K, DKV_TILE_M, DKV_TILE_N, PRECISION,
        )  # fmt: skip
    else:
        q_tiles = (seqlen_q + DQ_TILE_M - 1) // DQ_TILE_M
        # Under a causal mask the last queries have the most keys: they begin first.
        at = tl.num_programs(0) - 1 - program
        _backward_queries(
            q, k, v, do, row_lse, delta, dq,
            keys_masked, keys_count, keys, tensors, gradients,
            b, kv_head * groups + at // q_tiles, kv_head, at % q_tiles,
            scale, low, high, sizes, rows_q, rows_k, list_batch, list_head, q_blocks, k_blocks,
            q_steps, k_steps, v_steps, do_steps, SCORE, SLOPE, MASK, CAPTURED, BAND, PRESCALED, EVEN_Q, EVEN_K,
            DIM_QK, DIM_V, PAD_QK, PAD_V, STRIDED, BLOCK_Q, BLOCK_K, DQ_TILE_M, DQ_TILE_N, PRECISION,
        )  # fmt: skip


# Strided inputs may have any alignment: one compile for all.
_INPUTS = ["q", "k", "v", "do"]
forward_strided = triton.jit(do_not_specialize=_FORWARD_SCALARS, do_not_specialize_on_alignment=_INPUTS)(forward.fn)
preprocess_strided = triton.jit(do_not_specialize=_PREPROCESS_SCALARS, do_not_specialize_on_alignment=_INPUTS)(preprocess.fn)
backward_strided = triton.jit(do_not_specialize=_BACKWARD_SCALARS, do_not_specialize_on_alignment=_INPUTS)(backward.fn)
