"""A Campaign: Hypothesis drives many Trials of one or more kernels under a budget, and says what happens through events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from attnfuzz.harness import environment
from attnfuzz.harness.builds import compile_pool
from attnfuzz.harness.corpus import CaseFile, Corpus
from attnfuzz.harness.events import (
    CampaignFinished,
    CampaignStarted,
    CompileFinished,
    KernelFinished,
    KernelSkipped,
    KernelStarted,
    KernelSummary,
    Listener,
)
from attnfuzz.harness.failure import Failure
from attnfuzz.harness.hunt import Hunt
from attnfuzz.harness.settings import PROFILES, Settings
from attnfuzz.harness.trial import DeviceLost, run_trial
from attnfuzz.harness.verdict import Verdict
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.problem import BadArgument
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.shapes import Variant, all_variants, pool

__all__ = ["Execute", "campaign"]

Execute = Callable[[Case, Device], Verdict]


def campaign(kernels: Sequence[Kernel], settings: Settings, listener: Listener, execute: Execute = run_trial) -> CampaignFinished:
    """Try `kernels` one after the other, each with an even share of the budget.

    A kernel that cannot run here is skipped with its reason. Ctrl-C ends the run with what was found until then.

    Raises:
        BadArgument: none of the kernels can run here.
    """
    start = time.monotonic()
    environment.prepare(settings.device)
    able, skipped = _sorted_out(list({kernel.name: kernel for kernel in kernels}.values()), settings.device)
    corpus = Corpus(settings.out) if settings.out else None
    if corpus:
        corpus.check()
    # Read before anything runs: a file that cannot be read must not cost what was found until its turn.
    stored = {each.name: list(corpus.of(each.name)) if corpus and settings.replay else [] for each in able}
    described = environment.describe(settings.device)
    listener(CampaignStarted(settings.changed(), described, tuple(kernel.name for kernel in able), settings.seconds))
    for each in skipped:
        listener(each)
    summaries: list[KernelSummary] = []
    interrupted, lost = False, None
    for kernel in able:
        turn = _Turn(kernel, settings, listener, execute, corpus, stored[kernel.name], shares=len(able))
        try:
            turn.run()
        except KeyboardInterrupt:
            interrupted = True
        except DeviceLost as error:
            lost = str(error)
        finally:
            summaries.append(turn.hunt.summary(turn.compiles, turn.compile_seconds))
            listener(KernelFinished(summaries[-1]))
        if interrupted or lost:
            break
    finished = CampaignFinished(tuple(summaries), tuple(skipped), time.monotonic() - start, interrupted, lost)
    listener(finished)
    return finished


def _sorted_out(kernels: Sequence[Kernel], device: Device) -> tuple[list[Kernel], list[KernelSkipped]]:
    able: list[Kernel] = []
    skipped: list[KernelSkipped] = []
    for kernel in kernels:
        declared = kernel.capabilities.devices
        reason = kernel.unavailable(device) if device in declared else f"it is declared for {', '.join(declared)} only"
        if reason is None:
            able.append(kernel)
        else:
            skipped.append(KernelSkipped(kernel.name, reason))
    if not able:
        reasons = "; ".join(f"{each.kernel}: {each.reason}" for each in skipped) or "no kernel was named"
        raise BadArgument(
            f"device={device!r}: no kernel can run here ({reasons}); install what is missing, or choose another device"
        )
    return able, skipped


class _Turn:
    """One kernel's turn: its pool of variants, compiled, then hunted."""

    def __init__(
        self,
        kernel: Kernel,
        settings: Settings,
        listener: Listener,
        execute: Execute,
        corpus: Corpus | None,
        stored: Sequence[CaseFile],
        shares: int,
    ) -> None:
        self.kernel, self.settings, self.listener = kernel, settings, listener
        self.compiles, self.compile_seconds = 0, 0.0
        profile = PROFILES[settings.profile]
        variants = all_variants(kernel, settings.device)
        if settings.device in kernel.capabilities.compiles_on:
            variants = pool(variants, profile.variants[settings.device], settings.seed)
        self.variants = variants
        self.hunt = Hunt(
            kernel,
            settings.device,
            limits=profile.limits[settings.device],
            execute=execute,
            listener=listener,
            corpus=corpus,
            stored=stored,
            seed=settings.seed * 1000003 + settings.shard,
            seconds=None if settings.seconds is None else settings.seconds / shares,
            most=settings.max_examples,
            most_failures=settings.max_failures,
            shrink_seconds=profile.shrink,
        )

    def run(self) -> None:
        compiled = self.settings.device in self.kernel.capabilities.compiles_on
        self.listener(KernelStarted(self.kernel.name, len(self.variants), len(self.variants) if compiled else 0))
        self.hunt.run(self._compiled())

    def _compiled(self) -> tuple[Variant, ...]:
        """The variants whose compile succeeded; one that failed is a Failure with its smallest Case."""
        start = time.monotonic()
        keys = {self.kernel.compile_key(each.problem(self.kernel.capabilities), each.config): each for each in self.variants}
        good = dict(keys)
        for done in compile_pool(self.kernel, self.variants, self.settings.device, self.settings.jobs):
            self.compiles += 1
            self.listener(CompileFinished(done.kernel, done.key, done.seconds, done.error))
            if done.error is not None:
                variant = good.pop(done.key)
                failure = Failure(kernel=done.kernel, kind="compile-error", check="build", message=done.error[:2000])
                case = Case(kernel=done.kernel, problem=variant.problem(self.kernel.capabilities), config=variant.config)
                self.hunt.record(case, Verdict(status="fail", failures=(failure,)))
        self.compile_seconds = time.monotonic() - start
        return tuple(
            each for each in self.variants if self.kernel.compile_key(each.problem(self.kernel.capabilities), each.config) in good
        )
