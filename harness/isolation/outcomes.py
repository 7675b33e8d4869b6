"""What a child is asked to do, and what may become of it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attnfuzz.harness.core.text import printable
from attnfuzz.harness.isolation.worker import LOST_CONNECTION
from attnfuzz.harness.judge.failure import Failure

__all__ = ["THE_KERNELS_OWN", "Death", "Error", "Outcome", "Reply", "Task", "death_failure"]


@dataclass(frozen=True, slots=True)
class Task:
    """What a child shall do: `target` ("module:function") with `payload`; seconds that each stage may take."""

    target: str
    payload: dict[str, Any]
    deadlines: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Reply:
    """A task's result."""

    result: Any


@dataclass(frozen=True, slots=True)
class Error:
    """A task raised: an error of attnfuzz or of its use, since a kernel's own errors are results."""

    type: str
    message: str
    trace: str


@dataclass(frozen=True, slots=True)
class Death:
    """A task ended its process, or was killed for what it did."""

    why: Literal["exit", "hang", "memory", "pipe"]
    stage: str
    seconds: float
    """Time spent in that stage."""
    limit: float
    """What was exceeded: seconds (hang) or bytes (memory)."""
    status: int | None
    """Exit status as subprocess has it: negative for a signal."""
    output: str
    """The last that the process printed, faulthandler's stacks included."""
    printed: int
    """Bytes that it printed."""

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
        found = re.search(r"most recent call first\):\n\s+File \"([^\"]+)\", line \d+ in (\S+)", self.output)
        return f"{os.path.basename(found[1])}:{found[2]}" if found else None  # noqa: PTH119 - a name from another process


Outcome = Reply | Error | Death


THE_KERNELS_OWN = ("start", "compile", "kernel", "end")
"""Stages in which the kernel's code runs; the others are the harness's."""
_GIB = 1 << 30


def death_failure(kernel: str, death: Death) -> Failure:
    """The Failure of `kernel` that a death shows."""
    stage = "kernel" if death.stage in ("end", "start") else death.stage
    said = f"in stage {death.stage}, after {death.seconds:.2f} s; {death.printed} bytes printed\n{death.output}"
    detail = printable(said.strip())
    if death.why == "hang":
        message = f"{stage} did not end within {death.limit:.3g} s"
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
