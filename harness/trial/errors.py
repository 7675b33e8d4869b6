"""What a kernel raises, told: it may raise anything, with any message or none that can be made."""

from __future__ import annotations

import traceback

from attnfuzz.harness.core.text import printable
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.strategies.case import Case

__all__ = ["DeviceLost", "describe_exception", "format_traceback", "mark_as_child", "may_catch"]

_LONGEST = 2000
_child = False


class DeviceLost(BaseException):
    """The device answers no more after this Case: the process must end. `failure` says what happened, `case` is on record.

    No Exception, so that nothing on the way up takes it for the kernel's own and tries again.
    """

    def __init__(self, case: Case, failure: Failure) -> None:
        super().__init__(f"{failure.message}; the device context is lost, so this process can run no further Case")
        self.case, self.failure = case, failure


def mark_as_child() -> None:
    """Nobody presses Ctrl-C in this process: what is raised here is the kernel's own, whatever it is."""
    global _child
    _child = True


def may_catch(error: BaseException) -> bool:
    """Whether `error` is the kernel's, and not the user's Ctrl-C or a device that is lost."""
    return not isinstance(error, DeviceLost) and (_child or not isinstance(error, KeyboardInterrupt))


def describe_exception(error: BaseException) -> str:
    """Type and message."""
    try:
        message = str(error)
    except BaseException as broken:  # the error's own code
        message = f"(its message cannot be made: {type(broken).__name__})"
    return printable(f"{type(error).__name__}: {message}"[:_LONGEST])


def format_traceback(error: BaseException) -> str:
    """The last of its traceback."""
    try:
        return printable("".join(traceback.format_exception(error))[-6000:])
    except BaseException as broken:  # the error's own code
        return f"(its traceback cannot be made: {type(broken).__name__})"
