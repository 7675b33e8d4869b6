"""Which slots share a frame: padding costs scores, and each frame its operations."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["grouped"]

_LAUNCHES = 2
"""The operations of a frame cost as much as the scores of a chunk divided by this, and each row and key as much as as many scores
as q and v have dims: their own elements and budgets. It is what they cost the processor, which prepares them, more than a GPU.
A batch of 96 Cases of triton.varlen has 10.4 frames and 12.8 million padded scores, by 4 in place of 2 13.7 and 9.1, by 1 8.7 and
16.8 (960 drawn Cases, a script that is not in the repository). On a CPU no difference was measured."""


def grouped(sizes: Sequence[tuple[int, int]], chunk: int, around: int = 0) -> list[list[int]]:
    """Return the numbers of `sizes` (rows, keys) in groups of at most `chunk` padded scores, where padding is cheap or short.

    One that is larger is a group of its own. Groups of similar sizes are merged, those first that save most. `around`: scores
    that count for a row or a key.
    """
    groups = dict(enumerate(_alike(sizes, chunk, around)))
    price = chunk // _LAUNCHES
    best: list[tuple[int, int, int]] = []

    def offer(first: int, one: _Group, others: Iterable[tuple[int, _Group]]) -> None:
        # Hundreds of pairs for each batch: no objects of theirs.
        rows, keys, slots, cost, _ = one
        for other, (rows_, keys_, slots_, cost_, _) in others:
            most, longest, both = max(rows, rows_), max(keys, keys_), slots + slots_
            if (padded := most * longest * both) <= chunk:
                saved = price + cost + cost_ - padded - around * (most + longest) * both
                if saved > 0:
                    heapq.heappush(best, (-saved, min(first, other), max(first, other)))

    # Full groups merge with nothing; there may be thousands.
    small = {at: each for at, each in groups.items() if 2 * each.padded <= chunk}
    for at, (first, one) in enumerate(small.items()):
        offer(first, one, itertools.islice(small.items(), at + 1, None))
    new = len(groups)
    while best:
        _, first, other = heapq.heappop(best)
        if first not in groups or other not in groups:
            continue
        group = groups.pop(first).beside(groups.pop(other), around)
        del small[first], small[other]
        groups[new] = group
        if 2 * group.padded <= chunk:
            offer(new, group, small.items())
            small[new] = group
        new += 1
    return [each.numbers for each in groups.values()]


class _Group(NamedTuple):
    """Slots of one frame: the most rows and keys of one, how many they are, the scores that they cost as much as, and which."""

    rows: int
    keys: int
    slots: int
    cost: int
    numbers: list[int]

    @staticmethod
    def of(rows: int, keys: int, numbers: list[int], around: int) -> _Group:
        """Return a group, given the scores that count for a row or a key."""
        slots = len(numbers)
        return _Group(rows, keys, slots, slots * (rows * keys + around * (rows + keys)), numbers)

    @property
    def padded(self) -> int:
        return self.rows * self.keys * self.slots

    def beside(self, other: _Group, around: int) -> _Group:
        """Return the slots of both in one frame."""
        return _Group.of(max(self.rows, other.rows), max(self.keys, other.keys), self.numbers + other.numbers, around)


def _alike(sizes: Sequence[tuple[int, int]], chunk: int, around: int) -> Iterator[_Group]:
    """Yield groups of sizes that are equal up to a factor of 2, each of at most `chunk` padded scores or of one."""
    cells: dict[tuple[int, int], list[int]] = {}
    for number, (rows, keys) in enumerate(sizes):
        cells.setdefault((rows.bit_length(), keys.bit_length()), []).append(number)
    for cell in cells.values():
        rows, keys = (max(sizes[number][side] for number in cell) for side in (0, 1))
        at_once = max(1, chunk // max(1, rows * keys))
        for start in range(0, len(cell), at_once):
            yield _Group.of(rows, keys, cell[start : start + at_once], around)
