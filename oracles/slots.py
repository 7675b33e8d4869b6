"""Slots: the sequences of several batches, one key/value head each, in padded frames with their own masks and scales.

Batches have equal dims and dtype. A row is one query of one head; rows and keys of all batches lie one after the other, each
batch heads first, so that a batch's results are a slice. A frame is `(Z, rows, keys)` as in frames.py, but Z counts slots of any
batch. All indices are computed on the host and sent at once: nothing here waits for the device.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.problem import Dtype, Problem
from attnfuzz.oracles.frames import Loaded
from attnfuzz.oracles.fused import fused
from attnfuzz.oracles.modifiers import Leaves, Modifiers

__all__ = ["Flat", "SlotFrame", "Slots", "flat", "grouped", "sent", "sinks_of"]

_LAUNCHES = 2
"""The operations of a frame cost as much as the scores of a chunk divided by this, and each row and key as much as as many scores
as q and v have dims: their own elements and budgets. It is what they cost the processor, which prepares them, more than a GPU.
A batch of 96 Cases of triton.varlen has 10.4 frames and 12.8 million padded scores, by 4 in place of 2 13.7 and 9.1, by 1 8.7 and
16.8 (960 drawn Cases, a script that is not in the repository). On a CPU no difference was measured."""
_ENDLESS = 1 << 40
"""Keys of a side of the window without a limit."""


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """One key/value head of one sequence: first row and key in `Flat`, rows between heads, first head, lengths, and the mask.

    Query i sees keys from `i + shift - left` to `i + shift + right`.
    """

    batch: int
    first_head: int
    first_row: int
    between_heads: int
    groups: int
    n_q: int
    first_key: int
    n_k: int
    shift: int
    left: int
    right: int
    scale: float
    sunk: bool

    @property
    def rows(self) -> int:
        return self.groups * self.n_q


class Slots:
    """The slots of several batches and their frames.

    `frames`: covers all slots. `place`: frame and Z of a slot, by its number. `row_starts`, `key_starts`: where a batch begins.
    `rows`, `keys`: for each row (key) its index among those of the batches' own tensors, one after the other; `lse` the same for
    LSE. `batch_of_row`, `batch_of_key`: the number of its batch. `framed_rows`, `framed_keys`: where it is among those of all
    frames, padding included, one frame after the other; those in no frame are one behind the last. With sinks, `head_of_row` and
    `batch_of_head`: the number of a row's head among those of all batches, and of a head's batch. On the device.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        chunk: int,
        device: torch.device,
        *,
        even: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Place the slots in frames.

        Args:
            problems: those of the batches.
            chunk: scores of a frame.
            device: where indices are sent.
            even: whether all heads of a frame have equally many rows, for batches of equal groups.
            sinks: those of all heads (`sinks_of`); each frame has one more key then, which is the sink.
        """
        self.problems, self.sinks = tuple(problems), sinks
        self.head_starts = list(accumulate((p.heads for p in problems), initial=0))
        self.row_starts = list(accumulate((p.total_q * p.heads for p in problems), initial=0))
        self.key_starts = list(accumulate((p.total_k * p.kv_heads for p in problems), initial=0))
        slots, self._first = self._slots()
        around = problems[0].dim_qk + problems[0].dim_v
        together = grouped([(each.rows, each.n_k) for each in slots], chunk, around)
        self.place = {number: (at, z) for at, numbers in enumerate(together) for z, number in enumerate(numbers)}
        self.batches = [[slots[number].batch for number in numbers] for numbers in together]
        none = (self.row_starts[-1], self.key_starts[-1], None if sinks is None else self.head_starts[-1])
        tables = [_Table([slots[number] for number in numbers], none, even) for numbers in together]
        self._tables = tables
        rows, keys, lse = (list(x) for x in zip(*self._own_indices(), strict=True))
        starts = (self.row_starts, self.key_starts)
        of_row, of_key = (torch.arange(len(problems)).repeat_interleave(torch.tensor(each).diff()) for each in starts)
        framed = [_inverse([table.parts[at] for table in tables], count[-1]) for at, count in enumerate(starts)]
        parts = [torch.cat(rows), torch.cat(keys), torch.cat(lse), of_row, of_key, *framed]
        parts += [self._head_of_row(), self._batch_of_head()] if sinks is not None else [torch.zeros(0, dtype=torch.int64)] * 2
        on_device = sent([*parts, *(x for table in tables for x in table.parts)], device)
        self.rows, self.keys, self.lse, self.batch_of_row, self.batch_of_key, *rest = on_device
        self.framed_rows, self.framed_keys, self.head_of_row, self.batch_of_head, *rest = rest
        size = len(tables[0].parts) if tables else 1
        self.frames = [
            SlotFrame(problems[0].dtype, table, rest[size * at : size * (at + 1)], sinks) for at, table in enumerate(tables)
        ]

    def number(self, batch: int, sequence: int, kv_head: int) -> int:
        """Return the number of a slot, of a sequence with queries and keys."""
        return self._first[batch, sequence] + kv_head

    def row(self, number: int, head: int, token: int) -> int:
        """Return where query `token` of a head of the group is among the rows of its slot."""
        frame, z = self.place[number]
        return head * self._tables[frame].heights[z] + token

    def _head_of_row(self) -> torch.Tensor:
        rows = [p.total_q for p in self.problems for _ in range(p.heads)]
        return torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))

    def _batch_of_head(self) -> torch.Tensor:
        return torch.arange(len(self.problems)).repeat_interleave(torch.tensor(self.head_starts).diff())

    def _slots(self) -> tuple[list[_Slot], dict[tuple[int, int], int]]:
        slots: list[_Slot] = []
        first = {}
        for batch, p in enumerate(self.problems):
            left, right = p.window or (None, None)
            sides = (_ENDLESS if left is None else left, 0 if p.causal else _ENDLESS if right is None else right)
            at_q = at_k = 0
            for index, (n_q, n_k) in enumerate(zip(p.seqlens_q, p.seqlens_k, strict=True)):
                if n_q and n_k:
                    first[batch, index] = len(slots)
                    shift = 0 if p.causal == "top_left" else n_k - n_q
                    for kv in range(p.kv_heads):
                        row = self.row_starts[batch] + kv * p.groups * p.total_q + at_q
                        key = self.key_starts[batch] + kv * p.total_k + at_k
                        head = self.head_starts[batch] + kv * p.groups
                        slots.append(_Slot(batch, head, row, p.total_q, p.groups, n_q, key, n_k, shift, *sides, p.scale, p.sinks))
                at_q, at_k = at_q + n_q, at_k + n_k
        return slots, first

    def _own_indices(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return for each batch the indices of `rows`, `keys` and `lse`."""
        indices = []
        at_q = at_k = at_lse = 0
        for p in self.problems:
            rows, lse, size_q = _own(p.packing == "dense", p.seqlens_q, p.slack_q, p.heads)
            keys, _, size_k = _own(p.packing == "dense", p.seqlens_k, p.slack_k, p.kv_heads)
            indices.append((rows + at_q, keys + at_k, lse + at_lse))
            at_q, at_k, at_lse = at_q + size_q, at_k + size_k, at_lse + size_q
        return indices


def _inverse(parts: list[torch.Tensor], count: int) -> torch.Tensor:
    """Return for each of `count` rows its place in `parts`, one after the other, where other numbers are padding."""
    numbers = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    places = torch.full((count + 1,), len(numbers))
    places[numbers] = torch.arange(len(numbers))
    return places[:count]


def _own(dense: bool, lengths: tuple[int, ...], slack: int, heads: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return where (head, token) is in a tensor `([batch,] tokens, heads)`, in one `([batch,] heads, tokens)`, and its size."""
    head, token = torch.arange(heads)[:, None], torch.arange(sum(lengths))
    if not dense:
        width = sum(lengths) + slack
        return (token * heads + head).flatten(), (head * width + token).flatten(), width * heads
    width = lengths[0] + slack
    sequence = token // max(1, lengths[0])
    at = token - sequence * lengths[0]
    rows, lse = (sequence * width + at) * heads + head, (sequence * heads + head) * width + at
    return rows.flatten(), lse.flatten(), len(lengths) * width * heads


class _Table:
    """A frame's indices on the host: rows, keys, first and last visible key of each row; scale, rows and keys of each slot.

    With sinks, which count as keys, also the head of each row; `none`: the numbers of no row, no key and no head.
    """

    def __init__(self, slots: list[_Slot], none: tuple[int, int, int | None], even: bool) -> None:
        no_row, no_key, no_head = none
        longest = max(each.n_q for each in slots)
        self.heights = [longest if even else each.n_q for each in slots]
        """Rows of each head of a slot."""
        most = max(each.groups * height for each, height in zip(slots, self.heights, strict=True))
        self.shape = (len(slots), most, max(each.n_k for each in slots) + (no_head is not None))
        self.rows_of_head = longest if even else most
        table = torch.tensor(
            [
                (x.first_row, x.between_heads, x.first_head, x.groups, x.n_q, x.first_key, x.n_k, x.shift, x.left, x.right)
                for x in slots
            ]
        )
        first_row, between, first_head, groups, n_q, first_key, n_k, shift, left, right = table[:, :, None].unbind(1)
        r, j = torch.arange(self.shape[1]), torch.arange(self.shape[2])
        height = torch.tensor(self.heights)[:, None]
        head = r // height
        i = r - head * height
        inside = (head < groups) & (i < n_q)
        at_rows = torch.where(inside, first_row + head * between + i, no_row)
        at_keys = torch.where(j < n_k, first_key + j, no_key)
        start, stop = i + shift - left, torch.minimum(i + shift + right + 1, n_k)
        stop.masked_fill_(~inside, 0)
        numbers = torch.tensor([(x.scale, float(x.rows), float(x.n_k + x.sunk)) for x in slots], dtype=torch.float64)
        of_float = [each.contiguous().view(torch.int64) for each in (start.double(), stop.double(), numbers.T)]
        self.parts = [each.flatten() for each in (at_rows, at_keys, *of_float)]
        if no_head is not None:
            self.parts.append(torch.where(inside, first_head + head, no_head).flatten())


class SlotFrame:
    """A frame of slots on the device, as the budgets take it. `at_rows`, `at_keys`: its rows and keys in `Flat`.

    With sinks its last key is the sink, with k and v 0, which slots of batches without sinks and padding do not see (-inf).
    `at_heads`: the head of each row among those of all batches, one behind the last for padding.
    """

    part = 1.0

    def __init__(self, dtype: Dtype, table: _Table, parts: Sequence[torch.Tensor], sinks: torch.Tensor | None) -> None:
        self.dtype: Dtype = dtype
        self.modifiers = Modifiers(None, None, {})
        self.shape = table.shape
        z, rows, _ = table.shape
        self.at_rows, self.at_keys, begin, end, numbers, *at_heads = parts
        self.at_heads = at_heads[0] if at_heads else None
        self.sinks = None if sinks is None or self.at_heads is None else sinks[self.at_heads].view(z, rows, 1)
        self._begin, self._end = (each.view(torch.float64).view(z, rows, 1) for each in (begin, end))
        self._visible: torch.Tensor | None = None
        self.scale, self.terms_q, self.n_k = numbers.view(torch.float64).view(3, z, 1, 1).unbind()
        self.terms_k, self.rows_of_head = self.n_k, table.rows_of_head

    def take(self, flat: Flat) -> Loaded:
        """Return the frame's tensors."""
        d_lse = None if flat.d_lse is None else self._rows(flat.d_lse)
        return Loaded(self._rows(flat.q), self._keys(flat.k), self._keys(flat.v), self._rows(flat.d_o), d_lse)

    def leaves(self) -> Leaves:
        """Return nothing: slots are of batches without modifiers."""
        return {}

    def visible(self) -> torch.Tensor:
        """Return which keys a row sees, bool `(Z, rows, keys)`; none for padding. It is kept until `release`."""
        if self._visible is None:
            j = torch.arange(self.shape[2], dtype=torch.float64, device=self._end.device)
            self._visible = _seen(j, self._begin, self._end, self.sinks, self.shape[2] - 1)
        return self._visible

    def release(self) -> None:
        """Let go of what was kept."""
        self._visible = None

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, self.at_rows).view(*self.shape[:2], -1)

    def _keys(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, self.at_keys).view(self.shape[0], self.shape[2], -1)


@fused
def _seen(j: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, sinks: torch.Tensor | None, last: int) -> torch.Tensor:
    """Return whether key j is within a row's range, or is the sink, the last one."""
    within = (j >= begin) & (j < end)
    return within if sinks is None else within | ((j == last) & (sinks > -torch.inf))


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """Tensors of several batches in float64: q, d_o, d_lse `(rows + 1, dim)`; k, v `(keys + 1, dim)`; the last is 0."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_o: torch.Tensor
    d_lse: torch.Tensor | None


def flat(slots: Slots, batches: Sequence[Inputs]) -> Flat:
    """Return the tensors of the batches in the order of `slots`."""

    def ordered(parts: list[torch.Tensor], index: torch.Tensor) -> torch.Tensor:
        x = torch.cat([*(each.reshape(-1, each.shape[-1]) for each in parts), parts[0].new_zeros((1, parts[0].shape[-1]))])
        return x.index_select(0, torch.cat([index, index.new_full((1,), x.shape[0] - 1)])).to(torch.float64)

    d_lse = None
    if any(each.d_lse is not None for each in batches):
        shapes = [(each.q[..., 0].transpose(-1, -2).shape if each.d_lse is None else each.d_lse.shape) for each in batches]
        gradients = [
            torch.zeros(shape, device=each.q.device) if each.d_lse is None else each.d_lse
            for each, shape in zip(batches, shapes, strict=True)
        ]
        d_lse = ordered([each.reshape(-1, 1) for each in gradients], slots.lse)
    return Flat(
        q=ordered([each.q for each in batches], slots.rows),
        k=ordered([each.k for each in batches], slots.keys),
        v=ordered([each.v for each in batches], slots.keys),
        d_o=ordered([each.d_o for each in batches], slots.rows),
        d_lse=d_lse,
    )


def sinks_of(batches: Sequence[Inputs]) -> torch.Tensor | None:
    """Return the sinks of all heads, float64 `(heads + 1,)`, -inf in batches without any and last; None if no batch has any."""
    if not any(each.problem.sinks for each in batches):
        return None

    def none(heads: int) -> torch.Tensor:
        return torch.full((heads,), -torch.inf, dtype=torch.float64, device=batches[0].q.device)

    every = [none(each.problem.heads) if each.sinks is None else each.sinks.to(torch.float64) for each in batches]
    return torch.cat([*every, none(1)])


def grouped(sizes: Sequence[tuple[int, int]], chunk: int, around: int = 0) -> list[list[int]]:
    """Return the numbers of `sizes` (rows, keys) in groups of at most `chunk` padded scores, where padding is cheap or short.

    One that is larger is a group of its own. Groups of similar sizes are merged, those first that save most. `around`: scores
    that count for a row or a key.
    """
    groups = dict(enumerate(_alike(sizes, chunk)))
    price = chunk // _LAUNCHES
    best: list[tuple[int, int, int]] = []

    def offer(first: int, other: int) -> None:
        one, two = groups[first].size, groups[other].size
        both = one.beside(two)
        if both.padded <= chunk and (saved := price + one.cost(around) + two.cost(around) - both.cost(around)) > 0:
            heapq.heappush(best, (-saved, first, other))

    # Full groups merge with nothing; there may be thousands.
    for first, other in itertools.combinations([at for at, each in groups.items() if 2 * each.size.padded <= chunk], 2):
        offer(first, other)
    new = len(groups)
    while best:
        _, first, other = heapq.heappop(best)
        if first not in groups or other not in groups:
            continue
        one, two = groups.pop(first), groups.pop(other)
        groups[new] = _Group(one.size.beside(two.size), one.numbers + two.numbers)
        if 2 * groups[new].size.padded <= chunk:
            for each in [at for at, group in groups.items() if at != new and 2 * group.size.padded <= chunk]:
                offer(each, new)
        new += 1
    return [each.numbers for each in groups.values()]


class _Size(NamedTuple):
    """The most rows and keys of a slot of one frame, and how many slots it has."""

    rows: int
    keys: int
    slots: int

    @property
    def padded(self) -> int:
        return self.rows * self.keys * self.slots

    def cost(self, around: int) -> int:
        """Return the scores that it costs as much as."""
        return self.padded + around * (self.rows + self.keys) * self.slots

    def beside(self, other: _Size) -> _Size:
        """Return that of both in one frame."""
        return _Size(max(self.rows, other.rows), max(self.keys, other.keys), self.slots + other.slots)


class _Group(NamedTuple):
    """Slots of one frame."""

    size: _Size
    numbers: list[int]


def _alike(sizes: Sequence[tuple[int, int]], chunk: int) -> Iterator[_Group]:
    """Yield groups of sizes that are equal up to a factor of 2, each of at most `chunk` padded scores or of one."""
    cells: dict[tuple[int, int], list[int]] = {}
    for number, (rows, keys) in enumerate(sizes):
        cells.setdefault((rows.bit_length(), keys.bit_length()), []).append(number)
    for cell in cells.values():
        rows, keys = (max(sizes[number][side] for number in cell) for side in (0, 1))
        at_once = max(1, chunk // max(1, rows * keys))
        for start in range(0, len(cell), at_once):
            numbers = cell[start : start + at_once]
            yield _Group(_Size(rows, keys, len(numbers)), numbers)


def sent(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return int64 tensors of the host on the device, by one copy.

    It is not waited for, nor what the device does before it: the driver takes its own copy of memory that is not pinned.
    """
    return list(torch.cat(list(parts)).to(device, non_blocking=True).split([len(each) for each in parts]))
