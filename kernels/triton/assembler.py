"""Which ptxas Triton assembles its code with."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

from attnfuzz.kernels.triton import runtime

__all__ = ["assembler"]

_ASK = """
from triton.backends.nvidia.compiler import get_ptxas
capability = {}
if not capability:
    import torch
    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
print(capability, get_ptxas(capability).version)
"""
_SECONDS = 120


def assembler(capability: int = 0) -> tuple[int, tuple[int, int]] | None:
    """(90, (12, 8)): a compute capability, and the version of the ptxas that Triton takes for it, whatever variables name.

    In a process of its own, and once: Triton alone knows which release takes which, and to import it, or to look at a GPU, is
    not this process's to decide.

    Args:
        capability: 0: that of the GPU at hand.

    Returns:
        None where it cannot be told: Triton, or a GPU, is missing.
    """
    return _asked(capability, tuple(value for name, value in sorted(os.environ.items()) if name.startswith("TRITON_PTXAS")))


@functools.cache
def _asked(capability: int, _: tuple[str, ...]) -> tuple[int, tuple[int, int]] | None:
    environment = {name: value for name, value in os.environ.items() if name != runtime.VARIABLE}
    command = [sys.executable, "-P", "-c", _ASK.format(capability)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS, env=environment)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"^(\d+) (\d+)\.(\d+)", done.stdout, re.MULTILINE)
    return (int(found[1]), (int(found[2]), int(found[3]))) if found else None
