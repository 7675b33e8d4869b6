"""One GPU for each xdist worker, chosen before torch is imported, and the number of workers on a GPU node."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

__all__ = ["gpus", "pin_worker", "pytest_xdist_auto_num_workers"]

_PER_GPU = 4
"""Workers that share a GPU: small cases leave it idle most of the time, and each worker takes about 1 GiB of it."""


def gpus() -> list[str]:
    """Return the GPUs that this process may use, by the driver's tool: torch must not be imported before the choice."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [each for each in chosen.split(",") if each.strip() not in ("", "-1")]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(index) for index, _ in enumerate(line for line in listed.splitlines() if line.startswith("GPU "))]


def pin_worker(worker: str | None) -> None:
    """Give xdist worker "gwN" GPU number N mod the number of GPUs; must run before torch is imported."""
    if worker is None or not worker.startswith("gw"):
        return
    if usable := gpus():
        os.environ["CUDA_VISIBLE_DEVICES"] = usable[int(worker[2:]) % len(usable)]


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return the workers of `-n auto`: on a GPU node a few per GPU, elsewhere None (xdist's own choice)."""
    if config.getoption("--attnfuzz-device") == "cpu":
        return None
    count = len(gpus())
    return count * max(1, min(_PER_GPU, len(os.sched_getaffinity(0)) // count)) if count else None
