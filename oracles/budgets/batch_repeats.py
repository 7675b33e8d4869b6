"""How often values repeat in each of several batches: the figures of repeats.py, from the same samples as for a batch alone.

A batch alone is cut into frames, and its figures are those of each frame. Here its slots are in other frames, shared with other
batches, so that the sums and sampled rows and keys of each of its own frames, a part, are collected first.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from attnfuzz.oracles.budgets.forward import Forward
from attnfuzz.oracles.budgets.repeats import SAMPLED, Generic, anywhere, generic, repeated, sums_of_rows
from attnfuzz.oracles.budgets.score_gradient import Gradients
from attnfuzz.oracles.budgets.scores import Scores
from attnfuzz.oracles.formats import Format
from attnfuzz.oracles.frames import CHUNK, Frame, frames, key_range, rows_seeing, spread
from attnfuzz.oracles.slots import Slots, grouped, integers, sent

__all__ = ["BatchRepeats"]

_SUMS, _COUNTS = 9, 3


@dataclass(frozen=True, slots=True, eq=False)
class _Samples:
    """Sampled rows (or keys) of several parts, `(values, parts x SAMPLED, longest)`, and for each frame which ones it has.

    `parts`: their numbers. `of_frames`: by the frame's number, Z and row (key) of each, and its place. `sunk`: whether the last
    term is that of the sink.
    """

    parts: torch.Tensor
    values: torch.Tensor
    of_frames: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    sunk: bool

    def add(self, frame: int, values: Sequence[torch.Tensor]) -> None:
        """Store the frame's samples of `values (Z, rows, terms)`."""
        if frame in self.of_frames:
            z, row, place = self.of_frames[frame]
            taken = torch.stack([x[z, row] for x in values])
            if self.sunk:
                self.values[..., -1:].index_copy_(1, place, taken[..., -1:])
                taken = taken[..., :-1]
            taken = taken[..., : self.values.shape[-1] - self.sunk]
            self.values[..., : taken.shape[-1]].index_copy_(1, place, taken)

    def of_parts(self) -> torch.Tensor:
        """Return the samples, `(values, parts, SAMPLED, terms)`."""
        return self.values.unflatten(1, (-1, SAMPLED))


class BatchRepeats:
    """Collects how often values repeat, for some of several batches."""

    def __init__(self, slots: Slots, batches: Sequence[int], device: torch.device) -> None:
        self._form = Format.of(slots.problems[0].dtype)
        self._parts: list[tuple[int, Frame]] = []
        self._whole = dict.fromkeys(batches, True)
        chunk = CHUNK[device.type]
        for batch in batches:
            own = list(frames(slots.problems[batch], chunk))
            self._whole[batch] = bool(own) and all(each.whole for each in own)
            if self._whole[batch]:
                self._parts += [(batch, each) for each in own]
        self._sums = torch.zeros((len(self._parts) + 1, _SUMS), dtype=torch.float64, device=device)
        self._of_frames: list[torch.Tensor] = []
        self._rows: list[_Samples] = []
        self._keys: list[_Samples] = []
        if self._parts:
            self._place(slots, chunk, device)

    def add(self, number: int, t: Scores, f: Forward, g: Gradients) -> None:
        """Add frame number `number` of the slots."""
        if not self._parts:
            return
        assert g.d_s is not None
        self._sums.index_add_(0, self._of_frames[number], sums_of_rows(t, f, g))
        for each in self._rows:
            each.add(number, (t.p, g.d_s, t.e))
        for each in self._keys:
            each.add(number, (t.p.mT, g.d_s.mT))

    def figures(self) -> torch.Tensor:
        """Return the figures of all parts, on the device, for `generic`."""
        counts = self._sums.new_zeros((len(self._parts), _COUNTS))
        for each in self._rows:
            values = each.of_parts()
            counts[:, 0].index_copy_(0, each.parts, repeated(self._form, values[:2]))
            counts[:, 2].index_copy_(0, each.parts, anywhere(self._form, values[2]))
        for each in self._keys:
            counts[:, 1].index_copy_(0, each.parts, repeated(self._form, each.of_parts()))
        return torch.cat([self._sums[:-1], counts], 1)

    def generic(self, figures: Sequence[float]) -> dict[int, Generic]:
        """Return how often values repeat in each batch where that is known, from `figures` on the host, flattened."""
        width = _SUMS + _COUNTS
        rows = [figures[at : at + width] for at in range(0, len(self._parts) * width, width)]
        of: dict[int, list[Sequence[float]]] = {}
        for (batch, _), row in zip(self._parts, rows, strict=True):
            of.setdefault(batch, []).append(row)
        return {batch: generic(each) for batch, each in of.items()}

    def _place(self, slots: Slots, chunk: int, device: torch.device) -> None:
        """Choose the samples of every part, and send their indices to the device."""
        part_of = [len(self._parts)] * len(slots.place)
        for number, (batch, frame) in enumerate(self._parts):
            for first in _first_slots(slots, batch, frame):
                part_of[first : first + len(frame.kv_heads)] = [number] * len(frame.kv_heads)
        self._of_frames = sent([integers([part_of[slot] for slot in numbers]) for numbers in slots.together], device)
        sunk = slots.sinks is not None
        problems = [slots.problems[batch] for batch, _ in self._parts]
        sequences = [frame.sequences for _, frame in self._parts]
        rows, keys = _sampled(slots, self._parts)
        most_q, most_k = (
            [max([lengths[i] for i in own]) for lengths, own in zip(each, sequences, strict=True)]
            for each in ([p.seqlens_q for p in problems], [p.seqlens_k for p in problems])
        )
        self._rows = _samples(slots, rows, [n + sunk for n in most_k], 3, chunk, device, sunk=sunk)
        lengths = [n * p.groups for n, p in zip(most_q, problems, strict=True)]
        self._keys = _samples(slots, keys, lengths, 2, chunk, device)


class _Chosen(NamedTuple):
    """The slot of sampled rows, or keys, and the row (key) there, `(parts, SAMPLED)`; only those that are `kept`."""

    kept: torch.Tensor
    slot: torch.Tensor
    row: torch.Tensor


def _first_slots(slots: Slots, batch: int, frame: Frame) -> list[int]:
    """Return the number of the first slot of each sequence of a batch's own frame."""
    return [slots.number(batch, sequence, frame.kv_heads.start) for sequence in frame.sequences]


def _sampled(slots: Slots, parts: Sequence[tuple[int, Frame]]) -> tuple[_Chosen, _Chosen]:
    """Return the sampled rows and keys of batches' own frames (`Placed.sampled`)."""
    rows = [[rows_seeing(slots.problems[batch], i) for i in frame.sequences] for batch, frame in parts]
    keys = [
        [key_range(slots.problems[batch], i, seeing) for i, seeing in zip(frame.sequences, own, strict=True)]
        for (batch, frame), own in zip(parts, rows, strict=True)
    ]
    _, _, heights = slots.places
    firsts = [_first_slots(slots, batch, frame) for batch, frame in parts]
    first, behind = integers([*chain(*firsts)]), integers([*accumulate([len(each) for each in firsts[:-1]], initial=0)])[:, None]
    kv_heads, groups = [len(frame.kv_heads) for _, frame in parts], [slots.problems[batch].groups for batch, _ in parts]
    x, y = spread(rows, list(map(operator.mul, kv_heads, groups)), SAMPLED), spread(keys, kv_heads, SAMPLED)
    of_group = integers(groups)[:, None]
    kv = x.head // of_group
    slot = first[behind + x.sequence] + kv
    of_rows = _Chosen(x.kept, slot, (x.head - kv * of_group) * heights[slot] + x.token)
    return of_rows, _Chosen(y.kept, first[behind + y.sequence] + y.head, y.token)


def _samples(
    slots: Slots, chosen: _Chosen, lengths: list[int], values: int, chunk: int, device: torch.device, *, sunk: bool = False
) -> list[_Samples]:
    """Return the samples of all parts, those of about equal length together."""
    together, frames = grouped([(SAMPLED, length) for length in lengths], chunk), len(slots.frames)
    of_part = {part: (number, at) for number, parts in enumerate(together) for at, part in enumerate(parts)}
    group, at = integers([*chain(*[of_part[part] for part in range(len(lengths))])]).view(-1, 2).T[..., None]
    frame, z, _ = slots.places
    # One after the other those of a group and frame, then those that are not kept.
    key, order = torch.where(chosen.kept, group * frames + frame[chosen.slot], len(together) * frames).flatten().sort()
    table = torch.stack([z[chosen.slot], chosen.row, at * SAMPLED + chosen.kept.cumsum(1) - 1]).flatten(1)[:, order]
    counts = torch.bincount(key, minlength=len(together) * frames + 1).tolist()
    *part_numbers, placed = sent([*map(integers, together), table.flatten()], device)
    indices = placed.view(3, -1).split(counts, 1)
    samples = []
    for number, (parts, numbers) in enumerate(zip(together, part_numbers, strict=True)):
        longest = max([lengths[part] for part in parts])
        of = indices[number * frames : (number + 1) * frames]
        whole = torch.zeros((values, len(parts) * SAMPLED, longest), dtype=torch.float64, device=device)
        samples.append(_Samples(numbers, whole, {frame: _three(each) for frame, each in enumerate(of) if each.numel()}, sunk))
    return samples


def _three(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b, c = x.unbind()
    return a, b, c
