"""Nothing outlives a run: a process that waits for the end of its parent, however that comes, and then clears up after it.

Started by path, with `python -I -S reaper.py DESCRIPTOR RUN FOLDER`: when DESCRIPTOR, a pipe that only the parent can write
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

__all__ = ["MARK", "Process", "descends", "family", "marked"]

MARK = "ATTNFUZZ_RUN"
"""Environment variable that every process of a run inherits, whatever session or parent it has."""
_PATIENCE = 10.0


@dataclass(frozen=True)
class Process:
    """A living process: its number, its parent's, its session's, the bytes of memory it holds, whether it bears the mark."""

    pid: int
    parent: int
    session: int
    memory: int
    marked: bool


def marked(run: str) -> Iterator[Process]:
    """The living processes of `run`, in no order."""
    return (each for each in _living(run) if each.marked)


def family(run: str) -> dict[int, Process]:
    """The living processes of `run` and all that descend from them: one may have been started with an environment of its own."""
    everyone = {each.pid: each for each in _living(run)}
    roots = {each.pid for each in everyone.values() if each.marked}
    return {pid: each for pid, each in everyone.items() if descends(pid, everyone, roots)}


def descends(pid: int, everyone: dict[int, Process], roots: set[int]) -> bool:
    """Whether `pid` is one of `roots`, or descends from one."""
    seen = set[int]()
    while pid in everyone and pid not in seen:
        if pid in roots:
            return True
        seen.add(pid)
        pid = everyone[pid].parent
    return False


def _living(run: str) -> Iterator[Process]:
    wanted = f"{MARK}={run}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] in (b"Z", b"X"):
            continue
        try:
            ours = wanted in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            ours = False
        memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        yield Process(int(folder.name), int(fields[1]), int(fields[3]), memory, ours)


def _clear(run: str, folder: str) -> None:
    """Kill until none is left: a process may fork between look and kill."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        left = family(run)
        if not left:
            break
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.005)
    shutil.rmtree(folder, ignore_errors=True)


def _main(descriptor: int, run: str, folder: str) -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    # One byte is the parent's own word; the end of the pipe comes when every holder of its other end is gone.
    os.read(descriptor, 1)
    _clear(run, folder)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
