"""Device code. All is contiguous: q, o and dO (batch, seqlen_q, heads, dim), k and v (batch, seqlen_k, kv_heads, dim)."""

import triton
import triton.language as tl


@triton.jit
def tile(pointer, batch, rows, head, seqlen, heads, DIM: tl.constexpr):
    """Rows of one head, 0 beyond the sequence."""
    at = ((batch * seqlen + rows[:, None]) * heads + head) * DIM + tl.arange(0, DIM)[None, :]
    return tl.load(pointer + at, mask=rows[:, None] < seqlen, other=0.0)


@triton.jit
def put(pointer, values, batch, rows, head, seqlen, heads, DIM: tl.constexpr):
    """Store `tile`'s rows."""
    at = ((batch * seqlen + rows[:, None]) * heads + head) * DIM + tl.arange(0, DIM)[None, :]
    tl.store(pointer + at, values.to(pointer.dtype.element_ty), mask=rows[:, None] < seqlen)


@triton.jit
def scores(q, k, rows, keys, seqlen_q, seqlen_k, scale, CAUSAL: tl.constexpr):
    """Scaled scores in float32, -inf where a key is hidden: bottom-right aligned, as flash-attention's."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    visible = (rows[:, None] < seqlen_q) & (keys[None, :] < seqlen_k)
    if CAUSAL:
        visible = visible & (keys[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
    return tl.where(visible, s, float("-inf"))


@triton.jit
def forward(
    q, k, v, o, lse, scale, seqlen_q, seqlen_k, heads, kv_heads,
    CAUSAL: tl.constexpr, DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head against all keys, with a running maximum and sum."""
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    head, batch = tl.program_id(1), tl.program_id(2)
    kv_head = head // (heads // kv_heads)
    q_tile = tile(q, batch, rows, head, seqlen_q, heads, DIM)
    largest = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, DIM], tl.float32)
    for begin in range(0, seqlen_k, TILE_N):
        keys = begin + tl.arange(0, TILE_N)
        k_tile = tile(k, batch, keys, kv_head, seqlen_k, kv_heads, DIM)
        v_tile = tile(v, batch, keys, kv_head, seqlen_k, kv_heads, DIM)
        s = scores(q_tile, k_tile, rows, keys, seqlen_q, seqlen_k, scale, CAUSAL)
        new = tl.maximum(largest, tl.max(s, 1))
        # A row that has seen no key yet: exp(-inf - -inf) would be NaN.
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(s - base[:, None])
        shrink = tl.exp(largest - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        largest = new
    alone = total == 0.0
    result = acc / tl.where(alone, 1.0, total)[:, None]
    put(o, result, batch, rows, head, seqlen_q, heads, DIM)
    log_sum = tl.where(alone, float("-inf"), largest + tl.log(tl.where(alone, 1.0, total)))
    tl.store(lse + (batch * heads + head) * seqlen_q + rows, log_sum, mask=rows < seqlen_q)


@triton.jit
def gradients(q_tile, k_tile, v_tile, do_tile, lse_tile, delta_tile, rows, keys, seqlen_q, seqlen_k, scale, CAUSAL: tl.constexpr):
    """P and dS of one tile of queries and one of keys, float32."""
    s = scores(q_tile, k_tile, rows, keys, seqlen_q, seqlen_k, scale, CAUSAL)
    p = tl.exp(s - tl.where(lse_tile == float("-inf"), 0.0, lse_tile)[:, None])
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
    return p, p * (dp - delta_tile[:, None])


@triton.jit
def backward_queries(
    q, k, v, do, lse, delta, dq, scale, seqlen_q, seqlen_k, heads, kv_heads,
    CAUSAL: tl.constexpr, DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries."""
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    head, batch = tl.program_id(1), tl.program_id(2)
    kv_head = head // (heads // kv_heads)
    q_tile = tile(q, batch, rows, head, seqlen_q, heads, DIM)
    do_tile = tile(do, batch, rows, head, seqlen_q, heads, DIM)
    at = (batch * heads + head) * seqlen_q + rows
    lse_tile = tl.load(lse + at, mask=rows < seqlen_q, other=0.0)
    delta_tile = tl.load(delta + at, mask=rows < seqlen_q, other=0.0)
    acc = tl.zeros([TILE_M, DIM], tl.float32)
    for begin in range(0, seqlen_k, TILE_N):
        keys = begin + tl.arange(0, TILE_N)
        k_tile = tile(k, batch, keys, kv_head, seqlen_k, kv_heads, DIM)
        v_tile = tile(v, batch, keys, kv_head, seqlen_k, kv_heads, DIM)
        _, ds = gradients(q_tile, k_tile, v_tile, do_tile, lse_tile, delta_tile, rows, keys, seqlen_q, seqlen_k, scale, CAUSAL)
        acc += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision="ieee")
    put(dq, acc * scale, batch, rows, head, seqlen_q, heads, DIM)


@triton.jit
def backward_keys(
    q, k, v, do, lse, delta, dk, dv, scale, seqlen_q, seqlen_k, heads, kv_heads,
    CAUSAL: tl.constexpr, DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys: the sum over the group's query heads and all queries, without atomics."""
    keys = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    groups = heads // kv_heads
    k_tile = tile(k, batch, keys, kv_head, seqlen_k, kv_heads, DIM)
    v_tile = tile(v, batch, keys, kv_head, seqlen_k, kv_heads, DIM)
    dk_acc = tl.zeros([TILE_N, DIM], tl.float32)
    dv_acc = tl.zeros([TILE_N, DIM], tl.float32)
    for member in range(groups):
        head = kv_head * groups + member
        for begin in range(0, seqlen_q, TILE_M):
            rows = begin + tl.arange(0, TILE_M)
            q_tile = tile(q, batch, rows, head, seqlen_q, heads, DIM)
            do_tile = tile(do, batch, rows, head, seqlen_q, heads, DIM)
            at = (batch * heads + head) * seqlen_q + rows
            lse_tile = tl.load(lse + at, mask=rows < seqlen_q, other=0.0)
            delta_tile = tl.load(delta + at, mask=rows < seqlen_q, other=0.0)
            p, ds = gradients(
                q_tile, k_tile, v_tile, do_tile, lse_tile, delta_tile, rows, keys, seqlen_q, seqlen_k, scale, CAUSAL
            )
            dv_acc += tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, input_precision="ieee")
            dk_acc += tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile, input_precision="ieee")
    put(dk, dk_acc * scale, batch, keys, kv_head, seqlen_k, kv_heads, DIM)
    put(dv, dv_acc, batch, keys, kv_head, seqlen_k, kv_heads, DIM)
