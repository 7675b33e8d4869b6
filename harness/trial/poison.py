"""Poison and guard bands, which show wrong memory accesses while a kernel runs.

Memory from torch.empty is NaN (integers: a huge value), so that elements never written show. Every tensor, the kernel's own and
its inputs, lies between bands of a NaN pattern: a read beyond its ends shows in the results, a write in the bands.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz.harness.trial import guard_kernel
from attnfuzz.harness.trial.guard_kernel import Pieces, doubled
from attnfuzz.harness.trial.memory_ops import AS_STRIDED, COPIES, NEW_EMPTY_STRIDED, OFFSET, ZEROS, traits_of, written
from attnfuzz.harness.trial.own_storage import with_own_storage
from attnfuzz.harness.trial.reading import Reading
from attnfuzz.kernels.support.memory import Watch

__all__ = ["POISON", "Bands", "PoisonEmpty", "memory", "reach"]

_OWN = "a tensor of the kernel's own,"
_BAND = 1 << 16
"""Bytes before and after each tensor: more than a tile of rows. A multiple of every allocator's alignment."""
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
_COPIES_KEPT = 1 << 28
"""Bytes of what COPIES make that is moved between bands in one launch: it is kept until the launch has ended."""
_AT_ONCE = 128
"""Tensors whose bands are gathered to be checked: 16 MiB."""


POISON = {
    torch.float16: (torch.int16, 0x7E5A),
    torch.bfloat16: (torch.int16, 0x7FD6),
    torch.float32: (torch.int32, 0x7FD1A3B7),
}
"""The NaN of uninitialised memory, by dtype: as which integers, and its bits. None is that of another dtype, converted."""


@dataclass(frozen=True, slots=True, eq=False)
class _Band:
    what: str
    words: torch.Tensor
    """The whole buffer as int16: band, tensor, band."""
    before: int
    """Words in front of the tensor."""
    pattern: int
    """The words in front of it."""
    after: int
    """Those behind it."""
    begin: int = 0
    """Byte of the original's storage that is the first one here."""

    def taken(self) -> bool:
        """Whether the kernel has made the allocation smaller."""
        return bool(self.words.untyped_storage().nbytes() < self.words.numel() * self.words.element_size())


class Bands:
    """Tensors between guard bands, and the check that the bands are intact."""

    def __init__(self) -> None:
        self._kept: list[_Band] = []

    def like(
        self,
        tensor: torch.Tensor,
        what: str,
        pattern: int | None = None,
        *,
        own_storage: bool = False,
        later: dict[torch.device, Pieces] | None = None,
    ) -> torch.Tensor:
        """Return a tensor of the same shape, strides, dtype and device, between bands. `what` names it in messages.

        It is filled with the `pattern` of 32 bits, from its first element to its last with what lies between; None: unfilled.
        `own_storage`: its storage begins with it, where torch can do that. `later`: gets the bands and the filling, for a launch
        of the caller's, on devices where the kernel writes them.
        """
        size, device = reach(tensor) * tensor.element_size(), tensor.device
        pieces = None
        if guard_kernel.takes(device):
            pieces = Pieces(device) if later is None else later.setdefault(device, Pieces(device))
        held = self._between(size, 0, tensor, f"{what} {tuple(tensor.shape)} {tensor.dtype}", pieces)
        if pieces is not None:
            if pattern is not None:
                pieces.fill(held.data_ptr(), size, pattern)
            if later is None:
                pieces.launch()
        elif pattern is not None:
            _repeat(held, pattern)
        if own_storage and (alone := with_own_storage(held)) is not None:
            held = alone
        return held.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def copies(self, tensors: Mapping[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
        """Copy `tensors` between bands with their memory layout: strides, alignment, contents between rows.

        Tensors that share an allocation share one in the copies. Messages name them by `what` and their names.
        """
        copies: dict[str, torch.Tensor] = {}
        groups: dict[tuple[torch.device, int], list[str]] = {}
        for name, tensor in tensors.items():
            if tensor.numel():
                groups.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(name)
            else:
                copies[name] = tensor.clone()
        pieces = {device: Pieces(device) for device, _ in groups if guard_kernel.takes(device)}
        for (device, _), names in groups.items():
            copies |= self._copied({name: tensors[name] for name in names}, what, pieces.get(device))
        for each in pieces.values():
            each.launch()
        return {name: copies[name] for name in tensors}

    def _copied(self, sharing: Mapping[str, torch.Tensor], what: str, pieces: Pieces | None) -> dict[str, torch.Tensor]:
        """Copy tensors of one allocation, with all bytes from the first to the last of any.

        `pieces` gets what is to be written, bands and contents; without it they are written here.
        """
        spans = [_span(tensor) for tensor in sharing.values()]
        begin, end = min(first for first, _ in spans), max(last for _, last in spans)
        first = next(iter(sharing.values()))
        detail = f"{tuple(first.shape)} {first.dtype}" if len(sharing) == 1 else "in one allocation"
        lead, named = begin % _ALIGNMENT, f"{what} {', '.join(sharing)} {detail}"
        # One that shares its allocation with lengths may lie behind them; a positive band is NaN to numbers as well.
        like = next((tensor for tensor in sharing.values() if tensor.dtype in _INTEGERS), first)
        held = self._between(end - begin, lead, like, named, pieces, begin)
        if pieces is not None:
            pieces.copy(held.data_ptr(), first.untyped_storage().data_ptr() + begin, end - begin)
        else:
            held.copy_(memory(first, begin, end))
        copies = {}
        for (name, tensor), (start, stop) in zip(sharing.items(), spans, strict=True):
            own = held[start - begin : stop - begin].view(tensor.dtype)
            copies[name] = own.as_strided(tensor.shape, tensor.stride())
        return copies

    def _between(
        self, size: int, lead: int, original: torch.Tensor, what: str, pieces: Pieces | None, begin: int = 0
    ) -> torch.Tensor:
        """Return `size` bytes between bands that start `lead` bytes (an even number) past a multiple of the alignment.

        `original`: what they are for. `pieces` gets the bands; without it they are filled here. `begin`: of the `_Band`.
        """
        pattern, device = _FIRST_PATTERN + 17 * len(self._kept) % _PATTERNS, original.device
        after = pattern & _POSITIVE if original.dtype in _INTEGERS else pattern
        before = _BAND + lead // 2 * 2
        count = (before + size + _BAND + 1) // 2
        if pieces is not None:
            words = torch.empty((count,), dtype=torch.int16, device=device)
            start = words.data_ptr()
            pieces.fill(start, before, doubled(pattern))
            pieces.fill(start + before + size, 2 * count - before - size, doubled(after))
        else:
            words = torch.full((count,), pattern, dtype=torch.int16, device=device)
            if after != pattern:
                _write_words(words, (before + size) // 2, after)
        self._kept.append(_Band(what, words, before // 2, pattern, after, begin))
        return words.view(torch.uint8)[before : before + size]

    def offset_here(self, tensor: torch.Tensor, offset: int, extent: int) -> int:
        """Return where an element of the storage lies that `tensor` would have without bands, with `extent` elements from it on.

        An offset behind the first band is one of the storage that it has, and so is one from which they reach beyond it.
        """
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type not in ("cpu", "cuda"):
            return offset
        address, size = tensor.untyped_storage().data_ptr(), tensor.element_size()
        band = next((each for each in self._kept if each.words.data_ptr() == address), None)
        if band is None or offset * size >= 2 * band.before:
            return offset
        there = offset + int((2 * band.before - band.begin) // size)
        return there if (there + extent) * size <= tensor.untyped_storage().nbytes() else offset

    def edges(self, checks: Pieces | None = None) -> Reading | None:
        """Begin to check every band, most often by its smallest and largest 8 bytes; None: memory was taken away.

        `checks`: gets the bands on its device, for a launch of the caller's.
        """
        if any(each.taken() for each in self._kept):
            return None
        numbers: list[torch.Tensor] = []
        expected: list[int] = []
        for device in dict.fromkeys(each.words.device for each in self._kept):
            here = [each for each in self._kept if each.words.device == device]
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
                codes = [_code(word) for each in some for word in (each.pattern, each.after)]
                expected += codes + codes
        return Reading(numbers, expected)

    def broken(self) -> str | None:
        """Return what was written beyond the ends of which tensor, or None."""
        for each in self._kept:
            if each.taken():
                return f"the memory was taken away from {each.what}"
        edges = self.edges()
        if edges is None or edges.as_expected():
            return None
        sides = []
        for each in self._kept:
            sides += [(each.words[: each.before], each.pattern), (each.words[-_HALF:], each.after)]
        counts = [(band != pattern).sum() for band, pattern in sides]
        changed = torch.stack(counts).tolist()
        for number, each in enumerate(self._kept):
            before, after = changed[2 * number : 2 * number + 2]
            if before or after:
                side, count = ("before the start", before) if before else ("past the end", after)
                return f"{count} 2-byte words were written {side} of {each.what}"
        return None


def _write_words(words: torch.Tensor, start: int, word: int) -> None:
    """Fill a tensor of int16 with a word from `start` on; without operations of torch on a CPU, which take longer than that."""
    if words.device.type != "cpu":
        words[start:] = word
        return
    count = words.numel() - start
    ctypes.memmove(words.data_ptr() + 2 * start, word.to_bytes(2, sys.byteorder, signed=True) * count, 2 * count)


def _check_bands(bands: Sequence[_Band], pieces: Pieces) -> None:
    for each in bands:
        start = each.words.data_ptr()
        pieces.holds(start, 2 * each.before, doubled(each.pattern))
        pieces.holds(start + 2 * (each.words.numel() - _HALF), 2 * _HALF, doubled(each.after))


@functools.cache
def _code(pattern: int) -> int:
    """Return four equal 16-bit words as an int64."""
    return int.from_bytes(pattern.to_bytes(2, "little", signed=True) * 4, "little", signed=True)


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
    begin = tensor.storage_offset() * tensor.element_size()
    return begin, begin + reach(tensor) * tensor.element_size()


def reach(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last, with those between them."""
    return 1 + sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class PoisonEmpty(TorchDispatchMode):  # type: ignore[misc]
    """Mode that places every new tensor between `bands`, and fills uninitialised ones with `fill` (integers: the largest value).

    An output or a workspace that a kernel leaves partly unwritten then shows, independent of the allocator's earlier contents.
    `watch` is notified of uninitialised memory, and of what torch writes. Tensors that are made in a context of
    `kernels.support.memory.allocating` are filled when it ends.
    """

    def __init__(self, bands: Bands, *, fill: float = math.nan, watch: Watch | None = None) -> None:
        super().__init__()
        self._bands, self._value = bands, fill
        self._watch = Watch() if watch is None else watch
        self._unfilled: dict[torch.device, Pieces] = {}
        self._room = _COPIES_KEPT

    def __enter__(self) -> PoisonEmpty:
        """Begin; what the kernel has promised of new tensors is known by `watch`."""
        self._watch.filled = self._fill_now
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """End. The watch outlives the launch, whose memory it must not keep."""
        self._watch.filled = _nothing
        super().__exit__(*error)

    def _fill_now(self) -> None:
        """Fill what was left for later, by one launch."""
        while self._unfilled:
            self._unfilled.popitem()[1].launch()

    def _later(self) -> dict[torch.device, Pieces] | None:
        """Return what gets the filling of a new tensor, if nothing uses it yet."""
        return self._unfilled if self._watch.allocating else None

    def _takes_copy(self, tensor: torch.Tensor) -> bool:
        """Whether there is room for one more of the tensors that COPIES make."""
        self._room -= reach(tensor) * tensor.element_size() + 2 * _BAND
        return self._room >= 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the op, and move its new tensor between bands."""
        if func is AS_STRIDED and len(args) > OFFSET and args[OFFSET] is not None:
            extent = 1 + sum((size - 1) * stride for size, stride in zip(args[1], args[2], strict=True))
            return func(*args[:OFFSET], self._bands.offset_here(args[0], args[OFFSET], extent))
        traits = traits_of(func)
        if self._unfilled and not (traits.empty or func in ZEROS or getattr(func, "is_view", False)):
            # Whatever the kernel has promised.
            self._fill_now()
        if traits.plain:
            return func(*args, **(kwargs or {}))
        if func in ZEROS and _strided(args, kwargs or {}):
            unfilled = ZEROS[func](*args, **(kwargs or {}))
            if not _bandable(unfilled):
                return unfilled.zero_()
            return self._bands.like(unfilled, _OWN, 0, own_storage=_in_backward(), later=self._later())
        held = _held(args[0]) if traits.resizes else None
        result = func(*args, **(kwargs or {}))
        for tensor in written(traits.writes, args, kwargs or {}):
            self._watch.written(tensor)
        if held is not None and _bandable(result) and (grown := _held(result) - held) > 0:
            _fill(result.as_strided((grown,), (1,), held), self._value)
        if not (traits.empty or traits.filled) or not _bandable(result):
            return result
        if func in COPIES and not self._takes_copy(result):
            return result
        pattern = _pattern(result.dtype, self._value) if traits.empty else None
        own_storage = func is NEW_EMPTY_STRIDED or func in COPIES
        between = self._bands.like(result, _OWN, pattern, own_storage=own_storage, later=self._later())
        if traits.empty:
            if (pattern is not None or _fill(between, self._value)) and between.device.type == "cpu":
                self._watch.allocated(between)
        else:
            between.copy_(result)
        return between


def _nothing() -> None:
    """Fill nothing."""


def _in_backward() -> bool:
    """Whether autograd computes gradients: its own nodes take new tensors to begin where their storages do."""
    return bool(torch._C._current_graph_task_id() != -1)


def _held(tensor: Any) -> int:
    """Return the number of elements its storage has room for."""
    return int(tensor.untyped_storage().nbytes() // tensor.element_size())


def _strided(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op makes a tensor of rows and columns, by its keywords and the tensor that it is like."""
    layouts = {kwargs.get("layout"), *(each.layout for each in args if isinstance(each, torch.Tensor))}
    return layouts <= {None, torch.strided}


def _bandable(tensor: Any) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_nested
    plain = strided and tensor.device.type in ("cpu", "cuda") and not tensor.is_quantized
    return bool(plain and tensor.numel() and all(stride >= 0 for stride in tensor.stride()))


def _pattern(dtype: torch.dtype, value: float) -> int | None:
    """Return the 32 bits of a dtype's poison, if that is the value."""
    if dtype not in POISON or not math.isnan(value):
        return None
    words, bits = POISON[dtype]
    return bits if words is torch.int32 else doubled(bits)


def _repeat(held: torch.Tensor, pattern: int) -> None:
    """Fill bytes with a pattern of 32 bits from their start, or of 16 repeated."""
    if held.numel() % 4 == 0 and held.storage_offset() % 4 == 0:
        held.view(torch.int32).fill_(pattern - (pattern >> 31 << 32))
    elif held.numel() % 2 == 0:
        word = pattern & 0xFFFF
        held.view(torch.int16).fill_(word - (word >> 15 << 16))
    else:
        held.fill_(pattern & 0xFF)


def _fill(tensor: torch.Tensor, value: float) -> bool:
    """Fill it, if its dtype has a conspicuous value; return whether it has."""
    if tensor.dtype in POISON and math.isnan(value):
        words, bits = POISON[tensor.dtype]
        tensor.view(words).fill_(bits)
    elif tensor.is_floating_point():
        tensor.fill_(value)
    elif tensor.dtype is not torch.bool and not tensor.is_complex():
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    else:
        return False
    return True
