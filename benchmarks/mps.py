"""CUDA's MPS for some processes: a server that lets operations of several processes run on a GPU at the same time.

Without it, processes share a GPU in slices of time. The server belongs to this run alone: its pipes lie in a temporary folder,
which is named in the environment of the processes. The settings of the GPU are left as they are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

__all__ = ["CONTROL", "NoServer", "mps"]

CONTROL = "nvidia-cuda-mps-control"
_SECONDS = 30.0
_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


class NoServer(RuntimeError):
    """The server cannot be started, with the reason."""


@contextlib.contextmanager
def mps() -> Iterator[None]:
    """Start the server, and name it in the environment; end it afterwards, with all that it serves.

    Raises:
        NoServer: its program is missing, or refuses.
    """
    if shutil.which(CONTROL) is None:
        raise NoServer(f"{CONTROL} is not on the PATH; it comes with the driver")
    before = {name: os.environ.get(name) for name in _FOLDERS}
    # A socket's path has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="mps-", dir="/tmp") as folder:
        os.environ.update(dict.fromkeys(_FOLDERS, folder))
        try:
            _control(folder, "-d")
            yield
        finally:
            try:
                _control(folder, text="quit -t 5\n")
            except NoServer as error:
                # Raised, it would take the place of what was measured, or of the reason why the server did not start.
                warnings.warn(f"the server may go on: {error}", stacklevel=2)
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def _control(folder: str, *arguments: str, text: str = "") -> None:
    # To a file: a server that goes on has its pipes open, and would be waited for.
    with Path(folder, "output").open("w+") as output:
        try:
            command = [CONTROL, *arguments]
            done = subprocess.run(command, input=text, stdout=output, stderr=output, text=True, timeout=_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoServer(f"{CONTROL}: {error}") from None
        output.seek(0)
        said = output.read().strip()
    if done.returncode:
        raise NoServer(f"{CONTROL}: exit code {done.returncode}: {said}")
