"""Which of the Cases that a process had run are run again with a Case that fails in it alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnfuzz.strategies.case import Case
from attnfuzz.strategies.neighbours import differences

__all__ = ["parts_of_past"]

_MOST_ALIKE = 8


def parts_of_past(case: Case, past: Sequence[Case]) -> Iterator[tuple[Case, ...]]:
    """Yield 1, 2, 4, ... of the Cases of `past`, oldest first: the latest, and those that differ least; all of them at last.

    A cache with a wrong key fails after a Case that differs in little else, which may be long ago; a counter after the latest.
    """
    earlier = [each for each in past if each.kernel == case.kernel]
    alike = _least_different(case, earlier)
    count, yielded = 1, set[tuple[Case, ...]]()
    while earlier:
        parts = [tuple(earlier[-count:])]
        if count <= _MOST_ALIKE:
            parts.append(tuple(earlier[at] for at in sorted(alike[:count])))
        yield from dict.fromkeys(each for each in parts if each and each not in yielded)
        yielded.update(parts)
        if count >= len(earlier):
            return
        count *= 2


def _least_different(case: Case, earlier: Sequence[Case]) -> list[int]:
    """Return where the Cases are that differ from `case`, each once, in the order of how many parts differ, the latest first."""
    places = {each: at for at, each in enumerate(earlier)}
    parts = {at: len(differences(case, each)) for each, at in places.items()}
    return sorted((at for at, count in parts.items() if count), key=lambda at: (parts[at], -at))
