"""Memory of a GPU that many processes share: each gives back what it does not need, and its lack is not blamed on a kernel.

Torch keeps what it has freed for the next allocation of its own process. One large Case leaves gigabytes behind in that way, and
sixteen workers then have no memory for small ones.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from attnfuzz.harness.trial import sparse
from attnfuzz.harness.trial.errors import describe_exception
from attnfuzz.kernels.contract import Device

__all__ = ["is_out_of_memory", "is_own_need", "start_counting", "stop_counting", "trim", "when_free"]

_KEPT = 16
"""A process keeps at most that part of the GPU's memory between two tasks: its share among sixteen workers, and more
than a batch usually takes, which would wait for all of it otherwise."""
_FREE, _LITTLE = 8, 64
"""Where less than the first part of the GPU's memory is free, a process keeps at most the second: fourteen workers that each kept
their share held 127 of 141 GiB, and other programs may need some too."""
_SHARE = 16
"""A kernel that needs more than that part of the GPU's memory is refused on its own account, unless its inputs are large."""
_TIMES = 16
"""A kernel may need that many times what was allocated when counting began, its inputs among it, as far as the GPU has so much:
sums of dK and dV in float32 for each of 16 query heads are as much."""
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_PATIENCE, _PAUSE = 20.0, 0.5
_REFUSALS = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc")

_T = TypeVar("_T")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in Python, torch's CPU allocator or the device's."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(each in describe_exception(error) for each in _REFUSALS)
    )


def trim(device: Device) -> None:
    """Give back what is kept for later tensors, if it is much, or if it is not little and little memory is free."""
    if device == "cuda" and torch.cuda.is_initialized():
        total = _total()
        sparse.keep(min(sparse.KEPT, total // _LITTLE))
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() + sparse.kept()
        if unused > total // _KEPT or (unused > total // _LITTLE and torch.cuda.mem_get_info()[0] < total // _FREE):
            torch.cuda.empty_cache()
            sparse.keep(0)


_held: int | None = 0
"""Bytes that were allocated when counting began; None: nothing is counted."""


def start_counting(device: Device) -> None:
    """Count the most memory that is allocated from now on, for `is_own_need`."""
    global _held
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        # What memory_allocated() returns, which first makes and sorts a list of all 160 numbers.
        numbers = torch.cuda.memory_stats_as_nested_dict()
        _held = int(numbers["allocated_bytes"]["all"]["current"])


def stop_counting() -> None:
    """Count nothing, for a batch: a Case that is refused memory there runs alone, which counts. That takes 5 % of a launch."""
    global _held
    _held = None


def is_own_need(error: BaseException, device: Device) -> bool:
    """Whether memory was refused for what this process needs since `start_counting`, and not for what others hold.

    A Case whose inputs take gigabytes needs as much again for its outputs, which other processes may hold. Where nothing is
    counted, others hold it.
    """
    if device != "cuda":
        return True
    if _held is None:
        return False
    needs = int(torch.cuda.max_memory_allocated()) - _held + _requested(describe_exception(error))
    return needs > max(_total() // _SHARE, min(_TIMES * _held, _total() - _held))


def when_free(action: Callable[[], _T], device: Device, patience: float = _PATIENCE) -> _T:
    """Return what `action` returns; where the GPU's memory is taken, try again for `patience` seconds.

    Raises:
        Exception: what `action` raised at last.
    """
    end = time.monotonic() + patience
    while True:
        start_counting(device)
        try:
            return action()
        except (RuntimeError, MemoryError) as error:
            if device != "cuda" or not is_out_of_memory(error) or is_own_need(error, device) or time.monotonic() >= end:
                raise
        sparse.keep(0)
        time.sleep(_PAUSE)


def _requested(message: str) -> float:
    """Return the bytes that torch says were refused; 0 where the driver refused something else, such as room for code."""
    said = re.search(r"Tried to allocate (?:more than )?([\d.]+)\s*(\w+)?", message)
    # A unit beyond those is more than any GPU has.
    return float(said[1]) * _UNITS.get(said[2] or "bytes", float("inf")) if said else 0.0


def _total() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
