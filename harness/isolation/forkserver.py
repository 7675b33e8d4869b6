"""How children are started, forked or spawned, and how nothing of a run is left behind."""

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
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attnfuzz.harness.isolation import reaper
from attnfuzz.harness.isolation.child import TAIL, Child, ChildError
from attnfuzz.harness.isolation.wire import Board, wait

__all__ = ["Forkserver"]

_WORKER = Path(__file__).with_name("worker.py")
_REAPER = Path(__file__).with_name("reaper.py")
_START_SECONDS = 180.0
_DEATH_SECONDS = 5.0
_CLOSE_SECONDS = 15.0


class Forkserver:
    """Starts the children of one run, keeps their temporary files in one folder, and leaves nothing behind.

    Args:
        preload: what a zygote imports, as "module" or "module:function" to call; None: children are spawned, not forked.
        environment: variables of the children, on top of this process's own.
    """

    def __init__(self, preload: Sequence[str] | None, environment: dict[str, str] | None = None) -> None:
        self.run = secrets.token_hex(8)
        self._preload = preload
        self._folder = tempfile.mkdtemp(prefix="attnfuzz-")
        self._environment = {**os.environ, **(environment or {}), reaper.MARK: self.run, "TMPDIR": self._folder}
        self._zygote: _Zygote | None = None
        self._guard, self._leash = self._guarded()
        self._owner = os.getpid()

    def _guarded(self) -> tuple[subprocess.Popen[bytes], int]:
        read, write = os.pipe()
        command = [sys.executable, "-I", "-S", str(_REAPER), str(read), self.run, self._folder]
        guard = subprocess.Popen(
            command,
            pass_fds=[read],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        return guard, write

    def start(self) -> Child:
        """A new child.

        Raises:
            ChildError: none can be started.
        """
        here, there = socket.socketpair()
        board, log = Board.create(), os.memfd_create("attnfuzz-log", os.MFD_CLOEXEC)
        # Whoever writes appends, so that the log can be cut while a child floods it.
        _append(log)
        try:
            with there:
                if self._preload is None:
                    process = self._spawn("spawn", there.fileno(), board, log)
                    return Child(process.pid, here, board, log, lambda: _waited(process))
                zygote = self._ready_zygote()
                pid = zygote.fork([there.fileno(), board, log])
                return Child(pid, here, board, log, lambda: zygote.reap(pid))
        except BaseException:
            here.close()
            for descriptor in (board, log):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            raise

    def _ready_zygote(self) -> _Zygote:
        if self._zygote is not None and not self._zygote.alive():
            self._zygote.close()
            self._zygote = None
        if self._zygote is None:
            assert self._preload is not None
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            log = os.memfd_create("attnfuzz-zygote", os.MFD_CLOEXEC)
            with there:
                process = self._spawn("zygote", there.fileno(), None, log)
            self._zygote = _Zygote(process, here, log)
        return self._zygote

    def _spawn(self, how: str, connection: int, board: int | None, log: int) -> subprocess.Popen[bytes]:
        settings = {
            "socket": connection,
            "board": board,
            "parent": os.getpid(),
            # A zygote waits for the reaper: what it has adopted must not lose its parent before that has looked.
            "bound": how == "spawn" and threading.current_thread() is threading.main_thread(),
            "path": [str(Path(each).absolute()) if Path(each).exists() else each for each in sys.path],
            "preload": list(self._preload or ()),
        }
        try:
            return subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), how, json.dumps(settings)],
                pass_fds=[connection] if board is None else [connection, board],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        except OSError as error:
            raise ChildError(f"no process can be started: {error.strerror}") from None

    def fork_no_more(self) -> None:
        """Spawn every child from now on."""
        if self._zygote is not None:
            self._zygote.close()
        self._zygote = self._preload = None

    def family(self, child: Child) -> int:
        """Bytes of memory that a child and what it started (compilers) hold."""
        everyone = reaper.family(self.run)
        ours = {pid for pid, each in everyone.items() if child.pid in (pid, each.session)}
        return sum(each.memory for pid, each in everyone.items() if reaper.descends(pid, everyone, ours))

    def sweep(self, living: Iterable[int]) -> int:
        """Kill what ended children have left behind; returns how many. What descends from one of `living` stays."""
        found, at_work, killed = reaper.family(self.run), set(living), 0
        for pid in found:
            if (self._zygote and pid == self._zygote.pid) or reaper.descends(pid, found, at_work):
                continue
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        return killed

    def close(self) -> None:
        """Kill every process of the run, remove its temporary files, and wait until that is done."""
        if self._owner != os.getpid() or self._leash < 0:
            # A fork of this process must not end its parent's run.
            return
        self.sweep(())
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None
        with contextlib.suppress(OSError):
            # A fork of this process may hold the pipe open for as long as it likes.
            os.write(self._leash, b".")
        os.close(self._leash)
        self._leash = -1
        try:
            self._guard.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()


class _Zygote:
    """The process that forks children. It imports while its first child is being waited for."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket, log: int) -> None:
        self._process, self._connection, self._log = process, connection, log
        self.pid = process.pid
        self._ready = self._closed = False

    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, descriptors: list[int]) -> int:
        if not self._ready:
            self._ask(None, _START_SECONDS)
            self._ready = True
        return int(self._ask({"fork": True}, _DEATH_SECONDS * 4, descriptors)["pid"])

    def reap(self, pid: int) -> int | None:
        if self._closed:
            return None
        try:
            status = self._ask({"reap": pid}, _DEATH_SECONDS * 2)["status"]
        except ChildError:
            # The zygote itself was killed, and its children with it: nobody is left to tell how.
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
        found: dict[str, Any] = json.loads(answer)
        return found

    def _broken(self, why: str) -> ChildError:
        self._kill()
        size = os.fstat(self._log).st_size
        said = os.pread(self._log, TAIL, max(0, size - TAIL)).decode("utf-8", "replace").strip()
        return ChildError(f"the process that forks children does not answer ({why}){': ' if said else ''}{said}")

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self._closed = True
        self._kill()
        self._connection.close()
        os.close(self._log)


def _waited(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_DEATH_SECONDS)
    except subprocess.TimeoutExpired:
        # Uninterruptible, inside a driver.
        return None


def _append(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
