"""The parent's side of isolation: send tasks to children, enforce the deadlines of stages, report deaths with their cause."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from attnfuzz.harness.isolation.child import Child, ChildError
from attnfuzz.harness.isolation.child_main import LOST_CONNECTION
from attnfuzz.harness.isolation.children import START_DEADLINE, Children
from attnfuzz.harness.isolation.disturbances import Disturbance
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.outcomes import KERNEL_STAGES, Death, Error, Outcome, Past, Reply, Task, site_in
from attnfuzz.harness.isolation.stage_time import Pauses, StageTime
from attnfuzz.harness.isolation.statistics import Statistics
from attnfuzz.harness.isolation.wire import wait

__all__ = ["Running", "Statistics", "Supervisor"]

_TICK = 0.05
_USAGE_TICK, _STOPPED_TICK, _LATE_TICK = 1.0, 0.5, 0.1
"""Seconds between two looks at what a child and the processes that it started use, while it is stopped, and where its deadline
seems to be over. A look reads files of all processes, and most batches end before the first; what the child itself holds, and
whether it is stopped, is read in each tick."""
_LONG_PAUSE = 5.0
_AFTER_SHARING = 10.0
"""Seconds after the end of sharing in which a task may end whose child shares the GPU: it may wait for a server that is gone."""
_TO_END = 3.0
"""Seconds beyond its time in which a task may end whose child shares the GPU; a batch takes about one. What a killed process
leaves undone on the GPU may leave the server in any state, by NVIDIA's documentation of MPS ("Client Early Termination")."""
_SWEEP_EVERY = 50
"""Tasks after which processes that children left behind are killed, even if no child died."""


@dataclass(slots=True)
class Running:
    """A task that runs in a child."""

    task: Task
    child: Child
    number: int
    started: float
    looked: float
    time: StageTime
    past: Past = field(default_factory=Past)
    """What the child had run before."""
    fresh: bool = False
    """Its child must have run nothing before."""
    again: bool = False
    """Another child ended before it started the task."""
    unshared: float | None = None
    """When it was seen that sharing has ended, where its child shares the GPU."""
    disturbed: list[Disturbance] = field(default_factory=list)
    """How children ended that were, or may have been, killed or stopped from outside."""


class _NotBegunError(ChildError):
    """A child ended before it started its task, so that the task is not the cause."""


class _SharedError(Exception):
    """A task has no outcome: its child shared the GPU, and another one's fault may be the reason for what happened to it."""


class Supervisor:
    """Runs tasks in children of `forkserver`, one after the other or several at once.

    Args:
        forkserver: starts the children.
        warm: first task of every new child, so that a spare is ready when a child dies.
        memory: bytes that a child and what it starts may hold.
        spares: number of children that are kept ready.
        owner: whether `close` closes the forkserver; else another supervisor uses it as well.
        disturbed: called with each event of the machine; None: `statistics` counts it.
    """

    def __init__(
        self,
        forkserver: Forkserver,
        *,
        memory: int,
        warm: Task | None = None,
        spares: int = 1,
        owner: bool = True,
        disturbed: Callable[[Disturbance], None] | None = None,
    ) -> None:
        self.statistics = Statistics()
        self._disturbed = disturbed or self.statistics.disturbed
        self._pauses = Pauses()
        self._forkserver, self._memory, self._owner = forkserver, memory, owner
        self._children = Children(forkserver, self.statistics, warm=warm, spares=spares, disturbed=self._disturbed)
        self._fresh_next = False
        self._died: float | None = None

    def run(self, task: Task) -> Outcome:
        """Run `task` in a child that is free, or in a new one.

        Raises:
            ChildError: a child process cannot be started.
        """
        outcome = self.finish(self.begin(task))
        assert outcome is not None
        return outcome

    def begin(self, task: Task, *, fresh: bool = False) -> Running:
        """Send `task` to a child that is free, or to a new one; with `fresh` always to one that has run and built nothing.

        Raises:
            ChildError: a child process cannot be started.
        """
        fresh, self._fresh_next = fresh or self._fresh_next, False
        child = self._children.free(fresh=fresh)
        now, number, past = time.monotonic(), self._children.number(), self._children.take(task, child)
        child.send({"task": number, "target": task.target, "payload": task.payload})
        self._pauses.begin()
        return Running(task, child, number, now, now, StageTime(now, child.cpu()), past, fresh)

    def finish(self, running: Running, until: float | None = None) -> Outcome | None:
        """Wait for the outcome of a task that `begin` sent; None: it has not ended by `until` (time.monotonic), and was killed.

        Where its child shares the GPU, it has a few seconds more.

        Raises:
            ChildError: a child process cannot be started.
        """
        if self._pauses.since(0.0):
            # This process may have waited for something else since it sent the task: no event of the machine.
            running.time.restart(time.monotonic())
        while True:
            ready = wait([running.child.connection.fileno(), running.child.descriptor], _TICK)
            if pause := self._pauses.since(_TICK):
                running.time.restart(time.monotonic())
                if pause > _LONG_PAUSE:
                    self._disturbed("paused")
            outcome = self._outcome(running, ready)
            if outcome is not None:
                return outcome
            if until is not None and time.monotonic() >= until + (_TO_END if running.child.shares else 0.0):
                self.kill(running, "the time of a task was over")
                self._count(running)
                return None

    def ended(self, active: dict[int, Running], seconds: float) -> Iterator[tuple[int, Outcome]]:
        """Yield (number, outcome) of tasks of `active` that have ended or end within `seconds`, and remove them there.

        Raises:
            ChildError: a child process cannot be started.
        """
        children = [each.child for each in active.values()]
        ready = wait([each for child in children for each in (child.connection.fileno(), child.descriptor)], seconds)
        if self._pauses.since(seconds):
            for running in active.values():
                running.time.restart(time.monotonic())
        for number, running in list(active.items()):
            if (outcome := self._outcome(running, ready)) is not None:
                del active[number]
                yield number, outcome

    def kill(self, running: Running, why: str = "a task was ended that was at work") -> None:
        """End a task that is not wanted any more, and its child; `why`: the reason if that ends the sharing of the GPU."""
        if running.child.shares:
            # The end of a process whose kernel does not end breaks the GPU for those that share it. The end of a budget comes
            # here as well: all workers end their children at once then, and would wait for the server's end.
            self._forkserver.end_sharing(why, quits=False)
        self._children.discard(running.child)

    def take_late_death(self) -> Death | None:
        """Return the death of a child between two tasks, once."""
        late, self._children.late = self._children.late, None
        return late

    def idle(self, most: int) -> None:
        """Keep at most so many free children."""
        self._children.keep(most)

    def run_all(
        self, tasks: Sequence[Task], width: int, starting: Callable[[int], None] = lambda _: None
    ) -> Iterator[tuple[int, Outcome]]:
        """Run `tasks`, `width` at once; yield (index, outcome) as each is done. `starting` gets each index before it begins.

        Raises:
            ChildError: a child process cannot be started.
        """
        queue, active = deque(enumerate(tasks)), dict[int, Running]()
        try:
            while queue or active:
                while queue and len(active) < width:
                    index, task = queue.popleft()
                    starting(index)
                    active[index] = self.begin(task)
                yield from self.ended(active, _TICK)
        finally:
            # Interrupted: the state of the children at work is unknown.
            for running in active.values():
                self.kill(running)

    def hint(self, warm: Task) -> None:
        """Run `warm` first in new children from now on, instead of the default. If it fails, it is not used again."""
        self._children.hint = warm

    def renew(self, warm: Task | None) -> None:
        """Run the next tasks in new children, whose first task is `warm`, unless that fails again; None: the usual one."""
        self._children.renew(warm)

    def settle(self) -> None:
        """Wait until every spare is ready."""
        self._children.settle()

    def replace(self) -> None:
        """Run the next task in a new child, which has built nothing either: what `hint` had it build may be wrong for others."""
        self._fresh_next = True
        self._children.keep(0)

    def close(self) -> None:
        """End every child and everything that they started, and remove their temporary files."""
        self._children.close()
        if self._owner:
            self._forkserver.close()
        else:
            self._forkserver.sweep()

    def _outcome(self, running: Running, ready: set[int]) -> Outcome | None:
        """Return the outcome of a task; None while it runs, perhaps in another child."""
        died = self._died
        try:
            outcome = self._look(running.child, running, ready)
        except _SharedError:
            # Not one that shares: sharing has ended.
            self._died = time.monotonic()
            self._begin_again(running, fresh=True)
            return None
        except _NotBegunError:
            if running.again:
                return Death("exit", "start", 0.0, 0.0, None, self._children.last_output, 0)
            self._begin_again(running)
            running.again = True
            return None
        if isinstance(outcome, Death) and self._to_try_again(running, outcome):
            self._died = time.monotonic()
            self._begin_again(running, fresh=True)
            return None
        if outcome is not None:
            self._count(running)
            self.statistics.tasks += 1
            if self.statistics.tasks % _SWEEP_EVERY == 0:
                self._forkserver.sweep()
            if died is not None:
                self.statistics.recoveries.append(time.monotonic() - died)
                self._died = None if self._died == died else self._died
            if isinstance(outcome, Death):
                self._died = time.monotonic()
        return outcome

    def _count(self, running: Running) -> None:
        for each in running.disturbed:
            self._disturbed(each)

    def _begin_again(self, running: Running, *, fresh: bool = False) -> None:
        new = self.begin(running.task, fresh=fresh or running.fresh)
        running.child, running.number, running.started, running.time = new.child, new.number, new.started, new.time
        running.past = new.past

    def _to_try_again(self, running: Running, death: Death) -> bool:
        """Whether the machine may have ended a child, and not the kernel, of which a second end of this kind is."""
        what = death.disturbance
        if what is None:
            return False
        if what in running.disturbed:
            # It has ended in the same way twice: neither was from outside, nor the end of a spare child between the two.
            running.disturbed = [each for each in running.disturbed if each != what]
            return False
        running.disturbed.append(what)
        return True

    def _look(self, child: Child, running: Running, ready: set[int]) -> Outcome | None:
        if child.connection.fileno() in ready:
            message = child.receive()
            if message is None:
                return self._death(child, running, "pipe", 0.0)
            if message.get("task") != running.number:
                return None
            if child.shares and message.get("lost"):
                self._forkserver.end_sharing("the GPU no longer worked for a process", running.task)
                self._children.discard(child)
                raise _SharedError
            outcome = _read(message)
            if outcome is None:
                return self._death(child, running, "pipe", 0.0)
            if message.get("replace") or child.memory() > self._memory // 2:
                self._children.discard(child)
                if message.get("replace"):
                    self._died = time.monotonic()
            else:
                self._children.idle.append(child)
            return outcome
        if child.descriptor in ready:
            return self._death(child, running, "exit", 0.0)
        now = time.monotonic()
        if now - running.looked < _TICK:
            return None
        running.looked = now
        child.output_size()
        if self._waits_in_vain(running, now):
            self._children.discard(child)
            raise _SharedError
        stage, since = _stage(child, running)
        limit = running.task.deadlines_of(shares=child.shares).get(stage, START_DEADLINE)
        times, held = running.time, child.memory()
        times.enter(stage, since)
        if (late := times.late(now, limit)) and now - times.looked < _LATE_TICK:
            return None
        tick = _LATE_TICK if late else _STOPPED_TICK if child.stopped() else _USAGE_TICK
        if late or now - times.looked > tick:
            usage = self._forkserver.usage_of(child, tick / 2)
            held, now = max(held, usage.memory), usage.at
            times.look(usage)
        if held > self._memory:
            # Before its deadline: what fills the memory does so slowly on a busy machine.
            return self._death(child, running, "memory", self._memory)
        if times.stopped(limit) and not child.answers():
            return self._death(child, running, "hang", limit, stopped=True)
        if times.late(now, limit) and not child.answers():
            return self._death(child, running, "hang", limit)
        return None

    def _waits_in_vain(self, running: Running, now: float) -> bool:
        """Whether a child shares the GPU that has had its time to end since sharing has ended."""
        if not running.child.shares or self._forkserver.sharing is None or self._forkserver.sharing.on():
            return False
        running.unshared = now if running.unshared is None else running.unshared
        return now - running.unshared > _AFTER_SHARING

    def _death(
        self,
        child: Child,
        running: Running,
        why: Literal["exit", "hang", "memory", "pipe"],
        limit: float,
        *,
        stopped: bool = False,
    ) -> Death:
        # Before faulthandler's signal, which may interrupt a sleep and let the task go on.
        announced = child.stage(running.number)
        stage, since = _stage(child, running)
        seconds = time.monotonic() - since
        if why == "hang":
            child.ask_for_stack()
        elif why == "pipe" and wait([child.descriptor], _TICK * 4):
            why = "exit"
        doubtful = child.shares and why != "memory"
        if doubtful:
            # Before it is killed: that breaks the GPU for the others where its kernel does not end.
            self._forkserver.end_sharing(_reason(running.task, why, stage, seconds, site_in(child.tail())), running.task)
        item = child.item()
        printed, status = child.output_size(), child.kill()
        if (why == "pipe" or status == LOST_CONNECTION) and stage not in KERNEL_STAGES:
            # Only a kernel closes the connection. The child has gone on since, so that its stage says nothing.
            stage = "kernel"
        output = child.tail()
        self._children.discard(child, killed=True)
        if doubtful:
            raise _SharedError
        if announced is None:
            self._children.last_output = output.strip() or f"exit status {status}"
            if why == "exit" and status in (None, -signal.SIGKILL) and not running.again:
                running.disturbed.append("killed")
            raise _NotBegunError(self._children.last_output)
        return Death(why, stage, seconds, limit, status, output, printed, item, stopped)


def _reason(task: Task, why: str, stage: str, seconds: float, site: str | None) -> str:
    """Return in words what ends sharing, and what was run: if the task passes alone, nothing else is known of it."""
    where = f"stage {stage}"
    if task.cases:
        count, last = len(task.cases), task.cases[-1]
        shape = f"dims {last.problem.dim_qk} x {last.problem.dim_v}, {last.problem.dtype}"
        where += f" of {last.kernel} ({count} Case{'s' * (count > 1)}, {', '.join(filter(None, (shape, str(last.config))))})"
    what = f"a process ended in {where}" if why == "exit" else f"{why} in {where}"
    return f"{what}, after {seconds:.1f} s" + (f", at {site}" if site else "")


def _stage(child: Child, running: Running) -> tuple[str, float]:
    """Return (stage, start time). A kernel may have overwritten the time; an impossible one must not extend the deadline."""
    stage, since = child.stage(running.number) or ("start", running.started)
    return stage, since if running.started <= since <= time.monotonic() else running.started


def _read(message: dict[str, Any]) -> Reply | Error | None:
    """Convert a child's message into a Reply or an Error; None if it is neither."""
    error = message.get("error")
    if isinstance(error, dict) and all(isinstance(error.get(name), str) for name in ("type", "message", "trace")):
        return Error(error["type"], error["message"], error["trace"])
    return Reply(message["result"]) if "result" in message else None
