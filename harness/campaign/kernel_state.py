"""One kernel of a campaign, as the campaign sees it: rounds, findings, counts, and which workers are at it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

from attnfuzz.harness.campaign.account import Times
from attnfuzz.harness.campaign.compiles import Wanted
from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.contrast import Contrast
from attnfuzz.harness.campaign.corpus import CaseFile
from attnfuzz.harness.campaign.coverage import Phase, Tally
from attnfuzz.harness.campaign.earlier import EarlierCase, EarlierCases
from attnfuzz.harness.campaign.events import CompileFinished, Finding, KernelStarted, KernelSummary
from attnfuzz.harness.campaign.findings import Findings
from attnfuzz.harness.campaign.journal import LeftBehind
from attnfuzz.harness.campaign.plan import KernelPlan
from attnfuzz.harness.campaign.rounds import Rounds
from attnfuzz.harness.campaign.settings import PROFILES
from attnfuzz.harness.campaign.undrawn import models_left_out, never_drawn
from attnfuzz.harness.campaign.worker_link import Turn, TurnEnd
from attnfuzz.harness.isolation.disturbances import Disturbances
from attnfuzz.harness.isolation.executors import Compiled
from attnfuzz.harness.judge.failure import Failure, Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Kernel
from attnfuzz.strategies.case import Case

__all__ = ["KernelState"]

_MOST_UNCOUNTED = 1000
"""Trials that wait to be counted, at most."""


class KernelState:
    """Counts and findings of one kernel, and what is left to try.

    Args:
        kernel: what is tried; it can run on the device of the settings.
        plan: what its Cases are drawn from.
        context: what all kernels of the campaign share.
        stored: its case files, run first.
        left_behind: its Cases that were in flight when a run died, run before these.
    """

    def __init__(
        self,
        kernel: Kernel,
        plan: KernelPlan,
        context: CampaignContext,
        stored: Sequence[CaseFile] = (),
        left_behind: Sequence[LeftBehind] = (),
    ) -> None:
        self.kernel, self.plan, self._context = kernel, plan, context
        self._tally, self._contrast = Tally(), Contrast()
        self._uncounted = deque[tuple[Phase, Case, Verdict, bool]]()
        """Trials that are noted and not counted yet."""
        self.tried = False
        """Whether some Case has been tried."""
        settings = context.settings
        self.findings = Findings(kernel, context.corpus, context.listener, settings.seed, context.shared)
        self.rounds = Rounds(settings.max_examples, settings.shard, settings.shards)
        self.earlier = EarlierCases(kernel, context, self.findings, self.rounds, stored, left_behind)
        self.workers: set[int] = set()
        self.ready: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        """Drawn Cases that can run, and that wait for a compiler, by worker."""
        self._full = set[int]()
        """Workers that draw no more until code is compiled: a turn would have nothing to do, and end at once."""
        self.waiting_at: dict[int, int] = {}
        """Compiles that had ended at the beginning of a worker's last turn: of later ones it may not know."""
        self.seconds = 0.0
        self.times = Times()
        self.compiles, self.compile_seconds = 0, 0.0
        self.started = self.ended = self.broken = False
        self._replaced, self._recoveries, self._disturbances = 0, list[float](), Disturbances()
        self._keys = {plan.key(kernel, each) for each in plan.variants} if plan.compiled else set[str]()
        self._not_ended = set(self._keys)
        """Compile keys of variants whose compile has not ended: looked at for each message of each worker, so kept as a set."""
        self._compiled: set[str] = set()
        self._refused: dict[str, tuple[Case, Failure]] = {}

    def start(self) -> None:
        """Announce the kernel, once."""
        if not self.started:
            self.started = True
            self._context.listener(KernelStarted(self.kernel.name, len(self.plan.variants), len(self._keys), self._tally))

    def begin_turn(self, worker: int, until: float | None = None, *, workers: int = 1, seconds: float | None = None) -> Turn:
        """Count a worker as being at this kernel; returns its turn, with the Cases of earlier runs first.

        Args:
            worker: its number.
            until: the end of its turn.
            workers: of the campaign.
            seconds: of all workers together for the kernel's stored Cases.
        """
        self.start()
        self.workers.add(worker)
        self.waiting_at[worker] = self.compiles
        self._full.discard(worker)
        earlier, part = self.earlier.take(worker, workers, seconds)
        return Turn(self.kernel.name, until, earlier, only_earlier=bool(self.earlier), replay_seconds=part)

    def compiled(self, wanted: Wanted, done: Compiled) -> None:
        """Count a compile; one that failed is kept once all of the variants have ended: the simplest Case stands for it."""
        self.start()
        self.compiles += 1
        self.compile_seconds += done.seconds
        error = done.failure.message if done.failure else None
        self._context.listener(CompileFinished(self.kernel.name, done.case.config.canonical(), done.seconds, error))
        if done.failure is not None:
            self._refused[wanted.key] = done.case, done.failure
        else:
            self._compiled.add(wanted.key)
        self._not_ended.discard(wanted.key)
        if self.variants_ended:
            self.keep_refused()

    def know(self, key: str) -> None:
        """Count a compile key as compiled, by an earlier run."""
        self._compiled.add(key)
        self._not_ended.discard(key)

    @property
    def variants_ended(self) -> bool:
        """Whether the compile of every variant has ended."""
        return not self._not_ended

    @property
    def some_compiled(self) -> bool:
        """Whether Cases of some variant can run."""
        return not self._compiled.isdisjoint(self._keys)

    @property
    def hopeless(self) -> bool:
        """Whether the compiler refuses every variant."""
        return bool(self._keys) and self._keys <= self._refused.keys()

    def keep_refused(self) -> None:
        """Keep a finding for each failure of the compiler, with the simplest variant's Case; others stand for the same."""
        order = list(dict.fromkeys(self.plan.key(self.kernel, each) for each in self.plan.variants))
        for key in sorted(self._refused, key=lambda each: order.index(each) if each in order else len(order)):
            case, failure = self._refused[key]
            verdict = Verdict(status="fail", failures=(failure,))
            self.findings.keep(Finding(failure.identity, case, verdict), minimal=True)

    @property
    def enough(self) -> bool:
        """Whether it has as many failures as are wanted."""
        most = self._context.settings.max_failures
        return most is not None and self.findings.ended >= most

    @property
    def findings_enough(self) -> bool:
        """Whether it has as many failures as are wanted once those that are being shrunk are closed."""
        most = self._context.settings.max_failures
        return most is not None and self.findings.count >= most

    def may_go_on(self, worker: int) -> bool:
        """Whether a turn of this worker has something to try, as far as is known here."""
        if self.ready.get(worker) or self.earlier:
            return True
        if self.waiting.get(worker) and self.waiting_at[worker] != self.compiles:
            return True
        return self.rounds.may_give() and worker not in self._full

    def is_over(self) -> bool:
        """Whether nothing is left to try, for any worker."""
        if self.broken or self.enough or self.hopeless:
            return not self.workers
        drawn = any(self.ready.values()) or any(self.waiting.values())
        return not (self.earlier or self.workers or drawn or not self.rounds.over)

    def note(self, phase: Phase, case: Case, verdict: Verdict, *, counted: bool = False) -> None:
        """Take note of a trial: what it shows is counted later, by `count`, since workers wait for answers meanwhile.

        `counted`: its counts have come by `add_counts`; what Cases have in common is still taken from it later.
        """
        self.tried = True
        self._uncounted.append((phase, case, verdict, counted))
        if len(self._uncounted) > _MOST_UNCOUNTED:
            # One for each that comes: to count all of them would take a tenth of a second at once.
            self._count_next()
        if phase in ("replay", "generate"):
            self.earlier.tried(case)
        if phase == "generate" and self._context.settings.max_examples is not None:
            self.rounds.tried(case.id)

    def count(self, until: float = math.inf) -> bool:
        """Count trials that were noted, until then (time.monotonic); returns whether all are counted."""
        while self._uncounted:
            if time.monotonic() >= until:
                return False
            self._count_next()
        return True

    def _count_next(self) -> None:
        phase, case, verdict, counted = self._uncounted.popleft()
        if not counted:
            self._tally.add(phase, case, verdict)
        self._contrast.add(phase, case, verdict)

    def add_counts(self, tally: Tally) -> None:
        """Add what a worker has counted of its trials."""
        self._tally.merge(tally)

    @property
    def tally(self) -> Tally:
        """Counts over all trials."""
        self.count()
        return self._tally

    def close(self, before: Identity) -> Finding:
        """Close an open finding; it replaces case files of its failure that earlier runs could not shrink to their end.

        Their own Cases may not be tried before: a Case that was in flight comes first, and then shows nothing new.
        """
        finding = self.findings.close(before)
        for each in self.earlier.stored:
            if each.finding.identity is not None:
                EarlierCase(each.case, stored=each).remove_if_replaced([finding])
        return finding

    def resume(self, left: LeftBehind) -> None:
        """Try a Case first that was in flight when a worker died."""
        self.earlier.resume(left)

    def end_turn(self, worker: int, end: TurnEnd) -> None:
        """Add a worker's turn."""
        self.earlier.give_back(worker, end.not_tried, end.replay_seconds)
        self.leave(worker)
        self.ready[worker], self.waiting[worker] = end.ready, end.waiting
        if end.full:
            self._full.add(worker)
        self.seconds += end.seconds
        self.times += end.times
        self._replaced += end.replaced
        self._recoveries += end.recoveries
        self._disturbances += end.disturbances

    def leave(self, worker: int) -> None:
        """Count a worker as being at this kernel no more, without Cases of its own."""
        if worker in self.workers:
            self.earlier.leave(worker)
        self.workers.discard(worker)
        self.ready.pop(worker, None)
        self.waiting.pop(worker, None)
        self._full.discard(worker)

    def unreached(self) -> int:
        """Return the number of variants whose compile has not ended."""
        return sum(self.plan.key(self.kernel, each) in self._not_ended for each in self.plan.variants) if self._keys else 0

    def summary(self) -> KernelSummary:
        """Return counts and findings so far; a finding that is being shrunk is closed."""
        self.count()
        self.keep_refused()
        self.findings.close_all()
        self.findings.compare(self._contrast)
        refused = self._refused.keys()
        return KernelSummary(
            kernel=self.kernel.name,
            cases=self.tally.cases,
            shrink_cases=self.tally.shrink_cases,
            reruns=self.tally.reruns,
            seconds=self.seconds,
            compiles=self.compiles,
            compile_seconds=self.compile_seconds,
            refused=sum(self.plan.key(self.kernel, each) in refused for each in self.plan.variants) if refused else 0,
            failed_unjudged=self.tally.failed_unjudged,
            unreached=self.unreached(),
            replayed=len(self.earlier.replayed),
            not_replayed=self.earlier.not_replayed,
            replaced=self._replaced,
            recoveries=tuple(self._recoveries),
            outputs=dict(self.tally.outputs),
            captured=dict(self.tally.captured),
            findings=tuple(self.findings.closed.values()),
            elsewhere=tuple(self.findings.elsewhere.values()),
            features=dict(self.tally.features),
            times=self.times,
            disturbances=self._disturbances,
            drawn={name: dict(counts) for name, counts in self.tally.drawn.items()},
            never_drawn=self._never_drawn(),
        )

    def _never_drawn(self) -> dict[str, tuple[str, ...]]:
        settings = self._context.settings
        if PROFILES[settings.profile].models:
            return models_left_out(self.kernel, settings.device, self.plan.limits.length)
        return never_drawn(self.kernel.capabilities, settings.device, self.plan.variants, self.tally)
