"""How fast the cores of the machine are while a command runs.

A virtual machine shares its host with others, so that a rate may change where nothing of the command has.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import Self

__all__ = ["Core", "piece_of_work"]

_EVERY = 0.5
_TURNS = 30_000


def piece_of_work() -> float:
    """Do what is always the same; returns the milliseconds of a processor it took (about 2), waits for one left out."""
    start, total = time.thread_time_ns(), 0
    for turn in range(_TURNS):
        total = (total * 31 + turn) & 0xFFFF
    return (time.thread_time_ns() - start) / 1e6


class Core:
    """Takes the time of a piece of work twice a second while the block runs, in a thread."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> float | None:
        """Return the median between two times of `time.monotonic`, in milliseconds; None where there is none."""
        inside = [taken for at, taken in self._taken if begin <= at <= end]
        return statistics.median(inside) if inside else None

    def _work(self) -> None:
        while not self._over.wait(_EVERY):
            self._taken.append((time.monotonic(), piece_of_work()))
