"""Sequence lengths, drawn around the Config's tiles, and the relation of query to key lengths."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from hypothesis import strategies as st

from attnfuzz.kernels.contract import Capabilities
from attnfuzz.strategies.kernel_limits import Room, narrowed
from attnfuzz.strategies.weighted import weighted

_T = TypeVar("_T")
_Pair = tuple[int, int]

__all__ = ["batches", "blocks_in_room", "corners", "edges", "fits", "fitted", "parts_of_keys", "whole_blocks"]

_PASSED = (0, 1, -1, 2)
"""Tokens by which a diagonal passes a corner of tiles."""
_REMEMBERED = 4096
"""Strategies kept for the lengths, rooms and blocks of one process: to build one costs more than to draw from it."""


def edges(tile: int, longest: int) -> tuple[int, ...]:
    """Return lengths where kernels break, ascending: around multiples of the tile, and every residue class that matters."""
    near = [n * tile + d for n in (1, 2, 3) for d in (0, 1, -1)]
    residues = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33]
    far = [tile * n + r for n in (4, 8) for r in (0, 1, -1, 4, 12)]
    lengths = {*near, *residues, *far, longest, longest - 1}
    # Ascending: a failure then shrinks to the smallest edge that shows it.
    return tuple(sorted(n for n in lengths if 1 <= n <= longest))


class _LengthLimits(NamedTuple):
    """The lengths that a kernel takes, and the tiles around which they are drawn."""

    unequal: bool
    zero_q: bool
    zero_k: bool
    longest: int
    tile_m: int
    tile_n: int


def batches(can: Capabilities, room: Room, *, dense: bool = False, packed: bool = False) -> st.SearchStrategy[tuple[_Pair, ...]]:
    """Return a strategy of 1 to `room.batch` pairs (seqlen_q, seqlen_k) that fit `room`; all equal if `dense`.

    Where q is `packed` with k, both have the same length in every sequence.
    """
    room = narrowed(room, can)
    lengths = _LengthLimits(can.unequal and not packed, can.zero_q, can.zero_k, room.length, room.tile_m, room.tile_n)
    return _batches(lengths, room, dense)


@functools.lru_cache(_REMEMBERED)
def _batches(lengths: _LengthLimits, room: Room, dense: bool) -> st.SearchStrategy[tuple[_Pair, ...]]:
    equal = not lengths.unequal
    if dense:
        # All of a dense batch is empty where one sequence is.
        pair = weighted((2, _solid(lengths)), (1, _pairs(lengths)))
        alike = st.tuples(pair, st.integers(1, max(1, min(room.batch, room.tiles // room.heads))))
        return alike.map(lambda parts: _copied(*parts, room, equal))
    return _several(lengths, room.batch).map(lambda pairs: fitted(pairs, room, equal))


def _copied(pair: _Pair, copies: int, room: Room, equal: bool) -> tuple[_Pair, ...]:
    """Return a dense batch of `copies` sequences, or of fewer: lengths that lie at a tile's end matter more than their number."""
    copies = max(1, min(copies, room.tiles // (room.heads * max(1, _cost(room, *pair)))))
    return fitted([pair], room, equal, copies=copies) * copies


@functools.lru_cache(_REMEMBERED)
def _several(lengths: _LengthLimits, most: int) -> st.SearchStrategy[list[_Pair]]:
    """Return a strategy of 1 to `most` sequences, of which mostly one at least has both queries and keys."""
    # A batch of only empty sequences shows little.
    pair = _pairs(lengths)
    solid = st.tuples(_solid(lengths), st.lists(pair, max_size=most - 1), st.integers(0, most - 1))
    mostly = solid.map(lambda parts: [*parts[1][: parts[2]], parts[0], *parts[1][parts[2] :]])
    several = st.lists(pair, min_size=1, max_size=most)
    choices = [(6, mostly), (2, several)]
    if lengths.unequal:
        # Decoding: kernels and their wrappers have code of its own for max_seqlen_q = 1.
        choices.append((1, several.map(lambda pairs: [(min(n_q, 1), n_k) for n_q, n_k in pairs])))
    return weighted(*choices)


def blocks_in_room(room: Room, block: int) -> bool:
    """Whether a sequence of 2 x 2 blocks, each of `block` queries and keys, fits the room and is at most half the longest."""
    return 4 * block <= room.length and room.heads * _cost(room, 2 * block, 2 * block) <= room.tiles


def whole_blocks(
    can: Capabilities, room: Room, block: int, *, of_keys: int = 1, dense: bool = False, packed: bool = False
) -> st.SearchStrategy[tuple[_Pair, ...]]:
    """Return a strategy as `batches`, with at least one block of queries and `of_keys` of keys, around multiples of it."""
    room = narrowed(room, can)
    return _whole_blocks(can.unequal and not packed, room.length, room, block, of_keys, dense)


@functools.lru_cache(_REMEMBERED)
def _whole_blocks(
    unequal: bool, longest: int, room: Room, block: int, of_keys: int, dense: bool
) -> st.SearchStrategy[tuple[_Pair, ...]]:
    near = [n for n in (many * block + d for many in (1, 2, 3) for d in (0, 1, -1, -2)) if block <= n <= longest] or [longest]
    keys = [n for n in near if n > (of_keys - 1) * block] or near[-1:]
    # Cheapest first; without room for any, the smallest.
    pairs = [(q, k) for q in near for k in keys if unequal or q == k]
    every = sorted(pairs, key=lambda pair: (_cost(room, *pair), sum(pair)))
    most = max(1, min(room.batch, room.tiles // (room.heads * _cost(room, *every[0]))))

    def of(count: int) -> st.SearchStrategy[tuple[_Pair, ...]]:
        fits = [pair for pair in every if count * room.heads * _cost(room, *pair) <= room.tiles] or every[:1]
        pair = st.sampled_from(fits)
        return pair.map(lambda each: (each,) * count) if dense else st.tuples(*[pair] * count)

    by_count = [of(count) for count in range(1, most + 1)]
    return st.integers(1, most).flatmap(lambda count: by_count[count - 1])


@functools.lru_cache(_REMEMBERED)
def parts_of_keys(room: Room, block: int, *, dense: bool = False) -> st.SearchStrategy[tuple[_Pair, ...]]:
    """Return a strategy of two sequences with few queries and two or three blocks of keys, which a Config divides into parts.

    A part's sums have a stride for each sequence, head and part: all of them show only where there are several of each.
    """
    queries = {1, 2, 3, room.tile_m - 1, room.tile_m, room.tile_m + 1} - {0}
    keys = [n for n in (block + 1, 2 * block - 1, 2 * block, 2 * block + 1) if n <= room.length] or [room.length]
    pairs = sorted(((q, k) for q in queries for k in keys), key=lambda pair: (_cost(room, *pair), sum(pair)))
    pair = st.sampled_from([each for each in pairs if fits((each, each), room)] or pairs[:1])
    return pair.map(lambda each: (each, each)) if dense else st.tuples(pair, pair)


def corners(can: Capabilities, room: Room, *, packed: bool = False) -> st.SearchStrategy[tuple[_Pair, ...]]:
    """Return a strategy of one sequence in `room` whose diagonal from its last query and key runs through a corner of tiles.

    Or passes it by few tokens: loops over the keys of a tile of queries end there under a causal mask.
    """
    room = narrowed(room, can)
    return _corners(can.unequal and not packed, room)


@functools.lru_cache(_REMEMBERED)
def _corners(unequal: bool, room: Room) -> st.SearchStrategy[tuple[_Pair, ...]]:
    queries = [many * room.tile_m + d for many in (1, 2, 3) for d in (-1, 0, 1)]
    offsets = [many * room.tile_n + d for many in (0, 1, -1, 2, -2) for d in _PASSED] if unequal else [0]
    pairs = [(q, q + offset) for q in queries for offset in offsets if 1 <= q <= room.length and 1 <= q + offset <= room.length]
    fits = [pair for pair in pairs if room.heads * _cost(room, *pair) <= room.tiles]
    # Cheapest first; without room for any, the smallest.
    every = sorted(fits or [(1, 1)], key=lambda pair: (_cost(room, *pair), sum(pair)))
    return st.sampled_from(every).map(lambda pair: (pair,))


def fits(pairs: Sequence[_Pair], room: Room) -> bool:
    """Whether a batch takes no more tiles than there is room for."""
    return room.heads * sum(_cost(room, *pair) for pair in pairs) <= room.tiles


def _cost(room: Room, n_q: int, n_k: int) -> int:
    return _tiles(n_q, room.tile_m) * _tiles(n_k, room.tile_n)


def _length(tile: int, longest: int) -> st.SearchStrategy[int]:
    near = [n * tile + d for n in (1, 2, 3) for d in (-1, 0, 1) if 1 <= n * tile + d <= longest] or [longest]
    around = st.sampled_from(near)
    return weighted((2, st.sampled_from(edges(tile, longest))), (4, around), (2, st.integers(1, longest)))


def _solid(lengths: _LengthLimits) -> st.SearchStrategy[_Pair]:
    """Return a strategy of (seqlen_q, seqlen_k), neither empty, by relation: equal, k longer, q longer, unrelated."""
    longest, tile = lengths.longest, lengths.tile_n
    q, k = _length(lengths.tile_m, longest), _length(tile, longest)
    by = weighted((2, st.sampled_from((1, 2, 3, 8, lengths.tile_m, tile - 1, tile, tile + 1))), (1, st.integers(1, longest)))
    equal = weighted((1, q), (1, k)).map(lambda n: (n, n))
    if not lengths.unequal:
        return equal
    k_longer = st.tuples(q, by).map(lambda pair: (pair[0], max(1, min(sum(pair), longest))))
    q_longer = st.tuples(k, by).map(lambda pair: (max(1, min(sum(pair), longest)), pair[0]))
    return weighted((1, equal), (1, k_longer), (1, q_longer), (1, st.tuples(q, k)))


def _pairs(lengths: _LengthLimits) -> st.SearchStrategy[_Pair]:
    """Return a strategy of all sequences the kernel takes: both sides, queries without keys, keys without queries, neither."""
    q, k = _length(lengths.tile_m, lengths.longest), _length(lengths.tile_n, lengths.longest)
    choices = [(4, _solid(lengths))]
    if lengths.zero_k and lengths.unequal:
        choices.append((1, q.map(lambda n: (n, 0))))
    if lengths.zero_q and lengths.unequal:
        choices.append((1, k.map(lambda n: (0, n))))
    if lengths.zero_q and lengths.zero_k:
        choices.append((1, st.just((0, 0))))
    return weighted(*choices)


def fitted(pairs: Sequence[tuple[int, int]], room: Room, equal: bool = False, copies: int = 1) -> tuple[tuple[int, int], ...]:
    """Cut the batch to `room.tiles`, counting each sequence `copies` times.

    A sequence keeps its lengths while they fit, then loses whole tiles on its longer side: the partial last tile, where kernels
    break, stays as drawn.
    """
    heads = room.heads * copies
    left, out = room.tiles, []
    for index, (n_q, n_k) in enumerate(pairs):
        # Each later sequence may still need one tile per head.
        spare = max(1, (left - heads * (len(pairs) - index - 1)) // heads)
        rows, columns = _tiles(n_q, room.tile_m), _tiles(n_k, room.tile_n)
        while rows * columns > spare:
            cut_rows = rows > columns or (rows == columns and n_q < n_k)
            rows, columns = (rows - 1, columns) if cut_rows else (rows, columns - 1)
        n_q -= (_tiles(n_q, room.tile_m) - rows) * room.tile_m
        n_k -= (_tiles(n_k, room.tile_n) - columns) * room.tile_n
        if equal:
            n_q = n_k = min(n_q, n_k)
        left -= heads * rows * columns
        out.append((n_q, n_k))
    return tuple(out)


def _tiles(length: int, tile: int) -> int:
    return -(-length // tile)
