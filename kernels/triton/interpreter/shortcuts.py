"""Shortcuts past Triton's type checker for the most frequent operations of an interpreted kernel.

Triton checks, promotes and broadcasts both operands before each operation, which costs far more than the operation
itself. Where NumPy promotes and broadcasts as Triton does, such operations go to NumPy directly; everything else goes through
Triton. Loads and casts still go through the interpreter's builder.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from attnfuzz.kernels.support.absent import Absent

try:
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as shipped
except ImportError:
    np = tl = shipped = Absent("triton")  # type: ignore[assignment]


__all__ = ["install"]

_Handle: Any = shipped.TensorHandle
_tensor: Any = tl.tensor

_ARITHMETIC: dict[str, Callable[..., Any]] = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
_LOGIC: dict[str, Callable[..., Any]] = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}

# NumPy computes these exactly as Triton does, wrap-around included.
_NUMBERS = {"fp32": float, "int32": int, "int64": int}


def install() -> None:
    """Shorten operators, indexing, casts, `where` and `load`, once the language is in its interpreted form."""
    for name, function in _ARITHMETIC.items():
        setattr(_tensor, name, _operator(name, function))
    for name, function in _COMPARISONS.items():
        setattr(_tensor, name, _operator(name, function, result=tl.int1))
    for name, function in _LOGIC.items():
        setattr(_tensor, name, _logic(name, function))
    _tensor.__getitem__ = _getitem(_tensor.__getitem__)
    _tensor.to = _to(_tensor.to)
    tl.where = tl.core.where = _where(tl.where)
    tl.load = tl.core.load = _load(tl.load)
    shipped._get_np_dtype = _np_dtype(shipped._get_np_dtype)


_templates: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}


def _tensor_of(data: Any, scalar: Any, block: bool, kind: Any = None) -> Any:
    """Make the tensor of `data` with elements of type `scalar`; tensor types are built once per element type and shape.

    A pointer's handle has another type, `kind`, to which the memory checker has attached its tensor.
    """
    key = (scalar.name, data.shape if block else None)
    template = _templates.get(key)
    if template is None:
        tensor = _tensor(_Handle(data, kind or scalar), tl.block_type(scalar, list(data.shape)) if block else scalar)
        _templates[key] = {name: value for name, value in vars(tensor).items() if name != "handle"}
        return tensor
    tensor = _tensor.__new__(_tensor)
    vars(tensor).update(template)
    tensor.handle = _Handle(data, kind or scalar)
    return tensor


def _common(left: Any, right: Any) -> Any:
    """The type in which Triton computes with `left` and `right`, or None where NumPy would choose another."""
    if left.name == right.name:
        return left
    return tl.int64 if {left.name, right.name} == {"int32", "int64"} else None


def _literal(other: Any, kind: str) -> Any:
    """`other` as a NumPy operand for a tensor of type `kind`, or None where Triton would promote."""
    if type(other) is tl.constexpr:
        other = other.value
    if kind == "fp32":
        return np.float32(other) if type(other) in (int, float) else None
    if type(other) is int and -(2**31) <= other < 2**31:
        return np.int32(other) if kind == "int32" else np.int64(other)
    return None


def _operator(name: str, function: Callable[..., Any], result: Any = None) -> Callable[[Any, Any], Any]:
    """The operator `name` on fp32, on int32 and int64, and pointer + integer; `result`: its element type if not the operands'."""
    shipped_operator = getattr(_tensor, name)

    def operator(self: Any, other: Any) -> Any:
        kind = self.dtype.name
        if kind in _NUMBERS:
            if type(other) is _tensor:
                scalar = _common(self.dtype, other.dtype)
                if scalar is not None:
                    data = function(self.handle.data, other.handle.data)
                    return _tensor_of(data, result or scalar, bool(self.shape or other.shape))
            elif (literal := _literal(other, kind)) is not None:
                return _tensor_of(function(self.handle.data, literal), result or self.dtype, bool(self.shape))
        elif name == "__add__" and type(other) is _tensor and self.dtype.is_ptr() and other.dtype.name in ("int32", "int64"):
            width = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
            data = self.handle.data + other.handle.data.astype(np.uint64) * np.uint64(width)
            return _tensor_of(data, self.dtype, bool(self.shape or other.shape), self.handle.dtype)
        return shipped_operator(self, other)

    return operator


def _logic(name: str, function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """The operator `name` on two int1 tensors."""
    shipped_operator = getattr(_tensor, name)

    def operator(self: Any, other: Any) -> Any:
        if type(other) is _tensor and self.dtype.name == "int1" == other.dtype.name:
            return _tensor_of(function(self.handle.data, other.handle.data), tl.int1, bool(self.shape or other.shape))
        return shipped_operator(self, other)

    return operator


def _getitem(shipped_getitem: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`x[:, None]` and its like."""
    whole = slice(None)

    def getitem(self: Any, index: Any) -> Any:
        if type(index) is tuple and self.shape and all(part is None or part == whole for part in index):
            return _tensor_of(self.handle.data[index], self.dtype, True, self.handle.dtype if self.dtype.is_ptr() else None)
        return shipped_getitem(self, index)

    return getitem


def _where(shipped_where: Callable[..., Any]) -> Callable[..., Any]:
    """`where` with a boolean condition and one element type, or a literal as the last argument."""

    def where(condition: Any, x: Any, y: Any, **kwargs: Any) -> Any:
        if type(x) is _tensor and type(condition) is _tensor and condition.dtype.name == "int1":
            kind = x.dtype.name
            if kind in _NUMBERS:
                if type(y) is not _tensor:
                    other, block = _literal(y, kind), False
                else:
                    other, block = (y.handle.data, bool(y.shape)) if y.dtype.name == kind else (None, False)
                if other is not None:
                    data = np.where(condition.handle.data, x.handle.data, other)
                    return _tensor_of(data, x.dtype, bool(condition.shape or x.shape or block))
        return shipped_where(condition, x, y, **kwargs)

    return where


def _to(shipped_to: Callable[..., Any]) -> Callable[..., Any]:
    """Casts among numbers and to half precision, in the builder's way."""
    kinds = {*_NUMBERS, "fp16", "bf16"}

    def to(self: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        source, target = self.dtype.name, getattr(dtype, "name", None)
        if not args and not kwargs and source in kinds and target in kinds:
            if source == target:
                return self
            if source == "fp32" or target == "fp32" or {source, target} == {"int32", "int64"}:
                data = shipped.interpreter_builder.cast_impl(self.handle, dtype).data
                return _tensor_of(data, dtype, bool(self.shape))
        return shipped_to(self, dtype, *args, **kwargs)

    return to


def _load(shipped_load: Callable[..., Any]) -> Callable[..., Any]:
    """Loads through a block of pointers under a mask, with a number for the rest, and loads of one element."""
    builder = shipped.interpreter_builder
    # After pointers, mask and other: cache hints, of which Triton 3.6 has more than 3.9.
    hints = (None,) * (len(inspect.signature(builder.create_masked_load).parameters) - 3)

    def load(pointer: Any, mask: Any = None, other: Any = None, **kwargs: Any) -> Any:
        element = pointer.dtype.element_ty
        if element.name not in {*_NUMBERS, "fp16", "bf16"}:
            return shipped_load(pointer, mask, other, **kwargs)
        if mask is None and other is None and not pointer.shape:
            always = _Handle(np.ones(1, np.bool_), tl.int1)
            return _tensor_of(builder.create_masked_load(pointer.handle, always, None, *hints).data, element, False)
        if pointer.shape and type(mask) is _tensor and type(other) is float and set(kwargs) <= {"_semantic"}:
            shape = np.broadcast_shapes(pointer.handle.data.shape, mask.handle.data.shape)
            pointers = _Handle(np.broadcast_to(pointer.handle.data, shape), pointer.handle.dtype)
            kept = _Handle(np.broadcast_to(mask.handle.data, shape), tl.int1)
            if other:
                rest = builder.cast_impl(_Handle(np.full(shape, other, np.float32), tl.float32), element)
            else:
                rest = _Handle(np.zeros(shape, shipped._get_np_dtype(element)), element)
            return _tensor_of(builder.create_masked_load(pointers, kept, rest, *hints).data, element, True)
        return shipped_load(pointer, mask, other, **kwargs)

    return load


def _np_dtype(shipped_np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache the results: Triton builds a table of all types at every call."""
    known: dict[str, Any] = {}

    def np_dtype(scalar: Any) -> Any:
        if type(scalar) is not tl.dtype:
            return shipped_np_dtype(scalar)
        if scalar.name not in known:
            known[scalar.name] = shipped_np_dtype(scalar)
        return known[scalar.name]

    return np_dtype
