"""Memory that tests never look at, made visible while a kernel runs.

What torch.empty gives is NaN (integers: a huge value), so that what is never written shows. Every tensor, the kernel's own and
its inputs, lies between bands of a NaN pattern: a read beyond its ends shows in the results, a write in the bands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Bands", "PoisonEmpty"]

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
_BAND = 1 << 16
"""Bytes before and after each tensor: more than a tile of rows. A multiple of every allocator's alignment."""
_FIRST_PATTERN, _PATTERNS = 0xFF81 - (1 << 16), 63
"""16-bit words that are NaN in float16, bfloat16 and (two of them) float32: signalling in the last two, so that arithmetic
changes them. Each tensor has a word of its own: what was read in one band still shows when it is written to another."""


@dataclass(frozen=True, slots=True, eq=False)
class _Band:
    what: str
    words: torch.Tensor
    """The whole buffer as int16: band, tensor, band."""
    pattern: int


class Bands:
    """Tensors between bands, and the question whether the bands are whole."""

    def __init__(self) -> None:
        self._kept: list[_Band] = []

    def like(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """A tensor of the same shape, strides, dtype and device, unfilled, between bands. `what` names it in messages."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        size = extent * tensor.element_size()
        pattern = _FIRST_PATTERN + 17 * len(self._kept) % _PATTERNS
        words = torch.full(((2 * _BAND + size + 1) // 2,), pattern, dtype=torch.int16, device=tensor.device)
        self._kept.append(_Band(f"{what} {tuple(tensor.shape)} {tensor.dtype}", words, pattern))
        flat = words.view(torch.uint8)[_BAND : _BAND + size].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def copy(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """A copy of `tensor` between bands."""
        if not tensor.numel():
            return tensor.clone()
        made = self.like(tensor, what)
        made.copy_(tensor)
        return made

    def broken(self) -> str | None:
        """What was written beyond the ends of which tensor, or None."""
        if not self._kept:
            return None
        for each in self._kept:
            if each.words.untyped_storage().nbytes() < each.words.numel() * each.words.element_size():
                return f"the memory was taken away from {each.what}"
        half = _BAND // 2
        counts = [(band != each.pattern).sum() for each in self._kept for band in (each.words[:half], each.words[-half:])]
        found = torch.stack(counts).tolist()
        if not any(found):
            return None
        for number, each in enumerate(self._kept):
            before, after = found[2 * number : 2 * number + 2]
            if before or after:
                side, count = ("before the start", before) if before else ("past the end", after)
                return f"{count} 2-byte words were written {side} of {each.what}"
        return None


class PoisonEmpty(TorchDispatchMode):  # type: ignore[misc]
    """Within it every new tensor lies between `bands`, an uninitialised one filled with `fill` (integers: the largest value).

    A kernel that leaves part of an output or a workspace unwritten then shows it, whatever the allocator had there before.
    """

    def __init__(self, bands: Bands, *, fill: float = math.nan) -> None:
        super().__init__()
        self._bands, self._value = bands, fill

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the op; move what it made between bands."""
        held = _held(args[0]) if func is _aten.resize_.default else None
        made = func(*args, **(kwargs or {}))
        if held is not None and _bandable(made) and (grown := _held(made) - held) > 0:
            _fill(made.as_strided((grown,), (1,), held), self._value)
        empty = func in _EMPTY
        if not (empty or func in _FILLED) or not _bandable(made):
            return made
        between = self._bands.like(made, "a tensor of the kernel's own,")
        if empty:
            _fill(between, self._value)
        else:
            between.copy_(made)
        return between


def _held(tensor: Any) -> int:
    """Elements that its storage has room for."""
    return int(tensor.untyped_storage().nbytes() // tensor.element_size())


def _bandable(made: Any) -> bool:
    plain = made.layout is torch.strided and made.device.type in ("cpu", "cuda") and not made.is_quantized
    return bool(plain and made.numel() and all(stride >= 0 for stride in made.stride()))


def _fill(tensor: torch.Tensor, value: float) -> None:
    if tensor.is_floating_point():
        tensor.fill_(value)
    elif tensor.dtype is not torch.bool and not tensor.is_complex():
        tensor.fill_(torch.iinfo(tensor.dtype).max)
