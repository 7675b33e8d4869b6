"""A worker: takes turns on kernels until the campaign has none left."""

from __future__ import annotations

from collections.abc import Callable

from attnfuzz.harness.campaign.account import Account, counted
from attnfuzz.harness.campaign.context import WorkerContext
from attnfuzz.harness.campaign.kernel_run import KernelRun
from attnfuzz.harness.campaign.plan import KernelPlan
from attnfuzz.harness.campaign.worker_link import Campaign, Turn, Turns
from attnfuzz.harness.isolation.child import ChildError
from attnfuzz.harness.isolation.outcomes import ExecutionError
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import BadArgument

__all__ = ["Worker"]


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
