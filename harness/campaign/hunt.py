"""The hunt for one kernel's failures: rounds of Hypothesis until the budget is spent, each round past what is already known.

Hypothesis generates; what fails is then shrunk part by part (strategies/shrink_steps.py), which needs fewer trials than shrinking
the choices behind a Case, and ends in smaller ones.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from attnfuzz.harness.campaign import events
from attnfuzz.harness.campaign.corpus import CaseFile, Corpus
from attnfuzz.harness.campaign.coverage import Tally
from attnfuzz.harness.campaign.events import FailureFound, Found, KernelSummary, Listener, Shrunk, TrialFinished
from attnfuzz.harness.campaign.journal import Journal, LeftBehind
from attnfuzz.harness.campaign.maps import Gallery
from attnfuzz.harness.campaign.shrink import Shrinker, Sighting, tries
from attnfuzz.harness.isolation.executors import Executor
from attnfuzz.harness.judge.failure import OUTPUT_TITLES, Failure, Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.shapes import Variant
from attnfuzz.strategies.trials import trial_cases

__all__ = ["DEADLY", "Hunt"]

_ROUND = 100
"""Examples a round; each round has a seed of its own, so that a hunt may go on for as long as it likes."""
_BARREN_ROUNDS = 3
"""Rounds without a new Case after which a small space counts as exhausted."""
DEADLY = "run"
"""The check of a Case that ended whole runs, which no run tries again by itself."""
_DEATHS = 2
"""Runs that a Case may end before it counts as that."""


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
        gallery: Gallery | None = None,
        left_behind: Sequence[LeftBehind] = (),
        seed: int,
        seconds: float | None,
        most: int | None,
        most_failures: int | None = None,
        shrink_seconds: float,
        plain: bool = False,
    ) -> None:
        self.kernel, self.device, self.limits = kernel, device, limits
        self.executor, self.listener, self.corpus, self.seed = executor, listener, corpus, seed
        self.gallery = gallery
        self.stored, self.journal, self.left_behind, self.most_failures = stored, journal, left_behind, most_failures
        self.seconds, self.most, self.shrink_seconds = seconds, most, shrink_seconds
        self._strategy = cases if plain else trial_cases
        self.found: dict[Identity, Found] = {}
        self._known: set[Identity] = set()
        self.tally = Tally()
        self._memo: dict[Case, Verdict] = {}
        self._flying: Case | None = None
        self._sighted: dict[Identity, Sighting] = {}
        self.not_kept: str | None = None
        """Why Cases could not be written to disk, where they could not: then the run goes on, and tells them."""
        self._started: float | None = None
        self._ended: float | None = None
        self._variants: Sequence[Variant] = ()
        self._shrink_total = 0.0
        self._before = (0, 0)

    def run(self, variants: Sequence[Variant]) -> None:
        """Replay what was in flight when a run died and what the corpus holds, then hunt. Shrinking has time of its own."""
        self._started, self._variants = time.monotonic(), variants
        self._before = (self.executor.statistics.replaced, len(self.executor.statistics.recoveries))
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

    def cannot_keep(self, case: Case, error: OSError, *, failing: bool = False) -> None:
        """Tell that `case` could not be written, and go on."""
        where = f" ({error.filename})" if error.filename else ""
        self.not_kept = self.not_kept or f"{error.strerror or error}{where}"
        self.listener(events.CaseNotKept(case, self.not_kept, failing))

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
            replaced=self.executor.statistics.replaced - self._before[0],
            recoveries=tuple(self.executor.statistics.recoveries[self._before[1] :]),
            outputs=dict(self.tally.outputs),
            found=tuple(self.found.values()),
            features=dict(self.tally.features),
        )

    def _resume(self) -> None:
        """Cases that were in flight when their runs died: what kills every run with it must not do so for ever."""
        for left in self.left_behind:
            self.listener(events.CaseResumed(left.case, left.deaths))
            if reason := why_not_case(self.kernel, left.case, self.device):
                self.listener(events.CaseSkipped(str(left.path), reason))
            elif left.deaths >= _DEATHS and self.corpus:
                message = f"{left.deaths} runs died while this Case was in flight"
                failure = Failure(kernel=self.kernel.name, kind="crash", check=DEADLY, message=message)
                verdict = Verdict(status="fail", failures=(failure,))
                path = self._written(left.case, verdict, failure.identity, minimal=False)
                if path is None:
                    continue
                self.listener(events.CaseSkipped(path, message))
            else:
                self._tried_first(left.case, left=left)
                continue
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
        return why_not_case(self.kernel, stored.case, self.device)

    def _tried_first(self, case: Case, *, runs: int = 1, left: LeftBehind | None = None) -> Identity | None:
        """Try a Case known from before, shrink what it shows; returns the identity that it is kept under."""
        self._launch(case, left=left)
        verdict = self._landed(case, "replay")
        for _ in range(runs - 1):
            if verdict.failures:
                break
            verdict = self._attempt(case, False)
        if (identity := self._new(verdict)) is None:
            return None
        self._sight(identity, case, verdict)
        self._shrink(identity)
        name = self._settle()[identity]
        self._map(self.found[name], case)
        return name

    def _round(self, number: int, variants: Sequence[Variant]) -> None:
        """Draw the next Case while the one before runs."""

        def consume(case: Case) -> bool:
            if case == self._flying:
                return False
            self._land()
            if self._spent():
                return True
            if case not in self._memo:
                self._launch(case)
            return False

        strategy = self._strategy(self.kernel, device=self.device, limits=self.limits, variants=variants)
        draw_values(strategy, consume, seed=self.seed * 7919 + number, examples=_ROUND)
        self._land()

    def _launch(self, case: Case, *, patient: bool = False, left: LeftBehind | None = None) -> None:
        """Begin to run a Case, which is on disk before: in this run's journal, and from then on in no other's."""
        if self.journal:
            try:
                self.journal.launch(case, left.deaths if left else 0)
            except OSError as error:
                # A full disk: what is found from now on is told, and kept where that is still possible.
                self.cannot_keep(case, error)
                self.journal.forsake()
                self.journal = None
        if left and self.journal:
            left.path.unlink(missing_ok=True)
        self.executor.begin(case, patient=patient)
        self._flying = case

    def _land(self) -> None:
        """Count the Case in flight, if there is one, and shrink whatever it shows that is not known."""
        if self._flying is None:
            return
        case = self._flying
        verdict = self._landed(case, "generate")
        if case.check != "oracle" and self._new(verdict) is not None:
            case, verdict = self._told_plainly(case, verdict)
        while (identity := self._new(verdict)) is not None and not self._enough_failures():
            self._sight(identity, case, verdict)
            self._shrink(identity)
            self._map(self.found[self._settle()[identity]], case)

    def _told_plainly(self, case: Case, verdict: Verdict) -> tuple[Case, Verdict]:
        """The same Case against the oracle, if that fails as well: a bug that one call shows is told by that call, once."""
        plain = replace(case, check="oracle")
        # Relations are drawn at lengths that no oracle could follow.
        if max(plain.problem.seqlens_q + plain.problem.seqlens_k) > self.limits.length or not self._supported(plain):
            return case, verdict
        # What earlier calls left in the process is no fault of this one.
        self.executor.fresh()
        found = self._memo.get(plain) or self._attempt(plain, patient=False)
        if not found.failures:
            return case, verdict
        # Of what the related calls showed, only the same output's: a race, say, is another bug, and still to be told.
        wrong = {each.output for each in found.failures}
        self._known |= {each.identity for each in verdict.failures if each.kind == "relation" and each.output in wrong}
        return plain, found

    def _landed(self, case: Case, phase: events.Phase) -> Verdict:
        """The Verdict of the Case in flight."""
        self._flying = None
        verdict = self._memo[case] = self.executor.finish()
        if self.journal:
            with contextlib.suppress(OSError):  # at worst a Case that passed is tried once more
                self.journal.landed()
        if phase == "shrink":
            self.tally.shrink_cases += 1
        else:
            self.tally.add(case, verdict)
        self.listener(TrialFinished(self.kernel.name, phase, case, verdict))
        return verdict

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

    def _map(self, found: Found, first: Case) -> None:
        """Keep maps of a finding's errors. Takes no time from the hunt; what is launched is on disk before, as ever."""
        if self.gallery is None:
            return
        start = time.monotonic()
        try:
            self.listener(self.gallery.keep(found, first, self.journal))
        finally:
            self._shrink_total += time.monotonic() - start

    def _attempt(self, case: Case, patient: bool) -> Verdict:
        self._launch(case, patient=patient)
        return self._landed(case, "shrink")

    def _supported(self, case: Case) -> bool:
        return why_not_case(self.kernel, case, self.device) is None

    def _enough_failures(self) -> bool:
        return self.most_failures is not None and len(self.found) >= self.most_failures

    def _spent(self) -> bool:
        assert self._started is not None
        if self._enough_failures() or (self.most is not None and self.tally.cases >= self.most):
            return True
        return self.seconds is not None and time.monotonic() - self._started - self._shrink_total >= self.seconds

    def _sight(self, identity: Identity, case: Case, verdict: Verdict) -> None:
        """A new identity: on disk at once, so that nothing that happens later can lose it."""
        path = self._written(case, verdict, identity, minimal=False)
        seconds = 0.0 if self._started is None else time.monotonic() - self._started - self._shrink_total
        self._sighted[identity] = Sighting(case, verdict, self.tally.cases, seconds, path)
        self.listener(FailureFound(identity, case, verdict, self.tally.cases, seconds, path))

    def _written(
        self, case: Case, verdict: Verdict, identity: Identity, *, minimal: bool, rate: tuple[int, int] | None = None
    ) -> str | None:
        """Where the Case was written; None where it could not be, which is told with the Case: nothing that was found is lost."""
        if self.corpus is None:
            return None
        try:
            return str(self.corpus.write(case, verdict, identity, minimal=minimal, seed=self.seed, rate=rate))
        except OSError as error:
            self.cannot_keep(case, error, failing=True)
            return None

    def _settle(self) -> dict[Identity, Identity]:
        """Each sighting becomes a finding, its file replaced by the minimal Case's; returns what each is called now."""
        names = {}
        for sighted, seen in self._sighted.items():
            verdict = self._labelled(sighted, seen)
            identity = names[sighted] = verdict.failures[0].identity if verdict is not seen.verdict else sighted
            path = self._written(seen.case, verdict, identity, minimal=not seen.partly, rate=seen.rate)
            if self.corpus and path is not None and seen.path is not None and seen.path != path:
                self.corpus.remove(Path(seen.path))
            self.found[identity] = Found(
                identity, seen.case, verdict, seen.partly, path, seen.cases_before, seen.seconds, seen.trials, seen.rate
            )
            # What the minimal Case shows besides is the same bug, told with it.
            self._known |= {identity, sighted, *(each.identity for each in seen.verdict.failures)}
            self.listener(Shrunk(identity, seen.case, verdict, seen.partly, seen.trials, path, seen.rate, sighted))
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
