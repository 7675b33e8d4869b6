"""Rounds of draws: each has a number, which makes its seed, so that any worker can draw any of them.

With a limit on Cases, which rounds are drawn and which Cases they give depends on the limit alone, never on the number of workers
or on their speed: rounds of full size are given out together, the next ones once all of those are drawn, and what is lacking at
the end comes from one round at a time, of which the first new Cases are taken.

Shards of one run draw rounds of their own, every n-th, and an equal part of the Cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = ["EXAMPLES", "Round", "Rounds"]

EXAMPLES = 100
"""Values that Hypothesis draws in a round."""
_TOGETHER = 16
"""Rounds that are given out together where the number of Cases is limited."""
_MOST_EMPTY = 3
"""Rounds without a new Case after which all Cases count as tried."""
_SPARE = 8
"""Cases that a round draws beyond twice those that are lacking."""
_REMEMBERED = 1 << 12
"""Cases that are remembered where their number has no limit; of later ones, some may be tried twice."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round: its number, the distinct Cases to draw, and how many new ones of them are tried at most."""

    number: int
    quota: int = EXAMPLES
    most: int = EXAMPLES


class Rounds:
    """Gives out the rounds of one kernel that are one shard's.

    Args:
        most: Cases of all shards together; None: no limit.
        shard: which shard this is, from 0.
        shards: how many there are.
    """

    def __init__(self, most: int | None = None, shard: int = 0, shards: int = 1) -> None:
        self._shard, self._shards = shard, shards
        self._most = None if most is None else most * (shard + 1) // shards - most * shard // shards
        self._next = self._planned = self._empty = self._given = 0
        self._together: list[int] = []
        """New Cases of each round since rounds were planned."""
        self._returned: list[Round] = []
        self._undrawn: dict[int, Round] = {}
        self._untried: dict[int, tuple[Round, set[str]]] = {}
        """Rounds that are drawn, each with the Cases that no worker has reported."""
        self._round_of: dict[str, int] = {}
        self._known: set[str] = set()

    def know(self, ids: Iterable[str]) -> None:
        """Count Cases as tried already: no round gives them again, and others come in their place for those that one gave."""
        new = set(ids) - self._known
        self._known |= new
        if self._most is not None:
            self._most = max(0, self._most - len(new))

    def forget(self, ids: Iterable[str]) -> None:
        """Count Cases as not tried that `know` has counted, and that will not be tried either."""
        old = set(ids) & self._known
        self._known -= old
        if self._most is not None:
            self._most += len(old)

    @property
    def most(self) -> int | None:
        """Cases that are left for this shard beyond those that are known; None: no limit."""
        return self._most

    def may_give(self) -> bool:
        """Whether `take` returns a round now."""
        if self._returned:
            return True
        if self.over:
            return False
        return self._most is None or (self._given < self._most and (self._planned > 0 or not self._undrawn))

    @property
    def many(self) -> bool:
        """Whether more than one worker can draw rounds."""
        return self.may_give() and (self._most is None or self._most - self._given > EXAMPLES)

    def take(self) -> Round | None:
        """Return the next round; None: there is none, at least until those that were given out are drawn."""
        if not self.may_give():
            return None
        round_ = self._returned.pop() if self._returned else self._new()
        self._undrawn[round_.number] = round_
        return round_

    def _new(self) -> Round:
        first = self._next == 0
        number = self._shard + self._next * self._shards
        self._next += 1
        if self._most is None:
            return Round(number)
        lacking = self._most - self._given
        if self._planned == 0:
            self._together.clear()
            self._planned = min(_TOGETHER, max(1, lacking // EXAMPLES))
        self._planned -= 1
        if lacking >= EXAMPLES:
            return Round(number)
        # Some that it draws will be known: each round begins with the simplest Case.
        return Round(number, lacking if first else min(EXAMPLES, 2 * lacking + _SPARE), lacking)

    def drawn(self, number: int, ids: Sequence[str]) -> list[int]:
        """Return which of the Cases that a round has drawn are new, as indices; those are counted as given."""
        round_ = self._undrawn.pop(number, None) or Round(number)
        new = [index for index, each in enumerate(ids) if each not in self._known][: round_.most]
        if self._most is not None or len(self._known) < _REMEMBERED:
            self._known.update(ids[index] for index in new)
        self._untried[number] = round_, {ids[index] for index in new}
        self._given += len(new)
        self._together.append(len(new))
        if self._most is None:
            self._empty = 0 if new else self._empty + 1
            self._together.clear()
        else:
            self._round_of.update((ids[index], number) for index in new)
            if not (self._planned or self._undrawn or self._returned):
                self._empty = 0 if any(self._together) else self._empty + len(self._together)
        return new

    def tried(self, id_: str) -> None:
        """Note that a Case has been tried: its round does not give it again, should that be given out again."""
        if (number := self._round_of.pop(id_, None)) is not None:
            self._untried[number][1].discard(id_)

    def finish(self, number: int) -> None:
        """Forget what would be needed to give a round out again."""
        _, ids = self._untried.pop(number, (None, set[str]()))
        for each in ids:
            self._round_of.pop(each, None)

    def give_back(self, number: int) -> None:
        """Give out a round again whose worker is gone: the Cases of it that were not tried."""
        if (undrawn := self._undrawn.pop(number, None)) is not None:
            self._returned.append(undrawn)
        elif number in self._untried:
            round_, ids = self._untried[number]
            self.finish(number)
            self._known -= ids
            self._given -= len(ids)
            if ids:
                self._returned.append(replace(round_, most=len(ids)))

    @property
    def over(self) -> bool:
        """Whether no further round will be given out."""
        if self._returned:
            return False
        if self._most is not None:
            if self._undrawn or self._given >= self._most:
                return not self._undrawn
            if self._planned:
                return False
        return self._empty >= _MOST_EMPTY
