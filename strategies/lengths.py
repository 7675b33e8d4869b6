"""Sequence lengths, drawn around the Config's own tiles, and the relation of query to key lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from attnfuzz.kernels.contract import Capabilities

__all__ = ["Room", "batches", "edges", "fitted"]


@dataclass(frozen=True, slots=True)
class Room:
    """How large a batch may be, for one drawn number of heads and one Config.

    A sequence costs `heads * ceil(seqlen_q / tile_m) * ceil(seqlen_k / tile_n)` tiles; `tiles` bounds the batch's sum.
    """

    batch: int
    length: int
    tiles: int
    heads: int
    tile_m: int
    tile_n: int


def edges(tile: int, longest: int) -> tuple[int, ...]:
    """The lengths where kernels break, in order: around multiples of the tile, and every residue class that matters."""
    near = [n * tile + d for n in (1, 2, 3) for d in (0, 1, -1)]
    residues = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33]
    far = [tile * n + r for n in (4, 8) for r in (0, 1, -1, 4, 12)]
    found = {*near, *residues, *far, longest, longest - 1}
    # Ascending: a failure that needs some length then shrinks to the smallest edge that has it.
    return tuple(sorted(n for n in found if 1 <= n <= longest))


def batches(can: Capabilities, room: Room, *, dense: bool = False) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """1 to `room.batch` pairs (seqlen_q, seqlen_k) that fit `room`: zero lengths at any place, or all alike if `dense`."""
    longest = min(room.length, can.length_max or room.length)
    pair, equal = _pairs(can, room, longest), not can.unequal
    if dense:
        alike = st.tuples(pair, st.integers(1, max(1, min(room.batch, room.tiles // room.heads))))
        return alike.map(lambda drawn: fitted([drawn[0]], room, equal, copies=drawn[1]) * drawn[1])
    return st.lists(pair, min_size=1, max_size=room.batch).map(lambda found: fitted(found, room, equal))


def _lengths(tile: int, longest: int) -> st.SearchStrategy[int]:
    near = [n * tile + d for n in (1, 2) for d in (-1, 0, 1) if 1 <= n * tile + d <= longest] or [longest]
    return st.one_of(st.sampled_from(edges(tile, longest)), st.sampled_from(near), st.integers(1, longest))


def _pairs(can: Capabilities, room: Room, longest: int) -> st.SearchStrategy[tuple[int, int]]:
    """(seqlen_q, seqlen_k) by relation first, simplest first: equal, k longer, q longer, unrelated, and the empty ones."""
    q, k = _lengths(room.tile_m, longest), _lengths(room.tile_n, longest)
    by = st.one_of(st.sampled_from((1, 2, 3, 8, room.tile_m, room.tile_n + 1)), st.integers(1, longest))
    choices: list[st.SearchStrategy[tuple[int, int]]] = [st.one_of(q, k).map(lambda n: (n, n))]
    if can.unequal:
        choices.append(st.tuples(q, by).map(lambda pair: (pair[0], min(sum(pair), longest))))
        choices.append(st.tuples(k, by).map(lambda pair: (min(sum(pair), longest), pair[0])))
        choices.append(st.tuples(q, k))
    empty: list[st.SearchStrategy[tuple[int, int]]] = []
    if can.zero_k and can.unequal:
        empty.append(q.map(lambda n: (n, 0)))
    if can.zero_q and can.unequal:
        empty.append(k.map(lambda n: (0, n)))
    if can.zero_q and can.zero_k:
        empty.append(st.just((0, 0)))
    # The empty kinds stay a minority: a batch of nothing but empty sequences tells little.
    return st.one_of(choices * 2 + empty)


def fitted(pairs: Sequence[tuple[int, int]], room: Room, equal: bool = False, copies: int = 1) -> tuple[tuple[int, int], ...]:
    """The batch cut to `room.tiles`, counting each sequence `copies` times.

    A sequence keeps its lengths while they fit, then loses whole tiles on its longer side: what is left of the last tile, where
    kernels break, stays as it was drawn.
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
