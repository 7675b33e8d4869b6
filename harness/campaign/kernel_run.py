"""One kernel's part of a campaign: compile, run the Cases of earlier runs, then draw new ones until the budget is spent.

Hypothesis generates; what fails is then shrunk part by part (strategies/shrink_steps.py), which needs fewer trials than shrinking
the choices behind a Case, and ends in smaller ones.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from attnfuzz.harness.campaign.compiles import VariantCompiler
from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.corpus import CaseFile
from attnfuzz.harness.campaign.coverage import Tally
from attnfuzz.harness.campaign.earlier import EarlierCase, earlier_cases
from attnfuzz.harness.campaign.events import Finding, KernelStarted, KernelSummary, Phase, TrialFinished
from attnfuzz.harness.campaign.findings import Findings
from attnfuzz.harness.campaign.journal import LeftBehind
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.campaign.settings import PROFILES, Settings
from attnfuzz.harness.campaign.shrink import Shrinker
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels.contract import Kernel
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import cases
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.shapes import Variant, all_variants, modified, pool
from attnfuzz.strategies.trials import trial_cases

__all__ = ["KernelRun", "variants_of"]

_ROUND = 100
"""Cases drawn in a round; each round has a seed of its own, so that their number is not bounded."""
_MOST_EMPTY_ROUNDS = 3
"""Rounds without a new Case after which all Cases count as tried."""


def variants_of(kernel: Kernel, settings: Settings) -> tuple[Variant, ...]:
    """The variants that Cases are drawn from: all that the kernel declares; a pool of them where each is compiled."""
    variants = all_variants(kernel, settings.device)
    if settings.device not in kernel.capabilities.compiles_on:
        return variants
    variants = pool(variants, PROFILES[settings.profile].variants[settings.device], settings.seed)
    return modified(variants, kernel, settings.device, settings.seed)


class TrialClock:
    """Seconds of trials; shrinking and error maps have time of their own."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._ended: float | None = None
        self._paused = 0.0

    def start(self) -> None:
        """Begin to count."""
        self._started = time.monotonic()

    def stop(self) -> None:
        """Count no further."""
        self._ended = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what is done meanwhile."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._paused += time.monotonic() - start

    @property
    def seconds(self) -> float:
        """Until now, or until `stop`."""
        return 0.0 if self._started is None else (self._ended or time.monotonic()) - self._started - self._paused


def _by_oracle_alone(case: Case, verdict: Verdict, runner: TrialRunner, findings: Findings, longest: int) -> tuple[Case, Verdict]:
    """The same Case compared with the oracle alone, if that fails too: a bug that one call shows is one finding."""
    # Relations are drawn at lengths that no oracle could follow.
    if findings.new_in(verdict) is None or max(case.problem.seqlens_q + case.problem.seqlens_k) > longest:
        return case, verdict
    runner.fresh()
    alone = replace(case, check="oracle")
    by_oracle = runner.memo.get(alone) or runner.run(alone)
    if not by_oracle.failures:
        return case, verdict
    # Only what relations show of the same output: a race, say, is another bug.
    wrong = {each.output for each in by_oracle.failures}
    findings.ignore({each.identity for each in verdict.failures if each.kind == "relation" and each.output in wrong})
    return alone, by_oracle


class KernelRun:
    """Tries one kernel: each Case once; what fails is kept, shrunk and announced.

    Args:
        kernel: to try; it can run on the device of the settings.
        context: what all kernels of the campaign share.
        stored: the kernel's case files, run first.
        left_behind: its Cases that were in flight when a run died, run before these.
    """

    def __init__(
        self, kernel: Kernel, context: CampaignContext, stored: Sequence[CaseFile] = (), left_behind: Sequence[LeftBehind] = ()
    ) -> None:
        settings = context.settings
        self.kernel, self.context = kernel, context
        self._left_behind, self._stored = left_behind, stored
        self.seed = settings.seed * 1000003 + settings.shard
        self.limits = PROFILES[settings.profile].limits[settings.device]
        self.variants: Sequence[Variant] = variants_of(kernel, settings)
        self.tally, self.clock = Tally(), TrialClock()
        self.findings = Findings(kernel, context.corpus, context.listener, self.seed)
        self._runner = TrialRunner(context.executor, context.journal, self._count, self.findings.announce_not_kept)
        self._compiler = VariantCompiler(kernel, context, self.findings)
        self._statistics_before = self._statistics()

    def run(self) -> None:
        """Compile the variants where the device needs that, then try Cases of them; DeviceLost ends it, once it is kept."""
        self._statistics_before = self._statistics()
        compiles = self._compiler.plan(self.variants, self.limits)
        self.context.listener(KernelStarted(self.kernel.name, len(self.variants), compiles, self.tally))
        self.variants = self._compiler.compile()
        self.try_cases()

    def try_cases(self) -> None:
        """Run the Cases of earlier runs, then draw new ones until the budget is spent."""
        self.clock.start()
        try:
            for earlier in earlier_cases(self.kernel, self.context, self.findings, self._left_behind, self._stored):
                self._try_earlier(earlier)
            number = empty = 0
            while self.variants and not self._spent() and empty < _MOST_EMPTY_ROUNDS:
                before = self.tally.cases
                self._draw_round(number)
                number += 1
                empty = empty + 1 if self.tally.cases == before else 0
        except DeviceLost as lost:
            verdict = Verdict(status="fail", failures=(lost.failure,))
            self.findings.keep(self._finding(lost.failure.identity, lost.case, verdict))
            raise
        finally:
            self.clock.stop()

    def summary(self) -> KernelSummary:
        """Counts and findings so far; a finding that is being shrunk is closed."""
        self.findings.close()
        replaced, recoveries = self._statistics_before
        return KernelSummary(
            kernel=self.kernel.name,
            cases=self.tally.cases,
            shrink_cases=self.tally.shrink_cases,
            reruns=self.tally.reruns,
            seconds=self.clock.seconds,
            compiles=self._compiler.compiles,
            compile_seconds=self._compiler.seconds,
            refused=self._compiler.refused,
            replaced=self._statistics()[0] - replaced,
            recoveries=self._statistics()[1][len(recoveries) :],
            outputs=dict(self.tally.outputs),
            findings=tuple(self.findings.closed.values()),
            features=dict(self.tally.features),
        )

    def _try_earlier(self, earlier: EarlierCase) -> None:
        verdicts: list[Verdict] = []

        def shows(verdict: Verdict) -> bool:
            verdicts.append(verdict)
            return earlier.shows(verdict)

        self._runner.run(earlier.case, "replay", rate=earlier.rate, shows=shows, left=earlier.left)
        earlier.remove_if_replaced([each for verdict in verdicts for each in self._keep_new(earlier.case, verdict)])

    def _draw_round(self, number: int) -> None:
        """Draw each Case while the one before runs."""

        def consume(case: Case) -> bool:
            if case == self._runner.in_flight:
                return False
            self._finish()
            if not self._spent() and case not in self._runner.memo:
                self._runner.begin(case)
            return self._spent()

        strategy = cases if self.context.settings.plain else trial_cases
        of_kernel = strategy(self.kernel, device=self.context.settings.device, limits=self.limits, variants=self.variants)
        draw_values(of_kernel, consume, seed=self.seed * 7919 + number, examples=_ROUND)
        self._finish()

    def _finish(self) -> None:
        """Wait for the Case in flight, if there is one, and keep each failure that is new."""
        case = self._runner.in_flight
        if case is None:
            return
        verdict = self._runner.finish("generate")
        if case.check != "oracle" and self._supported(replace(case, check="oracle")):
            case, verdict = _by_oracle_alone(case, verdict, self._runner, self.findings, self.limits.length)
        self._keep_new(case, verdict)

    def _keep_new(self, case: Case, verdict: Verdict) -> list[Finding]:
        findings = []
        while (identity := self.findings.new_in(verdict)) is not None and not self._enough_failures():
            findings.append(self._keep(identity, case, verdict))
        return findings

    def _keep(self, identity: Identity, case: Case, verdict: Verdict) -> Finding:
        """Keep a failure: its case file first, then the shrunk one, then its error maps."""
        opened = self.findings.open(self._finding(identity, case, verdict))
        shrinker = Shrinker(opened, self._runner, self._supported, self.variants)
        with self.clock.paused():
            try:
                shrinker.shrink(PROFILES[self.context.settings.profile].shrink)
            finally:
                self.findings.update(shrinker.finding)
            finding = self.findings.close()[identity]
            if self.context.maps:
                self.context.listener(self.context.maps.write(finding, case, self._runner))
        return finding

    def _finding(self, identity: Identity, case: Case, verdict: Verdict) -> Finding:
        return Finding(identity, case, verdict, cases_to_find=self.tally.cases, seconds_to_find=self.clock.seconds)

    def _count(self, phase: Phase, case: Case, verdict: Verdict) -> None:
        self.tally.add(phase, case, verdict)
        self.context.listener(TrialFinished(self.kernel.name, phase, case, verdict))

    def _statistics(self) -> tuple[int, tuple[float, ...]]:
        return self.context.executor.statistics.replaced, tuple(self.context.executor.statistics.recoveries)

    def _supported(self, case: Case) -> bool:
        return why_not_case(self.kernel, case, self.context.settings.device) is None

    def _enough_failures(self) -> bool:
        return len(self.findings.closed) >= (self.context.settings.max_failures or math.inf)

    def _spent(self) -> bool:
        enough = self.tally.cases >= (self.context.settings.max_examples or math.inf)
        late = self.context.seconds is not None and self.clock.seconds >= self.context.seconds
        return enough or late or self._enough_failures()
