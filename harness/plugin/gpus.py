"""One GPU for each xdist worker, chosen before torch is imported, and how many workers a GPU node gets."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

__all__ = ["gpus", "pin_worker", "pytest_xdist_auto_num_workers"]

_PER_GPU = 4
"""Workers that share a GPU: small cases leave it idle most of the time, and every worker takes about a GiB of it."""


def gpus() -> list[str]:
    """The GPUs that this process may use, asked of the driver's tool so that torch is not imported before the choice is made."""
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
    found = gpus()
    if found:
        os.environ["CUDA_VISIBLE_DEVICES"] = found[int(worker[2:]) % len(found)]


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto` on a GPU node: a few workers per GPU, not one per core. None (xdist's own choice) without a GPU."""
    if config.getoption("--attnfuzz-device") == "cpu":
        return None
    found = len(gpus())
    return found * max(1, min(_PER_GPU, len(os.sched_getaffinity(0)) // found)) if found else None
