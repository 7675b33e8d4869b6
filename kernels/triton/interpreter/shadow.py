"""Notes on the programs that read and write each element of a storage: they show races and memory that was never written.

A program of a launch has a stamp, larger than all of earlier launches, so that nothing needs to be cleared between launches. For
a storage that is only read, addresses are merely kept: they are processed when something is stored to it.
"""

from __future__ import annotations

from typing import Any

from attnfuzz.kernels.support.absent import Absent
from attnfuzz.kernels.support.memory import Fresh

try:
    import numpy as np
except ImportError:
    np = Absent("numpy")  # type: ignore[assignment]

__all__ = ["Shadow", "live_of"]

Array = np.ndarray[Any, np.dtype[Any]]


def live_of(pointers: Array, mask: Array | None) -> Array:
    """The addresses under `mask`, in one dimension."""
    if mask is None:
        return pointers.reshape(-1)
    if pointers.shape != mask.shape:
        pointers, mask = np.broadcast_arrays(pointers, mask)
    if mask.ndim > 1 and not mask.strides[-1]:
        # Whole rows: faster to index.
        mask = mask[..., 0]
    taken: Array = pointers[mask]
    return taken.reshape(-1)


class Shadow:
    """Notes on one storage, per unit of `unit` bytes.

    Args:
        begin: the storage's address.
        size: its size in bytes.
        unit: bytes of an element; accesses of smaller elements split the units.
        fresh: the notes of torch's allocation, if it came from torch.empty.
    """

    __slots__ = ("_atomics", "_from_host", "_host", "_readers", "_writers", "begin", "fresh", "pending", "size", "stored", "unit")

    def __init__(self, begin: int, size: int, unit: int, fresh: Fresh | None) -> None:
        self.begin, self.size, self.unit, self.fresh = begin, size, unit, fresh
        self.pending: list[tuple[int, Array, Array | None, int]] = []
        """Loads of this launch that are not processed yet: stamp, pointers, mask, bytes per element."""
        self.stored = -1
        """The base of the last launch that stored here."""
        self._writers: Array | None = None
        self._atomics: Array | None = None
        self._readers: Array | None = None
        self._host: Array | None = None
        self._from_host = 0

    def units(self, live: Array, width: int) -> Array:
        """The units of the elements at addresses `live`, of `width` bytes each: (elements, units of one)."""
        offsets = live.astype(np.int64) - self.begin
        finest = min(width, self.unit)
        if bool((offsets % finest).any()):
            finest = 1
        if finest < self.unit:
            self._split(finest)
        units = offsets[:, None] // self.unit
        return units if width == self.unit else units + np.arange(width // self.unit)

    def loaded(self, units: Array, stamp: int, base: int, ordered: set[int]) -> tuple[int, int] | None:
        """Return (element, stamp) of an element that another program of the launch has written, or None."""
        return _other(self._writers, units, stamp, base, ordered) or _other(self._atomics, units, stamp, base, ordered)

    def store(self, units: Array, stamp: int, base: int, ordered: set[int], *, atomic: bool) -> tuple[int, int, str] | None:
        """Note a store; returns (element, stamp, "read" or "written") of an access by another program of the launch, or None."""
        self.settle(base)
        clash = _other(self._writers, units, stamp, base, ordered)
        if clash is None and not atomic:
            clash = _other(self._atomics, units, stamp, base, ordered)
        if clash is not None:
            return (*clash, "written")
        read = _other(self._readers, units, stamp, base, ordered)
        if read is not None:
            return (*read, "read")
        if atomic:
            self._atomics = self._noted(self._atomics, units, stamp, base)
        else:
            self._writers = self._stamps(self._writers)
            self._writers[units] = stamp
        self.stored = base
        return None

    def settle(self, base: int) -> None:
        """Process pending loads."""
        pending, self.pending = self.pending, []
        for stamp, pointers, mask, width in pending:
            self._readers = self._noted(self._readers, self.units(live_of(pointers, mask), width), stamp, base)

    def unwritten(self, live: Array, values: Array, width: int) -> Array | None:
        """Mask of the `values`, read at addresses `live`, that were never written; None: there are none."""
        fresh = self.fresh
        if fresh is None or not live.size:
            return None
        bits = np.ascontiguousarray(values).view(f"u{width}")
        if width >= len(fresh.filling):
            suspect = bits == np.frombuffer(fresh.filling * (width // len(fresh.filling)), f"u{width}")
        else:
            parts = np.frombuffer(fresh.filling, f"u{width}")
            suspect = bits == parts[(live.astype(np.int64) - fresh.begin) // width % len(parts)]
        if not suspect.any():
            return None
        # The filling's value may also have been written.
        units = self.units(live, width)
        written = np.zeros(units.shape, np.bool_)
        for stamps in (self._writers, self._atomics):
            if stamps is not None:
                written |= stamps[units] > 0
        if fresh.written:
            written |= self._by_host(fresh)[units]
        suspect &= ~written.any(-1)
        return suspect if suspect.any() else None

    def _by_host(self, fresh: Fresh) -> Array:
        smallest = min(width for _, _, _, width in fresh.written)
        if smallest < self.unit:
            self._split(smallest)
        if self._host is None:
            self._host, self._from_host = np.zeros(self.size // self.unit + 1, np.bool_), 0
        for address, shape, strides, width in fresh.written[self._from_host :]:
            each = width // self.unit
            steps = (*(stride * each for stride in strides), 1)
            start = self._host[(address - self.begin) // self.unit :]
            np.lib.stride_tricks.as_strided(start, (*shape, each), steps)[...] = True
        self._from_host = len(fresh.written)
        return self._host

    def _stamps(self, stamps: Array | None) -> Array:
        return np.zeros(self.size // self.unit + 1, np.int64) if stamps is None else stamps

    def _noted(self, stamps: Array | None, units: Array, stamp: int, base: int) -> Array:
        """Put `stamp` at `units`, or `base` where another program of the launch has stamped; returns the stamps."""
        stamps = self._stamps(stamps)
        before = stamps[units]
        stamps[units] = np.where((before < base) | (before == stamp), stamp, base)
        return stamps

    def _split(self, unit: int) -> None:
        times = self.unit // unit
        wanted = self.size // unit + 1
        for name in ("_writers", "_atomics", "_readers", "_host"):
            stamps = getattr(self, name)
            if stamps is not None:
                setattr(self, name, np.repeat(stamps, times)[:wanted])
        self.unit = unit


def _other(stamps: Array | None, units: Array, stamp: int, base: int, ordered: set[int]) -> tuple[int, int] | None:
    """Return (element, stamp) of the first that another program of the launch has stamped; `base` means several programs."""
    if stamps is None:
        return None
    noted = stamps[units]
    wrong = (noted >= base) & (noted != stamp)
    if ordered:
        # One of several programs may be unordered: a missed race is better than a false alarm.
        wrong &= ~np.isin(noted, [base, *ordered])
    if not wrong.any():
        return None
    element = int(wrong.any(-1).argmax())
    return element, int(noted[element][wrong[element]][0])
