"""The compiles of a campaign, in the background.

Every kernel's first comes before any kernel's second, and so does one more of a kernel that has tried no Case, whose Cases need
other code. From then on kernels have equal parts of the compilers' time: one whose code compiles in a tenth of another's time has
ten times as many, and need not wait for the other's second. Of a kernel, its variants and the other code that drawn Cases need
come in turn from the sixth on: the latter would otherwise come after all variants.
"""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from attnfuzz.harness.campaign.journal import Journal
from attnfuzz.harness.campaign.marks import Marks
from attnfuzz.harness.isolation.executors import Compiled, Compiler, Executor
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.strategies.case import Case

__all__ = ["CompileService", "KeyState", "Wanted"]

_LOOK_SECONDS = 0.02
_SOON, _FEW_READY = 3, 8
"""Compiles of a kernel that come soon where it has tried no Case, and of so many codes that its Cases need one is ready."""
_SHARED = 2
"""The rank from which on kernels have equal parts of the time. Before come each kernel's first, and the first that comes soon."""
KeyState = Literal["waiting", "ready", "failed"]
"""Of a compile key. failed: the compiler refused it, so that no Case of it can be tried."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A compile that waits or is at work: kernel, compile key, and the smallest Case of it that was asked for."""

    kernel: str
    key: str
    case: Case
    first: bool = False
    """Whether it is the first of its kernel."""


class CompileService:
    """Compiles what is asked for, each key once.

    Args:
        executor: whose compiler is used, made with the first compile.
        width: compiles at once.
        out: folder of the journals: a compiler may take the machine down as well; None: nothing is written.
        finished: called with each compile that has ended.
        known: called with the kernel and the key of what is compiled already, by an earlier run.
        not_written: called if a journal cannot be written.
        marks: of what earlier runs have compiled.
    """

    def __init__(
        self,
        executor: Executor,
        width: int | None,
        out: str | None,
        finished: Callable[[Wanted, Compiled], None],
        known: Callable[[str, str], None],
        not_written: Callable[[Case, OSError], None],
        marks: Marks,
    ) -> None:
        self._executor, self._out, self._known, self._marks = executor, out, known, marks
        self._finished, self._not_written = finished, not_written
        self._width, self._cores = width, len(os.sched_getaffinity(0))
        self.workers = 0
        """Worker processes that run: their cores are not the compiler's."""
        self._compiler: Compiler | None = None
        self._states: dict[tuple[str, str], KeyState] = {}
        self._queued: dict[str, int] = {}
        """Compiles of each kernel's variants that were queued, or are known: the first of them is what the kernel waits for."""
        self._soon: dict[str, int] = {}
        """Compiles of each kernel that were queued to come soon."""
        self._drawn: dict[str, int] = {}
        """Other compiles of each kernel that drawn Cases need, queued or known."""
        self._queues: dict[str, list[tuple[int, int, Wanted]]] = {}
        """What waits of each kernel, a heap by rank and order: tens of thousands may wait, and few are looked at."""
        self._spent: dict[str, float] = {}
        """Seconds of each kernel's compiles that have ended."""
        self._begun: dict[Case, float] = {}
        """When each of those at work began."""
        self._order = itertools.count()
        self._active: dict[Case, Wanted] = {}
        self._journals: dict[Case, Journal] = {}
        self._looked = 0.0

    def want(self, kernel: str, cases: Mapping[str, Case], *, drawn: bool = False, soon: bool = False) -> dict[str, KeyState]:
        """Queue the compile keys of `cases` that are not known yet; returns the state of each.

        `drawn`: drawn Cases need them, beside the kernel's variants; `soon`: the kernel has tried no Case. Where hardly any is
        ready, the first ones come before the kernel's second variant, one before that of any kernel: where code is specialised to
        lengths and heads, Cases need other code than that of its variants.
        """
        new = [key for key in cases if (kernel, key) not in self._states]
        known = [key for key in new if self._marks.has(kernel, key)]
        for key in known:
            self._states[kernel, key] = "ready"
            self._known(kernel, key)
        ready = sum(self._states.get((kernel, key)) == "ready" for key in cases)
        soon = soon and ready * _FEW_READY <= len(cases)
        counts = self._drawn if drawn and self._queued.get(kernel) else self._queued
        counts[kernel] = counts.get(kernel, 0) + len(known)
        for key in new:
            if (kernel, key) not in self._states:
                self._states[kernel, key] = "waiting"
                first = self._queued[kernel] == 0
                rank = self._rank_of_drawn(kernel, soon=soon) if drawn and not first else self._rank_of_own(kernel)
                wanted = Wanted(kernel, key, cases[key], first)
                heapq.heappush(self._queues.setdefault(kernel, []), (rank, next(self._order), wanted))
        return {key: self._states[kernel, key] for key in cases}

    def _rank_of_own(self, kernel: str) -> int:
        """Return the rank of the next code that no drawn Case has asked for: 0, 3, 4, 6, 8 and so on."""
        number = self._queued[kernel]
        self._queued[kernel] = number + 1
        return max(3, 2 * number) if number else 0

    def _rank_of_drawn(self, kernel: str, *, soon: bool) -> int:
        """Return the rank of the next code that drawn Cases ask for: 1 and 2 where it comes soon, then 9, 11, 13 and so on."""
        early = self._soon.get(kernel, 0)
        if soon and early < _SOON:
            self._soon[kernel] = early + 1
            return _SHARED if early else 1
        number = self._drawn.get(kernel, 0)
        self._drawn[kernel] = number + 1
        return 2 * number + 9

    def state(self, kernel: str, key: str) -> KeyState | None:
        """Return the state of a compile key; None: it was never asked for."""
        return self._states.get((kernel, key))

    def poll(self, seconds: float = 0.0) -> None:
        """Start and finish compiles; wait for one to end for at most `seconds`."""
        self._start()
        if self._compiler is None or not self._active:
            if seconds:
                time.sleep(seconds)
        elif seconds or time.monotonic() - self._looked > _LOOK_SECONDS:
            # A campaign polls for every Trial; to look at all children each time would take a tenth of the time of many workers.
            self._looked = time.monotonic()
            for done in self._compiler.poll(seconds):
                self._end(done)
            self._start()

    def _end(self, done: Compiled) -> None:
        wanted = self._active.pop(done.case)
        del self._begun[done.case]
        self._spent[wanted.kernel] = self._spent.get(wanted.kernel, 0.0) + done.seconds
        if (journal := self._journals.pop(done.case, None)) is not None:
            journal.discard()
        self._states[wanted.kernel, wanted.key] = "failed" if done.failure else "ready"
        if done.failure is None and done.error is None:
            self._marks.add(wanted.kernel, wanted.key)
        self._finished(wanted, done)

    @property
    def width(self) -> int:
        """Compiles at once: all cores until workers need them, half of them for first variants, a quarter for others."""
        return self._width or max(1, self._cores // (2 if self._firsts else 4), self._cores - self.workers)

    @property
    def _firsts(self) -> bool:
        """Whether some kernel has no compiled variant yet."""
        return any(queue[0][0] == 0 for queue in self._queues.values()) or any(each.first for each in self._active.values())

    def room_for_workers(self) -> int:
        """Return how many workers may run: half of the cores' number until every kernel has a compiled variant."""
        return max(1, self._cores // 2) if self._firsts else sys.maxsize

    def _start(self) -> None:
        while self._queues and len(self._active) < self.width:
            wanted = self._next()
            if self._compiler is None:
                self._compiler = self._executor.compiler()
            self._note(wanted.case)
            self._active[wanted.case], self._begun[wanted.case] = wanted, time.monotonic()
            try:
                self._compiler.start(wanted.case)
            except BadArgument as error:
                self._end(Compiled(wanted.case, 0.0, error=error))

    def _next(self) -> Wanted:
        """Take the compile that comes next out of the queue."""
        now, spent = time.monotonic(), dict(self._spent)
        for case, begun in self._begun.items():
            kernel = self._active[case].kernel
            spent[kernel] = spent.get(kernel, 0.0) + now - begun

        def place(kernel: str) -> tuple[float, ...]:
            rank, order, _ = self._queues[kernel][0]
            return min(rank, _SHARED), spent.get(kernel, 0.0) if rank >= _SHARED else 0.0, rank, order

        kernel = min(self._queues, key=place)
        _, _, wanted = heapq.heappop(self._queues[kernel])
        if not self._queues[kernel]:
            del self._queues[kernel]
        return wanted

    def _note(self, case: Case) -> None:
        if self._out is None:
            return
        journal = Journal(self._out)
        try:
            journal.launch(case)
        except OSError as error:
            journal.discard()
            self._out = None
            self._not_written(case, error)
        else:
            self._journals[case] = journal

    def pending(self, kernel: str | None = None) -> int:
        """Return the number of compiles, of one kernel or of all, that wait or are at work."""
        waiting = sum(len(queue) for of, queue in self._queues.items() if kernel in (None, of))
        return waiting + sum(kernel in (None, each.kernel) for each in self._active.values())

    def drop(self, kernel: str) -> None:
        """Forget the compiles of a kernel that wait: it is not tried further."""
        self._queues.pop(kernel, None)

    def close(self, *, died: bool = False) -> None:
        """End the compiles at work. `died`: by an error of attnfuzz, so that the next run begins with them."""
        for journal in self._journals.values():
            if died:
                journal.abandon()
            else:
                journal.discard()
        self._journals.clear()
        self._active.clear()
        self._begun.clear()
        self._queues.clear()
        if self._compiler is not None:
            self._compiler.close()
            self._compiler = None
