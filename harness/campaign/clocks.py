"""Clocks of a worker's turn: of its trials, and of those of stored Cases."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from attnfuzz.harness.campaign.earlier import EarlierCase
from attnfuzz.harness.isolation.statistics import Statistics

__all__ = ["ReplayClock", "TrialClock"]


class TrialClock:
    """Seconds of trials; shrinking and error maps have time of their own."""

    def __init__(self) -> None:
        self._counted, self._since = 0.0, time.monotonic()
        self._runs = False

    @property
    def seconds(self) -> float:
        """Until now."""
        return self._counted + (time.monotonic() - self._since if self._runs else 0.0)

    def reset(self) -> None:
        """Begin at 0."""
        self._counted, self._since = 0.0, time.monotonic()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the block."""
        yield from self._switched(runs=True)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the block."""
        yield from self._switched(runs=False)

    def _switched(self, *, runs: bool) -> Iterator[None]:
        before, self._counted, self._since, self._runs = self._runs, self.seconds, time.monotonic(), runs
        try:
            yield
        finally:
            self._counted, self._since, self._runs = self.seconds, time.monotonic(), before


class ReplayClock:
    """Seconds of the trials of stored Cases in one turn, without those of waiting for a child process.

    Args:
        most: seconds after which no other one begins; None: no limit.
        statistics: of the executor.
    """

    def __init__(self, most: float | None, statistics: Statistics) -> None:
        self._most, self._statistics = most, statistics
        self.seconds = 0.0

    @property
    def over(self) -> bool:
        """Whether no other stored Case begins in this turn."""
        return self._most is not None and self.seconds >= self._most

    @contextlib.contextmanager
    def counting(self, earlier: EarlierCase, clock: TrialClock) -> Iterator[None]:
        """Count the trials of a Case if it is a stored one."""
        before = clock.seconds - self._statistics.start_seconds
        try:
            yield
        finally:
            if earlier.stored is not None:
                self.seconds += max(0.0, clock.seconds - self._statistics.start_seconds - before)
