"""A worker's part in trying one kernel: the Cases of earlier runs, then drawn ones, turn by turn; what fails is shrunk.

Hypothesis generates; what fails is then shrunk part by part (strategies/shrink_steps.py), which needs fewer trials than shrinking
the choices behind a Case, and ends in smaller ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

from attnfuzz.harness.campaign.account import Account
from attnfuzz.harness.campaign.clocks import ReplayClock, TrialClock
from attnfuzz.harness.campaign.context import Batch, WorkerContext
from attnfuzz.harness.campaign.earlier import EarlierCase
from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.campaign.minimise import Minimiser
from attnfuzz.harness.campaign.plan import KernelPlan, cases_of
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.campaign.supply import Supply
from attnfuzz.harness.campaign.worker_link import Campaign, Turn, TurnEnd
from attnfuzz.harness.isolation.disturbances import Disturbances
from attnfuzz.harness.isolation.outcomes import OutOfTime
from attnfuzz.harness.isolation.statistics import Statistics
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels.contract import Kernel
from attnfuzz.strategies.case import Case, with_check

__all__ = ["KernelRun"]

_FIRST = 4
"""Cases of a kernel's first batch: where a child compiles for each of them, a whole batch outlasts a short run."""


def _supply(kernel: Kernel, plan: KernelPlan, context: WorkerContext, campaign: Campaign) -> Supply:
    return Supply(
        kernel,
        plan,
        functools.partial(cases_of, kernel, plan, context.settings),
        campaign,
        context.settings.device,
        background=not context.settings.in_process,
        growing=context.end is not None and not context.settings.all_variants,
        together=context.batch.together,
    )


def _by_oracle_alone(case: Case, verdict: Verdict, runner: TrialRunner, campaign: Campaign, longest: int) -> tuple[Case, Verdict]:
    """The same Case compared with the oracle alone, if that fails too: a bug that one call shows is one finding."""
    # Relations are drawn at lengths that no oracle could follow.
    if not verdict.failures or max(case.problem.seqlens_q + case.problem.seqlens_k) > longest:
        return case, verdict
    runner.fresh()
    alone = with_check(case, "oracle")
    by_oracle = runner.memo.get(alone) or runner.run(alone)
    if not by_oracle.failures:
        return case, verdict
    # Only what relations show of the same output: a race, say, is another bug.
    wrong = {each.output for each in by_oracle.failures}
    campaign.ignore(case.kernel, {each.identity for each in verdict.failures if each.kind == "relation" and each.output in wrong})
    return alone, by_oracle


def _first(batch: Batch) -> Batch:
    """Return the size of a kernel's first batch; Cases that run one by one give a Verdict each."""
    return dataclasses.replace(batch, most=min(batch.most, _FIRST)) if batch.together else batch


def _ran(
    runner: TrialRunner,
    cases: Sequence[Case],
    batch: Batch,
    known: set[Identity],
    take: Callable[[], list[Case]],
    spent: Callable[[], bool],
) -> Iterator[tuple[Case, Verdict]]:
    """Run drawn Cases and yield each with its Verdict, one by one or as a batch.

    While a batch runs, `take` returns the Cases after it. They are sent as soon as its Verdicts are there, unless time is spent
    or one of the Verdicts has a failure that is not `known`: that is shrunk in the same child, and they are not sent.
    """
    if not (batch.together and cases):
        return runner.run_each(cases, "generate")
    taken: list[Case] = []

    def following(verdicts: Sequence[Verdict]) -> list[Case]:
        new = any(each.identity not in known for verdict in verdicts for each in verdict.failures)
        return [] if new or spent() else taken

    return runner.run_all(cases, "generate", known, lambda: taken.extend(take()), following)


def _so_far(statistics: Statistics) -> tuple[int, tuple[float, ...], Disturbances]:
    return statistics.replaced, tuple(statistics.recoveries), statistics.disturbances


class KernelRun:
    """Tries one kernel: each Case once; what fails is reported, shrunk and reported again.

    Args:
        kernel: to try; it can run on the device of the settings.
        plan: variants and limits of its Cases.
        context: what all kernels of the worker share.
        campaign: what it reports to.
        account: of the worker's time.
    """

    def __init__(self, kernel: Kernel, plan: KernelPlan, context: WorkerContext, campaign: Campaign, account: Account) -> None:
        self.kernel, self.plan, self._context, self._campaign, self._account = kernel, plan, context, campaign, account
        self.clock, self._until = TrialClock(), context.end
        self._known, self._any = set[Identity](), False
        """Known failures, and whether any drawn Case has a Verdict."""
        self._supply = _supply(kernel, plan, context, campaign)
        self._runner = TrialRunner(
            context.executor,
            context.journal,
            lambda *trial: campaign.trial(kernel.name, *trial),
            lambda case, error: campaign.not_kept(kernel.name, case, error),
            account,
        )

    def turn(self, turn: Turn) -> TurnEnd:
        """Try Cases until time is over, and the batch at work then; or until nothing is left, or DeviceLost is kept."""
        self._until, statistics = turn.until, self._context.executor.statistics
        before = _so_far(statistics)
        self.clock.reset()
        self._supply.ask_again()
        self._context.executor.limit(self._context.end)
        earlier, replays = list(turn.earlier), ReplayClock(turn.replay_seconds, statistics)
        with self.clock.running():
            try:
                while earlier and not self._spent() and not (earlier[0].stored and replays.over):
                    with replays.counting(earlier[0], self.clock):
                        self._try_earlier(earlier[0])
                    del earlier[0]
                while self._runner.sent or (not turn.only_earlier and not self._spent()):
                    if not (self._try_next() or self._wait(turn.until)):
                        break
            except OutOfTime:
                pass
            except DeviceLost as lost:
                verdict = Verdict(status="fail", failures=(lost.failure,))
                self._keep(lost.failure.identity, lost.case, verdict, shrinks=False)
                raise
        (replaced, recoveries, disturbances), now = before, _so_far(statistics)
        return TurnEnd(
            seconds=self.clock.seconds,
            ready=self._supply.ready,
            waiting=self._supply.waiting,
            full=self._supply.full,
            replaced=now[0] - replaced,
            recoveries=now[1][len(recoveries) :],
            replay_seconds=replays.seconds,
            not_tried=tuple(earlier),
            times=self._account.take(),
            disturbances=now[2] - disturbances,
        )

    def _try_earlier(self, earlier: EarlierCase) -> None:
        verdicts: list[Verdict] = []

        def shows(verdict: Verdict) -> bool:
            verdicts.append(verdict)
            return earlier.shows(verdict)

        self._runner.run(earlier.case, "replay", rate=earlier.rate, shows=shows, left=earlier.left)
        keep = self._keep_new if earlier.stored else self._examine  # what was in flight is a drawn Case
        earlier.remove_if_replaced([each for verdict in verdicts for each in keep(earlier.case, verdict)])

    def _try_next(self) -> bool:
        """Try what can run, a batch at most; returns False where there is nothing."""
        batch = self._context.batch if self._any else _first(self._context.batch)
        waiting = self._runner.sent or self._take(batch)
        for case, verdict in _ran(self._runner, waiting, batch, self._known, self._take, self._spent):
            self._any = True
            self._examine(case, verdict)
            self._supply.tried(case)
            if not batch.together and self._spent():
                break
        if not self._runner.sent:
            self._supply.put_back()
        return bool(waiting)

    def _take(self, batch: Batch | None = None) -> list[Case]:
        # In one process a round is drawn as it is asked for.
        with self._account.step("draw" if self._context.settings.in_process else "other"):
            return self._supply.take(batch or self._context.batch)

    def _wait(self, until: float | None) -> bool:
        """Wait for the round that is being drawn; returns False where none has come."""
        with self._account.step("draw"):
            return self._supply.wait(until)

    def _examine(self, case: Case, verdict: Verdict) -> list[Finding]:
        """Keep each failure of a drawn Case that is new."""
        if self._new_in(verdict) is None or self._campaign.over(self.kernel.name):
            return []
        alone, device = with_check(case, "oracle"), self._context.settings.device
        if case.check != "oracle" and why_not_case(self.kernel, alone, device) is None:
            with contextlib.suppress(OutOfTime):
                case, verdict = _by_oracle_alone(case, verdict, self._runner, self._campaign, self.plan.limits.length)
        return self._keep_new(case, verdict)

    def _keep_new(self, case: Case, verdict: Verdict) -> list[Finding]:
        findings: list[Finding] = []
        while (identity := self._new_in(verdict)) is not None and not self._campaign.over(self.kernel.name):
            findings += filter(None, [self._keep(identity, case, verdict)])
        return findings

    def _new_in(self, verdict: Verdict) -> Identity | None:
        """The first failure of a Verdict that is not known here: a known one must not hide another."""
        return next((each.identity for each in verdict.failures if each.identity not in self._known), None)

    def _keep(self, identity: Identity, case: Case, verdict: Verdict, *, shrinks: bool = True) -> Finding | None:
        """Keep a failure: its case file first, then the shrunk one, then its error maps; None: another worker has it."""
        self._known.add(identity)
        finding = Finding(identity, case, verdict, seconds_to_find=self.clock.seconds)
        opened = self._campaign.open(self.kernel.name, finding)
        if opened is None:
            return None
        self._context.executor.limit(self._context.shrink_end)
        try:
            with self.clock.paused(), self._account.step("shrink"):
                if shrinks:
                    self._shrink(identity, opened)
                closed = self._campaign.close(self.kernel.name, identity)
                self._known |= {closed.identity, *(each.identity for each in closed.verdict.failures)}
                if self._context.maps and shrinks:
                    self._campaign.pass_on(self._context.maps.write(closed, case, self._runner))
        finally:
            self._context.executor.limit(self._context.end)
        return closed

    def _shrink(self, identity: Identity, opened: Finding) -> None:
        ready = self.plan.variants
        if self.plan.compiled and self._context.end is not None:
            # A compile would take the time of all steps.
            keys = {variant: self.plan.key(self.kernel, variant) for variant in ready}
            compiled = self._campaign.ready(self.kernel.name, set(keys.values()))
            ready = tuple(each for each in ready if keys[each] in compiled)
        update = functools.partial(self._campaign.update, self.kernel.name, identity)
        minimiser = Minimiser(self.kernel, self._context.settings.device, ready, self.plan.limits, self._runner)
        minimiser.minimise(opened, self._context.shrink_seconds, update)

    def _spent(self) -> bool:
        return self._campaign.over(self.kernel.name) or (self._until is not None and time.monotonic() >= self._until)
