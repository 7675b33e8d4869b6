"""The hunt for one kernel's failures: rounds of Hypothesis until the budget is spent, each round past what is already known.

Hypothesis generates; what fails is then shrunk part by part (strategies/simpler.py), which needs fewer trials than shrinking
the choices behind a Case, and ends in smaller ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky
from msgspec.structs import replace

from attnfuzz.harness import events
from attnfuzz.harness.corpus import CaseFile, Corpus
from attnfuzz.harness.events import FailureFound, Found, KernelSummary, Listener, Shrunk, TrialFinished
from attnfuzz.harness.executors import Executor
from attnfuzz.harness.failure import OUTPUT_TITLES, Failure, Identity
from attnfuzz.harness.journal import Journal, LeftBehind
from attnfuzz.harness.lost import DeviceLost
from attnfuzz.harness.shrink import Shrinker, Sighting, tries
from attnfuzz.harness.tally import Tally
from attnfuzz.harness.verdict import Verdict
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.shapes import Variant

__all__ = ["DEADLY", "Hunt"]

_ROUND = 100
"""Examples a round: Hypothesis stops soon after a round's first bug, and the clock is looked at between examples."""
_BARREN_ROUNDS = 3
"""Rounds without a new Case after which a small space counts as exhausted."""
DEADLY = "run"
"""The check of a Case that ended whole runs, which no run tries again by itself."""
_DEADLY = 2
"""Runs that a Case may end before it counts as that."""


class CaseFailed(AssertionError):
    """Raised to Hypothesis; one subclass per identity, so that Hypothesis tells them apart."""

    def __init__(self, case: Case, identity: Identity) -> None:
        super().__init__(f"{identity} with {case.canonical()}")
        self.case, self.identity = case, identity


class Hunt:
    """Draw Cases, try each once, keep what fails, shrink it, and go on until `seconds` or `most` Cases are spent."""

    def __init__(
        self,
        kernel: Kernel,
        device: Device,
        *,
        limits: Limits,
        executor: Executor,
        listener: Listener,
        corpus: Corpus | None,
        stored: Sequence[CaseFile] = (),
        journal: Journal | None = None,
        left_behind: Sequence[LeftBehind] = (),
        seed: int,
        seconds: float | None,
        most: int | None,
        most_failures: int | None = None,
        shrink_seconds: float,
    ) -> None:
        self.kernel, self.device, self.limits = kernel, device, limits
        self.executor, self.listener, self.corpus, self.seed = executor, listener, corpus, seed
        self.stored, self.journal, self.left_behind, self.most_failures = stored, journal, left_behind, most_failures
        self.seconds, self.most, self.shrink_seconds = seconds, most, shrink_seconds
        self.found: dict[Identity, Found] = {}
        self._known: set[Identity] = set()
        self.tally = Tally()
        self._memo: dict[Case, Verdict] = {}
        self._classes: dict[Identity, type[CaseFailed]] = {}
        self._sighted: dict[Identity, Sighting] = {}
        self._started: float | None = None
        self._ended: float | None = None
        self._variants: Sequence[Variant] = ()
        self._shrink_total = 0.0
        self._replaced_before = executor.statistics.replaced

    def run(self, variants: Sequence[Variant]) -> None:
        """Replay what was in flight when a run died and what the corpus holds, then hunt. Shrinking has time of its own."""
        self._started, self._variants = time.monotonic(), variants
        try:
            self._resume()
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

    def record(self, case: Case, verdict: Verdict, *, minimal: bool = False) -> None:
        """Keep a Failure as it is, unshrunk."""
        if (identity := self._new(verdict)) is not None:
            self._sight(identity, case, verdict)
            self._sighted[identity].partly = not minimal
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
            replaced=self.executor.statistics.replaced - self._replaced_before,
            outputs=dict(self.tally.outputs),
            found=tuple(self.found.values()),
            features=dict(self.tally.features),
        )

    def _resume(self) -> None:
        """Cases that were in flight when their runs died: what kills every run with it must not do so for ever."""
        for left in self.left_behind:
            self.listener(events.CaseResumed(left.case, left.deaths))
            if reason := self.kernel.supports(left.case.problem, left.case.config, self.device):
                self.listener(events.CaseSkipped(str(left.path), reason))
            elif left.deaths >= _DEADLY and self.corpus:
                message = f"{left.deaths} runs died while this Case was in flight"
                failure = Failure(kernel=self.kernel.name, kind="crash", check=DEADLY, message=message)
                verdict = Verdict(status="fail", failures=(failure,))
                path = self.corpus.write(left.case, verdict, failure.identity, minimal=False, seed=self.seed)
                self.listener(events.CaseSkipped(str(path), message))
            else:
                self._tried_first(left.case, deaths=left.deaths)
            left.path.unlink(missing_ok=True)

    def _replay(self) -> None:
        for stored in self.stored:
            if reason := self._why_not_again(stored):
                self.listener(events.CaseSkipped(str(stored.path), reason))
                continue
            identity = self._tried_first(stored.case, runs=tries(stored.rate))
            if (
                identity
                and stored.found.get("minimal") is False
                and str(stored.path) != self.found[identity].path
                and self.corpus
            ):
                self.corpus.remove(stored.path)

    def _why_not_again(self, stored: CaseFile) -> str | None:
        told = stored.found.get("identity")
        if isinstance(told, dict) and told.get("check") == DEADLY:
            return f"{stored.found.get('message')}; only `attnfuzz repro` tries it again"
        return self.kernel.supports(stored.case.problem, stored.case.config, self.device)

    def _tried_first(self, case: Case, *, runs: int = 1, deaths: int = 0) -> Identity | None:
        """Try a Case known from before, shrink what it shows; returns the identity that it is kept under."""
        verdict = self._try(case, "replay", deaths=deaths)
        for _ in range(runs - 1):
            if verdict.failures:
                break
            verdict = self._memo[case] = self._executed(case)
        if (identity := self._new(verdict)) is None:
            return None
        self._sight(identity, case, verdict)
        self._shrink(identity)
        return self._settle()[identity]

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
        start = time.monotonic()
        self._sighted[identity].partly = True
        shrinker = Shrinker(self._attempt, self._supported, self.executor.fresh, self._memo, self._variants)
        try:
            shrinker.shrink(self._sighted[identity], identity, self.shrink_seconds)
        finally:
            self._shrink_total += time.monotonic() - start

    def _attempt(self, case: Case, patient: bool) -> Verdict:
        verdict = self._memo[case] = self._executed(case, patient=patient)
        self.tally.shrink_cases += 1
        self.listener(TrialFinished(self.kernel.name, "shrink", case, verdict))
        return verdict

    def _supported(self, case: Case) -> bool:
        return self.kernel.supports(case.problem, case.config, self.device) is None

    def _spent(self) -> bool:
        assert self._started is not None
        if self.most is not None and self.tally.cases >= self.most:
            return True
        if self.most_failures is not None and len(self.found) >= self.most_failures:
            return True
        return self.seconds is not None and time.monotonic() - self._started - self._shrink_total >= self.seconds

    def _try(self, case: Case, phase: events.Phase, *, deaths: int = 0) -> Verdict:
        verdict = self._memo[case] = self._executed(case, deaths=deaths)
        self.tally.add(case, verdict)
        self.listener(TrialFinished(self.kernel.name, phase, case, verdict))
        return verdict

    def _executed(self, case: Case, *, patient: bool = False, deaths: int = 0) -> Verdict:
        """Run a Case that is on disk before it is launched."""
        if self.journal:
            self.journal.launch(case, deaths)
        verdict = self.executor.trial(case, patient=patient)
        if self.journal:
            self.journal.landed()
        return verdict

    def _sight(self, identity: Identity, case: Case, verdict: Verdict) -> None:
        """A new identity: on disk at once, so that nothing that happens later can lose it."""
        path = None
        if self.corpus:
            path = str(self.corpus.write(case, verdict, identity, minimal=False, seed=self.seed))
        seconds = 0.0 if self._started is None else time.monotonic() - self._started - self._shrink_total
        self._sighted[identity] = Sighting(case, verdict, self.tally.cases, seconds, path)
        self.listener(FailureFound(identity, case, verdict, self.tally.cases, seconds, path))

    def _settle(self) -> dict[Identity, Identity]:
        """Each sighting becomes a finding, its file replaced by the minimal Case's; returns what each is called now."""
        names = {}
        for sighted, seen in self._sighted.items():
            verdict = self._labelled(sighted, seen)
            identity = names[sighted] = verdict.failures[0].identity if verdict is not seen.verdict else sighted
            path = seen.path
            if self.corpus:
                minimal = not seen.partly
                path = str(self.corpus.write(seen.case, verdict, identity, minimal=minimal, seed=self.seed, rate=seen.rate))
                if seen.path is not None and seen.path != path:
                    self.corpus.remove(Path(seen.path))
            self.found[identity] = Found(
                identity, seen.case, verdict, seen.partly, path, seen.cases_before, seen.seconds, seen.trials, seen.rate
            )
            # What the minimal Case shows besides is the same bug, told with it.
            self._known |= {identity, sighted, *(each.identity for each in seen.verdict.failures)}
            self.listener(Shrunk(identity, seen.case, verdict, seen.partly, seen.trials, path))
        self._sighted.clear()
        return names

    def _labelled(self, identity: Identity, seen: Sighting) -> Verdict:
        """The verdict, or, where an output declared deterministic is wrong only sometimes, one that says so first."""
        failure = seen.failure(identity)
        deterministic = identity.output in self.kernel.capabilities.deterministic
        if seen.rate is None or failure is None or not deterministic or identity.kind not in ("mismatch", "nonfinite"):
            return seen.verdict
        title = OUTPUT_TITLES[identity.output] if identity.output else ""
        message = f"{title} differs from run to run, though declared deterministic: {failure.message}"
        first = replace(failure, kind="nondeterministic", message=message)
        return replace(seen.verdict, failures=(first, *(each for each in seen.verdict.failures if each is not failure)))


def _check_expected(error: BaseException) -> None:
    """A round ends with the failures it raised; anything else that Hypothesis raises is the harness's own and goes on up."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            _check_expected(each)
    elif not isinstance(error, CaseFailed):
        raise error
