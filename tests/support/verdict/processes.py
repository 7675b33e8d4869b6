"""Many like tasks over a few processes of plain Python; no kernel under test runs in them."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import TypeVar

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _PR_SET_PDEATHSIG = -1, -3, 1
Task = TypeVar("Task")
Result = TypeVar("Result")


class LostProcess(RuntimeError):
    """A process ended in the middle of a task."""


def finished(function: Callable[[Task], Result], tasks: Sequence[Task], jobs: int) -> Iterator[Result]:
    """Yield function(task) for all tasks as they end, from `jobs` processes, or from this one if that is 1.

    Raises:
        LostProcess: a process ended in the middle of a task. What `function` raises is raised as it is.
    """
    if min(jobs, len(tasks)) <= 1:
        yield from map(function, tasks)
        return
    others = active_children()
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn"), initializer=_prepare)
    try:
        with _without_ctrl_c():
            futures = [pool.submit(function, task) for task in tasks]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool:
        raise LostProcess("a process ended in the middle of a task, for lack of memory perhaps; try fewer --jobs") from None
    finally:
        for process in active_children():
            if process not in others:
                process.kill()
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Processes that start in the block get no Ctrl-C: the parent answers it, after the block if it comes within."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare() -> None:
    """End with the parent, and keep freed memory: else a third of the time goes into page faults of large tensors."""
    with contextlib.suppress(AttributeError):  # another C library than GNU's
        library = ctypes.CDLL(None)
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
