"""Processes of a measurement: started in a session of their own, marked in their environment, watched in /proc, ended whole."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["ATTNFUZZ", "CACHES", "MARK", "Memory", "Session", "cold_caches", "lists_option"]

MARK = "ATTNFUZZ_BENCHMARK"
"""Environment variable that every process of a measurement inherits, in any session and with any parent."""
CACHES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "XDG_CACHE_HOME")
ATTNFUZZ = (sys.executable, "-P", "-m", "attnfuzz.harness.cli")
"""The command `attnfuzz` of this Python."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PATIENCE = 20.0
"""Seconds that a campaign has after Ctrl-C to end its children."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of the first process, and of every other one of the session by pid."""

    first: int
    others: dict[int, int]

    @property
    def total(self) -> int:
        """Of all processes; pages that several share count in each."""
        return self.first + sum(self.others.values())


class Session:
    """One command and all that it starts.

    As a context manager it ends them all: Ctrl-C for the command first, then SIGKILL for whatever still has the mark.

    Args:
        command: what to run.
        folder: its current folder, where its output goes to the files "stdout" and "stderr".
        environment: variables in addition to this process's.
    """

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.mark = secrets.token_hex(8)
        self.folder = folder
        self.started = time.monotonic()
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            self._process = subprocess.Popen(
                list(command), cwd=folder, env={**os.environ, **(environment or {}), MARK: self.mark},
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid
        self.ended: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.interrupt()
        self.kill_all()

    @property
    def running(self) -> bool:
        """Whether the command itself still runs."""
        if self.ended is None and self._process.poll() is not None:
            self.ended = time.monotonic()
        return self.ended is None

    @property
    def code(self) -> int | None:
        """Exit code of the command; None while it runs."""
        return self._process.returncode

    def wait(self, seconds: float) -> bool:
        """Wait for the command to end, at most so long; return whether it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))
        return not self.running

    def interrupt(self) -> None:
        """Send Ctrl-C to the command, and wait for its end; then kill it."""
        if self.running:
            self._process.send_signal(signal.SIGINT)
            if not self.wait(_PATIENCE):
                self._process.kill()
                self.wait(_PATIENCE)

    def kill_all(self) -> int:
        """Kill every process with this session's mark; return how many there were."""
        killed = set[int]()
        end = time.monotonic() + _PATIENCE
        while (left := [pid for pid, _ in self._marked()]) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            killed.update(left)
            time.sleep(0.01)
        return len(killed)

    def memory(self) -> Memory:
        """Return the memory of the session's processes now."""
        held = dict(self._marked())
        return Memory(held.pop(self.pid, 0), held)

    def text(self, name: str) -> str:
        """Return the content of "stdout" or "stderr"."""
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")

    def _marked(self) -> Iterator[tuple[int, int]]:
        """Return (pid, resident bytes) of each living process with the mark."""
        wanted = f"{MARK}={self.mark}".encode()
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            # A process may end while it is looked at; another user's cannot be read.
            with contextlib.suppress(OSError, IndexError):
                if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                    continue
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    yield int(folder.name), int(fields[21]) * _PAGE


def cold_caches(folder: Path) -> dict[str, str]:
    """Return variables that give the compilers empty caches in `folder`."""
    paths = {name: folder / "caches" / name.lower() for name in CACHES}
    for path in paths.values():
        path.mkdir(parents=True)
    return {name: str(path) for name, path in paths.items()}


@functools.cache
def lists_option(option: str) -> bool:
    """Whether `attnfuzz run --help` lists an option."""
    done = subprocess.run([*ATTNFUZZ, "run", "--help"], capture_output=True, text=True, check=True)
    return option in done.stdout.split()
