"""The values of a block's buffers, as numpy arrays; 16-bit floats are float32 arrays of rounded values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnfuzz.kernels.tilelang.roles.regions import Buffer, Part

__all__ = ["Memory", "rounded"]

_ARRAYS = {"float16": np.float32, "bfloat16": np.float32, "float32": np.float32, "bool": np.bool_}


def rounded(value: Any, dtype: str) -> Any:
    """Round `value` to `dtype`, to nearest with ties to even, and return it in the form that arrays of `dtype` have."""
    if dtype == "float16":
        return np.asarray(value, dtype=np.float32).astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return _to_bfloat16(np.asarray(value, dtype=np.float32))
    return np.asarray(value, dtype=_ARRAYS.get(dtype, np.int64))


def _to_bfloat16(value: Any) -> Any:
    bits = np.ascontiguousarray(value).view(np.uint32).reshape(np.shape(value))
    low = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.where(np.isnan(value), value, (low & np.uint32(0xFFFF0000)).view(np.float32))


class Memory:
    """The arrays of all buffers, by slot; global ones are shared among blocks."""

    def __init__(self, buffers: Sequence[Buffer], tensors: dict[int, Any]) -> None:
        self.arrays: list[Any] = [
            tensors[each.slot] if each.slot in tensors else np.full(each.shape, *_unwritten(each.dtype)) for each in buffers
        ]

    def load(self, part: Part) -> Any:
        """Return the values of `part`, 0 for those beyond a global tensor."""
        value = self.arrays[part.buffer.slot][part.index] if self.arrays[part.buffer.slot].size else np.zeros(1, np.float32)
        if part.inside is not None:
            value = np.where(part.inside, value, value.dtype.type(0))
        if part.axes is not None:
            value = value.transpose(part.axes)
        return value if part.form is None else np.reshape(value, part.form)

    def store(self, part: Part, value: Any, mask: Any = None) -> None:
        """Store `value`, rounded to the buffer's dtype, where `mask` is true; what lies beyond a global tensor is dropped."""
        self._put(part, rounded(value, part.buffer.dtype), mask)

    def add(self, part: Part, value: Any, mask: Any = None) -> None:
        """Add `value` to the elements of `part`."""
        self.store(part, self.load(part) + value, mask)

    def _put(self, part: Part, value: Any, mask: Any) -> None:
        array = self.arrays[part.buffer.slot]
        if part.form is None or part.inside is not None:
            inside = np.bool_(True) if part.inside is None else part.inside
            if part.form is not None and mask is None:
                value = np.reshape(value, inside.shape)
            chosen = inside if mask is None else inside & mask
            everything = np.broadcast_arrays(value, chosen, *part.index)
            where = everything[1]
            array[tuple(each[where] for each in everything[2:])] = everything[0][where]
            return
        if mask is not None:
            value = np.where(mask, value, self.load(part))
        if value.ndim and value.shape != part.form and value.size != int(np.prod(part.form)):
            value = np.broadcast_to(value, part.form)
        target = array[part.index]
        if part.axes is not None:
            sizes = [target.shape[axis] for axis in part.axes]
            value = np.reshape(value, sizes).transpose(np.argsort(part.axes))
        array[part.index] = value if value.ndim == 0 else np.reshape(value, target.shape)


def _unwritten(dtype: str) -> tuple[Any, Any]:
    """Return what memory holds before the first store, and the arrays' type."""
    kind = _ARRAYS.get(dtype, np.int64)
    return (np.nan if kind is np.float32 else 0, kind)
