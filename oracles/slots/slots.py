"""Slots: the sequences of several batches, one key/value head each, in padded frames with their own masks and scales.

Batches have equal dims and dtype. A row is one query of one head; rows and keys of all batches lie one after the other, each
batch heads first, so that a batch's results are a slice. A frame is `(Z, rows, keys)` as in frames.py, but Z counts slots of any
batch. What describes the slots is sent at once, and their indices, a number for each row and key, are computed from it on the
device, as float64: on the host that took a fifth of the oracle's time. Nothing here waits for the device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.problem import Dtype, Problem
from attnfuzz.oracles.frames import Loaded
from attnfuzz.oracles.fused import fused
from attnfuzz.oracles.modifiers import Leaves, Modifiers
from attnfuzz.oracles.slots.groups import grouped
from attnfuzz.oracles.slots.sent import integers, reals_sent

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
            device: where indices are computed.
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
        tables = [_Table([slots[number] for number in numbers], even, sunk=sinks is not None) for numbers in together]
        self._tables = tables
        sides = [_layouts(problems, each) for each in ("q", "k")]
        heads = [p.heads for p in problems] if sinks is not None else []
        queries = [p.total_q for p, count in zip(problems, heads, strict=False) for _ in range(count)]
        of_q, of_k, heads_, queries_, *columns = reals_sent([*sides, heads, queries, *(each.columns for each in tables)], device)
        rows, keys = self.row_starts[-1], self.key_starts[-1]
        self.batch_of_row, self.rows, self.lse = _own(of_q.view(-1, len(_Layout._fields)), rows)
        self.batch_of_key, self.keys, _ = _own(of_k.view(-1, len(_Layout._fields)), keys)
        self.batch_of_head, self.head_of_row = _repeated(heads_, len(queries)), _repeated(queries_, rows if queries else 0)
        none = (rows, keys, self.head_starts[-1])
        self.frames = [SlotFrame(problems[0].dtype, *each, none, sinks) for each in zip(tables, columns, strict=True)]
        self.framed_rows = _inverse([frame.at_rows for frame in self.frames], rows, device)
        self.framed_keys = _inverse([frame.at_keys for frame in self.frames], keys, device)

    def number(self, batch: int, sequence: int, kv_head: int) -> int:
        """Return the number of a slot, of a sequence with queries and keys."""
        return self._first[batch, sequence] + kv_head

    @functools.cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return frame and Z of each slot, and the rows of each of its heads there: int64 on the host."""
        every = [self.place[number] for number in range(len(self.place))]
        heights = [self._tables[frame].heights[z] for frame, z in every]
        return integers([frame for frame, _ in every]), integers([z for _, z in every]), integers(heights)

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


class _Layout(NamedTuple):
    """How the tensors of one batch lie: of q, or of k.

    `size`: (head, token) pairs. `start`: the number of the first among those of all batches. `length`, `width`: tokens of a
    sequence, without and with slack; a ragged batch lies as a dense one of a single sequence does. `behind`: elements of the
    tensors before it, of one number for each head and token.
    """

    size: int
    start: int
    tokens: int
    length: int
    width: int
    heads: int
    behind: int


def _layouts(problems: Sequence[Problem], side: Literal["q", "k"]) -> list[int]:
    """Return the layouts of all batches, one after the other; where a number divides, it is at least 1."""
    table: list[int] = []
    start = behind = 0
    for p in problems:
        lengths, slack, heads = (p.seqlens_q, p.slack_q, p.heads) if side == "q" else (p.seqlens_k, p.slack_k, p.kv_heads)
        tokens = sum(lengths)
        length, sequences = (lengths[0], len(lengths)) if p.packing == "dense" else (tokens, 1)
        table += _Layout(tokens * heads, start, max(1, tokens), max(1, length), length + slack, heads, behind)
        start, behind = start + tokens * heads, behind + sequences * (length + slack) * heads
    return table


def _repeated(counts: torch.Tensor, total: int) -> torch.Tensor:
    """Return the number of each of `counts`, as often as it says, `total` in all."""
    return torch.repeat_interleave(counts.long(), output_size=total)


def _inverse(parts: list[torch.Tensor], count: int, device: torch.device) -> torch.Tensor:
    """Return for each of `count` rows its place in `parts`, one after the other, where other numbers are padding."""
    total = sum(map(len, parts))
    places = torch.full((count + 1,), total, device=device)
    if parts:
        places[torch.cat(parts)] = torch.arange(total, device=device)
    return places[:count]


def _own(layouts: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the batch of each of all (head, token), and where they are in the batches' tensors, one after the other.

    First in tensors `([batch,] tokens, heads)`, then in those `([batch,] heads, tokens)`.

    Args:
        layouts: float64 `(batches, 7)`, of `_Layout`.
        total: how many they are.
    """
    batch = _repeated(layouts[:, 0], total)
    number = torch.arange(total, dtype=torch.float64, device=layouts.device)
    by_token, by_head = _places(number, *layouts[:, 1:].T.index_select(1, batch).unbind())
    return batch, by_token.long(), by_head.long()


@fused
def _places(
    number: torch.Tensor,
    start: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    width: torch.Tensor,
    heads: torch.Tensor,
    behind: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where a (head, token) is in tensors of both orders. Whole parts of quotients are exact: all are far below 2**53."""
    at = number - start
    head = torch.floor(at / tokens)
    token = at - head * tokens
    sequence = torch.floor(token / length)
    at = token - sequence * length
    return (sequence * width + at) * heads + head + behind, (sequence * heads + head) * width + at + behind


class _Table:
    """What describes the slots of a frame, on the host. `heights`: rows of each head of a slot."""

    def __init__(self, slots: list[_Slot], even: bool, *, sunk: bool) -> None:
        longest = max([x.n_q for x in slots])
        self.heights = [longest if even else x.n_q for x in slots]
        most = max([x.groups * height for x, height in zip(slots, self.heights, strict=True)])
        self.shape = (len(slots), most, max([x.n_k for x in slots]) + sunk)
        self.rows_of_head = longest if even else most
        _, *columns, scale, _ = zip(*slots, strict=True)
        numbers = (self.heights, scale, [x.rows for x in slots], [x.n_k + x.sunk for x in slots])
        self.columns = [*itertools.chain(*columns, *numbers)]
        """Of each column one number a slot: those of `_Slot` from `first_head` to `right`, height, scale, rows, keys."""


@fused
def _rows(
    r: torch.Tensor,
    first_head: torch.Tensor,
    first_row: torch.Tensor,
    between: torch.Tensor,
    groups: torch.Tensor,
    n_q: torch.Tensor,
    n_k: torch.Tensor,
    shift: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    height: torch.Tensor,
    no_row: float,
    no_head: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of row r of a frame: which of all rows it is, its head, the first key that it sees, and the one after the last."""
    head = torch.floor(r / height)
    i = r - head * height
    inside = (head < groups) & (i < n_q)
    stop = torch.where(inside, torch.minimum(i + shift + right + 1.0, n_k), 0.0)
    row, of_head = torch.where(inside, first_row + head * between + i, no_row), torch.where(inside, first_head + head, no_head)
    return row, of_head, i + shift - left, stop


@fused
def _keys(j: torch.Tensor, first_key: torch.Tensor, n_k: torch.Tensor, no_key: float) -> torch.Tensor:
    """Return which of all keys key j of a frame is."""
    return torch.where(j < n_k, first_key + j, no_key)


class SlotFrame:
    """A frame of slots on the device, as the budgets take it. `at_rows`, `at_keys`: its rows and keys in `Flat`.

    With sinks its last key is the sink, with k and v 0, which slots of batches without sinks and padding do not see (-inf).
    `at_heads`: the head of each row among those of all batches, one behind the last for padding.
    """

    part = 1.0

    def __init__(
        self, dtype: Dtype, table: _Table, columns: torch.Tensor, none: tuple[int, int, int], sinks: torch.Tensor | None
    ) -> None:
        """Compute the indices from what a `_Table` has; `none`: the numbers of no row, no key and no head."""
        self.dtype: Dtype = dtype
        self.modifiers = Modifiers(None, None, {})
        self.shape = table.shape
        z, rows, keys = table.shape
        numbers = columns.view(-1, z, 1)
        first_head, first_row, between, groups, n_q, first_key, n_k, shift, left, right, height, *_ = numbers.unbind()
        r, j = (torch.arange(count, dtype=torch.float64, device=columns.device) for count in (rows, keys))
        no_row, no_key, no_head = map(float, none)
        of_slot = (first_head, first_row, between, groups, n_q, n_k, shift, left, right, height)
        row, head, begin, end = _rows(r, *of_slot, no_row, no_head)
        self.at_rows, self.at_keys = row.flatten().long(), _keys(j, first_key, n_k, no_key).flatten().long()
        self.at_heads = None if sinks is None else head.flatten().long()
        self.sinks = None if sinks is None else sinks[self.at_heads].view(z, rows, 1)
        self._j, self._begin, self._end = j, begin[:, :, None], end[:, :, None]
        self._visible: torch.Tensor | None = None
        self.scale, self.terms_q, self.n_k = numbers[-3:, :, :, None].unbind()
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
            self._visible = _seen(self._j, self._begin, self._end, self.sinks, self.shape[2] - 1)
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
