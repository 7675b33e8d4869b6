"""A Campaign: Hypothesis drives many Trials of one or more kernels under a budget, and says what happens through events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from attnfuzz.harness.campaign.corpus import CaseFile, Corpus
from attnfuzz.harness.campaign.events import (
    CampaignFinished,
    CampaignStarted,
    CompileFinished,
    KernelBroke,
    KernelFinished,
    KernelSkipped,
    KernelStarted,
    KernelSummary,
    Listener,
)
from attnfuzz.harness.campaign.hunt import Hunt
from attnfuzz.harness.campaign.journal import Journal, LeftBehind, left_behind
from attnfuzz.harness.campaign.maps import Gallery
from attnfuzz.harness.campaign.settings import PROFILES, Settings
from attnfuzz.harness.isolation.child import ChildError
from attnfuzz.harness.isolation.executors import Compiled, Executor, InProcess
from attnfuzz.harness.isolation.isolated import ExecutionError, Isolated
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.problem import BadArgument
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import met
from attnfuzz.strategies.shapes import Variant, all_variants, modified, pool

__all__ = ["executor_for", "run_campaign"]

_MET = 3
"""So many times the variants' compiles, at most, for what else drawn Cases have compiled in."""


def executor_for(kernels: Sequence[Kernel], settings: Settings) -> Executor:
    """Where the Trials of `settings` run: in child processes, or in this one if it says so. Close it after use."""
    if settings.in_process:
        return InProcess(settings.device, memory_check=settings.memory_check)
    return Isolated(
        settings.device,
        backends=[kernel.backend for kernel in kernels],
        deadline=settings.deadline,
        memory=settings.memory,
        memory_check=settings.memory_check,
    )


def run_campaign(
    kernels: Sequence[Kernel], settings: Settings, listener: Listener, executor: Executor | None = None
) -> CampaignFinished:
    """Try `kernels` one after the other, each with an even share of the budget.

    A kernel that cannot run here is skipped with its reason. Ctrl-C ends the run with what was found until then.

    Args:
        kernels: the subjects.
        settings: of the run.
        listener: hears every event.
        executor: where Trials run; None: one is made for this campaign, and closed after it.

    Raises:
        BadArgument: none of the kernels can run here, or a Case cannot.
    """
    start = time.monotonic()
    able, skipped = _sorted_out(list({kernel.name: kernel for kernel in kernels}.values()), settings.device)
    corpus = Corpus(settings.out) if settings.out else None
    if corpus:
        corpus.check()
    # Read before anything runs: a file that cannot be read must not cost what was found until its turn.
    replayed = corpus if settings.replay else None
    stored = {each.name: list(replayed.of(each.name)) if replayed else [] for each in able}
    left = list(left_behind(settings.out)) if settings.out and settings.replay else []
    used = executor or executor_for(able, settings)
    try:
        described = used.describe()
        listener(CampaignStarted(settings.changed(), described, tuple(kernel.name for kernel in able), settings.seconds))
        for each in skipped:
            listener(each)
        journal = Journal(settings.out) if settings.out else None
        gallery = Gallery(settings.out, used) if settings.out and settings.maps else None
        shared = _Shared(settings, listener, used, corpus, journal, gallery, len(able))
        turns = [
            _Turn(kernel, shared, stored[kernel.name], [each for each in left if each.case.kernel == kernel.name])
            for kernel in able
        ]
        return _taken(turns, shared, skipped, start)
    finally:
        if used is not executor:
            used.close()


def _taken(turns: Sequence[_Turn], shared: _Shared, skipped: Sequence[KernelSkipped], start: float) -> CampaignFinished:
    """Every kernel has its turn, until the user or a lost device ends the run."""
    summaries: list[KernelSummary] = []
    broken: list[KernelBroke] = []
    interrupted, lost = False, None
    try:
        for turn in turns:
            # What one kernel leaves behind in a process must not be the next one's.
            shared.executor.fresh()
            try:
                turn.run()
            except KeyboardInterrupt:
                interrupted = True
            except (BadArgument, ExecutionError, ChildError) as error:
                if len(turns) == 1:
                    raise
                broken.append(KernelBroke(turn.kernel.name, str(error)))
                shared.listener(broken[-1])
                if shared.journal:
                    # The next run meets its Case first.
                    shared.journal.abandon()
            except DeviceLost as error:
                lost = str(error)
            finally:
                summaries.append(replace(turn.hunt.summary(turn.compiles, turn.compile_seconds), refused=turn.refused))
                shared.listener(KernelFinished(summaries[-1]))
            if interrupted or lost:
                break
    except BaseException:
        # The Case in flight is the one to look at: the next run meets it first.
        if shared.journal:
            shared.journal.abandon()
        raise
    if shared.journal:
        shared.journal.forsake()
    seconds = time.monotonic() - start
    not_kept = next((turn.hunt.not_kept for turn in turns if turn.hunt.not_kept), None)
    finished = CampaignFinished(tuple(summaries), tuple(skipped), seconds, interrupted, tuple(broken), lost, not_kept)
    shared.listener(finished)
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


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the turns of one campaign have in common."""

    settings: Settings
    listener: Listener
    executor: Executor
    corpus: Corpus | None
    journal: Journal | None
    gallery: Gallery | None
    shares: int


class _Turn:
    """One kernel's turn: its pool of variants, compiled, then hunted."""

    def __init__(self, kernel: Kernel, shared: _Shared, stored: Sequence[CaseFile], left: Sequence[LeftBehind]) -> None:
        self.kernel, self.shared = kernel, shared
        self.compiles, self.compile_seconds, self.refused = 0, 0.0, 0
        settings = shared.settings
        profile = PROFILES[settings.profile]
        variants = all_variants(kernel, settings.device)
        if settings.device in kernel.capabilities.compiles_on:
            variants = pool(variants, profile.variants[settings.device], settings.seed)
            variants = modified(variants, kernel, settings.device, settings.seed)
        self.variants, self.limits = variants, profile.limits[settings.device]
        self.hunt = Hunt(
            kernel,
            settings.device,
            limits=self.limits,
            executor=shared.executor,
            listener=shared.listener,
            corpus=shared.corpus,
            stored=stored,
            journal=shared.journal,
            gallery=shared.gallery,
            left_behind=left,
            seed=settings.seed * 1000003 + settings.shard,
            seconds=None if settings.seconds is None else settings.seconds / shared.shares,
            most=settings.max_examples,
            most_failures=settings.max_failures,
            shrink_seconds=profile.shrink,
            plain=settings.plain,
        )

    def run(self) -> None:
        compiled = self.shared.settings.device in self.kernel.capabilities.compiles_on
        self.shared.listener(KernelStarted(self.kernel.name, len(self.variants), len(self.variants) if compiled else 0))
        self.hunt.run(self._compiled() if compiled else self.variants)

    def _compiled(self) -> tuple[Variant, ...]:
        """The variants whose compile succeeded; one that failed is a Failure with its smallest Case."""
        start, can = time.monotonic(), self.kernel.capabilities
        keys = [self.kernel.compile_key(each.problem(can), each.config) for each in self.variants]
        cases: dict[str, Case] = {}
        for key, each in zip(keys, self.variants, strict=True):
            cases.setdefault(key, Case(kernel=self.kernel.name, problem=each.problem(can), config=each.config))
        # What else of a Case is compiled in is met by drawing some: a compile within a Trial would take the Trials' time.
        can_meet = met(
            self.kernel, device=self.shared.settings.device, limits=self.limits, variants=self.variants,
            seed=self.shared.settings.seed,
        )  # fmt: skip
        ahead = [case for key, case in can_meet.items() if key not in cases][: _MET * len(self.variants)]
        broken: dict[Case, Failure] = {}
        for done in self._each_compiled([*cases.values(), *ahead]):
            self.compiles += 1
            error = done.failure.message if done.failure else None
            self.shared.listener(CompileFinished(done.case.kernel, done.case.config.canonical(), done.seconds, error))
            if done.failure is not None:
                broken[done.case] = done.failure
        # Simplest first, whichever was done first: the first Case of an identity is the one that is kept. What was compiled ahead
        # and refused is found, and shrunk, when a Trial meets it.
        for case in (each for each in cases.values() if each in broken):
            self.hunt.record(case, Verdict(status="fail", failures=(broken[case],)), minimal=True)
        self.compile_seconds = time.monotonic() - start
        made = tuple(each for key, each in zip(keys, self.variants, strict=True) if cases[key] not in broken)
        # One failure may stand for many of them.
        self.refused = len(self.variants) - len(made)
        return made

    def _each_compiled(self, cases: Sequence[Case]) -> Iterator[Compiled]:
        """Compile, each Case in a journal of its own while it lasts: a compiler may take the machine down as well."""
        flying: dict[Case, Journal] = {}

        def starting(case: Case) -> None:
            if self.shared.settings.out and self.hunt.not_kept is None:
                flying[case] = Journal(self.shared.settings.out)
                try:
                    flying[case].launch(case)
                except OSError as error:
                    flying.pop(case).forsake()
                    self.hunt.cannot_keep(case, error)

        try:
            for done in self.shared.executor.compiled(cases, self.shared.settings.jobs, starting):
                if done.case in flying:
                    flying.pop(done.case).forsake()
                yield done
        except (KeyboardInterrupt, GeneratorExit):
            for journal in flying.values():
                journal.forsake()
            raise
        except BaseException:
            for journal in flying.values():
                journal.abandon()
            raise
