"""What others than the kernel have done to the processes of a run: it is reported, and is no failure of the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from attnfuzz.harness.core.text import counted

__all__ = ["Disturbance", "Disturbances"]

Disturbance = Literal["killed", "stopped", "paused"]


@dataclass(frozen=True, slots=True)
class Disturbances:
    """Counts of events of the machine. Each Case that one of them hit was tried again, and did not end in the same way.

    killed: child processes with SIGKILL that attnfuzz did not send (the OOM killer, a user). stopped: child processes that were
    stopped (SIGSTOP) for longer than a deadline. paused: times that the process that watches them did not run for seconds.
    """

    killed: int = 0
    stopped: int = 0
    paused: int = 0

    def plus(self, what: Disturbance) -> Disturbances:
        """Return the counts with one more."""
        return replace(self, **{what: getattr(self, what) + 1})

    def __add__(self, other: Disturbances) -> Disturbances:
        """Return the sums."""
        return Disturbances(self.killed + other.killed, self.stopped + other.stopped, self.paused + other.paused)

    def __sub__(self, other: Disturbances) -> Disturbances:
        """Return what has come since `other`."""
        return Disturbances(self.killed - other.killed, self.stopped - other.stopped, self.paused - other.paused)

    def describe(self) -> str:
        """Return them in words; "" where there were none."""
        texts = []
        for count, what in ((self.killed, "killed"), (self.stopped, "stopped")):
            if count:
                texts.append(f"{count} child process{'es were' if count > 1 else ' was'} {what} from outside")
        if self.paused:
            texts.append(f"attnfuzz itself did not run for seconds, {counted(self.paused, 'time')}")
        return "; ".join(texts) + (": not counted as failures, their cases were tried again" if texts else "")
