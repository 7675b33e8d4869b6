"""How much memory a child and what it starts may hold."""

from __future__ import annotations

import os

from attnfuzz.kernels.contract import Device

__all__ = ["memory_cap", "share_of_memory"]

_GIB = 1 << 30
_LEAST: dict[Device, int] = {"cpu": 2 * _GIB, "cuda": 16 * _GIB}
"""Of a child of one worker among several: CUDA's libraries alone are 3 GiB, in memory that the children share."""


def share_of_memory(device: Device, workers: int) -> int:
    """Return the bytes that a child of one of this machine's `workers` may hold."""
    return max(_LEAST[device], memory_cap() // workers)


def memory_cap() -> int:
    """Return half of the machine's memory in bytes, divided among xdist's workers; at least 2 GiB."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(2 * _GIB, total // 2 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
