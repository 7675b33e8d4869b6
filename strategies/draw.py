"""Hypothesis as a source of values: draw from a strategy by seed, outside any test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine, providers

from attnfuzz.kernels.errors import reject

__all__ = ["draw_values", "drawn", "no_local_constants"]

_PATCHED = threading.RLock()
"""Held while Hypothesis is changed: another thread that drew at the same time would restore what this one has put there."""
T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


class _StopDrawing(BaseException):
    """Ends a draw; its cause, if any, is the consumer's own error. Not an Exception: Hypothesis would run the test again."""


def draw_values(strategy: st.SearchStrategy[T], consume: Callable[[T], bool | None], *, seed: int, examples: int) -> None:
    """Draw up to `examples` values of `strategy` and call `consume` with each, until it returns True.

    The same seed draws the same values in every process with the same version of Hypothesis, which would also draw constants
    from the source files of imported local modules.

    Args:
        strategy: what to draw from.
        consume: called with each value; True ends the draw. Its exceptions are raised here, unchanged.
        seed: of the draw.
        examples: limit on drawn values; a value may come twice.
    """
    values = _values_without_engine()
    if values is None:
        _draw_by_engine(strategy, consume, seed=seed, examples=examples)
        return
    with no_local_constants():
        for value in values(strategy, seed=seed, examples=examples):
            if consume(value):
                return


def _values_without_engine() -> Callable[..., Iterator[Any]] | None:
    """Return `choices.values`; None where Hypothesis has another form than it expects."""
    try:
        from attnfuzz.strategies import choices
    except ImportError:  # its internal modules lie elsewhere
        return None
    return choices.values if choices.usable() else None


def _draw_by_engine(strategy: st.SearchStrategy[T], consume: Callable[[T], bool | None], *, seed: int, examples: int) -> None:
    """Draw as `draw_values` does, with Hypothesis's engine, which stops early if it has drawn all values."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @hypothesis.given(strategy)
    def each(value: T) -> None:
        try:
            stop = consume(value)
        except Exception as error:  # Hypothesis would call `consume` again with the value that failed
            raise _StopDrawing from error
        if stop:
            raise _StopDrawing

    try:
        with no_local_constants(), _no_mutations():
            each()
    except _StopDrawing as stop:
        if stop.__cause__ is not None:
            raise stop.__cause__ from None


def drawn(strategy: st.SearchStrategy[H], *, seed: int, examples: int, quota: int) -> list[H]:
    """Return the distinct values of one round, in the order drawn: at most `quota` of them, after which the draw stops.

    Args:
        strategy: what to draw from.
        seed: of the round, as in `draw_values`.
        examples: limit on drawn values, equal ones counted.
        quota: limit on distinct values; fewer come where the round has no more.

    Raises:
        BadArgument: `quota` or `examples` is below 1.
    """
    for name, value in (("quota", quota), ("examples", examples)):
        if value < 1:
            raise reject(name, value, "no value could be drawn", "give 1 or more")
    distinct: dict[H, None] = {}

    def add(value: H) -> bool:
        distinct.setdefault(value)
        return len(distinct) >= quota

    draw_values(strategy, add, seed=seed, examples=examples)
    return list(distinct)


@contextlib.contextmanager
def no_local_constants() -> Iterator[None]:
    """Draw without constants of local modules, which depend on what this process has imported; other threads do not draw then.

    Hypothesis before 6.131 does not draw them.
    """
    name = "_get_local_constants"
    with _PATCHED:
        original = getattr(providers, name, None)
        if original is None:
            yield
            return
        no_constants = getattr(providers, "Constants")()  # noqa: B009 - not exported
        setattr(providers, name, lambda: no_constants)
        providers.CONSTANTS_CACHE.cache.clear()
        try:
            yield
        finally:
            setattr(providers, name, original)
            providers.CONSTANTS_CACHE.cache.clear()


@contextlib.contextmanager
def _no_mutations() -> Iterator[None]:
    """Draw each value by itself.

    Hypothesis otherwise follows each drawn value by up to five copies in which one part has the value of another: of 100 Cases
    that are drawn, four in five would be nearly alike, while what Cases need to have in common is in the strategies already.
    """
    name = "generate_mutations_from"
    original = getattr(engine.ConjectureRunner, name, None)
    if original is None:
        yield
        return
    setattr(engine.ConjectureRunner, name, lambda _runner, _data: None)
    try:
        yield
    finally:
        setattr(engine.ConjectureRunner, name, original)
