"""Many like tasks over a few processes of plain Python; no kernel under test runs in them."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import TypeVar

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _PR_SET_PDEATHSIG = -1, -3, 1
Task = TypeVar("Task")
Result = TypeVar("Result")


class LostProcess(RuntimeError):
    """A process ended in the middle of a task."""


class TimeOver(RuntimeError):
    """The time of all tasks together was over before the last one ended."""


def finished(
    function: Callable[[Task], Result], tasks: Sequence[Task], jobs: int, *, seconds: float | None = None, again: int = 0
) -> Iterator[Result]:
    """Yield function(task) for all tasks as they end, from `jobs` processes, or from this one if that is 1.

    Args:
        function: what to call.
        tasks: its arguments.
        jobs: processes; with `seconds` they are others than this one, which could not end a task that is at work.
        seconds: after which no more is waited for; None: no limit.
        again: how often all that have not ended are tried again where a process was lost and some had ended before.

    Raises:
        LostProcess: a process ended in the middle of a task. What `function` raises is raised as it is.
        TimeOver: the seconds were over.
    """
    if min(jobs, len(tasks)) <= 1 and seconds is None:
        yield from map(function, tasks)
        return
    end = None if seconds is None else time.monotonic() + seconds
    left = dict(enumerate(tasks))
    while left:
        before = len(left)
        try:
            for number, result in _from_processes(function, left, jobs, end):
                del left[number]
                yield result
        except BrokenProcessPool:
            again -= 1
            if again < 0 or len(left) == before:
                raise LostProcess(
                    "a process ended in the middle of a task, for lack of memory perhaps; try fewer --jobs"
                ) from None


def _from_processes(
    function: Callable[[Task], Result], tasks: Mapping[int, Task], jobs: int, end: float | None
) -> Iterator[tuple[int, Result]]:
    """Yield the number of each task and its result, from new processes, which end with the iteration.

    Raises:
        BrokenProcessPool: one of them was lost.
        TimeOver: it is `end` (time.monotonic).
    """
    others = active_children()
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn"), initializer=_prepare)
    try:
        with _without_ctrl_c():
            futures = {pool.submit(function, task): number for number, task in tasks.items()}
        for future in as_completed(futures, None if end is None else max(0.0, end - time.monotonic())):
            yield futures[future], future.result()
    except TimeoutError:
        if end is None or time.monotonic() < end:
            raise  # a task's own
        raise TimeOver("the time was over") from None
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
