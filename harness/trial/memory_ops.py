"""What torch's ops do to memory: which make new tensors, unfilled or filled, which prepare a kernel's inputs, which write."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnfuzz.harness.trial.bands import Form

__all__ = ["AS_STRIDED", "COPIES", "NEW_EMPTY_STRIDED", "OFFSET", "Traits", "contiguous", "form_of_new", "traits_of", "written"]

_aten = torch.ops.aten
_HOST = torch.device("cpu")
_EMPTY = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.empty_permuted.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
_FILLED = frozenset(
    {
        _aten.zeros.default,
        _aten.zeros_like.default,
        _aten.new_zeros.default,
        _aten.ones.default,
        _aten.ones_like.default,
        _aten.new_ones.default,
        _aten.full.default,
        _aten.full_like.default,
        _aten.new_full.default,
    }
)
COPIES = frozenset({_aten.cat.default, _aten.constant_pad_nd.default})
"""Ops by which wrappers pad and join tensors for their kernels: what a kernel reads or writes beyond those must show as well.
Arithmetic of kernels that are torch's operations is left out: all its results would be kept until the launch ends."""
AS_STRIDED, NEW_EMPTY_STRIDED = _aten.as_strided.default, _aten.new_empty_strided.default
OFFSET = 3
"""Place of the storage offset among the arguments of as_strided."""
_ZEROS = {
    _aten.zeros.default: _aten.empty.memory_format,
    _aten.zeros_like.default: _aten.empty_like.default,
    _aten.new_zeros.default: _aten.new_empty.default,
}
"""Ops that make zeros, and those that make the same tensor unfilled."""
_BY_SHAPE = frozenset({_aten.empty.memory_format, _aten.new_empty.default})
_SETTINGS = frozenset({"dtype", "device", "layout", "pin_memory", "memory_format"})
_QUANTISED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})
"""Tensors of these lie between no bands: torch fills none."""
_MOST = 1 << 40
"""Elements of a tensor whose form is found without its op, which refuses what is too large."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What an op does to memory."""

    writes: tuple[tuple[int, str], ...]
    """Index and name of the arguments that it changes."""
    empty: bool
    filled: bool
    resizes: bool
    copies: bool
    """Whether it is one of COPIES."""
    unfilled: Any
    """Of an op that makes zeros: that which makes the same tensor unfilled."""
    view: bool

    @property
    def plain(self) -> bool:
        """Whether it neither makes nor changes a tensor."""
        return not (self.writes or self.empty or self.filled or self.resizes)


@functools.cache
def traits_of(func: Any) -> Traits:
    """Return what an op does to memory, by its schema."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    writes = tuple((i, each.name) for i, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write)
    copies = func in COPIES
    return Traits(
        writes,
        empty=func in _EMPTY,
        filled=func in _FILLED or copies,
        resizes=func is _aten.resize_.default,
        copies=copies,
        unfilled=_ZEROS.get(func),
        view=bool(getattr(func, "is_view", False)),
    )


def form_of_new(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Form | None:
    """Return the form of what a plain call of an op makes that leaves it unfilled; None where only the op itself knows."""
    if not kwargs.keys() <= _SETTINGS or kwargs.get("pin_memory") or kwargs.get("layout") not in (None, torch.strided):
        return None
    like = args[0] if isinstance(args[0], torch.Tensor) else None
    if like is not None and (type(like) is not torch.Tensor or like.layout is not torch.strided or like.is_quantized):
        return None
    dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
    device = kwargs.get("device") or (_HOST if like is None else like.device)
    memory_format, strides = kwargs.get("memory_format"), None
    if func in _BY_SHAPE and len(args) == (1 if like is None else 2):
        shape = args[-1]
    elif func is _aten.empty_like.default and len(args) == 1 and like is not None:
        shape = like.shape
        if memory_format in (None, torch.preserve_format):
            memory_format, strides = None, like.stride() if like.is_contiguous() else None
            if strides is None:
                return None
    else:
        return None
    if memory_format not in (None, torch.contiguous_format):
        return None
    return contiguous(shape, dtype, device, strides)


def contiguous(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, strides: Sequence[int] | None = None
) -> Form | None:
    """Return the form of a tensor without gaps; None for one without elements, one that torch may refuse, and a quantised one.

    `strides`: its own, which may differ in dimensions of one element.
    """
    count, steps = 1, []
    for size in reversed(shape):
        steps.append(count)
        # A size may be a symbol of a compiler's.
        if type(size) is not int or size <= 0:
            return None
        count *= size
    if count >= _MOST or dtype in _QUANTISED:
        return None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return Form(shape, steps[::-1] if strides is None else strides, dtype, device, count)


def written(writes: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an op changes by its schema: its first argument, or `out`."""
    for place, name in writes:
        value = args[place] if place < len(args) else kwargs.get(name)
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, torch.Tensor):
                yield each
