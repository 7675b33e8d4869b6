"""The GPUs of this machine, by the driver's tool: torch is not imported, so that a process may still choose among them."""

from __future__ import annotations

import os
import shutil
import subprocess

__all__ = ["free_memory", "gpus"]

_SECONDS = 30.0


def gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [each for each in chosen.split(",") if each.strip() not in ("", "-1")]
    return [str(index) for index, _ in enumerate(line for line in _asked("-L") if line.startswith("GPU "))]


def free_memory() -> int:
    """Return the bytes that are free on the GPU with the least of them; 0 where there is none, or the tool does not say."""
    values = [int(line) for line in _asked("--query-gpu=memory.free", "--format=csv,noheader,nounits") if line.strip().isdigit()]
    return min(values, default=0) << 20


def _asked(*arguments: str) -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()
