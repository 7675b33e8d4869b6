"""The GPUs of this machine, by the driver's tool: torch is not imported, so that a process may still choose among them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

__all__ = ["free_memory", "gpus"]

_SECONDS = 30.0


def gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [each for each in chosen.split(",") if each.strip() not in ("", "-1")]
    return [str(index) for index, _ in enumerate(line for line in _asked("-L") if line.startswith("GPU "))]


def free_memory(usable: Sequence[str]) -> int | None:
    """Return the free memory of the fullest of these GPUs in MiB; None where the driver's tool does not say."""
    lines = _asked("-i", ",".join(usable), "--query-gpu=memory.free", "--format=csv,noheader,nounits") if usable else []
    figures = [int(line) for line in lines if line.strip().isdigit()]
    return min(figures) if figures and len(figures) == len(usable) else None


def _asked(*arguments: str) -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()
