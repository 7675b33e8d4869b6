"""Parts of buffers: the elements that an operation reads or writes, as an index of numpy and as a box."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Box", "Buffer", "Part", "covers", "overlap"]

Box = tuple[tuple[int, int], ...]
"""[begin, end) along each axis."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of a PrimFunc; `slot` is its place in a Memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scope: str
    slot: int

    @property
    def tracked(self) -> bool:
        """Whether accesses are checked: on-chip memory and registers are, global tensors are not."""
        return self.scope != "global"

    @property
    def item_bytes(self) -> int:
        """Bytes of an element on the device."""
        return {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8, "bool": 1}[self.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The elements of a buffer that one access has, for arrays of a given form.

    `index` is for numpy; `axes` are the axes of the result in the order of the indexed ones, `form` its final shape;
    `inside` masks what lies within a global tensor, None where all does.
    """

    buffer: Buffer
    box: Box
    index: tuple[Any, ...]
    form: tuple[int, ...] | None
    axes: tuple[int, ...] | None
    inside: Any = None

    @property
    def stage(self) -> int:
        """Index along the first axis where a buffer has several tiles, else 0."""
        begin, end = self.box[0] if self.box else (0, 1)
        return begin if len(self.box) > 2 and end - begin == 1 else 0

    @property
    def text(self) -> str:
        """The buffer, with the stage where it has several."""
        return f"{self.buffer.name}[{self.stage}]" if len(self.box) > 2 and self.buffer.shape[0] > 1 else self.buffer.name


def overlap(a: Box, b: Box) -> bool:
    """Whether two boxes of one buffer have an element in common."""
    return all(low < high_b and low_b < high for (low, high), (low_b, high_b) in zip(a, b, strict=True))


def covers(a: Box, b: Box) -> bool:
    """Whether `a` includes `b`."""
    return all(low <= low_b and high_b <= high for (low, high), (low_b, high_b) in zip(a, b, strict=True))


def block(buffer: Buffer, starts: Sequence[int], extents: Sequence[int]) -> Part:
    """Return the box at `starts`, whose axes of one element are dropped; beyond a global tensor it reads as zeros.

    Raises:
        IndexError: it lies beyond a buffer on the chip.
    """
    form = tuple(extent for extent in extents if extent != 1) or (1,)
    box = tuple((int(start), int(start) + extent) for start, extent in zip(starts, extents, strict=True))
    clipped = tuple((max(0, low), max(0, low, min(high, size))) for (low, high), size in zip(box, buffer.shape, strict=True))
    if clipped == box:
        return Part(buffer, box, tuple(slice(low, high) for low, high in box), form, None)
    if buffer.tracked:
        raise IndexError(f"{buffer.name}[{_text(box)}] is beyond its shape {buffer.shape}")
    grids = np.ix_(*(np.arange(low, high) for low, high in box))
    return _gathered(buffer, box, grids, form)


def elements(buffer: Buffer, indices: Sequence[Any], rank: int) -> Part:
    """Return the elements at `indices`: numbers, and arrays of `rank` axes as of a nest of loops.

    Raises:
        IndexError: one lies beyond a buffer on the chip.
    """
    if (quick := _as_slices(buffer, indices, rank)) is not None:
        return quick
    arrays = [np.asarray(each) for each in indices]
    box = tuple((int(each.min()), int(each.max()) + 1) if each.size else (0, 0) for each in arrays)
    within = all(low >= 0 and high <= size for (low, high), size in zip(box, buffer.shape, strict=True))
    if within:
        return Part(buffer, box, tuple(arrays), None, None)
    if buffer.tracked:
        raise IndexError(f"{buffer.name}[{_text(box)}] is beyond its shape {buffer.shape}")
    return _gathered(buffer, box, arrays, None)


def _gathered(buffer: Buffer, box: Box, indices: Sequence[Any], form: tuple[int, ...] | None) -> Part:
    inside = np.bool_(True)
    for each, size in zip(indices, buffer.shape, strict=True):
        inside = inside & (each >= 0) & (each < size)
    clipped = tuple(np.clip(each, 0, max(0, size - 1)) for each, size in zip(indices, buffer.shape, strict=True))
    return Part(buffer, box, clipped, form, None, inside)


def _as_slices(buffer: Buffer, indices: Sequence[Any], rank: int) -> Part | None:
    """Return the access by slices, where each index is a number or steps by one along an axis of its own."""
    slices: list[Any] = []
    box: list[tuple[int, int]] = []
    axes: list[int] = []
    for index, size in zip(indices, buffer.shape, strict=True):
        if not isinstance(index, np.ndarray) or index.size == 1:
            low, high = int(index if not isinstance(index, np.ndarray) else index.reshape(-1)[0]), None
            high = low + 1
            slices.append(low)
        else:
            wide = [axis for axis, extent in enumerate(index.shape) if extent > 1]
            flat = index.reshape(-1)
            low, high = int(flat[0]), int(flat[-1]) + 1
            if len(wide) != 1 or wide[0] in axes or high - low != flat.size or (np.diff(flat) != 1).any():
                return None
            axes.append(wide[0])
            slices.append(slice(low, high))
        if low < 0 or high > size:
            return None
        box.append((low, high))
    form = [1] * rank
    for axis, each in zip(axes, (each for each in slices if isinstance(each, slice)), strict=True):
        form[axis] = each.stop - each.start
    order = tuple(sorted(range(len(axes)), key=axes.__getitem__))
    return Part(buffer, tuple(box), tuple(slices), tuple(form), None if order == tuple(range(len(axes))) else order)


def size_of(part: Part) -> int:
    """Elements of the box."""
    return math.prod(high - low for low, high in part.box)


def _text(box: Box) -> str:
    return ", ".join(f"{low}:{high}" for low, high in box)
