"""A worker: takes turns on kernels until the campaign has none left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnfuzz.harness.campaign.account import Account, counted
from attnfuzz.harness.campaign.context import WorkerContext, batch_for
from attnfuzz.harness.campaign.journal import Journal
from attnfuzz.harness.campaign.kernel_run import KernelRun
from attnfuzz.harness.campaign.link import Campaign, Turn, Turns
from attnfuzz.harness.campaign.maps import MapWriter
from attnfuzz.harness.campaign.plan import KernelPlan
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.child import ChildError
from attnfuzz.harness.isolation.child_variables import child_variables
from attnfuzz.harness.isolation.executors import Executor, InProcess
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.outcomes import ExecutionError
from attnfuzz.harness.isolation.root import Root
from attnfuzz.harness.isolation.tasks import preloads
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.problem import BadArgument

__all__ = ["Worker", "executor_for", "executor_of", "worker_context"]


def executor_for(kernels: Sequence[Kernel], settings: Settings) -> Executor:
    """Make the executor that `settings` ask for: child processes, or this one. Close it after use."""
    return executor_of([kernel.backend for kernel in kernels], settings)


def executor_of(backends: Sequence[str], settings: Settings, *, spares: int | None = None, root: Root | None = None) -> Executor:
    """Make the executor for kernels of `backends`.

    Args:
        backends: of the kernels.
        settings: of the campaign.
        spares: children that are kept ready, by default as Isolated has it.
        root: forks the template process of the children, if it has imported the same.
    """
    if settings.in_process:
        return InProcess(settings.device, memory_check=settings.memory_check)
    forkserver = None if root is None else Forkserver(preloads(settings.device, backends), child_variables(settings.device), root)
    return Isolated(
        settings.device,
        backends=backends,
        deadline=settings.deadline,
        memory=settings.memory,
        memory_check=settings.memory_check,
        spares=spares,
        forkserver=forkserver,
    )


def worker_context(settings: Settings, executor: Executor, end: float | None) -> WorkerContext:
    """Return what the kernels of one worker share; its journal is its own."""
    return WorkerContext(
        settings=settings,
        executor=executor,
        journal=Journal(settings.out) if settings.out else None,
        maps=MapWriter(settings.out) if settings.out and settings.maps else None,
        end=end,
        batch=batch_for(settings),
    )


class Worker:
    """Tries kernels in turns; the Cases that it has drawn stay with it between its turns on a kernel.

    Args:
        kernel: returns the kernel of a name, and its plan.
        context: what all kernels of the worker share.
        campaign: what it reports to.
        turns: where it gets its work.
    """

    def __init__(
        self, kernel: Callable[[str], tuple[Kernel, KernelPlan]], context: WorkerContext, campaign: Campaign, turns: Turns
    ) -> None:
        self._kernel, self._context, self._account = kernel, context, Account(context.executor.statistics)
        self._campaign = counted(campaign, self._account, "campaign")
        self._turns = counted(turns, self._account, "turn")
        self._runs: dict[str, KernelRun] = {}
        self._last: str | None = None

    def work(self) -> None:
        """Take turns until there are none.

        Raises:
            DeviceLost: a kernel broke the device for this process.
        """
        journal, died = self._context.journal, True
        try:
            while (turn := self._turns.turn()) is not None:
                self._take(turn)
            died = False
        except (KeyboardInterrupt, DeviceLost):
            died = False
            raise
        finally:
            if journal and died:
                # The next run begins with the Case in flight.
                journal.abandon()
            elif journal:
                journal.discard()

    def _take(self, turn: Turn) -> None:
        if turn.kernel != self._last:
            # What one kernel leaves behind in a process must not be the next one's.
            with self._account.step("start"):
                self._context.executor.fresh()
            self._last = turn.kernel
        try:
            if turn.kernel not in self._runs:
                self._runs[turn.kernel] = KernelRun(*self._kernel(turn.kernel), self._context, self._campaign, self._account)
            end = self._runs[turn.kernel].turn(turn)
        except (BadArgument, ExecutionError, ChildError) as error:
            # The next kernel's times must not have this one's.
            self._account.take()
            self._turns.broke(turn.kernel, error)
            if self._context.journal:
                # The next run begins with its Case.
                self._context.journal.abandon()
        else:
            self._turns.end_turn(turn.kernel, end)
