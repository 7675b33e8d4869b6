"""Values of a Hypothesis strategy by seed, without Hypothesis's engine, which does four times the work of the strategy itself.

The engine remembers every choice of every value, so that it can shrink them and draw none twice; Cases are shrunk by steps of
their own. What it has for good is kept here: the first value is the simplest one, and some have few choices that are not the
simplest (of integers with limits, booleans and what is made of them; floats and text are as Hypothesis draws them). The
strategies and all of their rules are Hypothesis's own: this module replaces its internal `ConjectureData`, and is not used where
that has another form than it expects.
"""

# ruff: noqa: ARG002 - the parameters of the methods are those of Hypothesis's own class
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.control import BuildContext
from hypothesis.errors import StopTest, Unsatisfiable, UnsatisfiedAssumption
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.strategies._internal.lazy import unwrap_strategies

__all__ = ["usable", "values"]

_FEW = 20
"""One value in so many has few choices that are not the simplest."""
_MOST_RANDOM = 8
"""Of those, the choices that may not be the simplest."""
_TRIES = 10
"""Draws for each value that is wanted, since a strategy may reject some."""
_DEEPEST, _MOST_CHOICES = 100, 8192
"""A value that needs more is rejected, as Hypothesis does."""
_unwrapped: Callable[[st.SearchStrategy[Any]], st.SearchStrategy[Any]] = unwrap_strategies
T = TypeVar("T")


class _Choices(ConjectureData):
    """Makes the choices of one value at random, and remembers none of them.

    Args:
        random: makes them.
        most: choices that may not be the simplest; None: all.
    """

    def __init__(self, random: Random, most: int | None) -> None:
        super().__init__(random=random)
        self._numbers, self._uniform = random, random.random
        self._made, self._most = 0, most

    def draw(self, strategy: st.SearchStrategy[T], label: int | None = None, observe_as: str | None = None) -> T:
        """Return a value of `strategy`."""
        own = _unwrapped(strategy)
        # Strategies of a type without a rule of its own are never empty; asking each takes a tenth of the time of a draw.
        if type(own).calc_is_empty is not st.SearchStrategy.calc_is_empty and strategy.is_empty:
            self.mark_invalid(f"empty strategy {strategy!r}")
        if self.depth >= _DEEPEST:
            self.mark_invalid("max depth exceeded")
        self.depth += 1
        try:
            value: T = own.do_draw(self)
            return value
        finally:
            self.depth -= 1

    def start_span(self, label: int) -> None:
        """Count the depth, which collections look at."""
        self.depth += 1

    def stop_span(self, *, discard: bool = False) -> None:
        """Count the depth."""
        self.depth -= 1

    def track_arg_label(self, label: str) -> Any:
        """Return a context without labels: they would be printed with a failing example."""
        return contextlib.nullcontext({})

    def draw_integer(
        self,
        min_value: int | None = None,
        max_value: int | None = None,
        *,
        weights: dict[int, float] | None = None,
        shrink_towards: int = 0,
        forced: int | None = None,
        observe: bool = True,
    ) -> int:
        """Return an integer; without limits as Hypothesis draws it."""
        if forced is not None:
            return forced
        if self._is_simplest():
            return _within(shrink_towards, min_value, max_value)
        if min_value is None or max_value is None:
            rest: dict[str, Any] = {} if weights is None else {"weights": weights}
            number: int = super().draw_integer(min_value, max_value, shrink_towards=shrink_towards, **rest)
            return number
        at = self._uniform()
        for each, weight in (weights or {}).items():
            if at < weight:
                return each
            at -= weight
        size = max_value - min_value + 1
        return min_value + (int(self._uniform() * size) if size < 1 << 40 else self._numbers.randrange(size))

    def draw_boolean(self, p: float = 0.5, *, forced: bool | None = None, observe: bool = True) -> bool:
        """Return True with probability `p`."""
        if forced is not None:
            return forced
        return p >= 1 if self._is_simplest() else self._uniform() < p

    def _is_simplest(self) -> bool:
        """Count a choice; returns whether it must be the simplest."""
        self._made += 1
        if self._made > _MOST_CHOICES:
            self.mark_invalid("too many choices")
        return self._most is not None and self._made > self._most


class _Context(BuildContext):
    """The context of a draw. It remembers no calls: they would be printed with a failing example."""

    def record_call(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


def values(strategy: st.SearchStrategy[T], *, seed: int, examples: int) -> Iterator[T]:
    """Yield `examples` values of `strategy`, fewer where it rejects most of them; equal ones may be among them.

    Args:
        strategy: what to draw from.
        seed: the same values come in every process.
        examples: how many.

    Raises:
        Unsatisfiable: it rejects all.
    """
    random, drawn = Random(seed), 0
    strategy.validate()
    for number in range(_TRIES * examples):
        most = 0 if number == 0 else random.randint(1, _MOST_RANDOM) if number % _FEW == 0 else None
        try:
            value = _value(strategy, random, most)
        except (StopTest, UnsatisfiedAssumption):
            continue
        yield value
        drawn += 1
        if drawn == examples:
            return
    if examples and not drawn:
        raise Unsatisfiable(f"{strategy!r} rejects all that is drawn")


def _value(strategy: st.SearchStrategy[T], random: Random, most: int | None) -> T:
    data = _Choices(random, most)
    with _Context(data, is_final=False, wrapped_test=_value):
        return data.draw(strategy)


@functools.cache
def usable() -> bool:
    """Whether this version of Hypothesis has the form that is expected, by values of strategies of each kind."""
    word = st.sampled_from("ab") | st.just("c")
    pairs = st.tuples(st.integers(1, 300), st.lists(word, min_size=1, max_size=3)).filter(lambda pair: pair[0] > 1)
    nested = st.recursive(st.booleans().map(int), lambda inner: st.builds(max, inner, inner), max_leaves=3)

    @st.composite
    def both(draw: st.DrawFn) -> tuple[int, list[str], int, int]:
        first, words = draw(pairs)
        return first, words, draw(nested), draw(st.integers(0, first).flatmap(lambda most: st.integers(0, most)))

    try:
        drawn = [list(values(both(), seed=1, examples=60)) for _ in range(2)]
    except Exception:  # whatever an unknown version raises
        return False
    firsts = {first for first, *_ in drawn[0]}
    valid = all(1 < n <= 300 and words and {*words} <= {*"abc"} and a in (0, 1) and b <= n for n, words, a, b in drawn[0])
    return valid and drawn[0] == drawn[1] and len(drawn[0]) > 40 and len(firsts) > 20


def _within(value: int, least: int | None, most: int | None) -> int:
    value = value if least is None else max(value, least)
    return value if most is None else min(value, most)
