"""Exceptions from kernels, whose own `__str__` may raise, and the exceptions for a device that is lost."""

from __future__ import annotations

import traceback

from attnfuzz.harness.core.text import encodable
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.strategies.case import Case

__all__ = ["MEMORY_TAKEN", "BatchLost", "DeviceLost", "describe_exception", "format_traceback", "mark_as_child", "may_catch"]

MEMORY_TAKEN = "other processes hold the GPU's memory"
"""Says why memory was refused: a Case that needs little of it is not judged then."""
_LONGEST = 2000
_child = False


class DeviceLost(BaseException):
    """The device no longer works after `case`, so that the process must end; `failure` says what happened.

    Not an Exception, so that no caller takes it for the kernel's and tries again.
    """

    def __init__(self, case: Case, failure: Failure) -> None:
        super().__init__(f"{failure.message}; the device context is lost, so this process can run no further Case")
        self.case, self.failure = case, failure


class BatchLost(BaseException):
    """The device no longer works, or has no memory for a batch of Cases together: which of them is to blame is not known.

    The Cases have no Verdicts: each is to be run alone, in another process. Not an Exception, as DeviceLost is none.
    """


def mark_as_child() -> None:
    """Declare this process a child, which gets no Ctrl-C: every exception here is the kernel's, KeyboardInterrupt too."""
    global _child
    _child = True


def may_catch(error: BaseException) -> bool:
    """Whether `error` is the kernel's, not the user's Ctrl-C or a lost device."""
    return not isinstance(error, BatchLost | DeviceLost) and (_child or not isinstance(error, KeyboardInterrupt))


def describe_exception(error: BaseException) -> str:
    """Return type and message of `error`, at most 2,000 characters."""
    try:
        message = str(error)
    except BaseException as broken:  # the error's own code
        message = f"(its message cannot be made: {type(broken).__name__})"
    return encodable(f"{type(error).__name__}: {message}"[:_LONGEST])


def format_traceback(error: BaseException) -> str:
    """Return the last 6,000 characters of its traceback."""
    try:
        return encodable("".join(traceback.format_exception(error))[-6000:])
    except BaseException as broken:  # the error's own code
        return f"(its traceback cannot be made: {type(broken).__name__})"
