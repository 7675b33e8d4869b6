"""Ratios of head to base with the interval that noise leaves them, by a paired bootstrap. Standard library only."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Ratio", "interval", "paired_ratio_of_medians", "paired_ratio_of_rms"]

_RESAMPLES = 1000
_CONFIDENCE = 0.99
Pair = tuple[float, float]
"""(head, base), of one Case or of one round."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Head over base; `low` and `high` bound it with a confidence of 99 %."""

    value: float
    low: float
    high: float

    def above(self, threshold: float) -> bool:
        """Whether noise does not explain that it is above `threshold`."""
        return self.low > threshold

    def clearly_below(self, threshold: float) -> bool:
        """Whether noise does not explain that it is below `threshold`."""
        return self.high < threshold

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def paired_ratio_of_rms(squares: Sequence[Pair]) -> Ratio:
    """Ratio of root mean squares over the same Cases, each with the same weight. `squares`: mean squares of each Case."""
    return _bootstrapped(squares, _ratio_of_rms)


def paired_ratio_of_medians(times: Sequence[Pair]) -> Ratio:
    """The median of the rounds' ratios: what slows a whole round down slows both. `times`: positive, of each round."""
    logs = [(math.log(head / base), 0.0) for head, base in times]
    ratio = _bootstrapped(logs, lambda pairs: statistics.median(each for each, _ in pairs))
    return Ratio(math.exp(ratio.value), math.exp(ratio.low), math.exp(ratio.high))


def _ratio_of_rms(pairs: Sequence[Pair]) -> float:
    head, base = math.fsum(each for each, _ in pairs), math.fsum(each for _, each in pairs)
    if base == 0:
        return 1.0 if head == 0 else math.inf
    return math.sqrt(head / base)


def _bootstrapped(pairs: Sequence[Pair], statistic: Callable[[Sequence[Pair]], float]) -> Ratio:
    """`statistic` of `pairs`, and of as many drawn from them again and again, always the same draws."""
    value = statistic(pairs)
    if all(pair == pairs[0] for pair in pairs):
        return Ratio(value, value, value)
    generator = random.Random(len(pairs))
    values = sorted(statistic(generator.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    tail = round((1 - _CONFIDENCE) / 2 * _RESAMPLES)
    return Ratio(value, values[tail], values[-1 - tail])


_Z = 1.959963984540054
"""Of a normal distribution 95 % lie within so many deviations."""


def interval(failed: int, runs: int) -> tuple[float, float]:
    """Wilson's confidence interval (95 %) of a rate seen `failed` times in `runs`: from 0 to 1, also where none or all failed."""
    if runs == 0:
        return 0.0, 1.0
    share, spread = failed / runs, _Z**2 / runs
    middle = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / runs + spread / (4 * runs))
    return (0.0 if failed == 0 else middle - half), (1.0 if failed == runs else middle + half)
