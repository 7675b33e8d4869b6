"""Slots: the sequences of several batches, one key/value head each, in padded frames with their own masks and scales.

Batches have equal dims and dtype. A row is one query of one head; rows and keys of all batches lie one after the other, each
batch heads first, so that a batch's results are a slice. A frame is `(Z, rows, keys)` as in frames.py, but Z counts slots of any
batch. All indices are computed on the host and sent at once: nothing here waits for the device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.problem import Dtype, Problem
from attnfuzz.oracles.frames import Loaded
from attnfuzz.oracles.fused import fused
from attnfuzz.oracles.modifiers import Leaves, Modifiers
from attnfuzz.oracles.slots.groups import grouped
from attnfuzz.oracles.slots.sent import bits_of, integers, sent

__all__ = ["Flat", "SlotFrame", "Slots", "flat", "sinks_of"]

_ENDLESS = 1 << 40
"""Keys of a side of the window without a limit."""


class _Slot(NamedTuple):
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

    `frames`: covers all slots. `together`: the numbers of its slots, of each frame. `place`: frame and Z of a slot, by its
    number. `row_starts`, `key_starts`: where a batch begins.
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
        self.together = together
        none = (self.row_starts[-1], self.key_starts[-1], None if sinks is None else self.head_starts[-1])
        tables = [_Table([slots[number] for number in numbers], none, even) for numbers in together]
        self._tables = tables
        starts = (self.row_starts, self.key_starts)
        of_row, of_key = (_repeated([stop - start for start, stop in itertools.pairwise(each)]) for each in starts)
        sides = [[(p.packing == "dense", p.seqlens_q, p.slack_q, p.heads) for p in problems]]
        sides += [[(p.packing == "dense", p.seqlens_k, p.slack_k, p.kv_heads) for p in problems]]
        rows, lse = _own(sides[0], of_row, starts[0])
        keys, _ = _own(sides[1], of_key, starts[1])
        framed = [_inverse([table.parts[at] for table in tables], count[-1]) for at, count in enumerate(starts)]
        parts = [rows, keys, lse, of_row, of_key, *framed]
        parts += [self._head_of_row(), self._batch_of_head()] if sinks is not None else [integers([])] * 2
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

    @functools.cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return frame and Z of each slot, and the rows of each of its heads there: int64 on the host."""
        every = [self.place[number] for number in range(len(self.place))]
        heights = [self._tables[frame].heights[z] for frame, z in every]
        return integers([frame for frame, _ in every]), integers([z for _, z in every]), integers(heights)

    def _head_of_row(self) -> torch.Tensor:
        return _repeated([p.total_q for p in self.problems for _ in range(p.heads)])

    def _batch_of_head(self) -> torch.Tensor:
        return _repeated([p.heads for p in self.problems])

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


def _repeated(counts: Sequence[int]) -> torch.Tensor:
    """Return the number of each of `counts`, as often as it says."""
    return torch.arange(len(counts)).repeat_interleave(integers(counts))


def _inverse(parts: list[torch.Tensor], count: int) -> torch.Tensor:
    """Return for each of `count` rows its place in `parts`, one after the other, where other numbers are padding."""
    numbers = torch.cat(parts) if parts else integers([])
    places = torch.full((count + 1,), len(numbers))
    places[numbers] = torch.arange(len(numbers))
    return places[:count]


def _own(
    sides: Sequence[tuple[bool, tuple[int, ...], int, int]], batch: torch.Tensor, starts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the (head, token) of all batches are in their tensors `([batch,] tokens, heads)`, one after the other.

    The second tensor: where they are in tensors `([batch,] heads, tokens)`.

    Args:
        sides: of each batch whether it is dense, its lengths, slack and heads.
        batch: the number of the batch of each (head, token).
        starts: where a batch begins.
    """
    table: list[int] = []
    behind = 0
    for (dense, lengths, slack, heads), start in zip(sides, starts, strict=False):
        # A ragged batch lies as a dense one of a single sequence does.
        tokens = sum(lengths)
        length, sequences = (lengths[0], len(lengths)) if dense else (tokens, 1)
        table += [start, max(1, tokens), max(1, length), length + slack, heads, behind]
        behind += sequences * (length + slack) * heads
    start, tokens, length, width, heads, behind = integers(table).view(-1, 6).T.index_select(1, batch).unbind()
    at = torch.arange(len(batch)) - start
    head = at // tokens
    token = at - head * tokens
    sequence = token // length
    at = token - sequence * length
    return (sequence * width + at) * heads + head + behind, (sequence * heads + head) * width + at + behind


class _Table:
    """A frame's indices on the host: rows, keys, first and last visible key of each row; scale, rows and keys of each slot.

    With sinks, which count as keys, also the head of each row; `none`: the numbers of no row, no key and no head.
    """

    def __init__(self, slots: list[_Slot], none: tuple[int, int, int | None], even: bool) -> None:
        no_row, no_key, no_head = none
        longest = max([x.n_q for x in slots])
        self.heights = [longest if even else x.n_q for x in slots]
        """Rows of each head of a slot."""
        most = max([x.groups * height for x, height in zip(slots, self.heights, strict=True)])
        self.shape = (len(slots), most, max([x.n_k for x in slots]) + (no_head is not None))
        self.rows_of_head = longest if even else most
        *columns, scale, _ = zip(*slots, strict=True)
        table = integers([*itertools.chain(*columns), *self.heights]).view(len(columns) + 1, -1, 1)
        _, first_head, first_row, between, groups, n_q, first_key, n_k, shift, left, right, height = table.unbind()
        r, j = torch.arange(self.shape[1]), torch.arange(self.shape[2])
        head = r // height
        i = r - head * height
        inside = (head < groups) & (i < n_q)
        at_rows = torch.where(inside, first_row + head * between + i, no_row)
        at_keys = torch.where(j < n_k, first_key + j, no_key)
        start, stop = i + shift - left, torch.minimum(i + shift + right + 1, n_k)
        stop.masked_fill_(~inside, 0)
        numbers = bits_of([*scale, *[x.rows for x in slots], *[x.n_k + x.sunk for x in slots]])
        self.parts = [at_rows.flatten(), at_keys.flatten()]
        self.parts += [*(each.double().view(torch.int64).flatten() for each in (start, stop)), numbers]
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

    most = max(each.problem.heads for each in batches)
    none = torch.full((most,), -torch.inf, dtype=torch.float64, device=batches[0].q.device)
    # What is of another dtype becomes float64 beside `none`.
    return torch.cat([*(none[: each.problem.heads] if each.sinks is None else each.sinks for each in batches), none[:1]])
