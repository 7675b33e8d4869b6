"""One GPU for each xdist worker, chosen before torch is imported, and the number of workers on a GPU node."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

__all__ = ["free_memory", "gpus", "pin_worker", "pytest_xdist_auto_num_workers"]

_PER_GPU = 16
"""The most workers that share a GPU. Small Cases leave it idle most of the time: 12 processes did more than 8 on an H200."""
_MEMORY = 4096
"""MiB of a GPU's free memory for each worker: the CUDA contexts of itself, its child and that one's spares, and their tensors."""


def gpus() -> list[str]:
    """Return the GPUs that this process may use, by the driver's tool: torch must not be imported before the choice."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [each for each in chosen.split(",") if each.strip() not in ("", "-1")]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    lines = _answer(tool, "-L")
    return [str(index) for index, _ in enumerate(line for line in lines if line.startswith("GPU "))]


def _answer(tool: str, *arguments: str) -> list[str]:
    """What the driver's tool prints, or nothing."""
    try:
        return subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=30, check=False).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []


def free_memory(usable: list[str]) -> int | None:
    """Return the free memory of the fullest of these GPUs in MiB; None where the driver's tool does not say."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    lines = _answer(tool, "-i", ",".join(usable), "--query-gpu=memory.free", "--format=csv,noheader,nounits")
    figures = [int(line) for line in lines if line.strip().isdigit()]
    return min(figures) if len(figures) == len(usable) else None


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
