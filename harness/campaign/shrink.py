"""From the Case that failed first to the smallest that fails alike, and how often it does.

A failure counts as reliable when it shows in every rerun. One that shows only sometimes is rerun to measure its rate, and every
simpler Case is then tried as often as that rate demands before it counts as a pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from attnfuzz.harness.judge.failure import Failure, Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.strategies.case import CALLS, Case
from attnfuzz.strategies.shapes import Variant
from attnfuzz.strategies.shrink_steps import simpler

__all__ = ["Rate", "Shrinker", "Sighting", "tries"]

Rate = tuple[int, int]
"""A failure showed in so many of so many runs of one Case."""

_CONFIRMATIONS = 2
_RERUNS = 8
_MOST_TRIES = 12
_DEADLY = ("crash", "hang", "illegal-access")


def tries(rate: Rate | None) -> int:
    """Runs after which a failure of that rate has shown with a probability of 95 %."""
    if rate is None or rate[0] >= rate[1]:
        return 1
    return min(_MOST_TRIES, math.ceil(math.log(0.05) / math.log(1 - rate[0] / rate[1])))


@dataclass(slots=True)
class Sighting:
    """A Failure while it is being shrunk."""

    case: Case
    verdict: Verdict
    cases_before: int
    seconds: float
    path: str | None
    trials: int = 0
    partly: bool = False
    rate: Rate | None = None
    """None: it shows every time."""

    def failure(self, identity: Identity) -> Failure | None:
        """The Failure of that identity, as last seen."""
        return next((each for each in self.verdict.failures if each.identity == identity), None)


class Shrinker:
    """Makes Cases of one kernel simpler while they fail alike.

    Args:
        attempt: runs a Case; True asks for patience, deadlines of full length.
        supported: whether the kernel takes a Case.
        fresh: has the next attempt made in a process of its own.
        memo: verdicts of Cases tried already.
        variants: to stay within, simplest first.
    """

    def __init__(
        self,
        attempt: Callable[[Case, bool], Verdict],
        supported: Callable[[Case], bool],
        fresh: Callable[[], None],
        memo: dict[Case, Verdict],
        variants: Sequence[Variant],
    ) -> None:
        self._attempt, self._supported, self._fresh = attempt, supported, fresh
        self._memo, self._variants = memo, variants
        self._needs_its_check = False

    def shrink(self, seen: Sighting, identity: Identity, seconds: float) -> None:
        """Take the first simpler Case that fails alike, again and again, until none does or `seconds` are spent."""
        end = time.monotonic() + seconds
        seen.partly, self._needs_its_check = True, False
        self._confirm(seen, identity, end)
        first, passed = (seen.case, seen.verdict), set[Case]()
        while (step := self._step(seen, identity, passed, end)) is not None:
            seen.case, seen.verdict = step
        seen.partly = time.monotonic() >= end
        if seen.case != first[0] and not self._stands(seen, identity):
            # Shrunk along noise, or a slow Case taken for one that hangs.
            (seen.case, seen.verdict), seen.partly = first, True

    def _confirm(self, seen: Sighting, identity: Identity, end: float) -> None:
        """Rerun what was seen once; measure its rate where it does not show every time."""
        found = [True]
        for _ in range(_CONFIRMATIONS):
            if time.monotonic() < end:
                found.append(_has(self._attempted(seen, seen.case, patient=False), identity))
        if all(found):
            # What ends its process has shown in new ones already.
            known = identity.kind in _DEADLY or time.monotonic() >= end
            if known or self._shows_afresh(seen, seen.case, identity) or self._told_by_calls(seen, identity, end):
                return
            found.append(False)
        else:
            self._fresh()
        for _ in range(_RERUNS):
            if time.monotonic() >= end:
                break
            found.append(_has(self._attempted(seen, seen.case, patient=False), identity))
        seen.rate = (sum(found), len(found))

    def _shows_afresh(self, seen: Sighting, case: Case, identity: Identity) -> bool:
        """Whether it shows in a process that has made no calls yet."""
        self._fresh()
        return _has(self._attempted(seen, case, patient=False), identity)

    def _told_by_calls(self, seen: Sighting, identity: Identity, end: float) -> bool:
        """Take a Case with earlier calls of its own for one that failed by what earlier Cases had left in its process."""
        for check in CALLS if seen.case.check == "oracle" else ():
            case = replace(seen.case, check=check)
            if time.monotonic() < end and self._supported(case) and self._shows_afresh(seen, case, identity):
                self._fresh()
                verdict = self._attempted(seen, case, patient=False)
                if _has(verdict, identity):
                    seen.case, seen.verdict, self._needs_its_check = case, verdict, True
                    return True
        return False

    def _stands(self, seen: Sighting, identity: Identity) -> bool:
        """Whether the minimal Case fails once more, patiently tried; that Verdict is the one to show."""
        if seen.case.check in CALLS:
            self._fresh()
        for _ in range(tries(seen.rate)):
            verdict = self._attempted(seen, seen.case, patient=True)
            if _has(verdict, identity):
                seen.verdict = verdict
                return True
        return False

    def _step(self, seen: Sighting, identity: Identity, passed: set[Case], end: float) -> tuple[Case, Verdict] | None:
        for case in simpler(seen.case, self._variants):
            other_check = case.check != seen.case.check
            if case in passed or (other_check and self._needs_its_check) or not self._supported(case):
                continue
            verdict = None if other_check else self._memo.get(case)
            if verdict is None or (seen.rate is not None and not _has(verdict, identity)):
                verdict = self._tried(seen, case, identity, end)
            if verdict is None:
                return None
            if _has(verdict, identity):
                return case, verdict
            passed.add(case)
            # Asked once: every answer costs a new process.
            self._needs_its_check |= other_check
        return None

    def _tried(self, seen: Sighting, case: Case, identity: Identity, end: float) -> Verdict | None:
        """The first verdict with the failure, or the last without; None when time is up."""
        verdict = None
        if case.check != seen.case.check:
            # What earlier Cases left in the process must not stand for the calls that this one makes no more.
            self._fresh()
        for _ in range(tries(seen.rate)):
            if time.monotonic() >= end:
                return None
            verdict = self._attempted(seen, case, patient=False)
            if _has(verdict, identity):
                break
        return verdict

    def _attempted(self, seen: Sighting, case: Case, *, patient: bool) -> Verdict:
        seen.trials += 1
        return self._attempt(case, patient)


def _has(verdict: Verdict | None, identity: Identity) -> bool:
    return verdict is not None and any(failure.identity == identity for failure in verdict.failures)
