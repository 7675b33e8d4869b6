"""What a child is asked to do, and what may become of it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Death", "Error", "Outcome", "Reply", "Task"]


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
