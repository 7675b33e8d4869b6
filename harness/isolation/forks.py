"""Child processes that are forks of this process, with all that it has imported: a kernel is then imported once.

For a process that is itself a child of a `Forkserver`: its children have the mark of that run, whose reaper ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import cast

from attnfuzz.harness.isolation import child_main, reaper
from attnfuzz.harness.isolation.child import Child
from attnfuzz.harness.isolation.forkserver import Forkserver, Seen

__all__ = ["ForksOfThisProcess"]

_HIGHEST = 4096
"""File descriptors up to this are closed in the template process."""
_TICK = 0.005


class ForksOfThisProcess(Forkserver):
    """Forks children from a fork of this process, made at the first use: this process may start threads after that."""

    def __init__(self) -> None:
        self.run = os.environ[reaper.MARK]
        self._preload, self._template, self._root, self.sharing = (), None, None, None
        self._owner = os.getpid()
        self._children: set[Child] = set()
        self._seen = Seen()

    def _spawn(
        self,
        how: str,
        connection: int,
        board: int | None,
        log: int,
        shares: bool | None = None,  # noqa: ARG002 - the environment is this process's own
    ) -> subprocess.Popen[bytes]:
        assert how == "template", board
        settings = {"socket": connection, "parent": os.getpid(), "bound": True, "path": sys.path, "preload": []}
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                os.dup2(log, 1)
                os.dup2(log, 2)
                # Other descriptors are of this process's own children, and of its parent.
                for each in range(3, _HIGHEST):
                    if each != connection:
                        with contextlib.suppress(OSError):
                            os.close(each)
                child_main.main(["template", json.dumps(settings)])
            finally:
                os._exit(1)
        return cast("subprocess.Popen[bytes]", _Forked(pid))

    def watch_reaper(self) -> None:
        """Do nothing: the reaper is that of this process's own run, which its parent watches."""

    def stop_forking(self) -> None:
        """Do nothing: a kernel's module that has opened the CUDA driver at its import cannot be tried from here."""

    def sweep(self) -> int:
        """Kill what ended children left behind, which the template process has adopted."""
        if self._template is None:
            return 0
        processes, at_work, killed = reaper.processes(self.run), {each.pid for each in self._children}, 0
        template = self._template.pid
        for pid in processes:
            ours = pid != template and reaper.descends(pid, processes, {template})
            if ours and not reaper.descends(pid, processes, at_work):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
        return killed

    def close(self) -> None:
        """Kill every child and the template process."""
        if self._owner != os.getpid():
            return
        self._children.clear()
        self.sweep()
        if self._template is not None:
            self._template.close()
            self._template = None


class _Forked:
    """A forked process, as far as a template process needs subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        if self.returncode is None:
            try:
                gone, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                gone, status = self.pid, 0
            if gone:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("template", timeout or 0.0)
            time.sleep(_TICK)
        return status
