"""A campaign: many Trials of one or more kernels under a budget, reported through events."""

from __future__ import annotations

import time
from collections.abc import Sequence

from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.corpus import Corpus
from attnfuzz.harness.campaign.events import (
    CampaignFinished,
    CampaignStarted,
    KernelBroke,
    KernelFinished,
    KernelSkipped,
    KernelSummary,
    Listener,
)
from attnfuzz.harness.campaign.journal import Journal, left_behind
from attnfuzz.harness.campaign.kernel_run import KernelRun
from attnfuzz.harness.campaign.maps import MapWriter
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.child import ChildError
from attnfuzz.harness.isolation.executors import Executor, InProcess
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.outcomes import ExecutionError
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.problem import BadArgument

__all__ = ["executor_for", "run_campaign"]


def executor_for(kernels: Sequence[Kernel], settings: Settings) -> Executor:
    """Make the executor that `settings` ask for: child processes, or this one. Close it after use."""
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

    A kernel that cannot run here is skipped with its reason. Ctrl-C ends the run with the findings until then.

    Args:
        kernels: what to try.
        settings: of the run.
        listener: called with every event.
        executor: where trials run; None: one is made for this campaign, and closed after it.

    Raises:
        BadArgument: none of the kernels can run here, or a Case cannot.
    """
    start = time.monotonic()
    runnable, skipped = _sorted_out(list({kernel.name: kernel for kernel in kernels}.values()), settings.device)
    corpus = Corpus(settings.out) if settings.out else None
    if corpus:
        corpus.check()
    # Read before anything runs: a file that cannot be read must not cost the findings of the kernels before it.
    replay = corpus if settings.replay else None
    stored = {each.name: list(replay.of(each.name)) if replay else [] for each in runnable}
    left = list(left_behind(settings.out)) if settings.out and settings.replay else []
    executing = executor or executor_for(runnable, settings)
    try:
        names = tuple(kernel.name for kernel in runnable)
        listener(CampaignStarted(settings.changed(), executing.describe(), names, settings.seconds))
        for each in skipped:
            listener(each)
        journal = Journal(settings.out) if settings.out else None
        seconds = None if settings.seconds is None else settings.seconds / len(runnable)
        maps = MapWriter(settings.out) if settings.out and settings.maps else None
        context = CampaignContext(settings, executing, listener, corpus, journal, maps, seconds)
        runs = [
            KernelRun(kernel, context, stored[kernel.name], [each for each in left if each.case.kernel == kernel.name])
            for kernel in runnable
        ]
        return _run_all(runs, context, skipped, start)
    finally:
        if executing is not executor:
            executing.close()


def _run_all(
    runs: Sequence[KernelRun], context: CampaignContext, skipped: Sequence[KernelSkipped], start: float
) -> CampaignFinished:
    """Run every kernel, until the user or a lost device ends the campaign."""
    listener, journal = context.listener, context.journal
    summaries: list[KernelSummary] = []
    broken: list[KernelBroke] = []
    interrupted, lost = False, None
    try:
        for run in runs:
            # What one kernel leaves behind in a process must not be the next one's.
            context.executor.fresh()
            try:
                run.run()
            except KeyboardInterrupt:
                interrupted = True
            except (BadArgument, ExecutionError, ChildError) as error:
                if len(runs) == 1:
                    raise
                broken.append(KernelBroke(run.kernel.name, str(error)))
                listener(broken[-1])
                if journal:
                    # The next run begins with its Case.
                    journal.abandon()
            except DeviceLost as error:
                lost = str(error)
            finally:
                summaries.append(run.summary())
                listener(KernelFinished(summaries[-1]))
            if interrupted or lost:
                break
    except BaseException:
        # The next run begins with the Case in flight.
        if journal:
            journal.abandon()
        raise
    if journal:
        journal.discard()
    not_kept = next((run.findings.not_kept for run in runs if run.findings.not_kept), None)
    seconds = time.monotonic() - start
    finished = CampaignFinished(tuple(summaries), tuple(skipped), seconds, interrupted, tuple(broken), lost, not_kept)
    listener(finished)
    return finished


def _sorted_out(kernels: Sequence[Kernel], device: Device) -> tuple[list[Kernel], list[KernelSkipped]]:
    runnable: list[Kernel] = []
    skipped: list[KernelSkipped] = []
    for kernel in kernels:
        declared = kernel.capabilities.devices
        reason = kernel.unavailable(device) if device in declared else f"it is declared for {', '.join(declared)} only"
        if reason is None:
            runnable.append(kernel)
        else:
            skipped.append(KernelSkipped(kernel.name, reason))
    if not runnable:
        reasons = "; ".join(f"{each.kernel}: {each.reason}" for each in skipped) or "no kernel was named"
        raise BadArgument(
            f"device={device!r}: no kernel can run here ({reasons}); install what is missing, or choose another device"
        )
    return runnable, skipped
