"""A death, told: what ended a child process, in which stage, and the last that it said."""

from __future__ import annotations

from attnfuzz.harness.isolation.outcomes import Death
from attnfuzz.harness.isolation.worker import LOST_CONNECTION
from attnfuzz.harness.judge.failure import Failure, printable

__all__ = ["THE_KERNELS_OWN", "death_failure"]

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
