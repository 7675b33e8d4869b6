"""Trials of one Case or of a batch: Cases are in the journal before their trial, and their Verdicts are remembered after it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from attnfuzz.harness.campaign.account import Account
from attnfuzz.harness.campaign.coverage import Phase
from attnfuzz.harness.campaign.events import Rate
from attnfuzz.harness.campaign.journal import Journal, LeftBehind
from attnfuzz.harness.isolation.executors import Executor
from attnfuzz.harness.isolation.outcomes import OutOfTime, Past
from attnfuzz.harness.judge.errormap import ErrorMaps
from attnfuzz.harness.judge.failure import PATTERNED, Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.errors import reject
from attnfuzz.strategies.case import Case

__all__ = ["TrialRunner", "tries"]

_MOST_TRIES = 12
_REMEMBERED, _PASSED = 2000, 500
"""Verdicts that a runner remembers, and how many of them may be of drawn Cases that pass: each kernel of a run has a runner."""


def tries(rate: Rate | None) -> int:
    """Number of runs after which a failure of that rate has shown with a probability of 95 %; 1 where it shows every time.

    Raises:
        BadArgument: the rate is not positive.
    """
    if rate is None or rate[0] >= rate[1]:
        return 1
    if rate[0] < 1:
        raise reject("rate", rate, "the number of failed runs must be positive", "give (failed, runs), or None for every time")
    return min(_MOST_TRIES, math.ceil(math.log(0.05) / math.log(1 - rate[0] / rate[1])))


def _fails(verdict: Verdict) -> bool:
    return verdict.failure is not None


class Memo(dict[Case, Verdict]):
    """The Verdicts of the latest Cases: shrinking need not run them again."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[Case, None] = {}
        """Drawn Cases that passed."""
        self._like = Verdict(status="pass")

    def __setitem__(self, case: Case, verdict: Verdict) -> None:
        """Remember a Verdict, and forget the oldest if there are many."""
        like = self._like
        if (verdict.device, verdict.versions) == (like.device, like.versions):
            # Each message of a child has its own copy, which is more than a third of a Verdict.
            verdict = msgspec.structs.replace(verdict, device=like.device, versions=like.versions)
        self._like = verdict
        if verdict.failures:
            # It may have passed before.
            self._passed.pop(case, None)
        super().__setitem__(case, verdict)
        if len(self) > _REMEMBERED:
            del self[next(iter(self))]

    def drawn(self, case: Case, verdict: Verdict) -> None:
        """Remember the Verdict of a drawn Case; of those that pass, shrinking asks for few."""
        self[case] = verdict
        if not verdict.failures:
            self._passed[case] = None
            if len(self._passed) > _PASSED:
                oldest = next(iter(self._passed))
                del self._passed[oldest]
                self.pop(oldest, None)


@contextlib.contextmanager
def _later(errors: list[Exception]) -> Iterator[None]:
    """Keep an error of the block, which must not cost Verdicts that have arrived or are about to."""
    try:
        yield
    except Exception as error:  # raised by the caller
        errors.append(error)


class TrialRunner:
    """Runs Cases through an executor, one after the other or a batch at a time.

    Args:
        executor: where trials run.
        journal: of the run; None: Cases are not written before their trials.
        finished: called after each trial with its phase, Case and Verdict.
        not_written: called once if the journal cannot be written; the run goes on without one.
        account: of the time that trials and the journal take.
    """

    def __init__(
        self,
        executor: Executor,
        journal: Journal | None = None,
        finished: Callable[[Phase, Case, Verdict], None] = lambda *_: None,
        not_written: Callable[[Case, OSError], None] = lambda *_: None,
        account: Account | None = None,
    ) -> None:
        self.executor, self._journal = executor, journal
        self._finished, self._not_written = finished, not_written
        self._account = account or Account(executor.statistics)
        self.memo = Memo()
        self.in_flight: Case | None = None
        self.sent: Sequence[Case] = ()
        """The batch that a child has. Between two calls of `run_all` it is the one to call it with, before anything else runs."""
        self._failing: list[Case] = []
        """Cases of `run_all` whose failures are not examined yet; they stay in the journal with what is in flight."""
        self.trials = 0

    def begin(
        self, case: Case, *, patient: bool = False, left: LeftBehind | None = None, followed_by: Sequence[Case] = ()
    ) -> None:
        """Write the Case to this run's journal, remove it from the journal that `left` it behind, then start its trial.

        `patient`: deadlines of full length. `followed_by`: the Cases that run next, written together with it.
        """
        if followed_by and left is None and not self._failing:
            self._write(lambda journal: journal.launch_next([case, *followed_by]), case)
        else:
            self._launch(case, deaths=left.deaths if left else 0)
        if left and self._journal and left.last:
            left.path.unlink(missing_ok=True)
        with self._account.trial():
            self.executor.begin(case, patient=patient)
        self.in_flight = case

    def finish(self, phase: Phase, *, resumed: bool = False) -> Verdict:
        """Wait for the Verdict of the Case in flight; one that is `resumed` stays so for the next run where time is over."""
        assert self.in_flight is not None
        case, self.in_flight = self.in_flight, None
        try:
            with self._account.trial():
                verdict = self.executor.finish()
        except OutOfTime:
            if resumed and self._journal:
                self._journal.abandon()
            else:
                self._land()
            raise
        self._remember(phase, case, verdict)
        if phase == "generate" and verdict.failures:
            self._failing = [case]
        self._land()
        self.trials += 1
        self._account.judged([case], [verdict])
        self._finished(phase, case, verdict)
        return verdict

    def run_each(self, cases: Sequence[Case], phase: Phase) -> Iterator[tuple[Case, Verdict]]:
        """Run Cases one after the other; yields each with its Verdict before the next one runs."""
        for number, case in enumerate(cases):
            self.begin(case, followed_by=cases[number + 1 :])
            verdict = self.finish(phase)
            yield case, verdict
            self._examined(case, verdict)

    def run_all(
        self,
        cases: Sequence[Case],
        phase: Phase,
        known: Collection[Identity] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        following: Callable[[Sequence[Verdict]], Sequence[Case]] = lambda _: (),
    ) -> Iterator[tuple[Case, Verdict]]:
        """Run Cases of one kernel as a batch; yields each with its Verdict once all have run.

        Where no batch follows, those that fail stay in the journal until the caller has asked for the Case after them.

        Args:
            cases: to run; the same object as `sent`, if there is a batch at work.
            phase: of their trials.
            known: failures whose pattern is not looked for; None: the pattern of every failure.
            meanwhile: called while they run.
            following: called with their Verdicts; returns the Cases to send at once, which run while these Verdicts are examined.
                It returns none where one of them has a failure to be examined by trials.

        Raises:
            Exception: what `meanwhile` or sending those that follow raised, once each of `cases` that has a Verdict was yielded.
            OutOfTime: the time of the executor's `limit` was over first.
        """
        if not self.sent:
            try:
                self._send(cases, known)
            except BaseException:
                self.sent = ()
                raise
        assert self.sent is cases
        errors: list[Exception] = []
        with _later(errors):
            meanwhile()
        try:
            verdicts = self._received(cases)
        except OutOfTime:
            if errors:
                raise errors[0] from None
            raise
        more = following(verdicts) if not errors else ()
        if more:
            self._failing = []
            with _later(errors):
                self._send(more, known)
        else:
            self._land()
        self._report(cases, verdicts, phase)
        try:
            for case, verdict in zip(cases, verdicts, strict=True):
                yield case, verdict
                self._examined(case, verdict)
        finally:
            if errors:
                self.sent = ()
        for each in errors:
            raise each

    def _examined(self, case: Case, verdict: Verdict) -> None:
        self._failing = [each for each in self._failing if each != case]
        if verdict.failures:
            if not self.sent:
                self._land()
            self._forget_pasts()

    def _forget_pasts(self) -> None:
        """Forget what processes had run before failures, unless some of a batch are not examined."""
        if not self._failing:
            self.executor.forget_pasts()

    def _received(self, cases: Sequence[Case]) -> list[Verdict]:
        """Return the Verdicts of the batch at work."""
        # Whatever happens now, no batch is at work afterwards.
        self.sent = ()
        try:
            with self._account.trial():
                verdicts = self.executor.finish_batch()
        except OutOfTime:
            self._land()
            raise
        self._account.judged(cases, verdicts)
        self._failing = [case for case, verdict in zip(cases, verdicts, strict=True) if verdict.failures]
        return verdicts

    def _report(self, cases: Sequence[Case], verdicts: Sequence[Verdict], phase: Phase) -> None:
        for case, verdict in zip(cases, verdicts, strict=True):
            # One without a pattern stands for no finding.
            if all(each.pattern is not None or each.kind not in PATTERNED for each in verdict.failures):
                self._remember(phase, case, verdict)
            self.trials += 1
            self._finished(phase, case, verdict)

    def _send(self, cases: Sequence[Case], known: Collection[Identity] | None) -> None:
        self._launch(*cases)
        self.sent = cases
        with self._account.trial():
            self.executor.begin_batch(cases, known)

    def _remember(self, phase: Phase, case: Case, verdict: Verdict) -> None:
        if phase == "generate":
            self.memo.drawn(case, verdict)
        else:
            self.memo[case] = verdict

    def run(
        self,
        case: Case,
        phase: Phase = "rerun",
        *,
        rate: Rate | None = None,
        shows: Callable[[Verdict], bool] = _fails,
        patient: bool = False,
        left: LeftBehind | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> Verdict:
        """Run a Case until a Verdict `shows` the failure, at most as often as its `rate` demands; returns the last Verdict.

        Args:
            case: what to run.
            phase: of the first run; of a replay the others are reruns.
            rate: how often the Case fails; None: every time, so one run decides.
            shows: whether a Verdict has the failure in question; by default any failure.
            patient: deadlines of full length.
            left: the journal entry of a run that died with the Case in flight.
            before: called before each run; what it raises ends them.
        """
        if phase == "replay":
            # The stored Case before this one is examined.
            self._forget_pasts()
        for number in range(tries(rate)):
            before()
            self.begin(case, patient=patient, left=None if number else left)
            resumed = left is not None and not number
            verdict = self.finish("rerun" if number and phase == "replay" else phase, resumed=resumed)
            if shows(verdict):
                break
        return verdict

    def map_errors(self, case: Case, rate: Rate | None = None) -> ErrorMaps | str:
        """Run a Case for maps of its errors until they show, at most as often as `rate` demands; or why there are none."""
        for _ in range(tries(rate)):
            self._launch(case)
            try:
                with self._account.trial():
                    maps = self.executor.mapped(case)
            finally:
                self._land()
            if isinstance(maps, str) or maps.over:
                break
        return maps

    def past(self, case: Case) -> Past:
        """Return what the process of a Case's latest Verdict, a failure, had run before it."""
        return self.executor.past(case)

    def fresh(self) -> None:
        """Start a new process for the next trial: what earlier trials left behind must not show in it."""
        with self._account.step("start"):
            self.executor.fresh()

    def _launch(self, *cases: Case, deaths: int = 0) -> None:
        self._write(lambda journal: journal.launch(*dict.fromkeys((*cases, *self._failing)), deaths=deaths), cases[0])

    def _write(self, note: Callable[[Journal], None], case: Case) -> None:
        if self._journal:
            try:
                with self._account.step("journal"):
                    note(self._journal)
            except OSError as error:
                self._not_written(case, error)
                self._journal.discard()
                self._journal = None

    def _land(self) -> None:
        if self._journal:
            with self._account.step("journal"), contextlib.suppress(OSError):  # at worst a Case that passed is tried once more
                self._journal.landed(*self._failing)
