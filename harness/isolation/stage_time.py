"""The time of a stage that counts against its deadline.

A stage whose processes had no processor, or were stopped, does not hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Pauses", "StageTime", "Usage"]

_MOST_TIMES = 10.0
"""A stage ends after this multiple of its deadline, however little processor time it had."""
_MOST_RESTARTS = 3
_LEAST_STOPPED = 2.0
"""Seconds for which a child may be stopped where its deadline is shorter: it may be continued later than its parent."""
_PAUSE = 1.0
"""Seconds for which a process has not run, from which on it counts as stopped itself; a busy machine makes shorter ones."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a child and the processes that it started use: bytes of memory, seconds of processor time since they began.

    `at`: when this was read (time.monotonic). `running`: one of their threads runs or waits for a processor. `stopped`: the child
    is stopped (SIGSTOP, a debugger).
    """

    at: float
    memory: int
    cpu: float
    running: bool
    stopped: bool


class StageTime:
    """The time of the stages of one task.

    Args:
        now: when the task was sent (time.monotonic).
        cpu: processor seconds that its child had used by then.
    """

    def __init__(self, now: float, cpu: float) -> None:
        self._stage: tuple[str, float] = ("start", now)
        self._begin = self._looked = now
        self._cpu = cpu
        self._excused = self._stopped = 0.0
        self._seen_stopped = False
        self._restarts = 0

    @property
    def looked(self) -> float:
        """When `look` was called last."""
        return self._looked

    def enter(self, stage: str, since: float) -> None:
        """Take note of the stage that is at work, and of its begin."""
        if (stage, since) != self._stage:
            self._stage, self._begin = (stage, since), since
            self._excused, self._stopped, self._seen_stopped = 0.0, 0.0, False

    def look(self, usage: Usage) -> None:
        """Excuse the time since the last look in which the processes wanted a processor and had none, or may have been stopped.

        A child counts as stopped from the first look on that has seen it so.
        """
        now = max(usage.at, self._looked)
        of_stage = now - max(self._looked, self._begin)
        without = now - self._looked - max(0.0, usage.cpu - self._cpu)
        if usage.stopped:
            self._excused += max(0.0, of_stage)
            self._stopped += max(0.0, of_stage) if self._seen_stopped else 0.0
        elif usage.running:
            self._excused += max(0.0, min(without, of_stage))
        self._looked, self._cpu, self._seen_stopped = now, usage.cpu, usage.stopped

    def restart(self, now: float) -> None:
        """Begin the time of the stage again, a few times in a task: the process that watches it has not run itself."""
        if self._restarts < _MOST_RESTARTS:
            self._restarts += 1
            self._begin = self._looked = now
            self._excused, self._stopped, self._seen_stopped = 0.0, 0.0, False

    def late(self, now: float, limit: float) -> bool:
        """Return whether the stage has had more than `limit` seconds, or has lasted for many times that."""
        wall = now - self._begin
        return wall - self._excused > limit or wall > _MOST_TIMES * max(limit, _LEAST_STOPPED)

    def stopped(self, limit: float) -> bool:
        """Return whether the child has been stopped for more than `limit` seconds."""
        return self._stopped > max(limit, _LEAST_STOPPED)


def _clock() -> float:
    # It goes on while the machine is suspended, as time.monotonic does not.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Pauses:
    """Notices that this process itself has not run: it was stopped, or the whole machine was.

    Args:
        clock: seconds, those in which the machine is suspended included.
        busy: processor seconds of this thread.
    """

    def __init__(self, clock: Callable[[], float] = _clock, busy: Callable[[], float] = time.thread_time) -> None:
        self._clock, self._read_busy = clock, busy
        self.begin()

    def begin(self) -> None:
        """Measure from now on."""
        self._now, self._busy = self._clock(), self._read_busy()

    def since(self, asked: float) -> float:
        """Return the seconds since the last call in which this thread neither worked nor waited as it asked; 0 if few."""
        now, busy = self._now, self._busy
        self.begin()
        missing = (self._now - now) - (self._busy - busy) - asked
        return missing if missing > _PAUSE else 0.0
