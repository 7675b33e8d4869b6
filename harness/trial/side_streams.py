"""CUDA streams beside torch's default one: made current, held back until the host lets go, and captured into a CUDA graph.

What is held back begins late for sure, however fast the device is: a kernel that runs elsewhere, and does not wait, runs before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import struct
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch

from attnfuzz.kernels.contract import Device
from attnfuzz.oracles.fused import Handwritten

__all__ = ["CudaStreams", "Streams", "streams_of"]

_T = TypeVar("_T")
_ARGUMENTS = struct.Struct("=QIII4x")
_MOST_LOOKS = 30_000
"""Looks at the host's memory, each about a microsecond: a call that waits for its own stream goes on after that, and what calls
take that do not is less.
"""
_CYCLES = 20_000_000
"""Of a wait without a kernel of our own: about 10 ms."""
_TEXT = """
typedef unsigned long long address;
struct arguments { address flag; unsigned wanted, most; index_t number; };

extern "C" __global__ void held_back(const arguments a) {
  if (blockIdx.x != 0u || threadIdx.x != 0u) return;
  const volatile unsigned* flag = (const volatile unsigned*)a.flag;
  for (unsigned left = a.most; left > 0u && *flag < a.wanted; left--) {}
}
"""
_KERNEL = Handwritten("held_back", _TEXT)


class Streams(Protocol):
    """Streams of one device, by their numbers."""

    def on(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Make a stream that is not the default one current. Nothing waits for anything."""

    def synchronise(self) -> None:
        """Wait for all streams."""

    def hold(self) -> None:
        """Hold back what is requested on the current stream from now on, until `let_go`, or for a fraction of a second."""

    def let_go(self) -> None:
        """Let everything that is held back begin, on all streams at once."""

    def request(self, work: Callable[[], None]) -> None:
        """Request work on the current stream, behind what was requested there before."""

    def captured(self, call: Callable[[], _T]) -> tuple[_T, Callable[[], None]]:
        """Capture what `call` requests on the current stream into a CUDA graph, in which nothing runs yet.

        Returns what `call` returned, and a function that requests the graph on the current stream.
        Raises whatever `call` raised, or torch of the capture.
        """


class CudaStreams:
    """Streams of torch's current CUDA device."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._wanted = 1
        self._failed: list[torch.cuda.CUDAGraph] = []

    @contextlib.contextmanager
    def on(self, number: int) -> Iterator[None]:
        """Make a stream current."""
        if number not in self._streams:
            self._streams[number] = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._streams[number]):
            yield

    def synchronise(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self._device)

    def hold(self) -> None:
        """Hold back the current stream by a kernel of one thread, which reads the host's memory."""
        if _KERNEL.takes(self._device):
            _KERNEL(hold_arguments(self._flag.data_ptr(), self._wanted), 1, self._device)
        else:
            torch.cuda._sleep(_CYCLES)

    def let_go(self) -> None:
        """Let everything go."""
        # A plain store: an operation of torch may wait for the device.
        ctypes.c_int32.from_address(self._flag.data_ptr()).value = self._wanted
        self._wanted += 1

    def request(self, work: Callable[[], None]) -> None:
        """Do it: operations on a device are requests."""
        work()

    def captured(self, call: Callable[[], _T]) -> tuple[_T, Callable[[], None]]:
        """Capture what this thread requests on the current stream."""
        graph, pool, collects = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), gc.isenabled()
        raised: BaseException | None = None
        results: list[_T] = []
        # A tensor or graph that is freed meanwhile would end the capture.
        gc.disable()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results.append(call())
            except BaseException as error:  # the capture must be ended whatever a kernel raises
                raised = error
        finally:
            if collects:
                gc.enable()
        try:
            graph.capture_end()
        except RuntimeError as error:
            raised = raised or error
        if raised is not None:
            self._give_up(graph, pool)
            raise raised
        return results[0], graph.replay

    def _give_up(self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
        """End what a failed capture leaves: torch's allocator may go on to ask the graph which streams it captures."""
        self._failed.append(graph)
        # It raises where the capture's end has done so.
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._device.index, pool)


def hold_arguments(address: int, wanted: int, most: int = _MOST_LOOKS) -> bytes:
    """Return the struct of a launch that waits until an unsigned number at `address` is `wanted`, for `most` looks at it."""
    return _ARGUMENTS.pack(address, wanted, most, 1)


@functools.cache
def streams_of(device: Device) -> Streams:
    """Return the streams of a device of this process; it has none but on CUDA."""
    assert device == "cuda"
    return CudaStreams()
