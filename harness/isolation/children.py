"""The children of one supervisor: those that are free, spares that are kept ready, and what each has run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from attnfuzz.harness.isolation.child import Child, ChildError
from attnfuzz.harness.isolation.disturbances import Disturbance
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.outcomes import Death, Past, Task
from attnfuzz.harness.isolation.statistics import Statistics
from attnfuzz.harness.isolation.wire import wait

__all__ = ["START_DEADLINE", "Children"]

START_DEADLINE = 180.0
"""Seconds in which a child must be ready."""
_ATTEMPTS = 4
_ENDING = 16
"""Killed children that may live still: each keeps six descriptors, and a process may have 1024."""


class Children:
    """Starts children of `forkserver`, gives out free ones, and ends them.

    Args:
        forkserver: starts the children.
        statistics: counts those that are started and ended.
        warm: first task of every new child, so that a spare is ready when a child dies.
        spares: number of children that are kept ready.
        disturbed: called with each child that the machine has ended between two tasks.
    """

    def __init__(
        self,
        forkserver: Forkserver,
        statistics: Statistics,
        *,
        warm: Task | None,
        spares: int,
        disturbed: Callable[[Disturbance], None],
    ) -> None:
        self._forkserver, self._statistics, self._disturbed = forkserver, statistics, disturbed
        self._plain = self._warm = warm
        self._spares = spares
        self._filled = False
        """Whether spares have been started."""
        self._failed = False
        """Whether the child that was to be made ready last could not be."""
        self.hint: Task | None = None
        """The first task of new children, instead of `warm`; dropped if it fails."""
        self.idle: list[Child] = []
        """Children that have run a task and are free."""
        self.living: set[Child] = set()
        self.late: Death | None = None
        """The death of a child between two tasks, not reported yet."""
        self.last_output = ""
        """Of the child that could not be made ready last."""
        self._ready: list[Child] = []
        self._ending: list[Child] = []
        """Children that were killed, and may live still."""
        self._warming: dict[Child, int] = {}
        self._pasts: dict[Child, Past] = {}
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """Return the number of a new task."""
        return next(self._numbers)

    def take(self, task: Task, child: Child) -> Past:
        """Note that a child is to run a task; returns what it has run before."""
        past = self._pasts.get(child, Past())
        self._pasts[child] = past.plus(task.cases)
        return past

    def free(self, *, fresh: bool) -> Child:
        """Return a child that is free, or a new one; with `fresh` always one that has run and built nothing.

        Raises:
            ChildError: a child process cannot be started.
        """
        self._drop_dead()
        self._drop_sharing()
        if self.idle and not fresh and self._filled:
            return self.idle.pop(0)
        first = not self._statistics.children
        start = time.perf_counter()
        try:
            child = self.idle.pop(0) if self.idle and not fresh else self._ready_child(fresh=fresh)
            if not first:
                # The first task does not wait for cores on which spares are made ready, of all workers at once.
                self._fill(fresh=fresh)
        finally:
            self._statistics.start_seconds += time.perf_counter() - start
        return child

    def settle(self) -> None:
        """Wait until every spare is ready."""
        self._fill(fresh=False)
        for child in list(self._ready):
            if not self._warmed(child):
                self._ready.remove(child)

    def keep(self, most: int) -> None:
        """Keep at most so many free children."""
        while len(self.idle) > most:
            self.discard(self.idle.pop())

    def renew(self, warm: Task | None) -> None:
        """End the free children and the spares; `warm` is the first task of new ones, None: the usual one.

        It is given up where it ends in an error or not at all, or ends its process twice in a row.
        """
        self._warm, self.hint, self._failed = warm or self._plain, None, False
        for child in (*self.idle, *self._ready):
            self.discard(child, sweep=False)
            # That is no replacement of one that failed.
            self._statistics.replaced -= 1
        self.idle.clear()
        self._ready.clear()

    def discard(self, child: Child, *, killed: bool = False, sweep: bool = True) -> None:
        """End a child, unless it was `killed`, and with `sweep` what it has left behind; it is not waited for."""
        if child not in self.living:
            return
        self.living.discard(child)
        self._forkserver.ended(child)
        self._warming.pop(child, None)
        self._pasts.pop(child, None)
        self._statistics.replaced += 1
        if killed:
            child.close()
        else:
            child.end()
            self._ending.append(child)
        if sweep:
            self._forkserver.sweep()
        self._let_go()

    def close(self) -> None:
        """End every child."""
        for child in list(self.living):
            self.discard(child, sweep=False)
        self.idle.clear()
        self._ready.clear()
        self._let_go(every=True)

    def _let_go(self, *, every: bool = False) -> None:
        """Let go of the killed children that have ended; with `every` wait for the others, else for all but a few."""
        for child in list(self._ending):
            if every or len(self._ending) > _ENDING or child.gone():
                self._ending.remove(child)
                child.wait()
                child.close()

    def _drop_dead(self) -> None:
        """Drop children that died between two tasks, because of something that an earlier one left behind."""
        for waiting in (self.idle, self._ready):
            while waiting and waiting[0].gone():
                child = waiting.pop(0)
                if child.shares:
                    self._forkserver.end_sharing("a process has ended between two tasks")
                elif waiting is self.idle:
                    death = _late_death(child)
                    if death.disturbance is not None:
                        self._disturbed(death.disturbance)
                    else:
                        self.late = death
                self.discard(child, killed=waiting is self.idle and not child.shares)

    def _drop_sharing(self) -> None:
        """Drop the free children that share the GPU, once sharing has ended."""
        sharing = self._forkserver.sharing
        if sharing is None or not any(each.shares for each in (*self.idle, *self._ready)) or sharing.on():
            return
        for waiting in (self.idle, self._ready):
            for child in [each for each in waiting if each.shares]:
                waiting.remove(child)
                self.discard(child)
                # As in `renew`.
                self._statistics.replaced -= 1

    def _fill(self, *, fresh: bool) -> None:
        """Start spares: of several, one has built nothing; a single one is of the kind that was wanted last."""
        self._filled = True
        if fresh and self._spares == len(self._ready) == 1 and self._pasts.get(self._ready[0]):
            self.discard(self._ready.pop())
        while len(self._ready) < self._spares:
            several = self._spares > 1 and all(self._pasts.get(each) for each in self._ready)
            self._ready.append(self._started(plain=fresh or several))

    def _ready_child(self, *, fresh: bool) -> Child:
        """Return a spare or a new child. A kernel may have killed the template process, and the spares with it."""
        for attempt in range(_ATTEMPTS):
            try:
                able = (each for each in self._ready if not (fresh and self._pasts.get(each)))
                spare = max(able, key=lambda each: bool(self._pasts.get(each)), default=None)
                if spare is not None:
                    self._ready.remove(spare)
                child = spare or self._started(plain=fresh)
            except ChildError:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            if self._warmed(child):
                return child
            self._drop_sharing()
        raise ChildError(f"a child process could not be made ready: {self.last_output}")

    def _started(self, *, plain: bool = False) -> Child:
        child, warm = self._forkserver.start(), (None if plain else self.hint) or self._warm
        self.living.add(child)
        self._statistics.children += 1
        if warm is not None:
            self._pasts[child] = Past().plus(warm.cases)
            self._warming[child] = self.number()
            child.send({"task": self._warming[child], "target": warm.target, "payload": warm.payload})
        return child

    def _warmed(self, child: Child) -> bool:
        """Wait until a child is ready. If it fails to start, discard it and keep its output."""
        if self._warming.pop(child, None) is None:
            return True
        wait([child.connection.fileno(), child.descriptor], START_DEADLINE)
        message = child.receive() if child.answers() else None
        if message is not None and "error" not in message:
            self._failed = False
            return True
        self.last_output = (message["error"]["trace"] if message else child.tail()).strip() or "it printed nothing"
        if child.shares:
            # Another one's fault may be the reason, so that this says nothing of the first task.
            self._forkserver.end_sharing("a process could not be made ready")
            self.discard(child)
            return False
        died = message is None and (child.gone() or child.answers())
        # It may have died by chance: without this first task a kernel would find a process that has tensors on the device.
        if self.hint is None and (self._failed or not died):
            self._warm = self._plain
        self.hint, self._failed = None, True
        self.discard(child)
        return False


def _late_death(child: Child) -> Death:
    status = child.kill()
    return Death("exit", "end", 0.0, 0.0, status, child.tail(), child.output_size())
