"""The reaper: a process that waits for the end of its parent, killed or not, and then cleans up after it.

Started by path, with `python -I -S reaper.py DESCRIPTOR RUN FOLDER`: when DESCRIPTOR, a pipe that only the parent can write
to, is closed, every process with the mark RUN in its environment is killed, and FOLDER, its temporary files, is removed.
Standard library only.
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

__all__ = ["MARK", "Process", "clear", "descends", "marked", "processes", "runs"]

MARK = "ATTNFUZZ_RUN"
"""Environment variable that every process of a run inherits, in any session and with any parent."""
_PATIENCE = 10.0


@dataclass(frozen=True)
class Process:
    """A living process: its pid, its parent's, its session, the bytes of memory it holds, whether it has the mark.

    `cpu`: processor seconds that it and the processes it has waited for have used. `state`: a letter, as in /proc/PID/stat.
    """

    pid: int
    parent: int
    session: int
    memory: int
    marked: bool
    cpu: float
    state: str


def marked(run: str) -> Iterator[Process]:
    """Return the living processes with the mark of `run`, in no order."""
    return (each for each in _living(run) if each.marked)


def processes(run: str) -> dict[int, Process]:
    """Return the living processes of `run` and their descendants, which may have been started with another environment."""
    everything = {each.pid: each for each in _living(run)}
    roots = {each.pid for each in everything.values() if each.marked}
    return {pid: each for pid, each in everything.items() if descends(pid, everything, roots)}


def runs(process: Process) -> bool:
    """Whether one of its threads runs, or waits for a processor."""
    if process.state == "R":
        return True
    try:
        threads = list(Path(f"/proc/{process.pid}/task").iterdir())
        return len(threads) > 1 and any((each / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"R" for each in threads)
    except (OSError, IndexError):
        return False


def descends(pid: int, by_pid: dict[int, Process], roots: set[int]) -> bool:
    """Whether `pid` is one of `roots`, or descends from one."""
    visited = set[int]()
    while pid in by_pid and pid not in visited:
        if pid in roots:
            return True
        visited.add(pid)
        pid = by_pid[pid].parent
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
        cpu = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        yield Process(int(folder.name), int(fields[1]), int(fields[3]), memory, ours, cpu, fields[0].decode())


def clear(run: str, folder: str, keep: int = 0) -> None:
    """Kill every process of `run`, except that with the pid `keep`, and remove `folder`."""
    # Until none is left: a process may fork between listing and killing.
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        left = processes(run).keys() - {keep}
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
    # The parent sends one byte to end the run; the pipe is at its end when every holder of its other end is gone.
    os.read(descriptor, 1)
    clear(run, folder)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
