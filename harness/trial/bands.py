"""Guard bands: tensors between two parts of memory that hold a pattern, in which a write beyond the tensor's ends shows.

The pattern is NaN, so that a read beyond the ends shows in the results.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from attnfuzz.harness.trial import guard_kernel
from attnfuzz.harness.trial.guard_kernel import Pieces, doubled
from attnfuzz.harness.trial.own_storage import with_own_storage
from attnfuzz.harness.trial.reading import Reading

__all__ = ["AROUND", "Bands", "Form", "form_of", "memory", "reach"]

_BAND = 1 << 16
"""Bytes before and after each tensor: more than a tile of rows. A multiple of every allocator's alignment."""
AROUND = 2 * _BAND
"""Bytes that a tensor takes beside its own."""
_FIRST_PATTERN, _PATTERNS = 0xFF81 - (1 << 16), 63
"""16-bit words that are NaN in float16, bfloat16 and (two of them) float32: signalling in the last two, so that arithmetic
changes them. Up to 63 tensors have different words, so that a copy of one band to another shows."""
_POSITIVE = 0x7FFF
"""The bits of a pattern that follow integers: a positive number, so that a sequence whose end is read past those of lengths has
tokens. Before integers it is negative, so that one whose begin is read there has them too."""
_INTEGERS = (torch.int32, torch.int64)
"""Those of lengths and indices."""
_ALIGNMENT = 256
"""Bytes: a copy has the alignment of its original, up to this."""
_HALF = _BAND // 2
"""A band in 16-bit words."""
_AT_ONCE = 128
"""Tensors whose bands are gathered to be checked: 16 MiB."""


class Form(NamedTuple):
    """How a tensor lies in memory."""

    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    reach: int
    """Elements from the first to the last, with those between them."""


class _Patterns(NamedTuple):
    """What the two bands of a tensor hold, as words of 16 bits and of 32."""

    before: int
    after: int
    twice_before: int
    twice_after: int


class _Band(NamedTuple):
    what: str
    form: tuple[Sequence[int], torch.dtype] | None
    """Shape and dtype, where they are part of its name."""
    held: torch.Tensor
    """The whole buffer: band, tensor, band."""
    size: int
    """Words of 16 bits that these three have."""
    device: torch.device
    before: int
    """Words in front of the tensor."""
    patterns: _Patterns
    begin: int
    """Byte of the original's storage that is the first one here."""

    @property
    def name(self) -> str:
        """What a message calls the tensor."""
        return self.what if self.form is None else f"{self.what} {tuple(self.form[0])} {self.form[1]}"

    @property
    def words(self) -> torch.Tensor:
        """Bands and tensor as int16."""
        return self.held.view(torch.int16)[: self.size]

    def taken(self) -> bool:
        """Whether the kernel has made the allocation smaller."""
        return bool(self.held.untyped_storage().nbytes() < 2 * self.size)


class Bands:
    """Tensors between guard bands, and the check that the bands are intact."""

    def __init__(self) -> None:
        self._kept: list[_Band] = []

    def like(
        self,
        form: Form,
        what: str,
        pattern: int | None = None,
        *,
        own_storage: bool = False,
        later: dict[torch.device, Pieces] | None = None,
    ) -> torch.Tensor:
        """Return a tensor with elements, of that form, between bands. `what` names it in messages.

        It is filled with the `pattern` of 32 bits, from its first element to its last with what lies between; None: unfilled.
        `own_storage`: its storage begins with it, where torch can do that. `later`: gets the bands and the filling, for a launch
        of the caller's, on devices where the kernel writes them.
        """
        shape, strides, dtype, device, extent = form
        size = extent * dtype.itemsize
        pieces = None
        if guard_kernel.takes(device):
            pieces = Pieces(device) if later is None else _of(later, device)
        words, start = self._between(size, 0, dtype, device, (what, (shape, dtype)), pieces, dtype)
        if pieces is not None:
            if pattern is not None:
                pieces.fill(words.data_ptr() + start, size, pattern)
            if later is None:
                pieces.launch()
        elif pattern is not None:
            _repeat(words.view(torch.uint8)[start : start + size], pattern)
        if own_storage and (alone := with_own_storage(words.view(torch.uint8)[start : start + size])) is not None:
            return alone.view(dtype).as_strided(shape, strides)
        return _part(words, start, dtype, shape, strides)

    def copies(self, tensors: Mapping[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
        """Copy `tensors` between bands with their memory layout: strides, alignment, contents between rows.

        Tensors that share an allocation share one in the copies. Messages name them by `what` and their names.
        """
        copies: dict[str, torch.Tensor] = {}
        groups: dict[tuple[torch.device, int], dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if tensor.numel():
                groups.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), {})[name] = tensor
            else:
                copies[name] = tensor.clone()
        pieces = {device: Pieces(device) for device in {device for device, _ in groups} if guard_kernel.takes(device)}
        for (device, address), sharing in groups.items():
            copies |= self._copied(sharing, address, what, pieces.get(device))
        for each in pieces.values():
            each.launch()
        return {name: copies[name] for name in tensors}

    def _copied(
        self, sharing: Mapping[str, torch.Tensor], address: int, what: str, pieces: Pieces | None
    ) -> dict[str, torch.Tensor]:
        """Copy tensors of one allocation, with all bytes from the first to the last of any.

        `address`: the allocation's. `pieces` gets what is to be written, bands and contents; without it they are written here.
        """
        spans = [_span(tensor) for tensor in sharing.values()]
        begin, end = spans[0]
        like = first = next(iter(sharing.values()))
        named: tuple[str, tuple[Sequence[int], torch.dtype] | None] = f"{what} {', '.join(sharing)}", (first.shape, first.dtype)
        if len(sharing) > 1:
            begin, end = min(start for start, _ in spans), max(stop for _, stop in spans)
            named = f"{named[0]} in one allocation", None
            # One that shares its allocation with lengths may lie behind them; a positive band is NaN to numbers as well.
            like = next((tensor for tensor in sharing.values() if tensor.dtype in _INTEGERS), first)
        # As views of one buffer of floats, a gradient that an operation in place sets on one would show in the others.
        own = first.dtype if len(sharing) == 1 else torch.int16
        words, at = self._between(end - begin, begin % _ALIGNMENT, like.dtype, first.device, named, pieces, own, begin)
        if pieces is not None:
            pieces.copy(words.data_ptr() + at, address + begin, end - begin)
        else:
            words.view(torch.uint8)[at : at + end - begin].copy_(memory(first, begin, end))
        return {
            name: _part(words, at + start - begin, tensor.dtype, tensor.shape, tensor.stride())
            for (name, tensor), (start, _) in zip(sharing.items(), spans, strict=True)
        }

    def _between(
        self,
        size: int,
        lead: int,
        dtype: torch.dtype,
        device: torch.device,
        named: tuple[str, tuple[Sequence[int], torch.dtype] | None],
        pieces: Pieces | None,
        own: torch.dtype,
        begin: int = 0,
    ) -> tuple[torch.Tensor, int]:
        """Return a buffer with room for `size` bytes between bands, and the byte where it begins.

        That is `lead` bytes (an even number) past a multiple of the alignment. `dtype`: of what they are for. `pieces` gets the
        bands, and the buffer has the dtype `own`: a view of equal dtype is one operation instead of two. Without it they are
        filled here, and the buffer is of int16. `named`, `begin`: of the `_Band`.
        """
        patterns = _patterns(len(self._kept) % _PATTERNS, integers=dtype in _INTEGERS)
        before = _BAND + lead // 2 * 2
        count = (before + size + _BAND + 1) // 2
        if pieces is not None:
            # torch.empty takes 1.4 to 1.7 times as long.
            words = torch.empty_strided((-(-2 * count // own.itemsize),), (1,), dtype=own, device=device)
            start = words.data_ptr()
            behind = start + before + size
            pieces.fill_both((start, before, patterns.twice_before), (behind, start + 2 * count - behind, patterns.twice_after))
        else:
            words = torch.full((count,), patterns.before, dtype=torch.int16, device=device)
            if patterns.after != patterns.before:
                _write_words(words, (before + size) // 2, patterns.after)
        self._kept.append(_Band(*named, words, count, words.device, before // 2, patterns, begin))
        return words, before

    def offset_here(self, tensor: torch.Tensor, offset: int, extent: int) -> int:
        """Return where an element of the storage lies that `tensor` would have without bands, with `extent` elements from it on.

        An offset behind the first band is one of the storage that it has, and so is one from which they reach beyond it.
        """
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type not in ("cpu", "cuda"):
            return offset
        address, size = tensor.untyped_storage().data_ptr(), tensor.element_size()
        band = next((each for each in self._kept if each.held.data_ptr() == address), None)
        if band is None or offset * size >= 2 * band.before:
            return offset
        there = offset + int((2 * band.before - band.begin) // size)
        return there if (there + extent) * size <= tensor.untyped_storage().nbytes() else offset

    def edges(self, checks: Pieces | None = None) -> Reading | None:
        """Begin to check every band, most often by its smallest and largest 8 bytes; None: memory was taken away.

        `checks`: gets the bands on its device, for a launch of the caller's.
        """
        by_device: dict[torch.device, list[_Band]] = {}
        for each in self._kept:
            if each.taken():
                return None
            by_device.setdefault(each.device, []).append(each)
        numbers: list[torch.Tensor] = []
        expected: list[int] = []
        for device, here in by_device.items():
            if guard_kernel.takes(device):
                pieces = Pieces(device) if checks is None or checks.device != device else checks
                numbers.append(pieces.check())
                _check_bands(here, pieces)
                if pieces is not checks:
                    pieces.launch()
                expected.append(0)
                continue
            for some in (here[start : start + _AT_ONCE] for start in range(0, len(here), _AT_ONCE)):
                parts = [part for each in some for part in (each.words[each.before - _HALF : each.before], each.words[-_HALF:])]
                numbers += torch.aminmax(torch.cat(parts).view(torch.int64).view(len(parts), -1), dim=1)
                codes = [_code(word) for each in some for word in each.patterns[:2]]
                expected += codes + codes
        return Reading(numbers, expected)

    def broken(self) -> str | None:
        """Return what was written beyond the ends of which tensor, or None."""
        for each in self._kept:
            if each.taken():
                return f"the memory was taken away from {each.name}"
        edges = self.edges()
        if edges is None or edges.as_expected():
            return None
        sides = []
        for each in self._kept:
            sides += [(each.words[: each.before], each.patterns.before), (each.words[-_HALF:], each.patterns.after)]
        counts = [(band != pattern).sum() for band, pattern in sides]
        changed = torch.stack(counts).tolist()
        for number, each in enumerate(self._kept):
            before, after = changed[2 * number : 2 * number + 2]
            if before or after:
                side, count = ("before the start", before) if before else ("past the end", after)
                return f"{count} 2-byte words were written {side} of {each.name}"
        return None


@functools.cache
def _patterns(number: int, *, integers: bool) -> _Patterns:
    """Return the patterns around one of up to 63 tensors."""
    before = _FIRST_PATTERN + 17 * number % _PATTERNS
    after = before & _POSITIVE if integers else before
    return _Patterns(before, after, doubled(before), doubled(after))


def _of(pieces: dict[torch.device, Pieces], device: torch.device) -> Pieces:
    """Return the pieces of a device."""
    if device not in pieces:
        pieces[device] = Pieces(device)
    return pieces[device]


def _part(words: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Return the tensor that begins at byte `start` of words of 16 bits, or of a buffer of its own dtype."""
    size = dtype.itemsize
    if words.dtype == dtype:
        return words.as_strided(shape, strides, start // size)
    if rest := 2 * words.shape[0] % size:
        # Behind it in memory that it shares lies one of smaller elements; words of the last band are left out.
        words = words[: -(rest // 2)]
    return words.view(dtype).as_strided(shape, strides, start // size)


def _write_words(words: torch.Tensor, start: int, word: int) -> None:
    """Fill a tensor of int16 with a word from `start` on; without operations of torch on a CPU, which take longer than that."""
    if words.device.type != "cpu":
        words[start:] = word
        return
    count = words.numel() - start
    ctypes.memmove(words.data_ptr() + 2 * start, word.to_bytes(2, sys.byteorder, signed=True) * count, 2 * count)


def _check_bands(bands: Sequence[_Band], pieces: Pieces) -> None:
    for each in bands:
        start, patterns = each.held.data_ptr(), each.patterns
        last = start + 2 * (each.size - _HALF), 2 * _HALF, patterns.twice_after
        pieces.both_hold((start, 2 * each.before, patterns.twice_before), last)


@functools.cache
def _code(pattern: int) -> int:
    """Return four equal 16-bit words as an int64."""
    return int.from_bytes(pattern.to_bytes(2, "little", signed=True) * 4, "little", signed=True)


def _repeat(held: torch.Tensor, pattern: int) -> None:
    """Fill bytes with a pattern of 32 bits from their start, or of 16 repeated."""
    if held.numel() % 4 == 0 and held.storage_offset() % 4 == 0:
        held.view(torch.int32).fill_(pattern - (pattern >> 31 << 32))
    elif held.numel() % 2 == 0:
        word = pattern & 0xFFFF
        held.view(torch.int16).fill_(word - (word >> 15 << 16))
    else:
        held.fill_(pattern & 0xFF)


def memory(tensor: torch.Tensor, begin: int | None = None, end: int | None = None) -> torch.Tensor:
    """Return the bytes of `tensor`'s allocation from `begin` to `end`: uint8, without copying.

    By default from its first element to its last, with the bytes between them.
    """
    first, last = _span(tensor)
    begin, end = first if begin is None else begin, last if end is None else end
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), begin, (end - begin,), (1,))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its allocation, and the byte after its last."""
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    return begin, begin + reach(tensor) * size


def reach(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last, with those between them."""
    if tensor.is_contiguous() and (count := tensor.numel()):
        return int(count)
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return 1 + last


def form_of(tensor: torch.Tensor) -> Form:
    """Return how a tensor lies in memory."""
    return Form(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, reach(tensor))
