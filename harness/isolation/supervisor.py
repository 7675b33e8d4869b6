"""The parent's side of isolation: tasks go to children, each stage has a deadline, and a death is told with its cause."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from attnfuzz.harness.isolation.child import Child, ChildError
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.outcomes import KERNEL_STAGES, Death, Error, Outcome, Reply, Task
from attnfuzz.harness.isolation.wire import wait
from attnfuzz.harness.isolation.worker import LOST_CONNECTION

__all__ = ["Running", "Statistics", "Supervisor"]

_TICK = 0.05
_FAMILY_TICK = 0.5
_START_DEADLINE = 180.0
_ATTEMPTS = 4
_SWEEP_EVERY = 50
"""Tasks after which what children have left behind is cleared away, though none has died."""


@dataclass(slots=True)
class Statistics:
    """Tasks done, children replaced, and how long it took after each death until the next reply."""

    tasks: int = 0
    replaced: int = 0
    recoveries: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Running:
    """A task at work in a child."""

    task: Task
    child: Child
    number: int
    started: float
    looked: float
    family: float
    again: bool = False
    """A child before this one has ended before it took up the task."""


class _NotBegunError(ChildError):
    """A child ended before it took up its task: the task is not to blame."""


class Supervisor:
    """Runs tasks in children of `forkserver`, one after the other or several at once.

    Args:
        forkserver: starts the children; closed with the supervisor.
        warm: a task for every new child, before any other, so that the next one stands ready when one dies.
        memory: bytes that a child and what it starts may hold.
        spares: children that stand ready.
    """

    def __init__(self, forkserver: Forkserver, *, memory: int, warm: Task | None = None, spares: int = 1) -> None:
        self.statistics = Statistics()
        self._forkserver, self._memory, self._warm, self._spares = forkserver, memory, warm, spares
        self._hint: Task | None = None
        self._said = ""
        self.late: Death | None = None
        """The death of a child between two tasks, of which nobody has told yet."""
        self._numbers = itertools.count(1)
        self._idle: list[Child] = []
        self._ready: list[Child] = []
        self._living: set[Child] = set()
        self._warming: dict[Child, int] = {}
        self._died: float | None = None

    def run(self, task: Task) -> Outcome:
        """Do `task` in a child that is free, or in a new one.

        Raises:
            ChildError: no child can be started.
        """
        return self.finish(self.begin(task))

    def begin(self, task: Task) -> Running:
        """Give `task` to a child that is free, or to a new one.

        Raises:
            ChildError: no child can be started.
        """
        child, now, number = self._free_child(), time.monotonic(), next(self._numbers)
        child.send({"task": number, "target": task.target, "payload": task.payload})
        return Running(task, child, number, now, now, now)

    def finish(self, running: Running) -> Outcome:
        """Wait for the outcome of what `begin` gave.

        Raises:
            ChildError: no child can be started.
        """
        while True:
            outcome = self._outcome(running, wait([running.child.connection.fileno(), running.child.descriptor], _TICK))
            if outcome is not None:
                return outcome

    def run_all(
        self, tasks: Sequence[Task], width: int, starting: Callable[[int], None] = lambda _: None
    ) -> Iterator[tuple[int, Outcome]]:
        """Do `tasks`, `width` at once; yields (index, outcome) as each is done. `starting` hears of each before it begins.

        Raises:
            ChildError: no child can be started.
        """
        queue, active = deque(enumerate(tasks)), dict[int, Running]()
        try:
            while queue or active:
                while queue and len(active) < width:
                    index, task = queue.popleft()
                    starting(index)
                    active[index] = self.begin(task)
                children = [each.child for each in active.values()]
                ready = wait([each for child in children for each in (child.connection.fileno(), child.descriptor)], _TICK)
                for index, running in list(active.items()):
                    outcome = self._outcome(running, ready)
                    if outcome is not None:
                        del active[index]
                        yield index, outcome
        finally:
            # Interrupted: what was at work is in no known state.
            for running in active.values():
                self._put_down(running.child)

    def hint(self, warm: Task) -> None:
        """Make new children ready by `warm` from now on: what they will need first. It may fail; then it is not used again."""
        self._hint = warm

    def settle(self) -> None:
        """Wait until every spare stands ready."""
        while len(self._ready) < self._spares:
            self._ready.append(self._started())
        for child in list(self._ready):
            if not self._warmed(child):
                self._ready.remove(child)

    def replace(self) -> None:
        """Give the next task a child that has done none before."""
        for child in self._idle:
            self._put_down(child)
        self._idle.clear()

    def trim(self) -> None:
        """Keep one free child, and end the others."""
        for child in self._idle[1:]:
            self._put_down(child)
        del self._idle[1:]

    def close(self) -> None:
        """End every child and everything that they have started, and remove their temporary files."""
        for child in list(self._living):
            self._put_down(child, sweep=False)
        self._idle.clear()
        self._ready.clear()
        self._forkserver.close()

    def _outcome(self, running: Running, ready: set[int]) -> Outcome | None:
        """What has become of a task; None while it goes on, perhaps in another child."""
        died = self._died
        try:
            outcome = self._look(running.child, running, ready)
        except _NotBegunError:
            if running.again:
                return Death("exit", "start", 0.0, 0.0, None, self._said, 0)
            fresh = self.begin(running.task)
            running.child, running.number, running.started = fresh.child, fresh.number, fresh.started
            running.again = True
            return None
        if outcome is not None:
            self.statistics.tasks += 1
            if self.statistics.tasks % _SWEEP_EVERY == 0:
                self._forkserver.sweep(each.pid for each in self._living)
            if died is not None:
                self.statistics.recoveries.append(time.monotonic() - died)
                self._died = None if self._died == died else self._died
            if isinstance(outcome, Death):
                self._died = time.monotonic()
        return outcome

    def _free_child(self) -> Child:
        for waiting in (self._idle, self._ready):
            while waiting and waiting[0].gone():
                # It died between two tasks, of something that an earlier one left behind.
                child = waiting.pop(0)
                if waiting is self._idle:
                    self.late = self._late_death(child)
                self._put_down(child)
        if self._idle:
            return self._idle.pop(0)
        child = self._ready_child()
        while len(self._ready) < self._spares:
            self._ready.append(self._started())
        return child

    def _late_death(self, child: Child) -> Death:
        status = child.kill()
        return Death("exit", "end", 0.0, 0.0, status, child.tail(), child.noise())

    def _ready_child(self) -> Child:
        """A spare, or a new child. A kernel may have killed the process that forks them, and the spares with it."""
        for attempt in range(_ATTEMPTS):
            try:
                child = self._ready.pop(0) if self._ready else self._started()
            except ChildError:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            if self._warmed(child):
                return child
        raise ChildError(f"a child process could not be made ready: {self._said}")

    def _started(self) -> Child:
        child, warm = self._forkserver.start(), self._hint or self._warm
        self._living.add(child)
        if warm is not None:
            self._warming[child] = next(self._numbers)
            child.send({"task": self._warming[child], "target": warm.target, "payload": warm.payload})
        return child

    def _warmed(self, child: Child) -> bool:
        """Wait until a child is ready; where it cannot be made so, it is put down, and what it said kept."""
        if self._warming.pop(child, None) is None:
            return True
        wait([child.connection.fileno(), child.descriptor], _START_DEADLINE)
        message = child.receive() if child.answers() else None
        if message is not None and "error" not in message:
            return True
        self._said = (message["error"]["trace"] if message else child.tail()).strip() or "it ended without a word"
        self._hint = None
        self._put_down(child)
        return False

    def _look(self, child: Child, running: Running, ready: set[int]) -> Outcome | None:
        if child.connection.fileno() in ready:
            message = child.receive()
            if message is None:
                return self._death(child, running, "pipe", 0.0)
            if message.get("task") != running.number:
                return None
            outcome = _read(message)
            if outcome is None:
                return self._death(child, running, "pipe", 0.0)
            if message.get("replace") or child.memory() > self._memory // 2:
                self._put_down(child)
                if message.get("replace"):
                    self._died = time.monotonic()
            else:
                self._idle.append(child)
            return outcome
        if child.descriptor in ready:
            return self._death(child, running, "exit", 0.0)
        now = time.monotonic()
        if now - running.looked < _TICK:
            return None
        running.looked = now
        child.noise()
        stage, since = _stage(child, running)
        limit = running.task.deadlines.get(stage, _START_DEADLINE)
        if now - since > limit and not child.answers():
            return self._death(child, running, "hang", limit)
        held = child.memory()
        if now - running.family > _FAMILY_TICK:
            running.family, held = now, max(held, self._forkserver.family(child))
        return self._death(child, running, "memory", self._memory) if held > self._memory else None

    def _death(self, child: Child, running: Running, why: Literal["exit", "hang", "memory", "pipe"], limit: float) -> Death:
        # Before faulthandler's signal, which may interrupt a sleep and let the task go on.
        announced = child.stage(running.number)
        stage, since = _stage(child, running)
        seconds = time.monotonic() - since
        if why == "hang":
            child.ask_for_stack()
        elif why == "pipe" and wait([child.descriptor], _TICK * 4):
            why = "exit"
        printed, status = child.noise(), child.kill()
        if (why == "pipe" or status == LOST_CONNECTION) and stage not in KERNEL_STAGES:
            # Only a kernel closes the connection, and the child has gone on since: how far is chance.
            stage = "kernel"
        output = child.tail()
        self._put_down(child, killed=True)
        if announced is None:
            self._said = output.strip() or f"exit status {status}"
            raise _NotBegunError(self._said)
        return Death(why, stage, seconds, limit, status, output, printed)

    def _put_down(self, child: Child, *, killed: bool = False, sweep: bool = True) -> None:
        if child not in self._living:
            return
        self._living.discard(child)
        self._warming.pop(child, None)
        self.statistics.replaced += 1
        if not killed:
            child.kill()
        child.close()
        if sweep:
            self._forkserver.sweep(each.pid for each in self._living)


def _stage(child: Child, running: Running) -> tuple[str, float]:
    """(stage, since when). A time that cannot be is the child's doing, and must not keep its deadline from coming."""
    stage, since = child.stage(running.number) or ("start", running.started)
    return stage, since if running.started <= since <= time.monotonic() else running.started


def _read(message: dict[str, Any]) -> Reply | Error | None:
    """What a child's message says; None where it is no answer."""
    error = message.get("error")
    if isinstance(error, dict) and all(isinstance(error.get(name), str) for name in ("type", "message", "trace")):
        return Error(error["type"], error["message"], error["trace"])
    return Reply(message["result"]) if "result" in message else None
