"""The limits that a kernel declares on shapes: pools of shapes, multiples, the greatest batch and number of heads."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from attnfuzz.kernels.contract import Capabilities, Shape

__all__ = ["Room", "narrowed", "shapes_in_room", "within_limits"]

_TIMES = 64
"""Tiles of the largest shapes of a pool that are drawn, as a multiple of the limit's: the kernel takes no others instead."""
_CHEAP = 3
"""Weight of the shapes within the limit."""
_Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Room:
    """Limits on the size of a batch, for a number of heads and a Config.

    A sequence costs `heads * ceil(seqlen_q / tile_m) * ceil(seqlen_k / tile_n)` tiles; `tiles` bounds the batch's sum.
    """

    batch: int
    length: int
    tiles: int
    heads: int
    tile_m: int
    tile_n: int


def shapes_in_room(shapes: Sequence[Shape], room: Room, *, packed: bool = False) -> st.SearchStrategy[Shape]:
    """Return the strategy of `shapes`: those whose tiles fit the room most often, far larger ones never, except the smallest.

    Where q is `packed` with k, those with as many keys as queries: there must be one.
    """
    return _shapes(tuple(each for each in shapes if not packed or each[3] == each[4]), room.tiles, room.tile_m, room.tile_n)


@functools.lru_cache(256)
def _shapes(shapes: tuple[Shape, ...], tiles: int, tile_m: int, tile_n: int) -> st.SearchStrategy[Shape]:
    def cost(shape: Shape) -> int:
        batch, heads, _, n_q, n_k = shape
        return batch * heads * -(-n_q // tile_m) * -(-n_k // tile_n)

    most = max(_TIMES * tiles, min(map(cost, shapes)))
    affordable = [each for each in shapes if cost(each) <= most]
    return st.sampled_from([each for each in affordable for _ in range(_CHEAP if cost(each) <= tiles else 1)])


def narrowed(room: Room, can: Capabilities) -> Room:
    """Return the room as far as the kernel's greatest batch and length allow."""
    batch = room.batch if can.batch_max is None else min(room.batch, can.batch_max)
    length = room.length if can.length_max is None else min(room.length, can.length_max)
    return room if (batch, length) == (room.batch, room.length) else dataclasses.replace(room, batch=batch, length=length)


def within_limits(pairs: Sequence[_Pair], can: Capabilities, room: Room, *, packed: bool = False) -> tuple[_Pair, ...]:
    """Return the batch with lengths that the kernel takes: long enough, and rounded up to multiples, except empty ones.

    The last sequences are left out where the batch is no longer in the room by that. Where q is `packed` with k, both have one
    length.
    """
    steps, least, alike = can.multiples, can.min_seqlen_k, packed or not can.unequal
    if alike:
        steps = (math.lcm(*steps),) * 2
    raised = [(n_q, max(n_k, least) if n_k else 0) for n_q, n_k in pairs]
    pairs = tuple((n_k if alike else n_q, n_k) for n_q, n_k in raised)
    if steps == (1, 1):
        return pairs
    longest = room.length if can.length_max is None else min(room.length, can.length_max)
    pairs = tuple((_rounded(n_q, steps[0], longest), _rounded(n_k, steps[1], longest)) for n_q, n_k in pairs)
    return tuple(_affordable(pairs, room))


def _rounded(length: int, step: int, longest: int) -> int:
    """Return the next multiple of `step`; the largest one up to `longest` where that is beyond, but at least one step."""
    return min(-(-length // step) * step, max(longest // step * step, step))


def _affordable(pairs: Sequence[_Pair], room: Room) -> Iterator[_Pair]:
    spent = 0
    for number, (n_q, n_k) in enumerate(pairs):
        spent += room.heads * -(-n_q // room.tile_m) * -(-n_k // room.tile_n)
        if spent > room.tiles and number:
            return
        yield n_q, n_k
