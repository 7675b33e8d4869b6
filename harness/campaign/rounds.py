"""Rounds of draws: each has a number, which makes its seed, so that any worker can draw any of them.

With a limit on Cases, which rounds are drawn and how many Cases each gives depends on the limit alone, never on the number of
workers: rounds for all Cases are given out, and only when all of them are drawn others for what they lacked.

Shards of one run draw from the same rounds, each its own of them. Under a limit the rounds of the whole run are shared out: whole
ones in turn, and of the rest each shard has an equal part of the Cases. What the shards of one limit draw at first is together
what one run draws at first, for any number of shards. Where a round repeats Cases of others, one run draws further rounds in
their place and a shard does so only for what it has tried itself: then the shards have some Cases twice, and other further ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = ["EXAMPLES", "Round", "Rounds"]

EXAMPLES = 100
"""Values that Hypothesis draws in a round."""
_MOST_EMPTY = 3
"""Rounds without a new Case after which all Cases count as tried."""
_REMEMBERED = 1 << 14
"""Cases that are remembered where their number has no limit; of later ones, some may be tried twice."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round: its number, the most Cases it gives, and how many it passes over before them: those are another shard's."""

    number: int
    quota: int = EXAMPLES
    skip: int = 0


class Rounds:
    """Gives out the rounds of one kernel that are one shard's.

    Args:
        most: Cases of all shards together; None: no limit.
        shard: which shard this is, from 0.
        shards: how many there are.
    """

    def __init__(self, most: int | None = None, shard: int = 0, shards: int = 1) -> None:
        self._shard, self._shards = shard, shards
        self._whole, self._parts, self._first_free = 0, list[Round](), 0
        self._most = None if most is None else self._share(most)
        self._taken = self._planned = self._empty = self._given = 0
        self._returned: list[Round] = []
        self._undrawn: dict[int, Round] = {}
        self._of_round: dict[int, tuple[Round, list[str]]] = {}
        self._known: set[str] = set()

    def _share(self, most: int) -> int:
        """Plan this shard's rounds of a run of `most` Cases; returns the number of its Cases."""
        self._whole = most // EXAMPLES // self._shards
        before = self._whole * self._shards
        rest = most - before * EXAMPLES
        first, end = rest * self._shard // self._shards, rest * (self._shard + 1) // self._shards
        for start in range(0, rest, EXAMPLES):
            skip, quota = max(0, first - start), min(EXAMPLES, end - start) - max(0, first - start)
            if quota > 0:
                self._parts.append(Round(before + start // EXAMPLES, quota, skip))
        self._first_free = before + -(-rest // EXAMPLES)
        return self._whole * EXAMPLES + end - first

    def _next(self) -> Round:
        """Return this shard's next round, with all the Cases that are its own."""
        index, self._taken = self._taken, self._taken + 1
        if self._most is not None and index >= self._whole:
            index -= self._whole
            if index < len(self._parts):
                return self._parts[index]
            return Round(self._first_free + self._shard + (index - len(self._parts)) * self._shards)
        return Round(self._shard + index * self._shards)

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
        round_ = self._returned.pop() if self._returned else self._limited(self._next())
        self._undrawn[round_.number] = round_
        return round_

    def _limited(self, round_: Round) -> Round:
        """Return a round with the Cases of it that are still wanted."""
        if self._most is None:
            return round_
        if self._planned == 0 and not self._undrawn:
            self._planned = self._most - self._given
        quota = min(round_.quota, self._planned)
        self._planned -= quota
        return replace(round_, quota=quota)

    def drawn(self, number: int, ids: Sequence[str]) -> list[int]:
        """Return which of the Cases that a round has drawn are new, as indices; those are counted as given."""
        round_ = self._undrawn.pop(number, None) or Round(number)
        new = []
        for index, each in enumerate(ids):
            if each not in self._known:
                new.append(index)
                if self._most is not None or len(self._known) < _REMEMBERED:
                    self._known.add(each)
        self._of_round[number] = round_, [ids[index] for index in new]
        self._given += len(new)
        self._empty = 0 if new else self._empty + 1
        return new

    def finish(self, number: int) -> None:
        """Forget what would be needed to give a round out again."""
        self._of_round.pop(number, None)

    def give_back(self, number: int) -> None:
        """Give out a round again whose worker is gone."""
        undrawn = self._undrawn.pop(number, None)
        round_, ids = self._of_round.pop(number, (undrawn or Round(number), []))
        self._known.difference_update(ids)
        self._given -= len(ids)
        self._returned.append(round_)

    @property
    def over(self) -> bool:
        """Whether no further round will be given out."""
        if self._returned:
            return False
        enough = self._most is not None and not self._undrawn and self._given >= self._most
        return enough or self._empty >= _MOST_EMPTY
