"""Cases that are drawn and not tried yet: some wait for the compiler while others run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from attnfuzz.harness.campaign.context import Batch
from attnfuzz.strategies.case import Case

__all__ = ["Backlog"]

_PASSED_OVER = 8
"""Batches for which the oldest Case may wait for one that more Cases can join."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    round: int
    compiles: Mapping[str, Case]
    alike: object
    case: Case


class Backlog:
    """Keeps drawn Cases in order, and gives out those whose code is compiled.

    Args:
        round_over: called with the number of each round whose Cases have all been tried or dropped.
    """

    def __init__(self, round_over: Callable[[int], None]) -> None:
        self._round_over = round_over
        self._cases: dict[int, _Waiting] = {}
        self._ready: set[str] = set()
        self._out: dict[Case, tuple[int, _Waiting]] = {}
        """Cases that are given out, each with its place."""
        self._left: dict[int, int] = {}
        self._number = self._passed = 0

    def add(self, number: int, cases: Iterable[tuple[Mapping[str, Case], Case]]) -> None:
        """Add the Cases of a round, each with the compile keys of all its launches and a Case to compile for each."""
        before = self._number
        for compiles, case in cases:
            self._number += 1
            p = case.problem
            self._cases[self._number] = _Waiting(number, compiles, (p.dtype, p.dim_qk, p.dim_v, p.needs.outputs), case)
        self._left[number] = self._number - before
        self._count(number, 0)

    def mark(self, ready: Iterable[str]) -> None:
        """Give out the Cases of these keys."""
        self._ready.update(ready)

    def drop(self, keys: Iterable[str]) -> None:
        """Forget the Cases of keys that the compiler refused."""
        refused = set(keys)
        for place in [place for place, each in self._cases.items() if not refused.isdisjoint(each.compiles)]:
            self._count(self._cases.pop(place).round, 1)

    def take(self, batch: Batch) -> list[Case]:
        """Return Cases that can run, oldest first, as many as `batch` allows.

        Those of a batch that runs together are judged in one go: of the kind of which most wait, or of the oldest Case's kind if
        that has waited long.
        """
        ready = [place for place, each in self._cases.items() if self._ready.issuperset(each.compiles)]
        if batch.together and ready:
            kind = self._kind(ready)
            ready = [place for place in ready if self._cases[place].alike == kind]
        places: list[int] = []
        room = batch.room
        for place in ready:
            weight = batch.weight(self._cases[place].case)
            if places and weight > room:
                continue
            room -= weight
            places.append(place)
            if len(places) == batch.most:
                break
        taken = [(place, self._cases.pop(place)) for place in places]
        self._out |= {each.case: (place, each) for place, each in taken}
        return [each.case for _, each in taken]

    def _kind(self, ready: Sequence[int]) -> object:
        counts = Counter(self._cases[place].alike for place in ready)
        oldest = self._cases[ready[0]].alike
        most = max(counts, key=lambda kind: counts[kind])
        self._passed = 0 if most == oldest or self._passed >= _PASSED_OVER else self._passed + 1
        return most if self._passed else oldest

    def tried(self, case: Case) -> None:
        """Note that a Case that was given out has been tried."""
        if (out := self._out.pop(case, None)) is not None:
            self._count(out[1].round, 1)

    def put_back(self) -> None:
        """Take back the Cases that were given out and not tried, to their places."""
        if self._out:
            self._cases = dict(sorted([*self._out.values(), *self._cases.items()], key=lambda each: each[0]))
            self._out.clear()

    @property
    def ready(self) -> int:
        """The number of Cases that can run."""
        return sum(self._ready.issuperset(each.compiles) for each in self._cases.values())

    @property
    def waiting(self) -> dict[str, Case]:
        """The compile keys that are not ready, each with the first Case to compile for it."""
        waiting: dict[str, Case] = {}
        for each in self._cases.values():
            for key, case in each.compiles.items():
                if key not in self._ready:
                    waiting.setdefault(key, case)
        return waiting

    def __len__(self) -> int:
        return len(self._cases)

    def _count(self, number: int, count: int) -> None:
        self._left[number] -= count
        if not self._left[number]:
            del self._left[number]
            self._round_over(number)
