"""Many like tasks over a few processes of plain Python: what has no kernel under test in it needs no more isolation than this."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

__all__ = ["LostProcess", "finished"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
Task = TypeVar("Task")
Result = TypeVar("Result")


class LostProcess(RuntimeError):
    """A process ended in the middle of a task, or the task raised."""


def finished(function: Callable[[Task], Result], tasks: Sequence[Task], jobs: int) -> Iterator[Result]:
    """function(task) for all tasks, as they end: over `jobs` processes, or in this one if that is 1.

    `function` is a module's own, tasks and results can be pickled. A process ends with the one that started it.

    Raises:
        LostProcess: a process ended, or `function` raised in one; the text holds its traceback.
    """
    if min(jobs, len(tasks)) <= 1:
        yield from map(function, tasks)
        return
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    try:
        left = list(reversed(tasks))
        for _ in range(min(jobs, len(tasks))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, function), daemon=True)
            process.start()
            theirs.close()
            workers[ours] = process
            ours.send(left.pop())
        busy = set(workers)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                yield _received(ready, workers[ready])
                if left:
                    ready.send(left.pop())
                else:
                    busy.discard(ready)
    finally:
        for connection, worker in workers.items():
            connection.close()
            worker.kill()
        for worker in workers.values():
            worker.join()


def _received(connection: Connection, process: BaseProcess) -> Any:
    try:
        error, result = connection.recv()
    except (EOFError, OSError):
        process.join(5)
        raise LostProcess(f"a process of the self-test ended with {process.exitcode} in the middle of a task") from None
    if error:
        raise LostProcess(f"a task of the self-test failed:\n{error}")
    return result


def _serve(connection: Connection, function: Callable[[Any], Any]) -> None:
    """Do tasks until the other end is closed: Ctrl-C is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _keep_memory()
    try:
        while True:
            task = connection.recv()
            try:
                answer = "", function(task)
            except Exception:
                answer = traceback.format_exc(), None
            connection.send(answer)
    except (EOFError, OSError):
        return


def _keep_memory() -> None:
    """Have freed memory kept: large tensors come and go by the thousand, and a third of the time would go into page faults."""
    with contextlib.suppress(AttributeError):  # another C library than GNU's
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
