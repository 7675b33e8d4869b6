"""Cases that are drawn and not tried yet: some wait for the compiler while others run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from attnfuzz.harness.campaign.context import Batch
from attnfuzz.kernels.problem import LAYOUTS, Layout
from attnfuzz.strategies.case import Case

__all__ = ["Backlog"]

_PASSED_OVER = 8
"""Batches for which the oldest Case may wait for one that more Cases can join."""


_PLAIN = Layout()
_FORMS = frozenset({"sinks", "strides", "pages"})
"""Kinds of Cases for which kernels often have code of its own."""


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
        own: compile keys of the kernel's variants, which are compiled whatever is drawn.
    """

    def __init__(self, round_over: Callable[[int], None], own: Collection[str] = ()) -> None:
        self._round_over = round_over
        self._places = dict.fromkeys(own, 0)
        """The place of each compile key in the order in which code is to be compiled."""
        self._met: set[object] = set()
        """Kinds of the Cases that need no code beyond that of these keys."""
        self._cases: dict[int, _Waiting] = {}
        self._ready: set[str] = set()
        self._out: dict[Case, tuple[int, _Waiting]] = {}
        """Cases that are given out, each with its place."""
        self._left: dict[int, int] = {}
        self._number = self._passed = 0

    def add(self, number: int, cases: Iterable[tuple[Mapping[str, Case], Case]]) -> None:
        """Add the Cases of a round, each with the compile keys of all its launches and a Case to compile for each."""
        new: list[_Waiting] = []
        for compiles, case in cases:
            self._number += 1
            p = case.problem
            new.append(_Waiting(number, compiles, (p.dtype, p.dim_qk, p.dim_v, p.needs.outputs), case))
            self._cases[self._number] = new[-1]
        self._place(new)
        self._left[number] = len(new)
        self._count(number, 0)

    def _place(self, new: Sequence[_Waiting]) -> None:
        """Put keys that are new into the order: first those of forms that no code before has, then those that most Cases need.

        Cases of each variant need its code for sinks or strides. In the order in which they were drawn, that of sinks could come
        after all variants', and code that one Case needs before code that ten need.
        """
        for needs, (kinds, _) in self._lacking(new).items():
            self._met |= set() if needs else kinds
        while lacking := {needs: rest for needs, rest in self._lacking(new).items() if needs}:
            best = max(lacking, key=lambda needs: (-len(needs), *self._worth(*lacking[needs])))
            for key in best:
                self._places[key] = len(self._places)
            self._met |= lacking[best][0]

    def _worth(self, kinds: set[object], count: int) -> tuple[int, int, int]:
        """Return how many forms of code are new among kinds of Cases, the number of these Cases, and how many kinds are new."""
        new = kinds - self._met
        return len(new & _FORMS), count, len(new)

    def _lacking(self, new: Sequence[_Waiting]) -> dict[tuple[str, ...], tuple[set[object], int]]:
        """Return, by the keys without a place that Cases need, the kinds and the number of these Cases."""
        lacking: dict[tuple[str, ...], tuple[set[object], int]] = {}
        for each in new:
            needs = tuple(key for key in each.compiles if key not in self._places)
            kinds, count = lacking.get(needs, (set[object](), 0))
            lacking[needs] = (kinds.union(_kinds(each.case)), count + 1)
        return lacking

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
        """The compile keys that are not ready, in the order to compile them, each with the first Case to compile for it."""
        waiting: dict[str, Case] = {}
        for each in self._cases.values():
            for key, case in each.compiles.items():
                if key not in self._ready:
                    waiting.setdefault(key, case)
        return dict(sorted(waiting.items(), key=lambda item: self._places[item[0]]))

    def __len__(self) -> int:
        return len(self._cases)

    def _count(self, number: int, count: int) -> None:
        self._left[number] -= count
        if not self._left[number]:
            del self._left[number]
            self._round_over(number)


def _kinds(case: Case) -> Iterator[object]:
    """Yield what a Case has beside the parts of a variant, lengths and values."""
    p = case.problem
    laid_out = {name: layout for name in LAYOUTS if (layout := getattr(p, name)) != _PLAIN}
    forms = {"sinks": p.sinks, "strides": laid_out, "pages": p.page_size}
    yield from (name for name, holds in forms.items() if holds)
    yield from (("check", case.check), ("packing", p.packing), ("page size", p.page_size), ("dlse", p.needs.dlse))
    for name, layout in laid_out.items():
        yield from ((name, field) for field in Layout.__struct_fields__ if getattr(layout, field) != getattr(_PLAIN, field))
