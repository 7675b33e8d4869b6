"""One GPU for each xdist worker, chosen before torch is imported, and the number of workers on a GPU node."""

from __future__ import annotations

import os

import pytest

from attnfuzz.harness.core.gpus import free_memory, gpus

__all__ = ["pin_worker", "pytest_xdist_auto_num_workers"]

_PER_GPU = 16
"""The most workers that share a GPU. Small Cases leave it idle most of the time: 12 processes did more than 8 on an H200."""
_MEMORY = 4096
"""MiB of a GPU's free memory for each worker: the CUDA contexts of itself, its child and that one's spares, and their tensors."""


def pin_worker(worker: str | None) -> None:
    """Give xdist worker "gwN" GPU number N mod the number of GPUs; must run before torch is imported."""
    if worker is None or not worker.startswith("gw"):
        return
    if usable := gpus():
        os.environ["CUDA_VISIBLE_DEVICES"] = usable[int(worker[2:]) % len(usable)]


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return the workers of `-n auto`: on a GPU node as many as cores and GPU memory allow, elsewhere None (xdist's choice)."""
    if config.getoption("--attnfuzz-device") == "cpu":
        return None
    usable = gpus()
    if not usable:
        return None
    each = min(_PER_GPU, len(os.sched_getaffinity(0)) // len(usable))
    if (free := free_memory(usable)) is not None:
        each = min(each, free // _MEMORY)
    return len(usable) * max(1, each)
