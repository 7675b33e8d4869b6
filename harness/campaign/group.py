"""A campaign's workers outside its own process: answered, given turns, replaced where one dies, interrupted, ended."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.coordinator import Coordinator
from attnfuzz.harness.campaign.journal import left_behind
from attnfuzz.harness.campaign.link import Turn
from attnfuzz.harness.campaign.process import Answer, Message
from attnfuzz.harness.campaign.rounds import Round
from attnfuzz.harness.judge.failure import Identity

__all__ = ["GroupWorker", "WorkerGroup"]

_TICK = 0.05
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

    def died(self) -> bool:
        """Whether a worker that is gone has not ended by itself."""
        raise NotImplementedError

    def end(self) -> None:
        """End it now, if it has not ended."""
        raise NotImplementedError


class WorkerGroup:
    """Workers with the numbers 0 to `count` - 1; a group of one kind starts and hears its workers in its own way.

    Args:
        context: of the campaign.
        count: of the workers.
    """

    def __init__(self, context: CampaignContext, count: int) -> None:
        self._context, self._count = context, count
        self._living: list[GroupWorker] = []
        self._deaths = 0
        self._numbers = deque(range(count))

    def _start(self, number: int) -> None:
        """Start a worker, and add it to those that live."""
        raise NotImplementedError

    def _heard(self, seconds: float) -> Iterable[GroupWorker]:
        """Return the workers of which a message has come or that are gone, after waiting for one for at most `seconds`."""
        raise NotImplementedError

    def work(self, coordinator: Coordinator) -> None:
        """Answer the workers until all have ended.

        Raises:
            KeyboardInterrupt: by the user; what the workers had found until then is kept.
        """
        try:
            while self._living or (self._numbers and coordinator.able()):
                self._step(coordinator)
        except KeyboardInterrupt:
            self._interrupt(coordinator)
            raise

    def _step(self, coordinator: Coordinator) -> None:
        coordinator.poll()
        for worker in self._heard(_TICK):
            self._receive(worker, coordinator)
        for each in list(self._living):
            if each.waits:
                self._give_turn(each, coordinator)
        self._start_more(coordinator)
        end = self._context.end
        if end is not None and time.monotonic() > end + self._context.settings.grace + _LAST_WORDS:
            self._interrupt(coordinator)

    def _start_more(self, coordinator: Coordinator, most: int = sys.maxsize) -> None:
        """Start a worker where there is more to try than workers that are free, and fewer than `most` live."""
        idle = sum(each.kernel is None for each in self._living)
        while self._numbers and idle < coordinator.able() and len(self._living) < most:
            self._start(self._numbers.popleft())
            idle += 1

    def _receive(self, worker: GroupWorker, coordinator: Coordinator) -> None:
        try:
            message = worker.receive()
        except (EOFError, OSError):
            self._gone(worker, coordinator)
            return
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
        died = worker.died()
        worker.end()
        for kernel, identity in worker.open:
            coordinator.close(kernel, identity)
        for kernel, number in worker.rounds:
            coordinator.give_back(kernel, number)
        coordinator.leave(worker.number)
        if died:
            worker.leave_behind()
            self._deaths += 1
            if self._context.settings.out:
                coordinator.resume(list(left_behind(self._context.settings.out)))
            if self._deaths <= _MOST_DEATHS * self._count:
                self._numbers.append(worker.number)

    def _interrupt(self, coordinator: Coordinator) -> None:
        """End the workers, and keep what they report until they have ended."""
        for each in self._living:
            with contextlib.suppress(OSError):
                each.interrupt()
        end = time.monotonic() + _LAST_WORDS
        while self._living and time.monotonic() < end:
            for worker in self._heard(_TICK):
                try:
                    message = worker.receive()
                except (EOFError, OSError):
                    self._living.remove(worker)
                    worker.end()
                    continue
                for name, values in message.reports:
                    if name != "turn":
                        self._call(worker, coordinator, name, values)
        self.close()

    def close(self) -> None:
        """End every worker that is left; their children end with them."""
        for each in self._living:
            each.end()
        self._living.clear()
