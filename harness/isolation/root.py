"""Template processes that another one forks: importing torch, Triton and TileLang once serves all workers of a campaign.

The process that forks templates is the template process of a `Forkserver` that starts no children itself (`Forkserver.lend`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from attnfuzz.harness.isolation.wire import wait

__all__ = ["LentTemplate", "Root"]

_TICK = 0.005


class Root:
    """A connection to a process that forks templates.

    Args:
        connection: of `Forkserver.lend`, here or in the process that started this one.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def ask(self, settings: Mapping[str, Any], environment: Mapping[str, str], connection: int, log: int) -> LentTemplate:
        """Ask for a template process; the answer comes later.

        Args:
            settings: as `child_main.py template` is given them.
            environment: all of its variables.
            connection: its end of a socket pair.
            log: where its output goes.

        Raises:
            OSError: the process that forks is gone.
        """
        content = os.memfd_create("attnfuzz-template-settings", os.MFD_CLOEXEC)
        try:
            # Variables of an environment may be longer than a message can be.
            os.write(content, json.dumps({**settings, "environment": dict(environment)}).encode())
            socket.send_fds(self.connection, [b'{"template": true}'], [connection, log, content])
        finally:
            os.close(content)
        return LentTemplate(self.connection)

    def close(self) -> None:
        """Ask for no more."""
        self.connection.close()


class LentTemplate:
    """A template process that another process has forked, as far as its user needs subprocess.Popen."""

    def __init__(self, root: socket.socket) -> None:
        self._root: socket.socket | None = root
        self.pid = 0
        """0 until it is known."""
        self.returncode: int | None = None
        self._descriptor = -1

    def settle(self, seconds: float) -> bool:
        """Wait until it is known whether it was forked; returns whether it was."""
        if self._root is not None:
            root, self._root = self._root, None
            try:
                answer = json.loads(root.recv(65536) or b"{}") if wait([root.fileno()], seconds) else {}
                if "pid" in answer:
                    self.pid = int(answer["pid"])
                    self._descriptor = os.pidfd_open(self.pid)
            except (OSError, ValueError):
                pass
        return self._descriptor >= 0

    def poll(self) -> int | None:
        """Return an exit status, which is not the true one, once it has ended; None while it lives or is not known."""
        if self.returncode is None and self._descriptor >= 0 and wait([self._descriptor], 0.0):
            os.close(self._descriptor)
            self._descriptor, self.returncode = -1, 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, if it was forked."""
        end = None if timeout is None else time.monotonic() + timeout
        while self._descriptor >= 0 and self.poll() is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("template", timeout or 0.0)
            time.sleep(_TICK)
        return self.returncode or 0
