"""An actor of Ray with one worker's process on its node: it passes messages between the campaign and the process.

The worker has a process of its own, which is started and ends as on one machine: Ray's has threads and signals of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from attnfuzz.harness.campaign.worker_main import Assignment
from attnfuzz.harness.campaign.worker_processes import start_process

__all__ = ["FleetActor"]

_END = 15.0
"""Seconds that a process has to end once its connection is closed."""


class FleetActor:
    """Starts the worker's process when it is placed.

    Args:
        paths: where the campaign imports from, for nodes that share its file system.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._process, self._connection = self._started(paths)

    def _started(self, paths: Sequence[str]) -> tuple[subprocess.Popen[bytes], Connection]:
        return start_process(paths, {})

    def begin(self, assignment: Assignment) -> None:
        """Pass on the assignment, whose end comes as seconds from now: each node has a clock of its own."""
        end = None if assignment.end is None else time.monotonic() + assignment.end
        self._connection.send(replace(assignment, end=end))

    def exchange(self, answer: bytes | None) -> tuple[bytes, int | None]:
        """Pass on an answer, if there is one, and return the process's next message, or none and its exit code."""
        try:
            if answer is not None:
                self._connection.send_bytes(answer)
            return self._connection.recv_bytes(), None
        except (EOFError, OSError):
            try:
                return b"", self._process.wait(_END)
            except subprocess.TimeoutExpired:
                self._process.kill()
                return b"", self._process.wait()

    def interrupt(self) -> None:
        """Interrupt the process as Ctrl-C does."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGINT)

    def pids(self) -> tuple[int, int]:
        """Return the ids of this process and of the worker's."""
        return os.getpid(), self._process.pid
