"""The exact set of elements of a tensor of any strides, queried by address."""

from __future__ import annotations

import math
from typing import Any

from attnfuzz.kernels.support.absent import Absent

try:
    import numpy as np
except ImportError:
    np = Absent("numpy")  # type: ignore[assignment]

__all__ = ["View"]

Array = np.ndarray[Any, np.dtype[Any]]

_LARGEST_MAP = 1 << 26
"""Limit of a table's elements, from the first of a tensor to the last."""


class View:
    """The memory of one tensor argument.

    Args:
        tensor: an object with data_ptr(), element_size(), shape, stride() and untyped_storage(), like torch's.
    """

    __slots__ = ("_map", "_steps", "begin", "dense", "end", "shadow", "shape", "size", "storage", "title", "width")

    def __init__(self, tensor: Any) -> None:
        self.begin = int(tensor.data_ptr())
        self.width = int(tensor.element_size())
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        storage = tensor.untyped_storage()
        self.storage, self.size = int(storage.data_ptr()), int(storage.nbytes())
        self.title = str(tensor.dtype).removeprefix("torch.")
        self.shadow: Any = None
        self._map: Array | None = None
        if 0 in self.shape:
            steps, reach = [], 0
        else:
            # An expanded dimension has no elements of its own.
            pairs = zip(self.shape, tensor.stride(), strict=True)
            steps = sorted(((stride, size) for size, stride in pairs if size > 1 and stride), reverse=True)
            reach = 1 + sum((size - 1) * stride for stride, size in steps)
        self._steps = steps
        self.end = self.begin + reach * self.width
        self.dense = _dense(steps)

    def covers(self, pointers: Array) -> bool:
        """Whether all of `pointers` (at least one) lie between the first bytes of the first and the last element."""
        return bool(
            np.minimum.reduce(pointers, axis=None) >= self.begin
            and np.maximum.reduce(pointers, axis=None) <= self.end - self.width
        )

    def holds(self, pointers: Array, width: int) -> Array:
        """For each address whether the `width` bytes from it on belong to this tensor: bool, shaped like `pointers`."""
        offsets = pointers.astype(np.int64) - self.begin
        if width > self.width:
            parts = offsets[..., None] + np.arange(0, width, self.width)
            return np.asarray(self._holds(parts, self.width).all(-1))
        return self._holds(offsets, width)

    def _holds(self, offsets: Array, width: int) -> Array:
        inside = (offsets >= 0) & (offsets <= self.end - self.begin - width)
        if width == self.width:
            inside &= offsets % width == 0
        if self.dense or not inside.any():
            return inside
        elements = np.where(inside, offsets, 0) // self.width
        return np.asarray(inside & (self._counted(elements) if self._wide() else self._table()[elements]))

    def _table(self) -> Array:
        if self._map is None:
            self._map = np.zeros((self.end - self.begin) // self.width, np.bool_)
            sizes, strides = [size for _, size in self._steps], [stride for stride, _ in self._steps]
            np.lib.stride_tricks.as_strided(self._map, sizes, strides)[...] = True
        return self._map

    def _wide(self) -> bool:
        """Whether a table would be too large, and each element's indices can be computed from its number instead."""
        reach = (self.end - self.begin) // self.width
        rests = [1 + sum((size - 1) * stride for stride, size in self._steps[at:]) for at in range(1, len(self._steps) + 1)]
        apart = all(stride >= rest for (stride, _), rest in zip(self._steps, rests, strict=True))
        return reach > _LARGEST_MAP and apart

    def _counted(self, elements: Array) -> Array:
        inside = np.ones(elements.shape, np.bool_)
        for stride, size in self._steps:
            index, elements = np.divmod(elements, stride)
            inside &= index < size
        return np.asarray(inside & (elements == 0))

    def element(self, address: int) -> str:
        """Format an element of this tensor, by its indices where memory follows their order."""
        number = (address - self.begin) // self.width
        if self.dense and self.shape and 0 <= number < math.prod(self.shape) and self._rows_in_order():
            return f"[{', '.join(str(int(index)) for index in np.unravel_index(number, self.shape))}]"
        return f"element {number} (counted in memory from the first)"

    def _rows_in_order(self) -> bool:
        sizes = [size for size in self.shape if size > 1]
        return sizes == [size for _, size in self._steps]

    def __str__(self) -> str:
        return f"{self.shape} {self.title}"


def _dense(steps: list[tuple[int, int]]) -> bool:
    """Whether there is no gap between the first element and the last."""
    expected = 1
    for stride, size in reversed(steps):
        if stride != expected:
            return False
        expected *= size
    return True
