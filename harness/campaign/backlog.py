"""Cases that are drawn and not tried yet, by compile key: some wait for the compiler while others run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from attnfuzz.strategies.case import Case

__all__ = ["Backlog"]


class Backlog:
    """Keeps drawn Cases in order, and gives out those whose code is compiled.

    Args:
        round_over: called with the number of each round whose Cases have all been given out or dropped.
    """

    def __init__(self, round_over: Callable[[int], None]) -> None:
        self._round_over = round_over
        self._cases: dict[str, deque[tuple[int, int, Case]]] = {}
        self._ready: set[str] = set()
        self._left: dict[int, int] = {}
        self._number = 0

    def add(self, number: int, cases: Iterable[tuple[str, Case]]) -> None:
        """Add the Cases of a round, each with its compile key."""
        before = len(self)
        for key, case in cases:
            self._number += 1
            self._cases.setdefault(key, deque()).append((self._number, number, case))
        self._left[number] = len(self) - before
        self._taken(number, 0)

    def mark(self, ready: Iterable[str]) -> None:
        """Give out the Cases of these keys."""
        self._ready.update(ready)

    def drop(self, keys: Iterable[str]) -> int:
        """Forget the Cases of keys that the compiler refused; returns their number."""
        dropped = 0
        for key in keys:
            for _, number, _ in self._cases.pop(key, ()):
                dropped += 1
                self._taken(number, 1)
        return dropped

    def take(self, most: int, room: float, weight: Callable[[Case], float]) -> list[Case]:
        """Return the oldest Case that can run, with later ones of its key: at most `most`, of together at most `room`."""
        keys = [key for key in self._cases if key in self._ready]
        if not keys:
            return []
        oldest = min(keys, key=lambda key: self._cases[key][0][0])
        waiting, taken = self._cases[oldest], list[Case]()
        while waiting and len(taken) < most and (not taken or weight(waiting[0][2]) <= room):
            _, number, case = waiting.popleft()
            room -= weight(case)
            taken.append(case)
            self._taken(number, 1)
        if not waiting:
            del self._cases[oldest]
        return taken

    @property
    def ready(self) -> int:
        """The number of Cases that can run."""
        return sum(len(cases) for key, cases in self._cases.items() if key in self._ready)

    @property
    def waiting(self) -> Mapping[str, Case]:
        """The compile keys that are not ready, each with a Case of it."""
        return {key: cases[0][2] for key, cases in self._cases.items() if key not in self._ready}

    def __len__(self) -> int:
        return sum(map(len, self._cases.values()))

    def _taken(self, number: int, count: int) -> None:
        self._left[number] -= count
        if not self._left[number]:
            del self._left[number]
            self._round_over(number)
