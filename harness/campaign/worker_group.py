"""A campaign's workers outside its own process: answered, given turns, replaced where one dies, interrupted, ended."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.coordinator import Coordinator
from attnfuzz.harness.campaign.events import CaseSkipped, SharedGpu, WorkerDied
from attnfuzz.harness.campaign.journal import LeftBehind, left_behind
from attnfuzz.harness.campaign.rounds import Round
from attnfuzz.harness.campaign.worker_link import Turn
from attnfuzz.harness.campaign.worker_main import Answer, Message
from attnfuzz.harness.core.signals import ending, uninterrupted
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.harness.isolation.root import Root
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.strategies.case import Case

__all__ = ["GroupWorker", "WorkerGroup", "WorkersLost"]

_TICK, _COUNT = 0.05, 0.003
"""Seconds to wait for a message, and to count trials between two looks at whether one has come."""
_LAST_WORDS = 15.0
"""Seconds that a worker has to end after it was interrupted, or after the time of the campaign and its grace are over."""
_MOST_DEATHS = 3
"""Workers that are replaced, as a multiple of their number."""


class GroupWorker:
    """One worker, and what it is at; each kind of group has its own way to reach it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.kernel: str | None = None
        self.rounds: set[tuple[str, int]] = set()
        self.open: set[tuple[str, Identity]] = set()
        self.heard = self.tried = self.interrupted = False
        """Whether it has sent anything, whether that was a trial, and whether it was interrupted since the time is over."""
        self.waits = False
        """Whether it has asked for a turn and has no answer yet."""

    def receive(self) -> Message:
        """Return the message that has come.

        Raises:
            EOFError: the worker is gone.
            OSError: so it is.
        """
        raise NotImplementedError

    def send(self, answer: Answer) -> None:
        """Answer its question; OSError where it is gone."""
        raise NotImplementedError

    def taken(self, turn: Turn) -> Turn:
        """Return a turn as the worker is to have it."""
        return turn

    def leave_behind(self) -> None:
        """Leave its Cases in flight to others, where its journal is not its own: it has died."""

    def interrupt(self) -> None:
        """Interrupt it as Ctrl-C does; OSError where it is gone."""
        raise NotImplementedError

    def died(self) -> str | None:
        """Return how a worker that is gone has ended, such as "SIGKILL"; None: by itself."""
        raise NotImplementedError

    def had_in_flight(self, left: LeftBehind) -> bool:
        """Whether a Case that was left behind is from its journal."""
        raise NotImplementedError

    def end(self) -> None:
        """End it now, if it has not ended."""
        raise NotImplementedError


class WorkersLost(Exception):
    """Too many workers have died; the text says how many, and what to do."""


class WorkerGroup:
    """Workers with the numbers 0 to `count` - 1; a group of one kind starts and hears its workers in its own way.

    Args:
        context: of the campaign.
        count: of the workers.
    """

    def __init__(self, context: CampaignContext, count: int) -> None:
        self._context, self._count = context, count
        self._living: list[GroupWorker] = []
        self._deaths, self._last_end = 0, ""
        self._numbers = deque(range(count))
        self._refused: dict[str, BadArgument] = {}
        """Kernels that cannot be given to another process."""

    def _parcels(self, kernels: Sequence[Kernel]) -> dict[str, dict[str, Any]]:
        """Return what a worker needs to find each kernel; one that cannot be given to another process is reported by `work`."""
        parcels = {}
        for each in kernels:
            try:
                parcels[each.name] = shipped(each.name)
            except BadArgument as error:
                self._refused[each.name] = error
        return parcels

    def root(self) -> Root | None:
        """Return what forks template processes for the campaign's own process; None: nothing does."""
        return None

    def shared_gpu(self) -> SharedGpu | None:
        """Return how long the workers have shared the GPU; None: they were not to."""
        return None

    def ended_sharing(self) -> tuple[Case, ...]:
        """Return the Cases whose process ended sharing."""
        return ()

    def _start(self, number: int) -> None:
        """Start a worker, and add it to those that live."""
        raise NotImplementedError

    def _heard(self, seconds: float) -> Iterable[GroupWorker]:
        """Return the workers of which a message has come or that are gone, after waiting for one for at most `seconds`."""
        raise NotImplementedError

    def work(self, coordinator: Coordinator) -> None:
        """Answer the workers until all have ended.

        Raises:
            KeyboardInterrupt: by the user; what the workers have reported until then is kept.
            WorkersLost: too many workers have died.
        """
        for name, error in self._refused.items():
            if name in coordinator.states:
                coordinator.broke(-1, name, error)
        try:
            while self._living or coordinator.unfinished():
                self._step(coordinator)
        except KeyboardInterrupt:
            ending()
            self._interrupt(coordinator)
            raise

    def _step(self, coordinator: Coordinator) -> None:
        coordinator.poll()
        # Workers wait for answers: what their trials have shown is counted while none does.
        workers = list(self._heard(0.0))
        if not workers:
            with uninterrupted():
                counted = coordinator.count(_COUNT)
            workers = list(self._heard(_TICK if counted else 0.0))
        # Ctrl-C in the middle of a message would lose the rest of it, such as a failure whose case file is being written.
        with uninterrupted():
            for worker in workers:
                self._receive(worker, coordinator)
            for each in list(self._living):
                if each.waits:
                    self._give_turn(each, coordinator)
            self._start_more(coordinator)
        end = self._context.end
        if not all(each.tried for each in self._living) and not coordinator.unfinished():
            self._end_unheard()
            if end is not None:
                self._interrupt_untried()
        if end is not None and time.monotonic() > end + self._context.settings.grace + _LAST_WORDS:
            self._interrupt(coordinator)

    def _start_more(self, coordinator: Coordinator, most: int = sys.maxsize) -> None:
        """Start a worker where there is more to try than workers that are free, and fewer than `most` live."""
        idle = sum(each.kernel is None for each in self._living)
        while self._numbers and idle < coordinator.able() and len(self._living) < most:
            self._start(self._numbers.popleft())
            idle += 1
        if not self._living and not self._numbers and coordinator.unfinished():
            processes = "process" if self._deaths == 1 else "processes"
            raise WorkersLost(
                f"{self._deaths} worker {processes} died, the last with {self._last_end}; the next run begins with "
                "their Cases in flight; --workers 1 tries the kernels without worker processes"
            )

    def _receive(self, worker: GroupWorker, coordinator: Coordinator) -> None:
        try:
            message = worker.receive()
        except (EOFError, OSError):
            self._gone(worker, coordinator)
            return
        worker.heard = True
        *reports, (method, arguments) = message.reports
        for name, values in reports:
            self._call(worker, coordinator, name, values)
        if method == "turn":
            worker.waits = True
            return
        value = self._call(worker, coordinator, method, arguments)
        if message.asks:
            self._answer(worker, coordinator, value)

    def _call(self, worker: GroupWorker, coordinator: Coordinator, method: str, arguments: tuple[Any, ...]) -> Any:
        if method in ("end_turn", "broke"):
            worker.kernel = None
            return getattr(coordinator, method)(worker.number, *arguments)
        worker.tried |= method == "trial"
        value = getattr(coordinator, method)(*arguments)
        if isinstance(value, Round):
            worker.rounds.add((arguments[0], value.number))
        elif method == "end_round":
            worker.rounds.discard((arguments[0], arguments[1]))
        elif method == "open" and value is not None:
            worker.open.add((arguments[0], value.identity))
        elif method == "close":
            worker.open.discard((arguments[0], arguments[1]))
        return value

    def _answer(self, worker: GroupWorker, coordinator: Coordinator, value: Any) -> None:
        over = frozenset(name for name in coordinator.states if coordinator.over(name))
        with contextlib.suppress(OSError):
            worker.send(Answer(value, over))

    def _give_turn(self, worker: GroupWorker, coordinator: Coordinator) -> None:
        turn = coordinator.turn(worker.number)
        if turn == "wait":
            return
        worker.waits = False
        worker.kernel = turn.kernel if turn is not None else None
        self._answer(worker, coordinator, None if turn is None else worker.taken(turn))

    def _gone(self, worker: GroupWorker, coordinator: Coordinator) -> None:
        """Give out again what a worker that has ended or died was at, and start another in its place if it died."""
        self._living.remove(worker)
        ending = worker.died()
        worker.end()
        for kernel, identity in worker.open:
            coordinator.close(kernel, identity)
        for kernel, number in worker.rounds:
            coordinator.give_back(kernel, number)
        coordinator.leave(worker.number)
        if ending is not None:
            worker.leave_behind()
            self._deaths, self._last_end = self._deaths + 1, ending
            if self._context.settings.out:
                listener = self._context.listener
                left = left_behind(self._context.settings.out, lambda path, reason: listener(CaseSkipped(str(path), reason)))
                coordinator.resume([each for each in left if worker.had_in_flight(each)])
            if replaced := self._deaths <= _MOST_DEATHS * self._count:
                self._numbers.append(worker.number)
            self._context.listener(WorkerDied(worker.number, worker.kernel, ending, replaced))

    def _interrupt(self, coordinator: Coordinator) -> None:
        """End the workers, and keep what they report until they have ended."""
        self._end_unheard()
        for each in self._living:
            with contextlib.suppress(OSError):
                each.interrupt()
        end = time.monotonic() + _LAST_WORDS
        while self._living and time.monotonic() < end:
            for worker in list(self._heard(_TICK)):
                with uninterrupted():
                    self._receive_last(worker, coordinator)
        self.close()

    def _receive_last(self, worker: GroupWorker, coordinator: Coordinator) -> None:
        """Keep what a worker reports that is to end; it has no answer."""
        try:
            message = worker.receive()
        except (EOFError, OSError):
            self._living.remove(worker)
            worker.end()
            return
        for name, values in message.reports:
            if name != "turn":
                self._call(worker, coordinator, name, values)

    def _end_unheard(self) -> None:
        """End the workers that load still: they have nothing to report, and an interrupt would print a traceback."""
        for each in [each for each in self._living if not each.heard]:
            self._living.remove(each)
            each.end()

    def _interrupt_untried(self) -> None:
        """End the workers that wait for their first child process: no limit on trials ends that."""
        for each in self._living:
            if not (each.tried or each.interrupted):
                each.interrupted = True
                with contextlib.suppress(OSError):
                    each.interrupt()

    def close(self) -> None:
        """End every worker that is left; their children end with them."""
        for each in self._living:
            each.end()
        self._living.clear()
