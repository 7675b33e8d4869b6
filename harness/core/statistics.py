"""Intervals of ratios by a paired bootstrap and of rates by Wilson, and Fisher's exact test. Standard library only."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Ratio", "fisher", "interval", "paired_ratio_of_medians", "paired_ratio_of_rms"]

_RESAMPLES = 1000
_CONFIDENCE = 0.99
_Z = 1.959963984540054
"""95 % of a normal distribution lie within this many deviations."""
Pair = tuple[float, float]
"""(head, base) of one Case or of one round."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Head over base; `low` and `high` bound it with 99 % confidence."""

    value: float
    low: float
    high: float

    def above(self, threshold: float) -> bool:
        """Whether it is above `threshold` by more than noise."""
        return self.low > threshold

    def clearly_below(self, threshold: float) -> bool:
        """Whether it is below `threshold` by more than noise."""
        return self.high < threshold

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def paired_ratio_of_rms(squares: Sequence[Pair]) -> Ratio:
    """Return the ratio of root mean squares over the same Cases, equally weighted. `squares`: mean squares of each Case."""
    return _bootstrapped(squares, _ratio_of_rms)


def paired_ratio_of_medians(times: Sequence[Pair]) -> Ratio:
    """Return the median of the rounds' ratios, since a slow round slows head and base. `times`: positive, of each round."""
    logs = [(math.log(head / base), 0.0) for head, base in times]
    ratio = _bootstrapped(logs, lambda pairs: statistics.median(each for each, _ in pairs))
    return Ratio(math.exp(ratio.value), math.exp(ratio.low), math.exp(ratio.high))


def _ratio_of_rms(pairs: Sequence[Pair]) -> float:
    head, base = math.fsum(each for each, _ in pairs), math.fsum(each for _, each in pairs)
    if base == 0:
        return 1.0 if head == 0 else math.inf
    return math.sqrt(head / base)


def _bootstrapped(pairs: Sequence[Pair], statistic: Callable[[Sequence[Pair]], float]) -> Ratio:
    """Return `statistic` of `pairs` with its interval over resamples of them, always the same ones."""
    value = statistic(pairs)
    if all(pair == pairs[0] for pair in pairs):
        return Ratio(value, value, value)
    generator = random.Random(len(pairs))
    values = sorted(statistic(generator.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    tail = round((1 - _CONFIDENCE) / 2 * _RESAMPLES)
    return Ratio(value, values[tail], values[-1 - tail])


def interval(failed: int, runs: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of the failure rate, within 0 to 1 also where none or all of `runs` failed."""
    if runs == 0:
        return 0.0, 1.0
    share, spread = failed / runs, _Z**2 / runs
    middle = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / runs + spread / (4 * runs))
    return (0.0 if failed == 0 else middle - half), (1.0 if failed == runs else middle + half)


def fisher(having: int, of: int, other_having: int, other_of: int) -> float:
    """Return the p-value of Fisher's exact test, one-sided: of at least `having` by chance.

    Of `of` Cases of one kind `having` have a property, of `other_of` Cases of another kind `other_having`.
    """
    total, with_it = of + other_of, having + other_having
    whole = _log_choose(total, of)
    most = min(of, with_it)
    terms = (_log_choose(with_it, n) + _log_choose(total - with_it, of - n) - whole for n in range(having, most + 1))
    return min(1.0, math.fsum(math.exp(each) for each in terms))


def _log_choose(n: int, k: int) -> float:
    if not 0 <= k <= n:
        return -math.inf
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
