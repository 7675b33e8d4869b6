"""Shrinking: from the Case that failed first to the smallest that fails alike, and how often it does.

A failure counts as reliable when it shows in every rerun. One that shows only sometimes is rerun to measure its rate, and a
simpler Case must show it about as often; where the simplest shows it in fewer than half of its runs, larger ones that may show it
more often are tried (chance.py). One that does not show in a new process may need what earlier Cases left in the old one: these
are then part of the Case (`Case.after`), and are shrunk with it. A Case that hangs costs a deadline each time, one that passes
nearly nothing: nearly minimal ones are tried first, before the Case itself is run again.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from attnfuzz.harness.campaign.chance import HALF, MOST_RUNS, Sampler, often
from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.campaign.past import parts_of_past
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.isolation.outcomes import Past
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Capabilities
from attnfuzz.strategies.case import CALLS, Case
from attnfuzz.strategies.nearly_minimal import nearly_minimal
from attnfuzz.strategies.shrink_steps import change, larger, simpler
from attnfuzz.strategies.variants import Variant

__all__ = ["Shrinker"]

_CONFIRMATIONS = 2
_RERUNS = 8
_NEARLY_MINIMAL = 0.25
"""Share of the time in which nearly minimal Cases are tried first, of a Case that hangs."""
_ENDS_PROCESS = ("crash", "hang", "illegal-access")


class _TimeIsUp(Exception):
    """Ends the trials of one step."""


class Shrinker:
    """Makes the Case of a finding simpler while it fails alike.

    `finding` is the simplest so far, at any time: also after an error or Ctrl-C in the middle.

    Args:
        finding: what was found.
        runner: runs the Cases; a Case in its memo is not run again.
        supported: whether the kernel takes a Case.
        variants: to stay within, simplest first.
        can: what the kernel declares: the multiples and shapes that steps go by.
        room: whether a Case that is larger than the simplest so far may run.
    """

    def __init__(
        self,
        finding: Finding,
        runner: TrialRunner,
        supported: Callable[[Case], bool],
        variants: Sequence[Variant],
        can: Capabilities | None = None,
        room: Callable[[Case], bool] = lambda _: True,
    ) -> None:
        self.finding = dataclasses.replace(finding, shrunk=True, partly=True)
        self._runner, self._supported, self._variants = runner, supported, variants
        self._can, self._room = can or Capabilities(unequal=True), room
        self._sampler = Sampler(runner, self._shows, self._late)
        self._goal = finding.rate or HALF
        """How often a simpler Case must fail, where the failure shows only sometimes."""
        self._rejected = set[frozenset[tuple[str, object]]]()
        """Changes after which a Case did not fail alike."""
        self._needs_its_check = False
        self._misled = False
        """Whether a Case failed by what others had left in the process."""
        self._afresh = finding.case.check in CALLS
        """Every step is tried in a new process: what a Case leaves in a used one may hide what the calls of the next leave."""
        self._untried = 0
        """Cases that its process had run before, and that were not run again."""
        self._end = 0.0

    def shrink(self, seconds: float) -> Finding:
        """Take the first simpler Case that fails alike, again and again, until none does or `seconds` are spent."""
        self._end = time.monotonic() + seconds
        before = self._runner.trials
        original = self.finding.case, self.finding.verdict
        try:
            partly = self._reach_nearly_minimal(_NEARLY_MINIMAL * seconds) and self._take_steps(original)
            if self.finding.case == original[0]:
                partly = self._confirm_and_take_steps()
            self.finding = dataclasses.replace(self.finding, partly=partly)
        finally:
            trials = self.finding.shrink_trials + self._runner.trials - before
            self.finding = dataclasses.replace(self.finding, shrink_trials=trials)
        return self.finding

    def _reach_nearly_minimal(self, seconds: float) -> bool:
        """Go from a Case that hangs to the first nearly minimal one that does, if one is found in time; whether there is one."""
        case, end = self.finding.case, time.monotonic() + seconds
        if self.finding.identity.kind != "hang" or case.after:
            return False
        for each in nearly_minimal(case, self._variants, self._can):
            if time.monotonic() >= end:
                break
            if self._supported(each) and self._shows(verdict := self._tried_again(each)):
                self._keep(each, verdict)
                return True
        return False

    def _confirm_and_take_steps(self) -> bool:
        """Rerun the Case, then take steps from it; returns whether some are not tried."""
        self._confirm()
        first = self.finding.case, self.finding.verdict
        partly = self._take_steps(first)
        if partly and self._misled and not self._late():
            self._count_failures([True])
            self._afresh |= self.finding.rate is None
            partly = self._take_steps(first)
        if self.finding.case.after and self._fails_alone():
            partly = self._take_steps((self.finding.case, self.finding.verdict))
        return partly

    def _take_steps(self, first: tuple[Case, Verdict]) -> bool:
        """Take steps from `first`, or none where the last does not fail in a new process; returns whether some are not tried."""
        self._misled = False
        self._descend(set())
        if self.finding.rate is not None:
            return self._settle(first)
        # The last run of a Case that hangs takes a full deadline, after all steps have been tried.
        late = self._late()
        if self.finding.case == first[0] or self._fails_once_more():
            return late
        # A step followed chance, what earlier Cases had left in the process, or took a slow Case for one that hangs.
        self._misled = self.finding.identity.kind not in _ENDS_PROCESS
        self._keep(*first)
        return True

    def _descend(self, passed: set[Case]) -> None:
        """Take steps until none is left or time is up; `passed`: simpler Cases that are not to be tried."""
        # No Case is taken twice: steps whose Verdicts are known would go on for ever if they led in a circle.
        passed.add(self.finding.case)
        while (step := self._step(passed)) is not None:
            self._keep(*step)
            passed.add(step[0])

    def _settle(self, first: tuple[Case, Verdict]) -> bool:
        """Measure how often the simplest Case fails, and look for a larger one if that is seldom; returns as `_take_steps`."""
        rate = self.finding.rate
        failed = self.finding.case == first[0] or self._measures()
        if failed and often(self._goal) and self.finding.rate and not often(self.finding.rate):
            # It showed in half of some runs by chance: those that show it as seldom as this one are simpler Cases too.
            self._goal = self.finding.rate
            self._descend(set())
            failed = self._measures()
        if not failed:
            self._keep(*first)
            why = "" if often(rate) else f"a simpler Case failed, but in none of {MOST_RUNS} more runs"
            self.finding = dataclasses.replace(self.finding, rate=rate, seldom=why)
            return True
        if not often(self.finding.rate):
            simplest = self.finding
            tried = self._grow(first[0])
            if self.finding.case == simplest.case or not (self._ends_often({simplest.case}) or self._ends_often(None)):
                why = f"no larger Case shows it in half of its runs (tried: {tried})"
                self.finding = dataclasses.replace(simplest, seldom=f"{why}; time was over" if self._late() else why)
        return self._late()

    def _grow(self, first: Case) -> int:
        """Go to a larger Case that fails in half of its runs, if there is one; returns how many ran."""
        case, tried = self.finding.case, 0
        for each in dict.fromkeys((*larger(case), first)):
            if each == case or not (self._supported(each) and self._room(each)) or self._late(each):
                continue
            tried += 1
            sample = self._sampler.fails_as_often(each, HALF)
            if sample is not None and sample.verdict is not None:
                self._goal = HALF
                self._keep(each, sample.verdict)
                break
        return tried

    def _ends_often(self, passed: set[Case] | None) -> bool:
        """Whether steps from this Case (None: no steps) end at one that fails in half of its runs; if not, they are undone."""
        before = self.finding
        if passed is not None:
            self._descend(passed)
        if self._measures() and often(self.finding.rate):
            return True
        self.finding = before
        return False

    def _measures(self) -> bool:
        """Measure how often the simplest Case fails; whether it has failed at all, or there is no time to measure it."""
        case = self.finding.case
        sample = self._sampler.measured(case)
        if sample is not None and sample.verdict is not None:
            self._keep(case, sample.verdict)
            self.finding = dataclasses.replace(self.finding, rate=sample.rate)
        return sample is None or sample.failed > 0

    def _confirm(self) -> None:
        """Rerun what was seen once; measure its rate where it does not show every time."""
        case, outcomes = self.finding.case, [True]
        past = self._runner.past(case)
        for _ in range(_CONFIRMATIONS):
            if not self._late():
                outcomes.append(self._shows(self._tried_again(case)))
        steady = all(outcomes)
        if steady:
            # What ends its process has shown in new ones already, though they may have built something in advance.
            known = (self.finding.identity.kind in _ENDS_PROCESS and not self._runner.past(case)) or self._late()
            if known or self._shows(self._tried_afresh(case)) or self._fails_with_own_calls():
                return
            outcomes.append(False)
        if self._fails_after(past):
            return
        if not steady:
            self._runner.fresh()
        self._count_failures(outcomes)

    def _count_failures(self, outcomes: list[bool]) -> None:
        """Measure the rate of a Case of which `outcomes` are known; it stays without one if it fails every time."""
        for _ in range(_RERUNS):
            if self._late():
                break
            outcomes.append(self._shows(self._tried(self.finding.case)))
        rate = None if all(outcomes) else (sum(outcomes), len(outcomes))
        self.finding = dataclasses.replace(self.finding, rate=rate, untried=self._untried)
        self._goal = HALF if rate is None else rate

    def _fails_with_own_calls(self) -> bool:
        """Replace a Case that failed by what earlier Cases left in its process by one with calls of its own, if it fails."""
        case = self.finding.case
        for check in CALLS if case.check == "oracle" else ():
            with_calls = replace(case, check=check)
            if not self._late() and self._supported(with_calls) and self._shows(self._tried_afresh(with_calls)):
                verdict = self._tried_afresh(with_calls)
                if self._shows(verdict):
                    self._keep(with_calls, verdict)
                    self._needs_its_check = True
                    return True
        return False

    def _fails_after(self, past: Past) -> bool:
        """Have the Case run after few of those that its process had run before, if it fails so."""
        alone = self.finding.case
        self._untried = past.dropped + len(past.cases)
        for earlier in () if alone.after else parts_of_past(alone, past.cases):
            case = replace(alone, after=earlier)
            if self._late(case):
                return False
            verdict = self._tried(case)
            if self._shows(verdict):
                if needed := self._needs_earlier(case):
                    self._keep(case, verdict)
                return needed
            self._untried = min(self._untried, past.dropped + len(past.cases) - len(earlier))
        self._untried = past.dropped
        return False

    def _needs_earlier(self, case: Case) -> bool:
        """Whether a Case fails every time after its earlier ones, and never alone."""
        for number in range(_CONFIRMATIONS):
            if number and self._late(case):
                break
            if self._shows(self._tried_afresh(case.alone)) or not self._shows(self._tried(case)):
                return False
        return True

    def _fails_alone(self) -> bool:
        """Drop the earlier Cases of a minimal one that does not need them: a step has led to another failure of the identity."""
        alone = self.finding.case.alone
        verdict = self._tried_afresh(alone)
        if self._shows(verdict):
            self._keep(alone, verdict)
        return self._shows(verdict)

    def _fails_once_more(self) -> bool:
        """Whether the minimal Case fails in a new process, with full deadlines, and again; its first Verdict is kept."""
        self._runner.fresh()
        case = self.finding.case
        verdict = self._runner.run(case, "shrink", patient=True)
        if not self._shows(verdict):
            return False
        self._keep(case, verdict)
        # What shows in most runs has led to a Case that shows it in few.
        again = 0 if self.finding.identity.kind in _ENDS_PROCESS else _CONFIRMATIONS
        return all(self._late(case) or self._shows(self._tried_again(case)) for _ in range(again))

    def _step(self, passed: set[Case]) -> tuple[Case, Verdict] | None:
        """The first simpler Case that fails alike; None: there is none, or time is up."""
        now = self.finding
        for case in self._new_steps_first(now.case):
            other_check = case.check != now.case.check
            if case in passed or (other_check and self._needs_its_check) or not self._supported(case):
                continue
            try:
                verdict = self._outcome(case, other_check=other_check)
            except _TimeIsUp:
                return None
            if verdict is not None:
                return case, verdict
            passed.add(case)
            self._rejected.add(change(now.case, case))
            # Tried once, since it takes a new process.
            self._needs_its_check |= other_check
        return None

    def _new_steps_first(self, case: Case) -> Iterator[Case]:
        """Yield simpler Cases, those last that change what has passed when it was changed in an earlier Case."""
        later = []
        for each in simpler(case, self._variants, self._can):
            if change(case, each) in self._rejected:
                later.append(each)
            else:
                yield each
        yield from later

    def _outcome(self, case: Case, *, other_check: bool) -> Verdict | None:
        """The Verdict of a simpler Case, if it fails alike.

        Raises:
            _TimeIsUp: before that was decided.
        """
        chance = self.finding.rate is not None
        known = None if other_check or self._afresh or chance else self._runner.memo.get(case)
        if known is None and (other_check or self._afresh):
            # What earlier Cases left in the process must not stand for the calls that this one makes no more.
            self._runner.fresh()
        if chance:
            return self._fails_as_often(case)
        verdict = known or self._runner.run(case, "shrink", before=functools.partial(self._stop_if_late, case))
        return verdict if self._shows(verdict) else None

    def _fails_as_often(self, case: Case) -> Verdict | None:
        """A Verdict that shows the failure, if the Case fails about as often as those before it."""
        sample = self._sampler.fails_as_often(case, self._goal)
        if sample is None:
            self._stop_if_late(case)
            return None
        if not often(self._goal) and 2 * sample.failed >= sample.runs and self._sampler.fails_as_often(case, HALF):
            self._goal = HALF
        return sample.verdict

    def _tried(self, case: Case) -> Verdict:
        return self._runner.run(case, "shrink")

    def _tried_again(self, case: Case) -> Verdict:
        """Its Verdict in the same process, or in a new one if it makes calls, which what others left may stand for or hide."""
        return self._tried_afresh(case) if case.check in CALLS else self._tried(case)

    def _tried_afresh(self, case: Case) -> Verdict:
        """Its Verdict in a process that has made no calls yet."""
        self._runner.fresh()
        return self._tried(case)

    def _shows(self, verdict: Verdict) -> bool:
        return any(failure.identity == self.finding.identity for failure in verdict.failures)

    def _keep(self, case: Case, verdict: Verdict) -> None:
        self.finding = dataclasses.replace(self.finding, case=case, verdict=verdict)

    def _late(self, case: Case | None = None) -> bool:
        """Whether time is up, or would be before the Cases that run before `case` are done."""
        earlier = (self._runner.memo.get(each) for each in (case.after if case else ()))
        return time.monotonic() + sum(sum(each.seconds.values()) for each in earlier if each) >= self._end

    def _stop_if_late(self, case: Case) -> None:
        if self._late(case):
            raise _TimeIsUp
