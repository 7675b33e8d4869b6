"""A failure that shows only in some runs: how often a Case shows it, and whether a simpler Case shows it as often.

Chance decides each run, so that a Case counts by several. A Case that shows the failure in half of its runs is what a person can
work with: a simpler one must then show it in half of its runs too. Below that, it must show it about as often, or shrinking would
end at a Case that fails once in a hundred runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from attnfuzz.harness.campaign.events import Rate
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.strategies.case import Case

__all__ = ["HALF", "MOST_RUNS", "RUNS", "Sample", "Sampler", "often"]

RUNS = 10
MOST_RUNS = 30
"""Runs by which the rate of a Case is measured: the first, and until it fails the second."""
HALF: Rate = (1, 2)
_HALF = 6, 10
_SELDOM = 2, 12
"""(failures, runs) by which a Case counts as failing in half of its runs, and as failing at all: many Cases are tried, so that
some that fail less often show fewer by chance."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Runs of one Case. `verdict`: the latest that shows the failure; None: none does."""

    failed: int = 0
    runs: int = 0
    verdict: Verdict | None = None

    @property
    def rate(self) -> Rate | None:
        """How often it fails; None: every time."""
        return None if self.failed == self.runs else (self.failed, self.runs)


def _share(rate: Rate | None) -> float:
    """Return the share of runs in which a failure shows."""
    return 1.0 if rate is None else rate[0] / rate[1]


def often(rate: Rate | None) -> bool:
    """Whether a failure shows in at least half of the runs."""
    return _share(rate) >= _share(HALF)


def _demanded(rate: Rate) -> tuple[int, int]:
    """Return (least failures, most runs) of a Case that fails in half of its runs, or as often as `rate` if that is less."""
    if often(rate):
        return _HALF
    least, most = _SELDOM
    return max(least, math.ceil(most * _share(rate) / 2)), most


class Sampler:
    """Runs a Case several times.

    Args:
        runner: runs it.
        shows: whether a Verdict has the failure.
        late: whether there is no time left to run a Case.
    """

    def __init__(self, runner: TrialRunner, shows: Callable[[Verdict], bool], late: Callable[[Case], bool]) -> None:
        self._runner, self._shows, self._late = runner, shows, late

    def measured(self, case: Case) -> Sample | None:
        """Run a Case in a new process as often as a rate is measured by; None: there is no time for it."""
        self._runner.fresh()
        sample = Sample()
        while sample.runs < RUNS or (not sample.failed and sample.runs < MOST_RUNS):
            if self._late(case):
                return None
            sample = self._once_more(case, sample)
        return sample

    def fails_as_often(self, case: Case, rate: Rate) -> Sample | None:
        """Run a Case until it is decided whether it fails as often as one of that rate; None: it does not, or time is up."""
        least, most = _demanded(rate)
        sample = Sample()
        while sample.failed < least:
            if sample.failed + most - sample.runs < least or self._late(case):
                return None
            sample = self._once_more(case, sample)
        return sample

    def _once_more(self, case: Case, sample: Sample) -> Sample:
        verdict = self._runner.run(case, "shrink")
        if self._shows(verdict):
            return Sample(sample.failed + 1, sample.runs + 1, verdict)
        return dataclasses.replace(sample, runs=sample.runs + 1)
