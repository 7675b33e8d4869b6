"""The child that makes kernels of third parties first; started by path, with `python -P import_child.py SETTINGS`."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import resource
import signal
import sys
from typing import Any

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_NO_REPORT = 78
"""Exit code where the module has closed the descriptor of the report."""


class _TorchSeen:
    """A finder that finds nothing, and reports that torch is being imported."""

    def __init__(self, report: int) -> None:
        self._report = report

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "torch":
            _write(self._report, "torch\n")


def main(arguments: list[str]) -> None:
    """Make the kernel at each target, and report that this process outlived it, whatever it raised."""
    settings = json.loads(arguments[0])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings["parent"]:
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(all_threads=False)
    report, me = settings["report"], os.getpid()
    os.set_inheritable(report, False)
    targets = _targets(settings["path"])
    sys.path[:] = settings["path"]
    sys.meta_path.insert(0, _TorchSeen(report))
    for target in settings["targets"]:
        with contextlib.suppress(BaseException):
            targets.load_here(target)
        if os.getpid() != me:
            # A fork that the module load and let return.
            os._exit(0)
        _write(report, "survived\n")
    os._exit(0)


def _targets(path: list[str]) -> Any:
    """Import attnfuzz from where this process finds it: modules of the current folder must not stand in for it or for others."""
    try:
        return importlib.import_module("attnfuzz.kernels.targets")
    except ModuleNotFoundError:  # the parent has it from elsewhere
        sys.path += [each for each in path if each not in sys.path]
        return importlib.import_module("attnfuzz.kernels.targets")


def _write(report: int, text: str) -> None:
    try:
        os.write(report, text.encode())
    except OSError:
        os._exit(_NO_REPORT)


if __name__ == "__main__":
    main(sys.argv[1:])
