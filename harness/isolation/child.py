"""The parent's handle on a child process: send tasks, receive replies, watch, kill."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from attnfuzz.harness.isolation.wire import Board, connect, receive, send, wait

__all__ = ["TAIL", "Child", "ChildError"]

_OUTPUT_LIMIT = 16 << 20
"""Bytes of output that are kept in memory; the rest is dropped."""
TAIL = 6000
"""Bytes of a process's last output that are kept."""
_STACK_SECONDS = 0.5


class ChildError(RuntimeError):
    """A child could not be started: an error of this machine or of attnfuzz, never of a kernel."""


class Child:
    """One child process: its connection, the page that shows its stage, its output and its exit status.

    `shares`: the GPU with children of other workers, whose faults may break it for this one.
    """

    def __init__(
        self,
        pid: int,
        connection: socket.socket,
        board: int,
        log: int,
        ended: Callable[[], int | None],
        *,
        shares: bool = False,
    ) -> None:
        self.pid, self._log, self._wait, self.shares = pid, log, ended, shares
        self.descriptor = os.pidfd_open(pid)
        # Read by descriptor: pathlib interns each part of a path, and Python replaces its table of interned strings, of a
        # megabyte, when such entries have filled it.
        self._stat, self._statm = (os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("stat", "statm"))
        # A child that stops in the middle of a message must not keep its parent waiting.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 5, 0))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
        self.connection = connect(connection.detach())
        self._board = Board(board)
        os.close(board)
        self.tasks = 0
        self._dropped = 0

    def send(self, message: dict[str, Any]) -> None:
        """Send a task. If the child has ended, the next check of it says so."""
        self._dropped = 0
        if os.fstat(self._log).st_size:
            os.ftruncate(self._log, 0)
        with contextlib.suppress(OSError):
            send(self.connection, message)
        self.tasks += 1

    def receive(self) -> dict[str, Any] | None:
        """Return its message; None if it closed the connection or sent something else."""
        try:
            return receive(self.connection)
        except (EOFError, OSError, ValueError, TypeError, RecursionError):
            return None

    def gone(self) -> bool:
        """Whether the process has ended."""
        return bool(wait([self.descriptor], 0.0))

    def answers(self) -> bool:
        """Whether a message waits, or the end of the connection."""
        return bool(wait([self.connection.fileno()], 0.0))

    def stage(self, task: int) -> tuple[str, float] | None:
        """Return (stage, start time) that the child last announced for `task`; None if it has not started it."""
        return self._board.read(task)

    def item(self) -> int:
        """Return the number of the Case of a batch that the child last announced."""
        return self._board.item

    def memory(self) -> int:
        """Return the bytes of memory that the process holds."""
        try:
            return int(os.pread(self._statm, 256, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    def cpu(self) -> float:
        """Return the processor seconds that the process has used, and the processes that it has waited for."""
        try:
            return sum(map(int, self._fields()[11:15])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return 0.0

    def stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP, a debugger)."""
        try:
            return self._fields()[0] in (b"T", b"t")
        except (OSError, IndexError):
            return False

    def _fields(self) -> list[bytes]:
        """Return what /proc/PID/stat has behind the name."""
        return os.pread(self._stat, 4096, 0).rpartition(b")")[2].split()

    def output_size(self) -> int:
        """Return the bytes printed during its task. Beyond the limit, only the tail of the output is kept."""
        size = os.fstat(self._log).st_size
        if size > _OUTPUT_LIMIT:
            tail = os.pread(self._log, TAIL, size - TAIL)
            os.ftruncate(self._log, 0)
            os.write(self._log, tail)
            self._dropped += size
        return self._dropped + size

    def tail(self) -> str:
        """Return the last output of its task."""
        size = os.fstat(self._log).st_size
        return os.pread(self._log, TAIL, max(0, size - TAIL)).decode("utf-8", "replace")

    def ask_for_stack(self) -> None:
        """Have faulthandler print every thread's stack; this works even while a C call holds the GIL."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGUSR1)
        end = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < end and "most recent call first" not in self.tail():
            time.sleep(0.005)
        time.sleep(0.01)

    def kill(self) -> int | None:
        """Kill it and its session; return its exit status as subprocess has it, None if unknown."""
        self.end()
        return self.wait()

    def wait(self) -> int | None:
        """Wait for its end without a signal, which may meet another process of its number once it is gone; return as `kill`."""
        return self._wait()

    def end(self) -> None:
        """Kill it and its session, without waiting: a process with gigabytes of a GPU's memory takes a second to end."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            # Not in a session of its own yet, or no longer.
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Close the parent's descriptors."""
        self.connection.close()
        self._board.close()
        for descriptor in (self.descriptor, self._stat, self._statm, self._log):
            os.close(descriptor)
