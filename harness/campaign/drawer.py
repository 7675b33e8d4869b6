"""Rounds of draws beside the trials: Hypothesis draws in a thread while the worker waits for a child process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from attnfuzz.harness.campaign.rounds import EXAMPLES, Round
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.draw import drawn
from attnfuzz.strategies.other_values import with_other_values
from attnfuzz.strategies.variants import Variant

__all__ = ["Drawer", "Drawn", "draw_round"]

_SHAPES = 12
"""Shapes of a round, at least, where it has so many Cases."""


def draw_round(
    strategy: st.SearchStrategy[Case], seed: int, round_: Round, values: int = 1, takes: Callable[[Case], bool] = lambda _: True
) -> list[Case]:
    """Return the Cases of a round.

    Args:
        strategy: of the kernel's Cases.
        seed: of the kernel's run.
        round_: which round, and how many.
        values: how many Cases share a shape; fewer where a round of few Cases would have few shapes.
        takes: whether the kernel takes a Case that has the shape of a drawn one, with other values.
    """
    seed = seed * 7919 + round_.number
    values = max(1, min(values, round_.quota // _SHAPES))
    shapes = drawn(strategy, seed=seed, examples=EXAMPLES, quota=1 + -(-(round_.quota - 1) // values))
    # Each round begins with the simplest Case, which is enough of its shape.
    return [*shapes[:1], *with_other_values(shapes[1:], values, seed, takes)][: round_.quota]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A round and its Cases, with their ids."""

    round: Round
    cases: list[Case]
    ids: list[str]


class Drawer:
    """Draws rounds of one kernel's Cases, one at a time.

    Args:
        strategy: makes the strategy of Cases of some variants.
        seed: of the kernel's run; each round has a seed of its own.
        background: draw in a thread; else at the request.
        values: how many Cases share a shape.
        takes: whether the kernel takes a Case that has the shape of a drawn one, with other values.
    """

    def __init__(
        self,
        strategy: Callable[[tuple[Variant, ...]], st.SearchStrategy[Case]],
        seed: int,
        *,
        background: bool,
        values: int = 1,
        takes: Callable[[Case], bool] = lambda _: True,
    ) -> None:
        self._make, self._seed, self._background = strategy, seed, background
        self._values, self._takes = values, takes
        self._strategy: st.SearchStrategy[Case] | None = None
        self._variants: tuple[Variant, ...] = ()
        self._thread: threading.Thread | None = None
        self._result: Drawn | BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a round has been requested and not taken."""
        return self._thread is not None or self._result is not None

    def request(self, round_: Round, variants: tuple[Variant, ...]) -> None:
        """Begin to draw a round of Cases of `variants`; nothing may be requested before it is taken."""
        if self._background:
            self._thread = threading.Thread(target=self._draw, args=(round_, variants), daemon=True, name="attnfuzz-draw")
            self._thread.start()
        else:
            self._draw(round_, variants)

    def take(self, *, wait: bool, until: float | None = None) -> Drawn | None:
        """Return the round that was requested; None: there is none, or it is not drawn yet.

        Args:
            wait: wait until it is drawn,
            until: or until then (time.monotonic).

        Raises:
            Exception: what the strategy raised.
        """
        if self._thread is not None:
            if wait:
                self._thread.join(None if until is None else max(0.0, until - time.monotonic()))
            if self._thread.is_alive():
                return None
            self._thread = None
        result, self._result = self._result, None
        if isinstance(result, BaseException):
            raise result
        return result

    def _draw(self, round_: Round, variants: tuple[Variant, ...]) -> None:
        try:
            if self._strategy is None or variants != self._variants:
                self._strategy, self._variants = self._make(variants), variants
            cases = draw_round(self._strategy, self._seed, round_, self._values, self._takes)
            self._result = Drawn(round_, cases, [each.id for each in cases])
        except BaseException as error:  # raised where it is taken
            self._result = error
