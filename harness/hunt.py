"""The hunt for one kernel's failures: rounds of Hypothesis until the budget is spent, each round past what is already known.

Hypothesis generates; what fails is then shrunk part by part (strategies/simpler.py), which needs fewer trials than shrinking
the choices behind a Case, and ends in smaller ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from attnfuzz.harness import events
from attnfuzz.harness.corpus import CaseFile, Corpus
from attnfuzz.harness.events import FailureFound, Found, KernelSummary, Listener, Shrunk, TrialFinished
from attnfuzz.harness.failure import Identity
from attnfuzz.harness.tally import Tally
from attnfuzz.harness.trial import DeviceLost
from attnfuzz.harness.verdict import Verdict
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.shapes import Variant
from attnfuzz.strategies.simpler import simpler

__all__ = ["Hunt"]

_ROUND = 100
"""Examples a round: Hypothesis stops soon after a round's first bug, and the clock is looked at between examples."""
_BARREN_ROUNDS = 3
"""Rounds without a new Case after which a small space counts as exhausted."""


class CaseFailed(AssertionError):
    """Raised to Hypothesis; one subclass per identity, so that Hypothesis tells them apart."""

    def __init__(self, case: Case, identity: Identity) -> None:
        super().__init__(f"{identity} with {case.canonical()}")
        self.case, self.identity = case, identity


@dataclass(slots=True)
class _Sighting:
    """A Failure while it is being shrunk."""

    case: Case
    verdict: Verdict
    cases_before: int
    seconds: float
    path: str | None
    trials: int = 0
    partly: bool = False


class Hunt:
    """Draw Cases, try each once, keep what fails, shrink it, and go on until `seconds` or `most` Cases are spent."""

    def __init__(
        self,
        kernel: Kernel,
        device: Device,
        *,
        limits: Limits,
        execute: Callable[[Case, Device], Verdict],
        listener: Listener,
        corpus: Corpus | None,
        stored: Sequence[CaseFile],
        seed: int,
        seconds: float | None,
        most: int | None,
        most_failures: int | None = None,
        shrink_seconds: float,
    ) -> None:
        self.kernel, self.device, self.limits = kernel, device, limits
        self.execute, self.listener, self.corpus, self.seed = execute, listener, corpus, seed
        self.stored, self.most_failures = stored, most_failures
        self.seconds, self.most, self.shrink_seconds = seconds, most, shrink_seconds
        self.found: dict[Identity, Found] = {}
        self._known: set[Identity] = set()
        self.tally = Tally()
        self._memo: dict[Case, Verdict] = {}
        self._classes: dict[Identity, type[CaseFailed]] = {}
        self._sighted: dict[Identity, _Sighting] = {}
        self._started: float | None = None
        self._ended: float | None = None
        self._variants: Sequence[Variant] = ()
        self._shrink_total = 0.0

    def run(self, variants: Sequence[Variant]) -> None:
        """Replay the corpus, then hunt. Time is counted from here, shrinking apart."""
        self._started, self._variants = time.monotonic(), variants
        try:
            self._replay()
            barren = number = 0
            while variants and not self._spent() and barren < _BARREN_ROUNDS:
                before = self.tally.cases
                self._round(number, variants)
                number += 1
                barren = barren + 1 if self.tally.cases == before else 0
        except DeviceLost as lost:
            self.record(lost.case, Verdict(status="fail", failures=(lost.failure,)))
            raise
        finally:
            self._ended = time.monotonic()

    def record(self, case: Case, verdict: Verdict) -> None:
        """Keep a Failure as it is, unshrunk."""
        if (identity := self._new(verdict)) is not None:
            self._sight(identity, case, verdict)
            self._sighted[identity].partly = True
            self._settle()

    def summary(self, compiles: int, compile_seconds: float) -> KernelSummary:
        """What was tried and found so far."""
        self._settle()
        now = self._ended or time.monotonic()
        seconds = 0.0 if self._started is None else now - self._started - self._shrink_total
        return KernelSummary(
            kernel=self.kernel.name,
            cases=self.tally.cases,
            shrink_cases=self.tally.shrink_cases,
            seconds=seconds,
            compiles=compiles,
            compile_seconds=compile_seconds,
            outputs=dict(self.tally.outputs),
            found=tuple(self.found.values()),
            features=dict(self.tally.features),
        )

    def _replay(self) -> None:
        for stored in self.stored:
            if reason := self.kernel.supports(stored.case.problem, stored.case.config, self.device):
                self.listener(events.CaseSkipped(str(stored.path), reason))
                continue
            verdict = self._try(stored.case, "replay")
            if (identity := self._new(verdict)) is not None:
                self._sight(identity, stored.case, verdict)
                self._shrink(identity)
                self._settle()
                if stored.found.get("minimal") is False and str(stored.path) != self.found[identity].path and self.corpus:
                    self.corpus.remove(stored.path)

    def _round(self, number: int, variants: Sequence[Variant]) -> None:
        @seed(self.seed * 7919 + number)
        @settings(
            max_examples=_ROUND,
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        @given(case=cases(self.kernel, device=self.device, limits=self.limits, variants=variants))
        def one_round(case: Case) -> None:
            failed = self._failed(case)
            if failed is not None:
                raise failed

        try:
            one_round()
        except (CaseFailed, BaseExceptionGroup, Flaky) as error:
            _check_expected(error)
        finally:
            self._settle()

    def _failed(self, case: Case) -> CaseFailed | None:
        """What to raise for a Case: None where it passes, is known already, or there is no time left to try it."""
        verdict = self._memo.get(case)
        if verdict is None:
            if self._spent():
                return None
            verdict = self._try(case, "generate")
        identity = self._new(verdict)
        if identity is None:
            return None
        if identity not in self._sighted:
            self._sight(identity, case, verdict)
            self._shrink(identity)
        made = self._classes.get(identity)
        if made is None:
            made = self._classes[identity] = type(f"CaseFailed_{identity.fingerprint}", (CaseFailed,), {})
        return made(case, identity)

    def _new(self, verdict: Verdict) -> Identity | None:
        """The first failure of a verdict that is not known yet: a known one must not hide another."""
        return next((each.identity for each in verdict.failures if each.identity not in self._known), None)

    def _shrink(self, identity: Identity) -> None:
        """Take the first simpler Case that fails alike, again and again, until none does or the time for it is spent."""
        start, seen = time.monotonic(), self._sighted[identity]
        seen.partly = True
        try:
            while (step := self._step(seen, identity, start + self.shrink_seconds)) is not None:
                seen.case, seen.verdict = step
            seen.partly = time.monotonic() >= start + self.shrink_seconds
        finally:
            self._shrink_total += time.monotonic() - start

    def _step(self, seen: _Sighting, identity: Identity, deadline: float) -> tuple[Case, Verdict] | None:
        for case in simpler(seen.case, self._variants):
            if self.kernel.supports(case.problem, case.config, self.device) is not None:
                continue
            verdict = self._memo.get(case)
            if verdict is None:
                if time.monotonic() >= deadline:
                    return None
                seen.trials += 1
                verdict = self._try(case, "shrink")
            if any(failure.identity == identity for failure in verdict.failures):
                return case, verdict
        return None

    def _spent(self) -> bool:
        assert self._started is not None
        if self.most is not None and self.tally.cases >= self.most:
            return True
        if self.most_failures is not None and len(self.found) >= self.most_failures:
            return True
        return self.seconds is not None and time.monotonic() - self._started - self._shrink_total >= self.seconds

    def _try(self, case: Case, phase: events.Phase) -> Verdict:
        verdict = self._memo[case] = self.execute(case, self.device)
        if phase == "shrink":
            self.tally.shrink_cases += 1
        else:
            self.tally.add(case, verdict)
        self.listener(TrialFinished(self.kernel.name, phase, case, verdict))
        return verdict

    def _sight(self, identity: Identity, case: Case, verdict: Verdict) -> None:
        """A new identity: on disk at once, so that nothing that happens later can lose it."""
        path = None
        if self.corpus:
            path = str(self.corpus.write(case, verdict, identity, minimal=False, seed=self.seed))
        seconds = 0.0 if self._started is None else time.monotonic() - self._started - self._shrink_total
        self._sighted[identity] = _Sighting(case, verdict, self.tally.cases, seconds, path)
        self.listener(FailureFound(identity, case, verdict, self.tally.cases, seconds, path))

    def _settle(self) -> None:
        """Each sighting becomes a finding, its file replaced by the minimal Case's."""
        for identity, seen in self._sighted.items():
            path = seen.path
            if self.corpus:
                path = str(self.corpus.write(seen.case, seen.verdict, identity, minimal=not seen.partly, seed=self.seed))
                if seen.path is not None and seen.path != path:
                    self.corpus.remove(Path(seen.path))
            self.found[identity] = Found(
                identity, seen.case, seen.verdict, seen.partly, path, seen.cases_before, seen.seconds, seen.trials
            )
            # What the minimal Case shows besides is the same bug, told with it.
            self._known |= {identity, *(each.identity for each in seen.verdict.failures)}
            self.listener(Shrunk(identity, seen.case, seen.verdict, seen.partly, seen.trials, path))
        self._sighted.clear()


def _check_expected(error: BaseException) -> None:
    """A round ends with the failures it raised; anything else that Hypothesis raises is the harness's own and goes on up."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            _check_expected(each)
    elif not isinstance(error, CaseFailed):
        raise error
