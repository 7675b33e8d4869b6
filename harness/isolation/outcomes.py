"""A child's task and its outcome: a Reply, an Error or a Death, and what each means to the caller."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attnfuzz.harness.core.text import encodable
from attnfuzz.harness.isolation.child_main import LOST_CONNECTION
from attnfuzz.harness.isolation.disturbances import Disturbance
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.kernels.errors import BadArgument, WrongProcess
from attnfuzz.kernels.registry import UnknownKernel
from attnfuzz.kernels.targets import LeavesProcess, MissingObject
from attnfuzz.strategies.case import BadCase, Case

__all__ = [
    "KERNEL_STAGES",
    "ChildMemoryError",
    "ChildOSError",
    "Death",
    "Error",
    "ExecutionError",
    "OutOfTime",
    "Outcome",
    "Past",
    "Reply",
    "Task",
    "death_failure",
    "exception_of",
    "site_in",
]

KERNEL_STAGES = ("start", "compile", "kernel", "end")
"""Stages in which the kernel's code runs; the others are the harness's."""
_KEPT = 256
"""Cases that a Past holds: what a process ran long ago is unlikely to matter, and is too much to run again."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Task:
    """A call of `target` ("module:function") with `payload`; `deadlines` are the seconds that each stage may take.

    `shared`: those of a child that shares the GPU; None: no others.
    """

    target: str
    payload: dict[str, Any]
    deadlines: Mapping[str, float]
    cases: tuple[Case, ...] = ()
    """What it builds or runs, in order: the process keeps them in its Past."""
    shared: Mapping[str, float] | None = None

    def deadlines_of(self, *, shares: bool) -> Mapping[str, float]:
        """Return the deadlines in a child that shares the GPU, or does not."""
        return self.deadlines if self.shared is None or not shares else self.shared


@dataclass(frozen=True, slots=True)
class Past:
    """What a process has run since it was started, oldest first; `dropped` others came before them."""

    cases: tuple[Case, ...] = ()
    dropped: int = 0

    def __bool__(self) -> bool:
        """Whether it has run or built anything."""
        return bool(self.cases)

    def plus(self, cases: Sequence[Case]) -> Past:
        """Return the Past after `cases` as well, whose own earlier Cases count too."""
        together = (*self.cases, *(single for each in cases for single in (*each.after, each.alone)))
        too_many = max(0, len(together) - _KEPT)
        return Past(together[too_many:], self.dropped + too_many)


@dataclass(frozen=True, slots=True)
class Reply:
    """A task's result."""

    result: Any


@dataclass(frozen=True, slots=True)
class Error:
    """An exception from a task: an error of attnfuzz or of its use, since a kernel's own errors are results."""

    type: str
    message: str
    trace: str


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a task's process, by itself or because it exceeded a limit."""

    why: Literal["exit", "hang", "memory", "pipe"]
    stage: str
    seconds: float
    """Time spent in that stage."""
    limit: float
    """The limit that was exceeded: seconds (hang) or bytes (memory)."""
    status: int | None
    """Exit status as subprocess has it: negative for a signal."""
    output: str
    """End of what the process printed, faulthandler's stacks included."""
    printed: int
    """Total bytes printed."""
    item: int = 0
    """Of a batch, the number of the Case at work."""
    stopped: bool = False
    """It was stopped (SIGSTOP) for longer than its limit."""

    @property
    def disturbance(self) -> Disturbance | None:
        """What others than the kernel may have done to the process: a kernel can do it too, but not only once."""
        if self.stopped:
            return "stopped"
        # Without a status: with the process that forks children, whose end is a SIGKILL too.
        return "killed" if self.why == "exit" and self.status in (None, -signal.SIGKILL) else None

    @property
    def by_itself(self) -> bool:
        """Whether the process ended by its own doing: it exited, or by a signal that others do not send."""
        if self.why != "exit" or self.status is None or self.stopped:
            return False
        return self.status >= 0 or -self.status not in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    @property
    def signal(self) -> str | None:
        """Name of the signal that ended it."""
        if self.status is None or self.status >= 0:
            return None
        try:
            return signal.Signals(-self.status).name
        except ValueError:
            return f"signal {-self.status}"

    @property
    def site(self) -> str | None:
        """ "file.py:function" of the innermost Python frame, where faulthandler printed a stack."""
        return site_in(self.output)


Outcome = Reply | Error | Death


class OutOfTime(Exception):
    """A trial that had not ended when the time of its run was over; it says nothing of the kernel."""


class ExecutionError(RuntimeError):
    """An error of attnfuzz itself, raised in a child process."""


class ChildMemoryError(ExecutionError):
    """Lack of host or device memory for the harness in a child process."""


class ChildOSError(ExecutionError):
    """An error of the file system in a child process."""


_EXCEPTIONS: dict[str, type[Exception]] = {
    **{each.__name__: each for each in (BadArgument, BadCase, LeavesProcess, MissingObject, UnknownKernel, WrongProcess)},
    **dict.fromkeys((MemoryError.__name__, "OutOfMemoryError"), ChildMemoryError),
    **{each.__name__: ChildOSError for each in (OSError, PermissionError, FileNotFoundError)},
}


def exception_of(error: Error) -> Exception:
    """Return the exception that an Error stands for: a BadArgument as its own class, or else an ExecutionError with the trace."""
    kind = _EXCEPTIONS.get(error.type, ExecutionError)
    return kind(error.message if issubclass(kind, BadArgument) else f"{error.type}: {error.message}\n{error.trace}")


def site_in(output: str) -> str | None:
    """Return "file.py:function" of the innermost Python frame, where faulthandler printed a stack."""
    frame = re.search(r"most recent call first\):\n\s+File \"([^\"]+)\", line \d+ in (\S+)", output)
    return f"{os.path.basename(frame[1])}:{frame[2]}" if frame else None  # noqa: PTH119 - a name from another process


def death_failure(kernel: str, death: Death) -> Failure:
    """Turn a child's end into a Failure of `kernel`."""
    stage = "kernel" if death.stage in ("end", "start") else death.stage
    where = f"in stage {death.stage}, after {death.seconds:.2f} s; {death.printed} bytes printed"
    detail = encodable(f"{where}\n{death.output}".strip())
    if death.why == "hang":
        message = f"{stage} did not end within {death.limit:.3g} s"
        message = f"{stage} stopped its own process (SIGSTOP)" if death.stopped else message
        return Failure(kernel=kernel, kind="hang", check=stage, message=message, detail=detail)
    if death.why == "memory":
        message = f"the process and what it started held more than {death.limit / _GIB:.1f} GiB"
        return Failure(kernel=kernel, kind="out-of-memory", check="memory", message=message, detail=detail)
    return Failure(kernel=kernel, kind="crash", check=stage, message=_ending(death), detail=detail)


def _ending(death: Death) -> str:
    if death.why == "pipe" or death.status == LOST_CONNECTION:
        return "closed the connection to its parent"
    if death.signal is not None:
        return death.signal + (f" at {death.site}" if death.site else "")
    if death.status is None:
        return "it was killed with the process that started it"
    return f"exit code {death.status}"
