"""Tensors of CUDA whose rows lie gigabytes apart: addresses for all of it, memory only where rows are.

The driver's virtual memory management reserves the addresses and maps memory, a granule of 2 MiB or more at a time, around each
row. An access elsewhere between the rows is an illegal memory access.

Mapping takes longer than the launches, and the longer the more processes of the machine do it, on whatever GPU. So a process
keeps some of what no tensor needs any more: the next tensor whose rows lie in the same places has it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnfuzz.harness.trial import guard_kernel
from attnfuzz.kernels.support import driver

__all__ = ["KEPT", "MARGIN", "SparseMemory", "Unsupported", "empty_strided", "keep", "kept", "mapped_ranges"]

MARGIN = 1 << 16
"""Bytes before and after each row that are mapped too: a kernel may load whole vectors and tiles around a row."""
KEPT = 256 << 20
"""Bytes that a process keeps for later tensors between two tasks. Of the ranges that drawn Cases of triton.varlen need, two
thirds are then mapped already."""
_MOST = 4 * KEPT
"""Bytes beyond which it gives memory back within a task too: where Cases run in the user's own process, there are no tasks."""
_NAN_BYTE = 0xFF
"""What memory is filled with: NaN in every floating-point dtype."""
_SUPPORTED = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED."""
_PINNED, _ON_DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, the smallest granularity."""
_OUT_OF_MEMORY, _NOT_PERMITTED, _NOT_SUPPORTED = 2, 800, 801


class Unsupported(Exception):
    """The driver or the device has no virtual memory management, or torch cannot use it."""


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp; what is not set here is 0: no handle for other processes, no compression."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def empty_strided(shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an unfilled tensor as torch.empty_strided does; on CUDA with memory around its rows only, which is NaN.

    A row is what lies together in memory. Where the driver or the device cannot do it, all memory is taken. Once the last tensor
    in it is gone, the memory is kept for another one with rows in the same places, until `keep` gives it back.

    Raises:
        MemoryError: the device has no memory for the rows.
        RuntimeError: there is no memory for the whole tensor, or the driver reports another error.
    """
    if device.type == "cuda":
        with contextlib.suppress(Unsupported), torch.cuda.device(device):
            return _sparse(shape, strides, dtype, device)
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)


def _sparse(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if importlib.util.find_spec("numpy") is None:
        raise Unsupported("torch takes an array of others by NumPy only")
    rows = _rows(shape, strides, dtype.itemsize)
    try:
        memory = SparseMemory(rows)
    except MemoryError:
        # What torch keeps of earlier tensors is of no use to the driver.
        torch.cuda.empty_cache()
        keep(0)
        memory = SparseMemory(rows)
    flat = _as_tensor(memory, device)
    if guard_kernel.takes(flat.device):
        pieces = guard_kernel.Pieces(flat.device)
        for begin, end in memory.ranges:
            pieces.fill(flat.data_ptr() + begin, end - begin, _NAN_BYTE * 0x01010101)
        pieces.launch()
    else:
        for begin, end in memory.ranges:
            flat[begin:end].fill_(_NAN_BYTE)
    whole = flat[memory.first : memory.first + (rows[-1][1] - rows[0][0])]
    return whole.view(dtype).as_strided(tuple(shape), tuple(strides))


def _as_tensor(memory: SparseMemory, device: torch.device) -> torch.Tensor:
    """Return all bytes of `memory`, which lives as long as the tensor."""
    return torch.as_tensor(memory, device=device)


def _rows(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> list[tuple[int, int]]:
    """Return where the rows of a tensor lie, each as its first byte and the byte after its last, in order."""
    outer, together = len(shape), 1
    while outer and strides[outer - 1] == together:
        outer -= 1
        together *= shape[outer]
    places = itertools.product(*(range(size) for size in shape[:outer]))
    offsets = sorted(sum(map(operator.mul, place, strides)) for place in places)
    return [(offset * itemsize, (offset + together) * itemsize) for offset in offsets]


def mapped_ranges(rows: Iterable[tuple[int, int]], granularity: int) -> list[tuple[int, int]]:
    """Return the ranges of whole granules that `rows` and their margins touch, in order; those that meet are one.

    Rows are in order and begin at MARGIN or later.
    """
    ranges: list[tuple[int, int]] = []
    for first, last in rows:
        begin = (first - MARGIN) // granularity * granularity
        end = -(-(last + MARGIN) // granularity) * granularity
        if ranges and begin <= ranges[-1][1]:
            begin, end = ranges[-1][0], max(end, ranges.pop()[1])
        ranges.append((begin, end))
    return ranges


@dataclass(frozen=True, slots=True, eq=False)
class _Mapped:
    """Memory that is mapped at the `ranges` behind `address`, for one context.

    `give_back`: wait for all that the device was asked to do, then unmap the memory and free the addresses.
    """

    context: int | None
    ranges: tuple[tuple[int, int], ...]
    address: int
    give_back: Callable[[], None]

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return sum(end - begin for begin, end in self.ranges)


_unused: list[_Mapped] = []
"""What no tensor has any more, in the order in which it was last used. A finalizer, which runs anywhere, only appends to it."""


def kept() -> int:
    """Return how many bytes are kept for later tensors."""
    return sum(mapped.size for mapped in _unused.copy())


def keep(most: int) -> None:
    """Keep at most so many bytes for later tensors, first of what was used last. What is given back is waited for."""
    room = most
    for mapped in reversed(_unused.copy()):
        if mapped.size <= room:
            room -= mapped.size
            continue
        # Another finalizer may have appended since: nothing else is removed.
        _unused.remove(mapped)
        mapped.give_back()


def _taken(context: int | None, ranges: tuple[tuple[int, int], ...]) -> _Mapped | None:
    """Return what is kept for these ranges, which is then in use; None: nothing is."""
    for mapped in reversed(_unused.copy()):
        if mapped.ranges == ranges and mapped.context == context:
            _unused.remove(mapped)
            return mapped
    return None


def _mapped(cuda: _Cuda, ranges: tuple[tuple[int, int], ...]) -> _Mapped:
    """Reserve addresses and map memory."""
    if kept() > _MOST:
        keep(KEPT)
    with contextlib.ExitStack() as undo:
        address = cuda.reserve(ranges[-1][1], undo)
        for begin, end in ranges:
            cuda.map(address + begin, end - begin, undo)
        # Undone in reverse order: waiting comes first, and the addresses go last.
        undo.callback(cuda.wait)
        return _Mapped(cuda.context, ranges, address, undo.pop_all().close)


class SparseMemory:
    """Memory of the current CUDA context's device around `rows`, and addresses from the first to the last of them.

    torch.as_tensor takes it for an array of bytes. What it held before is still there. When nothing refers to this object any
    more, the memory is kept for another one with the same ranges, until `keep` gives it back.

    Args:
        rows: first byte of each, counted from that of the first one, and the byte after its last, in order.

    Raises:
        Unsupported: the driver or the device has no virtual memory management.
        MemoryError: the device has not enough memory; nothing is taken.
        RuntimeError: a function of the driver reports another error; nothing is taken.
    """

    first = MARGIN
    """Byte at which the first row begins."""

    def __init__(self, rows: Sequence[tuple[int, int]]) -> None:
        cuda = _Cuda()
        granularity = cuda.granularity()
        self.ranges = tuple(mapped_ranges([(MARGIN + begin, MARGIN + end) for begin, end in rows], granularity))
        mapped = _taken(cuda.context, self.ranges) or _mapped(cuda, self.ranges)
        weakref.finalize(self, _unused.append, mapped).atexit = False
        self.__cuda_array_interface__: dict[str, Any] = {
            "typestr": "|u1",
            "shape": (self.ranges[-1][1],),
            "data": (mapped.address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }


class _Cuda:
    """The driver's functions for virtual memory, on the device of the current context.

    Raises:
        Unsupported: the driver or the device does not have them.
    """

    def __init__(self) -> None:
        try:
            self._library = driver.library()
        except OSError as error:
            raise Unsupported from error
        device, supported = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        self._call("cuDeviceGetAttribute", ctypes.byref(supported), _SUPPORTED, device)
        if not supported.value:
            raise Unsupported
        self._context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))
        location = _Location(_ON_DEVICE, device.value)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)

    @property
    def context(self) -> int | None:
        """The current context."""
        return self._context.value

    def granularity(self) -> int:
        """Return the size of a granule in bytes."""
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), _MINIMUM)
        return size.value

    def reserve(self, size: int, undo: contextlib.ExitStack) -> int:
        """Return the first of `size` addresses; `undo` frees them."""
        address, bytes_ = ctypes.c_uint64(), ctypes.c_size_t(size)
        nothing = ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), bytes_, ctypes.c_size_t(0), nothing, nothing)
        undo.callback(self._try, "cuMemAddressFree", address, bytes_)
        return address.value

    def map(self, address: int, size: int, undo: contextlib.ExitStack) -> None:
        """Map new memory at `address`; `undo` unmaps it, which frees it."""
        handle, begin, bytes_ = ctypes.c_uint64(), ctypes.c_uint64(address), ctypes.c_size_t(size)
        nothing = ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), bytes_, ctypes.byref(self._properties), nothing)
        try:
            self._call("cuMemMap", begin, bytes_, ctypes.c_size_t(0), handle, nothing)
        finally:
            # The memory then lives as long as it is mapped.
            self._try("cuMemRelease", handle)
        undo.callback(self._try, "cuMemUnmap", begin, bytes_)
        self._call("cuMemSetAccess", begin, bytes_, ctypes.byref(self._access), ctypes.c_size_t(1))

    def wait(self) -> None:
        """Wait for all that the device was asked to do, from whatever thread."""
        if self._try("cuCtxPushCurrent_v2", self._context):
            self._try("cuCtxSynchronize")
            self._try("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            error = int(getattr(self._library, name)(*arguments))
        except AttributeError as missing:
            raise Unsupported(name) from missing
        if error in (_NOT_PERMITTED, _NOT_SUPPORTED):
            raise Unsupported(name)
        if error == _OUT_OF_MEMORY:
            raise MemoryError(f"{name}: the device is out of memory")
        if error:
            raise RuntimeError(f"{name}: CUDA error {error}")

    def _try(self, name: str, *arguments: Any) -> bool:
        """Call it; return whether it reports no error. After an illegal access every function does, and the process ends."""
        try:
            self._call(name, *arguments)
        except (MemoryError, RuntimeError, Unsupported):
            return False
        return True
