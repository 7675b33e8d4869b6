"""The child: runs one task after the other and announces its stage; a task may crash it.

Started by path, with `python -P child_main.py {spawn|template} SETTINGS`; standard library only until its first task. The
template process imports what tasks need, runs none itself, and forks children on request: 20 ms instead of the seconds that
importing torch takes. It must not have a CUDA context, which no fork survives.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["LOST_CONNECTION", "bind_to", "main"]

LOST_CONNECTION = 77
"""Exit code of a child that cannot reply: its task closed the connection."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_HIGH = 200
"""The child's own descriptors start here, away from small numbers that a kernel may close by mistake."""
_LINGER = 1.0
"""Seconds in which the template process waits for the reaper once its parent is gone."""
_PATIENCE = 5.0
"""Seconds that the template process waits for a child that was killed."""
_MARK = "ATTNFUZZ_RUN"
"""As the reaper has it."""
_LONGEST_ERROR = 4000
"""Characters of an error of imports: a message has a limit."""
_OF_A_TEMPLATE = {
    *(_MARK, "TMPDIR", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PYTEST_CURRENT_TEST"),
    *("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"),
}
"""Variables that differ between the template processes of one campaign, and that nothing reads at its import."""


def main(arguments: list[str]) -> None:
    """Run as a child, or as the template process of children."""
    how, settings = arguments[0], json.loads(arguments[1])
    bind_to(settings["parent"], bound=settings["bound"])
    sys.path[:] = settings["path"]
    if how == "template":
        _template(settings)
    else:
        os.set_inheritable(settings["socket"], False)
        _child(settings["socket"], settings["board"], settings["shares"])


def _wire() -> ModuleType:
    return importlib.import_module("attnfuzz.harness.isolation.wire")


def _sharing() -> ModuleType:
    return importlib.import_module("attnfuzz.harness.isolation.sharing")


def bind_to(parent: int, *, bound: bool) -> None:
    """Die with `parent`. Linux ties that to the thread that started us, so it is bound only if that was the main thread."""
    if bound:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _child(connection_fd: int, board_fd: int, shares: bool | None) -> None:
    """Run tasks until the parent is gone. `shares`: the GPU, by the server in its environment; None: there is none."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        # If the machine runs out of memory, Linux kills this process before its parent.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    high = os.dup2(connection_fd, _HIGH, inheritable=False)
    os.close(connection_fd)
    wire = _wire()
    board = wire.Board(board_fd)
    os.close(board_fd)
    connection = wire.connect(high)
    me, sharing = os.getpid(), None if shares is None else _sharing()
    if sharing is not None and not shares:
        sharing.leave()
    while True:
        try:
            task = wire.receive(connection)
        except (EOFError, OSError, ValueError):
            os._exit(0)
        board.begin(task["task"])
        reply = _done(task, board.enter)
        if os.getpid() != me:
            # A fork that the task made and let return: the original process replies.
            os._exit(0)
        board.enter("end")
        if sharing is not None and shares and sharing.device_is_broken(unused=reply["replace"]):
            # By this task or by that of another process: the parent has it run again. A build that fails for that reason, say,
            # does not ask to be replaced.
            reply["lost"] = True
        try:
            wire.send(connection, {"task": task["task"], **reply})
        except OSError:
            os._exit(LOST_CONNECTION)


def _done(task: dict[str, Any], enter: Callable[..., None]) -> dict[str, Any]:
    """Run the task and return its result. `replace`: this process must not be used again."""
    try:
        module, _, name = task["target"].partition(":")
        result, replace = getattr(importlib.import_module(module), name)(task["payload"], enter)
    except BaseException as error:  # the parent reports it
        return {"error": _formatted(error), "replace": True}
    return {"result": result, "replace": replace}


def _formatted(error: BaseException) -> dict[str, str]:
    try:
        text = "".join(traceback.format_exception(error))[-8000:]
        return {"type": type(error).__name__, "message": str(error)[:8000], "trace": text}
    except BaseException:  # the error's own code
        return {"type": type(error).__name__, "message": "its message cannot be made", "trace": ""}


def _template(settings: dict[str, Any]) -> None:
    """Import, then fork on request until the parent is gone. Orphans of children become children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = socket.socket(fileno=settings["socket"])
    os.set_inheritable(settings["socket"], False)
    variables = dict(os.environ)
    error = None
    try:
        for target in settings["preload"]:
            module, _, name = target.partition(":")
            imported = importlib.import_module(module)
            if name:
                getattr(imported, name)()
    except BaseException as raised:  # the child's own import fails in the same way, and is reported
        error = f"{type(raised).__name__}: {raised}"[:_LONGEST_ERROR]
    _answer(parent, {"ready": True, "error": error}, settings)
    _serve(parent, settings, variables)


def _serve(parent: socket.socket, settings: dict[str, Any], variables: dict[str, str]) -> None:
    """Fork children, and templates for others, until the parent is gone."""
    wire, here, children, clients = _wire(), os.getpid(), set[int](), dict[int, socket.socket]()

    def alone() -> bool:
        return settings["parent"] is not None and os.getppid() != settings["parent"]

    while True:
        ready: set[int] = set()
        while not ready and not alone():
            ready = wire.wait([parent.fileno(), *clients], _LINGER)
        for each in ready & clients.keys():
            if not _lent(clients[each], [parent, *clients.values()], settings, variables):
                clients.pop(each).close()
        if not alone() and parent.fileno() not in ready:
            continue
        request, descriptors = (None, []) if alone() else _request(parent)
        if request is None:
            _end_alone(settings)
        if "lend" in request:
            # What it forks has other users, which wait for its end without being its parent.
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            clients.update((each, socket.socket(fileno=each)) for each in descriptors)
            continue
        if "reap" in request:
            _answer(parent, {"status": _reaped(request["reap"])}, settings)
            children.discard(request["reap"])
            _reap_orphans(children)
            continue
        try:
            pid = os.fork()
        except OSError as refused:
            _answer(parent, {"errno": refused.errno}, settings)
        else:
            if pid == 0:
                parent.close()
                _forked(descriptors, here, request.get("shares"))
            children.add(pid)
            _answer(parent, {"pid": pid}, settings)
        for descriptor in descriptors:
            os.close(descriptor)


def _lent(client: socket.socket, ours: list[socket.socket], settings: dict[str, Any], variables: dict[str, str]) -> bool:
    """Fork the template process that a client asks for, or say why not; returns False where the client is gone."""
    request, descriptors = _request(client)
    if request is None:
        return False
    connection, log, content = descriptors
    wanted = json.loads(os.pread(content, os.fstat(content).st_size, 0))
    answer: dict[str, Any] = {"refused": _why_not_lent(wanted, settings, variables)}
    if answer["refused"] is None:
        try:
            answer = {"pid": os.fork()}
        except OSError as refused:
            answer = {"refused": str(refused)}
    if answer.get("pid") == 0:
        try:
            for each in ours:
                each.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            os.close(content)
            _become(wanted, settings["folder"], variables)
            _template({**wanted, "socket": connection, "preload": []})
        finally:
            os._exit(1)
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        client.send(json.dumps(answer).encode())
    except OSError:
        return False
    return True


def _why_not_lent(wanted: dict[str, Any], settings: dict[str, Any], variables: dict[str, str]) -> str | None:
    """Why a fork of this process is not what a client wants; None: it is."""
    if wanted["preload"] != settings["preload"]:
        return "other imports"
    names = (variables.keys() | wanted["environment"].keys()) - _OF_A_TEMPLATE
    if others := [each for each in names if variables.get(each) != wanted["environment"].get(each)]:
        return f"other variables: {', '.join(sorted(others))}"
    return None if _mark_written(settings["run"]) else "processes cannot be marked"


def _become(wanted: dict[str, Any], folder: str, before: dict[str, str]) -> None:
    """Have the mark, the variables and the paths of imports that a template process of this user has once it has imported.

    Args:
        wanted: what the user asks for.
        folder: of this process's temporary files.
        before: the variables before the imports, some of which set others: TileLang finds headers and programs by them.
    """
    if not _mark_written(wanted["run"]):
        os._exit(1)
    environment = dict(wanted["environment"])
    for name, value in os.environ.items():
        if value != before.get(name) and environment.get(name) == before.get(name):
            environment[name] = value.replace(folder, wanted["folder"])
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.path[:] = wanted["path"]


def _mark_written(run: str) -> bool:
    """Write the mark of a run into the environment that Linux shows of this process; returns whether it is there.

    Linux shows the memory that the process was started with, to which the variable still points: it was never set again.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    at, before = getenv(_MARK.encode()), os.environ.get(_MARK, "")
    if not at or len(before) != len(run) or ctypes.string_at(at) != before.encode():
        return False
    ctypes.memmove(at, run.encode(), len(run))
    return f"\0{_MARK}={run}\0".encode() in b"\0" + Path("/proc/self/environ").read_bytes() + b"\0"


def _end_alone(settings: dict[str, Any]) -> NoReturn:
    """End, now that the parent is gone: its reaper kills this process, and finds through it what children left behind.

    The parent may also live, and have given this process up: then nothing of its run is touched.
    """
    time.sleep(_LINGER)
    # No reaper is left.
    try:
        if settings["parent"] is None:
            importlib.import_module("attnfuzz.harness.isolation.folders").clear_if_gone(settings["folder"], os.getpid())
        elif os.getppid() != settings["parent"] and "folder" in settings:
            # Without a folder it is part of another run.
            reaper = importlib.import_module("attnfuzz.harness.isolation.reaper")
            reaper.clear(settings["run"], settings["folder"], os.getpid())
    finally:
        os._exit(0)


def _forked(descriptors: list[int], template: int, shares: bool | None) -> None:
    """Run as a forked child: in its own session, with output to the log; never return to the template process's loop."""
    try:
        connection, board, log = descriptors
        os.setsid()
        bind_to(template, bound=True)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        _child(connection, board, shares)
    finally:
        os._exit(1)


def _reap_orphans(children: set[int]) -> None:
    """Reap orphans of our children that have been killed since."""
    try:
        adopted = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    except OSError:
        return
    for pid in {int(each) for each in adopted} - children:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _request(parent: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    descriptors = array.array("i")
    try:
        content, ancillary, _, _ = parent.recvmsg(65536, socket.CMSG_SPACE(3 * descriptors.itemsize))
    except OSError:
        return None, []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return (json.loads(content) if content else None), list(descriptors)


def _answer(parent: socket.socket, message: dict[str, Any], settings: dict[str, Any]) -> None:
    """Send an answer; the parent may have been killed since it asked, or have given this process up."""
    try:
        parent.send(json.dumps(message).encode())
    except OSError:
        _end_alone(settings)


def _reaped(pid: int) -> int | None:
    """Return the exit status of a child that is dead or dying, as subprocess has it; None if it does not die."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        try:
            gone, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if gone:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
