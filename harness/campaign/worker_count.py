"""How many workers fill this machine."""

from __future__ import annotations

import os

from attnfuzz.harness.campaign.rounds import EXAMPLES
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.core.gpus import free_memory, gpus
from attnfuzz.harness.isolation.sharing import obstacle
from attnfuzz.kernels.contract import Device

__all__ = ["auto_workers", "useful_workers"]

_PER_GPU = 16
"""Most workers of one GPU: on an H200 18 and 20 had as many Cases a second as 16."""
_OF_CORES, _SHARED = {"cpu": 1.0, "cuda": 0.75}, 1.0
"""Workers for each core. With a GPU, a worker and its child want a core at the same time: on one H100 and 16 cores, 8, 12 and 16
workers tried 8,400, 11,000 and 10,200 Cases of three kernels in half a minute. Where they share the GPU by MPS, each waits less
for the others: on two H200 nodes with 16 cores, 16 and 18 workers had 1 to 15 % more Cases a second than 14
(docs/performance.md)."""
_GPU_MIB = 5 << 10
"""MiB of a worker on its GPU: the contexts of its child and of the next, and the tensors of a batch."""
_HOST_BYTES = 3 << 29
"""Memory of a worker: its own, its children's, and the process that forks them."""


def auto_workers(device: Device, *, share_gpu: bool = False) -> int:
    """Return the number of workers for `device`: by the cores, fewer where memory of the host or of the GPUs is short.

    `share_gpu`: they are to share GPUs by CUDA's MPS, as far as a server can be started here.
    """
    shared = device == "cuda" and share_gpu and obstacle() is None
    cores = max(1, int(len(os.sched_getaffinity(0)) * (_SHARED if shared else _OF_CORES[device])))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = max(1, min(cores, host // 2 // _HOST_BYTES))
    if device == "cuda":
        usable = gpus()
        free = free_memory(usable)
        each = _PER_GPU if free is None else min(_PER_GPU, free // _GPU_MIB)
        most = min(most, max(1, len(usable)) * max(1, each))
    return most


def useful_workers(settings: Settings, kernels: int) -> int:
    """Return how many of the settings' workers have something to do: a round of a kernel is one worker's."""
    if settings.budget is not None or settings.max_examples is None:
        return settings.workers
    return min(settings.workers, kernels * -(-settings.max_examples // EXAMPLES))
