"""Rounds of draws: each has a number, which makes its seed, so that any worker can draw any of them.

With a limit on Cases, which rounds are drawn and how many Cases each gives depends on the limit alone, never on the number of
workers: rounds for all Cases are given out, and only when all of them are drawn others for what they lacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["EXAMPLES", "Round", "Rounds"]

EXAMPLES = 100
"""Values that Hypothesis draws in a round."""
_MOST_EMPTY = 3
"""Rounds without a new Case after which all Cases count as tried."""
_REMEMBERED = 1 << 14
"""Cases that are remembered where their number has no limit; of later ones, some may be tried twice."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round: its number, and the most Cases it gives."""

    number: int
    quota: int = EXAMPLES


class Rounds:
    """Gives out the rounds of one kernel.

    Args:
        most: Cases in all; None: no limit.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._next = self._planned = self._empty = self._given = 0
        self._returned: list[Round] = []
        self._undrawn: dict[int, Round] = {}
        self._of_round: dict[int, list[str]] = {}
        self._known: set[str] = set()

    def know(self, ids: Iterable[str]) -> None:
        """Count Cases as tried already: no round gives them again."""
        self._known.update(ids)

    def reduce(self, count: int) -> None:
        """Give so many Cases less, where their number is limited: others are tried in their place."""
        if self._most is not None:
            self._most = max(0, self._most - count)

    def may_give(self) -> bool:
        """Whether `take` returns a round now."""
        if self._returned:
            return True
        if self.over:
            return False
        return self._most is None or self._planned > 0 or (not self._undrawn and self._given < self._most)

    @property
    def many(self) -> bool:
        """Whether more than one worker can draw rounds."""
        return self.may_give() and (self._most is None or self._most - self._given > EXAMPLES)

    def take(self) -> Round | None:
        """Return the next round; None: there is none, at least until those that were given out are drawn."""
        if not self.may_give():
            return None
        if self._returned:
            round_ = self._returned.pop()
        else:
            round_ = Round(self._next, self._quota())
            self._next += 1
        self._undrawn[round_.number] = round_
        return round_

    def _quota(self) -> int:
        if self._most is None:
            return EXAMPLES
        if self._planned == 0 and not self._undrawn:
            self._planned = self._most - self._given
        quota = min(EXAMPLES, self._planned)
        self._planned -= quota
        return quota

    def drawn(self, number: int, ids: Sequence[str]) -> list[int]:
        """Return which of the Cases that a round has drawn are new, as indices; those are counted as given."""
        self._undrawn.pop(number, None)
        new = []
        for index, each in enumerate(ids):
            if each not in self._known:
                new.append(index)
                if self._most is not None or len(self._known) < _REMEMBERED:
                    self._known.add(each)
        self._of_round[number] = [ids[index] for index in new]
        self._given += len(new)
        self._empty = 0 if new else self._empty + 1
        return new

    def finish(self, number: int) -> None:
        """Forget what would be needed to give a round out again."""
        self._of_round.pop(number, None)

    def give_back(self, number: int) -> None:
        """Give out a round again whose worker is gone."""
        ids = self._of_round.pop(number, [])
        self._known.difference_update(ids)
        self._given -= len(ids)
        known = self._undrawn.pop(number, None)
        self._returned.append(known or Round(number, EXAMPLES if self._most is None else max(1, len(ids))))

    @property
    def over(self) -> bool:
        """Whether no further round will be given out."""
        if self._returned:
            return False
        enough = self._most is not None and not self._undrawn and self._given >= self._most
        return enough or self._empty >= _MOST_EMPTY
