"""How many workers fill this machine."""

from __future__ import annotations

import os

from attnfuzz.harness.core.gpus import free_memory, gpus
from attnfuzz.kernels.contract import Device

__all__ = ["auto_workers"]

_PER_GPU = 16
"""Workers of one GPU beyond which more bring nothing (docs/performance.md)."""
_GPU_BYTES = 3 << 30
"""Memory of a worker on its GPU: a context in each of its children, and the tensors of a batch."""
_HOST_BYTES = 3 << 29
"""Memory of a worker: its own, its children's, and the process that forks them."""


def auto_workers(device: Device) -> int:
    """Return the number of workers for `device`: the cores, fewer where memory of the host or of the GPUs is short."""
    cores = len(os.sched_getaffinity(0))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = max(1, min(cores, host // 2 // _HOST_BYTES))
    if device == "cuda":
        count = max(1, len(gpus()))
        most = min(most, count * max(1, min(_PER_GPU, free_memory() // _GPU_BYTES or 1)))
    return most
