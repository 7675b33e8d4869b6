"""CUDA's MPS for the children of a campaign's workers: a server through which their operations run on a GPU at the same time.

Without it, processes share a GPU in slices of time. The server belongs to one campaign: its pipes lie in a folder of the run that
starts it, which the workers have in their environment. A fault of one child may break the device for all others, so that sharing
ends with the first fault, for the whole campaign: a file in the folder says so to every worker. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CONTROL", "VARIABLES", "NotShared", "Sharing", "SharingEnd", "device_is_broken", "leave", "obstacle", "start"]

CONTROL = "nvidia-cuda-mps-control"
_PIPES, _LOG = VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
"""The driver reads them when a process first uses CUDA."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OURS, _OFF, _SOCKET, _LONGEST_NAME = ".attnfuzz", "off", "control", "control_privileged"
_LONGEST_PATH = 107
"""Characters of a socket's path."""
_USUAL = Path("/tmp/nvidia-mps")
_START_SECONDS, _QUIT_SECONDS, _DEVICE_SECONDS = 2.0, 5.0, 5.0
_CLOSE_SECONDS = 2.0
"""Where it ends at all, it does so at once: runs on an H200 were over 15 s late, most likely by servers that did not answer."""
_TICK = 0.01


class NotShared(Exception):
    """No server can be started, or none is wanted, with the reason."""


@dataclass(frozen=True, slots=True)
class SharingEnd:
    """The end of sharing before that of the campaign: when (time.monotonic), why, and the Cases of the process that ended it."""

    at: float
    why: str
    cases: tuple[str, ...] = ()


class Sharing:
    """The folder of a server: every process that has it in its environment can ask whether to share, and end it for all.

    Args:
        folder: of the server's pipes and logs.
        process: the server's control program, in the process that has started it.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None = None) -> None:
        self.folder = folder
        self._process, self._over = process, False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Sharing | None:
        """Return that of a process with these variables; None where they name no server of a campaign."""
        folder = environment.get(_PIPES)
        return cls(Path(folder)) if folder and Path(folder, _OURS).exists() else None

    @property
    def variables(self) -> dict[str, str]:
        """What a process that shares has in its environment."""
        return dict.fromkeys(VARIABLES, str(self.folder))

    def on(self) -> bool:
        """Whether a child that is started now is to share."""
        # The folder goes with the campaign.
        return not self._over and (self.folder / _OURS).exists() and not (self.folder / _OFF).exists()

    def end(self, why: str, cases: Sequence[str] = (), *, quits: bool = True) -> None:
        """End sharing for every worker, and then the server; nothing where it has ended.

        Args:
            why: in words.
            cases: what was at work, as JSON.
            quits: whether the server ends now; else `close` ends it. On a full disk it ends now in any case.
        """
        first, self._over = not self._over, True
        try:
            descriptor = os.open(self.folder / _OFF, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            # Another worker has ended it, or the campaign is over; or the disk is full, and the others are told by its end.
            if first and self.folder.exists() and not (self.folder / _OFF).exists():
                self._quit(_QUIT_SECONDS)
            return
        try:
            with contextlib.suppress(OSError):
                os.write(descriptor, json.dumps({"at": time.monotonic(), "why": why, "cases": list(cases)}).encode())
        finally:
            os.close(descriptor)
        if quits:
            self._quit(_QUIT_SECONDS)

    def ended(self) -> SharingEnd | None:
        """Return when and why it has ended; None while it goes on."""
        try:
            content = json.loads((self.folder / _OFF).read_text(encoding="utf-8"))
            return SharingEnd(float(content["at"]), str(content["why"]), tuple(map(str, content["cases"])))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError):
            return SharingEnd(time.monotonic(), "it is not known why")

    def close(self) -> None:
        """End the server that this process has started, once no process of the campaign needs it."""
        if self._process is None:
            return
        self._over = True
        if self._process.poll() is None:
            end = time.monotonic() + _CLOSE_SECONDS
            self._quit(_CLOSE_SECONDS)
            try:
                self._process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(self._process)

    def _quit(self, seconds: float) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [CONTROL],
                input=b"quit -t 1\n",
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                check=False,
                env={**os.environ, **self._marks(), **self.variables},
            )

    def _marks(self) -> dict[str, str]:
        """Return the variables by which the reaper of the campaign knows its processes: this one may be killed meanwhile."""
        try:
            return {
                str(name): str(value) for name, value in json.loads((self.folder / _OURS).read_text(encoding="utf-8")).items()
            }
        except (OSError, ValueError, AttributeError):
            return {}


def obstacle() -> str | None:
    """Return why no server can be started on this machine; None: one may."""
    for name in VARIABLES:
        if name in os.environ:
            return f"{name} is set: an MPS server of the user's is left alone"
    if (_USUAL / _SOCKET).exists():
        return f"{_USUAL} has the pipes of an MPS server of the user's"
    return f"{CONTROL} is not on the PATH" if shutil.which(CONTROL) is None else None


def start(folder: Path, variables: Mapping[str, str], usable: Sequence[str]) -> Sharing:
    """Start a server with its pipes in `folder`, which is made.

    Args:
        folder: for its pipes and logs.
        variables: of its environment, beside those of this process.
        usable: the GPUs, as CUDA_VISIBLE_DEVICES has them.

    Raises:
        NotShared: there is one of the user's, its program is missing, or it does not start.
    """
    if (reason := obstacle()) is not None:
        raise NotShared(reason)
    if len(os.fsencode(folder / _LONGEST_NAME)) > _LONGEST_PATH:
        raise NotShared(f"the path of its sockets is too long: {folder}")
    environment = {**os.environ, **variables, **dict.fromkeys(VARIABLES, str(folder))}
    if not all(each.startswith("GPU-") for each in usable):
        # Numbers of the clients would be counted among the server's own.
        environment.pop(_VISIBLE, None)
    try:
        folder.mkdir(0o700)
        process = subprocess.Popen(
            [CONTROL, "-f"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
    except OSError as error:
        raise NotShared(f"{CONTROL}: {error}") from None
    end = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        if (folder / _SOCKET).exists():
            try:
                (folder / _OURS).write_text(json.dumps(dict(variables)), encoding="utf-8")
            except OSError as error:
                _kill(process)
                raise NotShared(f"{folder}: {error.strerror}") from None
            return Sharing(folder, process)
        time.sleep(_TICK)
    ending = f"ended with exit code {process.returncode}" if process.returncode is not None else "did not start"
    _kill(process)
    raise NotShared(f"{CONTROL} {ending} within {_START_SECONDS:.0f} s")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a server with what it has started in its group; the rest has the mark of the run. One inside a driver is left."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_QUIT_SECONDS)


def leave() -> None:
    """Keep this process, which has not used CUDA yet, from sharing."""
    for name in VARIABLES:
        os.environ.pop(name, None)


def device_is_broken(*, unused: bool) -> bool:
    """Whether the GPU no longer works for this process, or does not answer; False where torch is not imported.

    `unused`: ask also where this process has not used the GPU, which it then does.
    """
    torch = sys.modules.get("torch")
    if torch is None or not (unused or torch.cuda.is_initialized()):
        return False
    works = threading.Event()

    def ask() -> None:
        with contextlib.suppress(BaseException):
            torch.cuda.synchronize()
            works.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_DEVICE_SECONDS)
    return not works.is_set()
