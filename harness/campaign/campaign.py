"""A campaign: many Trials of one or more kernels under a budget, reported through events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from attnfuzz.harness.campaign.context import CampaignContext, worker_context
from attnfuzz.harness.campaign.coordinator import Coordinator, LocalTurns
from attnfuzz.harness.campaign.corpus import Corpus
from attnfuzz.harness.campaign.events import (
    CampaignFinished,
    CampaignStarted,
    CaseSkipped,
    Event,
    KernelBroke,
    KernelSkipped,
    Listener,
)
from attnfuzz.harness.campaign.executor import executor_of
from attnfuzz.harness.campaign.journal import left_behind
from attnfuzz.harness.campaign.kernel_state import KernelState
from attnfuzz.harness.campaign.plan import plan_of
from attnfuzz.harness.campaign.replays import ReplayRecord
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.campaign.shared_failures import SharedFailures
from attnfuzz.harness.campaign.worker import Worker
from attnfuzz.harness.campaign.worker_group import WorkerGroup, WorkersLost
from attnfuzz.harness.campaign.worker_processes import WorkerProcesses
from attnfuzz.harness.core.signals import ending, interrupted_once, uninterrupted
from attnfuzz.harness.isolation.executors import Executor
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.support.third_party import ThirdPartyError, guarded
from attnfuzz.kernels.targets import why_not_on

__all__ = ["run_campaign"]


def run_campaign(
    kernels: Sequence[Kernel],
    settings: Settings,
    listener: Listener,
    executor: Executor | None = None,
    group: Callable[[Sequence[Kernel], CampaignContext], WorkerGroup] | None = None,
    broken: Sequence[KernelBroke] = (),
    shared: SharedFailures | None = None,
) -> CampaignFinished:
    """Try `kernels` in turns, each with an even share of the budget.

    A kernel that cannot run here is skipped with its reason. Ctrl-C ends the run with the findings until then.

    Args:
        kernels: what to try.
        settings: of the run.
        listener: called with every event.
        executor: where trials run, with one worker, in this process; None: one is made for this campaign, and closed after it.
        group: makes the workers, of the settings' number, from what they try and the campaign's context; None: processes here.
        broken: kernels that were to be tried as well, and that cannot be loaded.
        shared: failures that this shard shares with others; None: each that is found is kept and shrunk here.

    Raises:
        BadArgument: none of the kernels can run here, or a Case cannot.
    """
    # Ctrl-C pressed twice must not cost the table of what was found, nor the files that are written last.
    with interrupted_once():
        return _run_campaign(kernels, settings, listener, executor, group, broken, shared)


def _run_campaign(
    kernels: Sequence[Kernel],
    settings: Settings,
    listener: Listener,
    executor: Executor | None,
    group: Callable[[Sequence[Kernel], CampaignContext], WorkerGroup] | None,
    broken: Sequence[KernelBroke],
    shared: SharedFailures | None,
) -> CampaignFinished:
    start, unique = time.monotonic(), list({kernel.name: kernel for kernel in kernels}.values())
    corpus = Corpus(settings.out) if settings.out else None
    if corpus:
        corpus.check()
    end = None if settings.seconds is None else start + settings.seconds
    replays = ReplayRecord(settings.out) if settings.out and settings.replay else None
    context = CampaignContext(settings, listener, corpus, end, replays, shared)
    if group is None and settings.workers > 1 and executor is None:
        group = WorkerProcesses
    declared = [each for each in unique if _declares(each, settings.device)]
    # Workers and children load while kernels are asked whether they can run here, for which some import torch.
    processes = group(declared, context) if group and declared else None
    executing, started = executor, list[Executor]()
    try:
        if executing is None:
            # With worker processes, this one has trials of its own only to describe the machine, and compiles.
            spares, root = (0, processes.root()) if processes else (None, None)
            executing = executor_of([each.backend for each in declared], settings, spares=spares, root=root)
            started.append(executing)
        executing.prepare()
        runnable, skipped, refused = _sorted_out(unique, settings.device, broken)
        # Read before anything runs: a file that cannot be read must not cost the findings of the kernels before it.
        unread: list[CaseSkipped] = []
        states = _states(runnable, context, unread)
        names = tuple(kernel.name for kernel in runnable)
        examples = states[0].rounds.most
        listener(CampaignStarted(settings.changed(), executing.describe(), names, settings.seconds, settings.seed, examples))
        events: tuple[Event, ...] = (*skipped, *unread, *refused)
        for each in events:
            listener(each)
        coordinator = Coordinator(context, states, executing, settings.workers if processes else 1)
        coordinator.broken += refused
        if processes:
            coordinator.shared_gpu, coordinator.ended_sharing = processes.shared_gpu, processes.ended_sharing
        work = partial(processes.work, coordinator) if processes else _worker(coordinator, executing).work
        return _run(coordinator, work, skipped, start)
    finally:
        with uninterrupted(drop=True):
            if processes:
                processes.close()
            for own in started:
                own.close()


def _states(kernels: Sequence[Kernel], context: CampaignContext, unread: list[CaseSkipped]) -> list[KernelState]:
    """Return the kernels' states, with what earlier runs have stored and left in flight; `unread` gets what cannot be read."""
    settings, corpus = context.settings, context.corpus
    stored = corpus.of_all([each.name for each in kernels]) if corpus and settings.replay else {}
    left = []
    if settings.out and settings.replay:
        left = list(left_behind(settings.out, lambda path, reason: unread.append(CaseSkipped(str(path), reason))))
    return [
        KernelState(
            kernel,
            plan_of(kernel, settings),
            context,
            stored.get(kernel.name, ()),
            [each for each in left if each.case.kernel == kernel.name],
        )
        for kernel in kernels
    ]


def _worker(coordinator: Coordinator, executor: Executor) -> Worker:
    """Return the worker of this process."""
    context = worker_context(coordinator.context.settings, executor, coordinator.context.end)
    kernels = {name: (state.kernel, state.plan) for name, state in coordinator.states.items()}
    return Worker(kernels.__getitem__, context, coordinator, LocalTurns(coordinator))


def _run(coordinator: Coordinator, work: Callable[[], None], skipped: Sequence[KernelSkipped], start: float) -> CampaignFinished:
    """Let the workers work until they, the user or a lost device end the campaign."""
    interrupted, lost, died = False, None, True
    try:
        try:
            work()
            ending()
        except KeyboardInterrupt:
            ending()
            interrupted = True
        except (DeviceLost, WorkersLost) as error:
            lost = str(error)
        if coordinator.errors and len(coordinator.states) == 1:
            raise coordinator.errors[0]
        died = False
        with uninterrupted(drop=True):
            return coordinator.finish(skipped, start, interrupted=interrupted, lost=lost)
    finally:
        with uninterrupted(drop=True):
            coordinator.compiles.close(died=died)


def _declares(kernel: Kernel, device: Device) -> bool:
    try:
        return guarded(lambda: device in kernel.capabilities.devices)
    except ThirdPartyError:  # `_sorted_out` reports it
        return False


def _sorted_out(
    kernels: Sequence[Kernel], device: Device, broken: Sequence[KernelBroke]
) -> tuple[list[Kernel], list[KernelSkipped], list[KernelBroke]]:
    """Return the kernels that can run, those that cannot, and those that say nothing but an error, after `broken`."""
    runnable: list[Kernel] = []
    skipped: list[KernelSkipped] = []
    refused = list(broken)
    for kernel in kernels:
        try:
            reason = why_not_on(kernel, device)
        except BadArgument as error:
            refused.append(KernelBroke(kernel.name, str(error)))
            continue
        if reason is None:
            runnable.append(kernel)
        else:
            skipped.append(KernelSkipped(kernel.name, reason))
    if not runnable:
        reasons = [f"{each.kernel}: {each.reason}" for each in skipped] + [f"{each.kernel}: {each.error}" for each in refused]
        reason = f"no kernel can run here ({'; '.join(reasons) or 'no kernel was named'})"
        raise reject("device", device, reason, "install what is missing, or choose another device")
    return runnable, skipped, refused
