"""The template process, which has imported what children need and forks them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from attnfuzz.harness.isolation.child import TAIL, ChildError
from attnfuzz.harness.isolation.limits import explained
from attnfuzz.harness.isolation.root import LentTemplate
from attnfuzz.harness.isolation.wire import wait
from attnfuzz.kernels.errors import BadArgument

__all__ = ["Template", "refused"]

_START_SECONDS = 180.0
_DEATH_SECONDS = 5.0


class Template:
    """The template process, which forks children. It imports while the parent waits for the first child."""

    def __init__(self, process: subprocess.Popen[bytes] | LentTemplate, connection: socket.socket, log: int) -> None:
        self._process, self._connection, self._log = process, connection, log
        self._ready = self._closed = False

    @property
    def pid(self) -> int:
        """Its number; 0 while another process has not forked it yet."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def settle(self) -> bool:
        """Whether there is such a process; one that another process forks is waited for."""
        return not isinstance(self._process, LentTemplate) or self._process.settle(_START_SECONDS)

    def lend(self, connection: int) -> None:
        """Have it fork templates for who has the other end of `connection`, once it has imported."""
        socket.send_fds(self._connection, [b'{"lend": true}'], [connection])

    def fork(self, descriptors: list[int], shares: bool | None) -> int:
        """Have it fork a child with these descriptors; returns the child's number. `shares`: whether the child shares the GPU.

        Raises:
            BadArgument, ChildError: no process can be started, or it does not answer.
        """
        if not self._ready:
            self._ask(None, _START_SECONDS)
            self._ready = True
        answer = self._ask({"fork": True, "shares": shares}, _DEATH_SECONDS * 4, descriptors)
        if "errno" in answer:
            raise refused(OSError(answer["errno"], os.strerror(answer["errno"])))
        return int(answer["pid"])

    def reap(self, pid: int) -> int | None:
        """Return the exit status of a child; None where it has not ended, or is not known."""
        if self._closed:
            return None
        try:
            status = self._ask({"reap": pid}, _DEATH_SECONDS * 2)["status"]
        except ChildError:
            # The template process was killed, and its children with it: their exit statuses are lost.
            return None
        return None if status is None else int(status)

    def _ask(self, request: dict[str, Any] | None, seconds: float, descriptors: Sequence[int] = ()) -> dict[str, Any]:
        try:
            if request is not None:
                socket.send_fds(self._connection, [json.dumps(request).encode()], list(descriptors))
            if not wait([self._connection.fileno()], seconds):
                raise TimeoutError
            answer = self._connection.recv(65536)
        except OSError as error:
            raise self._broken(type(error).__name__) from None
        if not answer:
            raise self._broken("it has ended")
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def _broken(self, why: str) -> ChildError:
        self._kill()
        size = os.fstat(self._log).st_size
        output = os.pread(self._log, TAIL, max(0, size - TAIL)).decode("utf-8", "replace").strip()
        return ChildError(f"the process that forks children does not answer ({why}){': ' if output else ''}{output}")

    def _kill(self) -> None:
        if self.pid and self.alive():
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                # A fork may not have a session of its own yet.
                os.kill(self.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Kill it, and close the connection to it."""
        self._closed = True
        self._kill()
        self._connection.close()
        os.close(self._log)


def refused(error: OSError) -> BadArgument | ChildError:
    """Return what to raise where a child process cannot be started."""
    reason = explained(error, "a child process")
    return reason if isinstance(reason, BadArgument) else ChildError(f"no process can be started: {error.strerror}")
