"""Version of the ptxas that Triton assembles its code with."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys

from attnfuzz.kernels.support.installed_torch import gpu_capability, sees_cuda
from attnfuzz.kernels.triton import runtime

__all__ = ["assembler"]

_ASK = """
from triton.backends.nvidia.compiler import get_ptxas
print(get_ptxas({}).version)
"""
_SECONDS = 120


def assembler(capability: int = 0) -> tuple[int, tuple[int, int]] | None:
    """Return a compute capability and the version of the ptxas that Triton uses for it, such as (90, (12, 8)).

    A child process asks Triton, once: only Triton knows which ptxas it uses (environment variables included), and this process
    must not import it or initialise a GPU for that.

    Args:
        capability: 0: that of this machine's GPU.

    Returns:
        None where it is unknown, because Triton or a GPU is missing.
    """
    if not capability:
        if importlib.util.find_spec("torch") is None or not sees_cuda():
            return None
        major, minor = gpu_capability()
        capability = 10 * major + minor
    version = _query(capability, tuple(value for name, value in sorted(os.environ.items()) if name.startswith("TRITON_PTXAS")))
    return None if version is None else (capability, version)


@functools.cache
def _query(capability: int, _: tuple[str, ...]) -> tuple[int, int] | None:
    environment = {name: value for name, value in os.environ.items() if name != runtime.VARIABLE}
    command = [sys.executable, "-P", "-c", _ASK.format(capability)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS, env=environment)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"^(\d+)\.(\d+)", done.stdout, re.MULTILINE)
    return (int(match[1]), int(match[2])) if match else None
