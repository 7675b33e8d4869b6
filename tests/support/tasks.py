"""What a child process is asked to do in tests: nothing that imports torch, so that a child is ready at once."""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def echo(payload: dict[str, Any], enter: Any) -> tuple[Any, bool]:
    enter("kernel")
    return payload, bool(payload.get("replace"))


def who(payload: dict[str, Any], enter: Any) -> tuple[Any, bool]:
    return os.getpid(), False


def variables(payload: dict[str, Any], enter: Any) -> tuple[Any, bool]:
    return dict(os.environ), False


def set_variables() -> None:
    """Set variables, as the imports of some libraries do."""
    os.environ.update(PATH=f"/of/a/library{os.pathsep}{os.environ['PATH']}", A_CACHE=f"{os.environ['TMPDIR']}/cache")


def late(payload: dict[str, Any], enter: Any) -> tuple[Any, bool]:
    """Two seconds, no stage longer than a third of one."""
    for stage in ("compile", "inputs", "kernel", "oracle", "judge", "end"):
        enter(stage)
        time.sleep(0.3)
    return "done", False


def nap(payload: dict[str, Any], enter: Any) -> tuple[Any, bool]:
    """Do nothing for some seconds in the kernel's stage."""
    enter("kernel")
    time.sleep(payload["seconds"])
    return "woken", False


def noisy(payload: dict[str, Any], enter: Any) -> tuple[Any, bool]:
    print("on stdout", flush=True)
    sys.stderr.write("on stderr\n")
    os.write(1, b"\x00\xff" * 100)
    return "quiet", False


def dies(payload: dict[str, Any], enter: Any) -> tuple[Any, bool]:
    enter("kernel")
    {
        "segfault": lambda: ctypes.memset(8, 1, 8),
        "abort": os.abort,
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "exit": lambda: os._exit(3),
        "raise": lambda: (_ for _ in ()).throw(ValueError("seven")),
        "leave": lambda: sys.exit(5),
        "loop": _loop,
        "c loop": _c_loop,
        "memory": _memory,
        "memory of another process": _memory_of_another_process,
        "pipes": lambda: os.closerange(0, 4096),
        "half a message": _half_a_message,
        "rubbish": _rubbish,
        "flood": _flood,
        "daemon": _daemon,
        "scribble": lambda: (_scribble(), _loop()),
        "parent": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(60)),
    }[payload["how"]]()
    return "alive", False


def _loop() -> None:
    while True:
        pass


def _c_loop() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP})
    re.match("(a+)+$", "a" * 200 + "b")


def _memory() -> None:
    held = []
    while True:
        held.append(bytearray(b"x") * (16 << 20))


def _memory_of_another_process() -> None:
    subprocess.run([sys.executable, "-c", "import time; held = b'x' * (700 << 20); time.sleep(60)"], env={}, check=True)


def _flood() -> None:
    while True:
        os.write(1, b"x" * 65536)


def _connection() -> int:
    """The socket to the parent: what a wild write might hit."""
    return next(int(each.name) for each in Path("/proc/self/fd").iterdir() if int(each.name) >= 200)


def _half_a_message() -> None:
    os.write(_connection(), b"\x00\x00\x10\x00{")
    time.sleep(60)


def _rubbish() -> None:
    os.write(_connection(), b"\x00\x00\x00\x04\xff\xff\xff\xff")
    time.sleep(60)


def _scribble() -> None:
    """Write over the page where this process says what it does."""
    for each in Path("/proc/self/fd").iterdir():
        if each.is_symlink() and "attnfuzz-board" in str(each.readlink()):
            os.pwrite(int(each.name), b"\xff" * 4096, 0)
            return
    raise RuntimeError("no page to write on")


def _daemon() -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    time.sleep(0.2)
    os._exit(4)


def once(payload: dict[str, Any], enter: Any) -> tuple[Any, bool]:
    """Say which process this is; the first of them then waits, for what happens to it from outside."""
    enter("kernel")
    mark = Path(payload["mark"])
    if len(list(mark.parent.glob(f"{mark.name}.*"))) < payload.get("times", 1):
        mark.with_name(f"{mark.name}.{os.getpid()}").touch()
        time.sleep(60)
    return "done", False


def dies_once(payload: dict[str, Any], enter: Any) -> tuple[Any, bool]:
    """End the first process that comes here."""
    marker = Path(payload["marker"])
    if not marker.exists():
        marker.touch()
        os._exit(4)
    return "done", False


def _shares() -> bool:
    """Whether this process has a server in its environment through which it would share a GPU."""
    return "CUDA_MPS_PIPE_DIRECTORY" in os.environ


def dies_sharing(payload: dict[str, Any], enter: Any) -> tuple[Any, bool]:
    """End a process that shares the GPU."""
    return dies(payload, enter) if _shares() else ("alone", False)


def breaks_sharing(payload: dict[str, Any], enter: Any) -> tuple[Any, bool]:
    """Break the GPU for a process that shares it, and raise an error, ask to be replaced, or reply as usual."""
    enter("kernel")

    def synchronize() -> None:
        if payload.get("for_ever"):
            time.sleep(600)
        if _shares() or payload.get("anyway"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(synchronize=synchronize, is_initialized=lambda: True))  # type: ignore[assignment]
    if payload["how"] == "raise" and (_shares() or payload.get("anyway")):
        raise RuntimeError("broken")
    return "shares" if _shares() else "alone", payload["how"] == "replace"


def impatient() -> None:
    """Preloaded: a device that does not answer is waited for in vain for a moment only."""
    importlib.import_module("attnfuzz.harness.isolation.sharing")._DEVICE_SECONDS = 0.2


def ends_later(payload: dict[str, Any], enter: Any) -> tuple[Any, bool]:
    """End this process after its reply."""
    threading.Timer(0.1, os._exit, [5]).start()
    return os.getpid(), False


def works(payload: dict[str, Any], enter: Any) -> tuple[Any, bool]:
    """Use so many processor seconds, however long that takes."""
    enter("kernel")
    while time.process_time() < payload["seconds"]:
        pass
    return "done", False


def stops(payload: dict[str, Any], enter: Any) -> tuple[Any, bool]:
    enter("kernel")
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
    return "done", False


def refuse_forks() -> None:
    """Preloaded: as under a limit on processes, which root does not have."""

    def refuse() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    os.fork = refuse  # type: ignore[assignment]


def sleeping(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def dying_once(path: str) -> str:
    """Kill this process, where no earlier one has left that file."""
    file = Path(path)
    if file.name != "right" and not file.exists():
        time.sleep(1.0)  # the other task has ended
        file.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return file.name
