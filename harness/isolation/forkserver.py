"""Start child processes, forked or spawned, and clean up all that a run started."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnfuzz.harness.core.bytecode import bytecode_variables
from attnfuzz.harness.isolation import reaper
from attnfuzz.harness.isolation.child import Child
from attnfuzz.harness.isolation.folders import clear_left_behind, folder_of, make_folder
from attnfuzz.harness.isolation.limits import check_open_files, explained
from attnfuzz.harness.isolation.outcomes import Task
from attnfuzz.harness.isolation.root import LentTemplate, Root
from attnfuzz.harness.isolation.sharing import Sharing
from attnfuzz.harness.isolation.stage_time import Usage
from attnfuzz.harness.isolation.template import Template, refused
from attnfuzz.harness.isolation.wire import Board

__all__ = ["Forkserver", "Seen"]

_CHILD = Path(__file__).with_name("child_main.py")
_REAPER = Path(__file__).with_name("reaper.py")
_DEATH_SECONDS = 5.0
_CLOSE_SECONDS = 15.0


class Forkserver:
    """Starts the children of one run, keeps their temporary files in one folder, and leaves nothing behind.

    Args:
        preload: imports of the template process: "module", or "module:function" to call; None: children are spawned, not forked.
        environment: variables of the children, added to this process's own.
        root: forks the template process, where it has imported the same; without it, the template process imports for itself.
    """

    def __init__(
        self, preload: Sequence[str] | None, environment: dict[str, str] | None = None, root: Root | None = None
    ) -> None:
        check_open_files()
        clear_left_behind()
        self.run = secrets.token_hex(8)
        self._preload, self._root = preload, root
        self.folder = folder_of(self.run)
        self._environment = {
            **os.environ,
            **bytecode_variables(),
            **(environment or {}),
            reaper.MARK: self.run,
            "TMPDIR": self.folder,
        }
        self.sharing = Sharing.of(self._environment)
        """Of the GPU, by a server of the campaign's; None: there is none."""
        self._template: Template | None = None
        try:
            self._reaper, self._reaper_pipe = self._start_reaper()
        except OSError as error:
            raise explained(error, "the process that cleans up") from None
        # After the reaper is there, which removes it however this process ends: a worker that loads still may be killed.
        try:
            self._lock = make_folder(self.run)
        except BaseException:
            os.close(self._reaper_pipe)
            raise
        self._owner = os.getpid()
        self._children: set[Child] = set()
        self._seen = Seen()

    def _start_reaper(self) -> tuple[subprocess.Popen[bytes], int]:
        read, write = os.pipe()
        command = [sys.executable, "-I", "-S", str(_REAPER), str(read), self.run, self.folder]
        try:
            process = subprocess.Popen(
                command,
                pass_fds=[read],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except BaseException:
            os.close(write)
            raise
        finally:
            os.close(read)
        return process, write

    def watch_reaper(self) -> None:
        """Start another reaper where it has been killed; where that fails, `close` cleans up."""
        if self._reaper_pipe < 0 or self._reaper.poll() is None or self._owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            process, pipe = self._start_reaper()
            os.close(self._reaper_pipe)
            self._reaper, self._reaper_pipe = process, pipe

    def start(self) -> Child:
        """Start a child. It counts as living until `ended`.

        Raises:
            ChildError: the process cannot be started.
        """
        self.watch_reaper()
        child = self._started()
        self._children.add(child)
        return child

    def prepare(self) -> None:
        """Start the process that forks children, without waiting until it has imported."""
        if self._preload is not None:
            self._ready_template()

    def lend(self) -> socket.socket:
        """Return a connection for a `Root`, over which the template process forks others; then it forks no children itself."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            try:
                self._ready_template().lend(there.fileno())
            except OSError:
                # It was killed after it was looked at.
                self._drop_template()
                self._ready_template().lend(there.fileno())
        return here

    def ended(self, child: Child) -> None:
        """Count a child as dead: what it leaves behind may be killed."""
        self._children.discard(child)

    def end_sharing(self, why: str, task: Task | None = None, *, quits: bool = True) -> None:
        """Have no child share the GPU from now on, those of other workers neither.

        Args:
            why: in words.
            task: whose outcome is the reason.
            quits: whether the server ends at once, and not with the campaign.
        """
        if self.sharing is not None:
            self.sharing.end(why, [each.canonical() for each in task.cases] if task else [], quits=quits)

    def _started(self) -> Child:
        shares = None if self.sharing is None else self.sharing.on()
        here, there = socket.socketpair()
        board, log = Board.create(), os.memfd_create("attnfuzz-log", os.MFD_CLOEXEC)
        # In append mode the log can be truncated while a child writes to it.
        _append(log)
        try:
            with there:
                if self._preload is None:
                    process = self._spawn("spawn", there.fileno(), board, log, shares)
                    return Child(process.pid, here, board, log, lambda: _waited(process), shares=bool(shares))
                template = self._settled_template()
                pid = template.fork([there.fileno(), board, log], shares)
                return Child(pid, here, board, log, lambda: template.reap(pid), shares=bool(shares))
        except BaseException:
            here.close()
            for descriptor in (board, log):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            raise

    def _ready_template(self) -> Template:
        if self._template is not None and not self._template.alive():
            self._drop_template()
        if self._template is None:
            assert self._preload is not None
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            log = os.memfd_create("attnfuzz-template", os.MFD_CLOEXEC)
            with there:
                process = self._asked(there.fileno(), log) or self._spawn("template", there.fileno(), None, log)
            self._template = Template(process, here, log)
        return self._template

    def _settled_template(self) -> Template:
        """Return the template process, one of our own if the root refuses."""
        template = self._ready_template()
        if self._root is not None and not template.settle():
            self._drop_root()
            self._drop_template()
            template = self._ready_template()
        return template

    def _drop_template(self) -> None:
        if self._template is not None:
            self._template.close()
            self._template = None

    def _asked(self, connection: int, log: int) -> LentTemplate | None:
        """Have the root fork a template process; None: it cannot."""
        if self._root is None:
            return None
        settings = {**self._settings(connection, None), "parent": None, "bound": False}
        try:
            return self._root.ask(settings, self._environment, connection, log)
        except OSError:
            self._drop_root()
            return None

    def _drop_root(self) -> None:
        if self._root is not None:
            self._root.close()
            self._root = None

    def _settings(self, connection: int, board: int | None) -> dict[str, Any]:
        return {
            "socket": connection,
            "board": board,
            "parent": os.getpid(),
            "path": [str(Path(each).absolute()) if Path(each).exists() else each for each in sys.path],
            "preload": list(self._preload or ()),
            "run": self.run,
            "folder": self.folder,
        }

    def _spawn(
        self, how: str, connection: int, board: int | None, log: int, shares: bool | None = None
    ) -> subprocess.Popen[bytes]:
        # The template process lives until the reaper has looked: orphans that it adopted are found as its descendants.
        bound = how == "spawn" and threading.current_thread() is threading.main_thread()
        settings = {**self._settings(connection, board), "bound": bound, "shares": shares}
        try:
            return subprocess.Popen(
                [sys.executable, "-P", str(_CHILD), how, json.dumps(settings)],
                pass_fds=[connection] if board is None else [connection, board],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        except OSError as error:
            raise refused(error) from None

    def stop_forking(self) -> None:
        """Spawn every child from now on."""
        self._drop_template()
        self._preload = None
        self._drop_root()

    def usage_of(self, child: Child, age: float = 0.0) -> Usage:
        """Return what a child and the processes that it started (compilers) use, as of at most `age` seconds ago."""
        self.watch_reaper()
        group, at = self._seen.group(child.pid, age)
        own = next((each for each in group if each.pid == child.pid), None)
        return Usage(
            at=at,
            memory=sum(each.memory for each in group),
            cpu=sum(each.cpu for each in group),
            running=any(reaper.runs(each) for each in group),
            stopped=own is not None and own.state in ("T", "t"),
        )

    def sweep(self) -> int:
        """Kill what ended children left behind, and return how many processes. Living children and their descendants stay."""
        self.watch_reaper()
        processes, at_work, killed = reaper.processes(self.run), {each.pid for each in self._children}, 0
        for pid in processes:
            if (self._template and pid == self._template.pid) or reaper.descends(pid, processes, at_work):
                continue
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        return killed

    def close(self) -> None:
        """Kill every process of the run, remove its temporary files, and wait until both are done."""
        if self._owner != os.getpid() or self._reaper_pipe < 0:
            # A fork of this process must not end its parent's run.
            return
        self._children.clear()
        self.sweep()
        self._drop_template()
        self._drop_root()
        with contextlib.suppress(OSError):
            # A fork of this process may hold the pipe open, so that its end never comes.
            os.write(self._reaper_pipe, b".")
        os.close(self._reaper_pipe)
        self._reaper_pipe = -1
        try:
            self._reaper.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._reaper.kill()
            self._reaper.wait()
        if self._reaper.returncode:
            # It was killed, perhaps by a kernel: what it was to do is done here.
            reaper.clear(self.run, self.folder)
        os.close(self._lock)


class Seen:
    """The processes of this machine as last seen.

    One look at /proc serves all children: a look for each of many compiles takes the time of the process that waits for them.
    """

    def __init__(self) -> None:
        self._at = 0.0
        self._processes: dict[int, reaper.Process] = {}
        self._children: dict[int, list[int]] = {}
        self._sessions: dict[int, list[int]] = {}

    def group(self, pid: int, age: float) -> tuple[list[reaper.Process], float]:
        """Return a process if it lives, those of its session, and all their descendants, and when that was (time.monotonic).

        They are as of at most `age` seconds ago; a process that was not there then is looked for.
        """
        if time.monotonic() - self._at > age or pid not in self._processes:
            self._look()
        group, left = dict[int, reaper.Process](), [pid, *self._sessions.get(pid, ())]
        while left:
            each = left.pop()
            if each in self._processes and each not in group:
                group[each] = self._processes[each]
                left += self._children.get(each, ())
        return list(group.values()), self._at

    def _look(self) -> None:
        self._processes, self._at = reaper.living(), time.monotonic()
        self._children, self._sessions = {}, {}
        for each in self._processes.values():
            self._children.setdefault(each.parent, []).append(each.pid)
            self._sessions.setdefault(each.session, []).append(each.pid)


def _waited(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_DEATH_SECONDS)
    except subprocess.TimeoutExpired:
        # Uninterruptible, inside a driver.
        return None


def _append(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
