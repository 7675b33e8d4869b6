"""What the CUDA driver says of this machine's GPUs: torch, whose import takes seconds, is not imported for that."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

__all__ = ["Driver", "driver", "library", "sleep_while_waiting"]

_LIBRARY = "libcuda.so.1"
_BLOCKING_SYNC = 4
"""CU_CTX_SCHED_BLOCKING_SYNC."""
_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR (CUDA Driver API, "Data types used by CUDA driver")."""


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver: the version of CUDA that it supports, such as (13, 0), and the compute capability of each visible GPU."""

    version: tuple[int, int]
    gpus: tuple[tuple[int, int], ...]


def library() -> ctypes.CDLL:
    """Return the driver's functions, without initialising it.

    Raises:
        OSError: there is no driver.
    """
    return ctypes.CDLL(_LIBRARY)


@functools.cache
def driver() -> Driver | None:
    """Return what the driver says, or None where there is none or it does not work.

    It makes no CUDA context, but initialises the driver for this process, which a fork does not survive.
    """
    try:
        cuda = library()
        if cuda.cuInit(0):
            return None
        version = _number(cuda.cuDriverGetVersion)
        devices = [_number(cuda.cuDeviceGet, index) for index in range(_number(cuda.cuDeviceGetCount))]
        gpus = [
            (_number(cuda.cuDeviceGetAttribute, _MAJOR, each), _number(cuda.cuDeviceGetAttribute, _MINOR, each))
            for each in devices
        ]
    except (OSError, AttributeError):
        return None
    return Driver((version // 1000, version % 1000 // 10), tuple(gpus))


def sleep_while_waiting() -> bool:
    """Have this process sleep while it waits for a GPU; return whether the driver agreed. Call it before CUDA is used.

    By default a process polls the GPU, and so takes a core from the others while its work waits for its turn. It initialises the
    driver as `driver` does.
    """
    try:
        cuda = library()
        if cuda.cuInit(0):
            return False
        devices = [_number(cuda.cuDeviceGet, index) for index in range(_number(cuda.cuDeviceGetCount))]
        errors = [cuda.cuDevicePrimaryCtxSetFlags_v2(each, _BLOCKING_SYNC) for each in devices]
    except (OSError, AttributeError):
        return False
    return bool(errors) and not any(errors)


def _number(function: ctypes._NamedFuncPointer, *arguments: int) -> int:
    """Return the integer that a function of the driver writes to its first argument.

    Raises:
        OSError: it returns an error.
    """
    value = ctypes.c_int()
    if error := function(ctypes.byref(value), *arguments):
        raise OSError(f"{function.__name__}: CUDA error {error}")
    return value.value
