"""What torch's ops do to memory: which make new tensors, unfilled or filled, which prepare a kernel's inputs, which write."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["AS_STRIDED", "COPIES", "NEW_EMPTY_STRIDED", "OFFSET", "ZEROS", "traits_of", "written"]

_aten = torch.ops.aten
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
ZEROS = {
    _aten.zeros.default: _aten.empty.memory_format,
    _aten.zeros_like.default: _aten.empty_like.default,
    _aten.new_zeros.default: _aten.new_empty.default,
}
"""Ops that make zeros, and those that make the same tensor unfilled."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What an op does to memory."""

    writes: tuple[tuple[int, str], ...]
    """Index and name of the arguments that it changes."""
    empty: bool
    filled: bool
    resizes: bool

    @property
    def plain(self) -> bool:
        """Whether it neither makes nor changes a tensor."""
        return not (self.writes or self.empty or self.filled or self.resizes)


@functools.cache
def traits_of(func: Any) -> Traits:
    """Return what an op does to memory, by its schema."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    writes = tuple((i, each.name) for i, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write)
    return Traits(writes, func in _EMPTY, func in _FILLED or func in COPIES, func is _aten.resize_.default)


def written(writes: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an op changes by its schema: its first argument, or `out`."""
    for place, name in writes:
        value = args[place] if place < len(args) else kwargs.get(name)
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, torch.Tensor):
                yield each
