"""Nothing outlives a run: a process that waits for the end of its parent, however that comes, and then clears up after it.

Started by path, with `python -I -S guardian.py DESCRIPTOR RUN FOLDER`: when DESCRIPTOR, a pipe that only the parent can write
to, comes to its end, every process that carries the mark RUN in its environment is killed, and FOLDER, its temporary files,
is removed. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MARK", "Process", "marked"]

MARK = "ATTNFUZZ_RUN"
"""Environment variable that every process of a run inherits, whatever session or parent it has."""
_PATIENCE = 10.0


@dataclass(frozen=True)
class Process:
    """A living process: its own number, its parent's, its session's, and the bytes of memory it holds."""

    pid: int
    parent: int
    session: int
    memory: int


def marked(run: str) -> Iterator[Process]:
    """The living processes of `run`, in no order."""
    wanted = f"{MARK}={run}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            yield Process(int(folder.name), int(fields[1]), int(fields[3]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))


def _clear(run: str, folder: str) -> None:
    """Kill until none is left: a process may fork between look and kill."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        left = list(marked(run))
        if not left:
            break
        for process in left:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.005)
    shutil.rmtree(folder, ignore_errors=True)


def _main(descriptor: int, run: str, folder: str) -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    while os.read(descriptor, 1):
        continue
    _clear(run, folder)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
