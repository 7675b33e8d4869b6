"""How often values repeat in each of several batches: the figures of repeats.py, from the same samples as for a batch alone.

A batch alone is cut into frames, and its figures are those of each frame. Here its slots are in other frames, shared with other
batches, so that the sums and sampled rows and keys of each of its own frames, a part, are collected first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnfuzz.kernels.problem import Problem
from attnfuzz.oracles.budgets.forward import Forward, Scores
from attnfuzz.oracles.budgets.repeats import SAMPLED, Generic, anywhere, generic, repeated, sums_of_rows
from attnfuzz.oracles.budgets.score_gradient import Gradients
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
        part_of = {}
        rows, keys = [], []
        for number, (batch, frame) in enumerate(self._parts):
            for sequence in frame.sequences:
                for kv in frame.kv_heads:
                    part_of[slots.number(batch, sequence, kv)] = number
            own_rows, own_keys = _sampled(slots, batch, frame)
            rows.append(own_rows)
            keys.append(own_keys)
        lengths = [[max(each) for each in _lengths(slots.problems[batch], frame)] for batch, frame in self._parts]
        none = len(self._parts)
        numbers: list[list[int]] = [[none] * len(each) for each in slots.batches]
        for slot, part in part_of.items():
            frame_number, z = slots.place[slot]
            numbers[frame_number][z] = part
        self._of_frames = sent([integers(each) for each in numbers], device)
        sunk = slots.sinks is not None
        self._rows = _samples(slots, rows, [each[1] + sunk for each in lengths], 3, chunk, device, sunk=sunk)
        self._keys = _samples(slots, keys, [each[0] for each in lengths], 2, chunk, device)


def _lengths(problem: Problem, frame: Frame) -> tuple[list[int], list[int]]:
    """Return the rows and keys of slots of a batch's own frame."""
    return [problem.seqlens_q[i] * problem.groups for i in frame.sequences], [problem.seqlens_k[i] for i in frame.sequences]


def _sampled(slots: Slots, batch: int, frame: Frame) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (slot, row) and (slot, key) of the samples of a batch's own frame (`Placed.sampled`)."""
    p = slots.problems[batch]
    rows = [rows_seeing(p, i) for i in frame.sequences]
    keys = [key_range(p, i, seeing) for i, seeing in zip(frame.sequences, rows, strict=True)]

    def slot(at: int, kv: int) -> int:
        return slots.number(batch, frame.sequences[at], frame.kv_heads.start + kv)

    of_rows = [
        (number := slot(at, head // p.groups), slots.row(number, head % p.groups, token))
        for at, head, token in spread(rows, len(frame.kv_heads) * p.groups, SAMPLED)
    ]
    return of_rows, [(slot(at, head), token) for at, head, token in spread(keys, len(frame.kv_heads), SAMPLED)]


def _samples(
    slots: Slots,
    chosen: list[list[tuple[int, int]]],
    lengths: list[int],
    values: int,
    chunk: int,
    device: torch.device,
    *,
    sunk: bool = False,
) -> list[_Samples]:
    """Return the samples of all parts, those of about equal length together; `chosen`: (slot, row) of each part."""
    together = grouped([(SAMPLED, length) for length in lengths], chunk)
    tables: list[torch.Tensor] = []
    of: list[list[int]] = []
    for parts in together:
        by_frame: dict[int, list[tuple[int, int, int]]] = {}
        for at, part in enumerate(parts):
            for place, (slot, row) in enumerate(chosen[part]):
                number, z = slots.place[slot]
                by_frame.setdefault(number, []).append((z, row, at * SAMPLED + place))
        of.append(list(by_frame))
        tables += [torch.tensor(parts), *(torch.tensor(each).T.flatten() for each in by_frame.values())]
    on_device = iter(sent(tables, device))
    samples = []
    for parts, numbers in zip(together, of, strict=True):
        longest = max(lengths[part] for part in parts)
        part_numbers = next(on_device)
        indices = {number: _three(next(on_device)) for number in numbers}
        whole = torch.zeros((values, len(parts) * SAMPLED, longest), dtype=torch.float64, device=device)
        samples.append(_Samples(part_numbers, whole, indices, sunk))
    return samples


def _three(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b, c = x.view(3, -1).unbind()
    return a, b, c
