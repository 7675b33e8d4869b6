"""What ends a process for Trials: raised, never returned, so that nothing on the way up goes on with the next Case."""

from __future__ import annotations

from attnfuzz.harness.judge.failure import Failure
from attnfuzz.strategies.case import Case

__all__ = ["DeviceLost"]


class DeviceLost(BaseException):
    """The device answers no more after this Case: the process must end. `failure` says what happened, `case` is on record.

    No Exception, so that nothing on the way up takes it for the kernel's own and tries again.
    """

    def __init__(self, case: Case, failure: Failure) -> None:
        super().__init__(f"{failure.message}; the device context is lost, so this process can run no further Case")
        self.case, self.failure = case, failure
