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

__all__ = ["MARK", "Process", "clear", "descends", "living", "marked", "processes", "runs"]

MARK = "ATTNFUZZ_RUN"
"""Environment variable that every process of a run inherits, in any session and with any parent."""
_PATIENCE = 10.0


@dataclass(frozen=True)
class Process:
    """A living process: its pid, its parent's, its session, the bytes of memory it holds, whether it has the mark asked for.

    `cpu`: processor seconds that it and the processes it has waited for have used. `state`: a letter, as in /proc/PID/stat.
    """

    pid: int
    parent: int
    session: int
    memory: int
    marked: bool
    cpu: float
    state: str


def living() -> dict[int, Process]:
    """Return all living processes without looking for a mark, which takes two thirds of the time."""
    return {each.pid: each for each in _living(None)}


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
        folder = f"/proc/{process.pid}/task"
        threads = os.listdir(folder)  # noqa: PTH208 - as in _content
        states = (_content(f"{folder}/{each}/stat").rpartition(b")")[2].split()[0] for each in threads)
        return len(threads) > 1 and b"R" in states
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


def _living(run: str | None) -> Iterator[Process]:
    wanted = f"\0{MARK}={run}\0".encode()
    page, tick = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - as in _content
        try:
            fields = _content(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        except OSError:
            continue
        if not fields or fields[0] in (b"Z", b"X"):
            continue
        try:
            ours = run is not None and wanted in b"\0%b\0" % _content(f"/proc/{pid}/environ")
        except OSError:
            ours = False
        cpu = sum(map(int, fields[11:15])) / tick
        yield Process(int(pid), int(fields[1]), int(fields[3]), int(fields[21]) * page, ours, cpu, fields[0].decode())


def _content(path: str) -> bytes:
    # Twice as fast as pathlib, and a run reads the files of every process of the machine several times a second.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


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
