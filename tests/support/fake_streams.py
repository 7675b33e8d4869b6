"""Streams on the CPU: work is kept in the order in which a device could run it, and runs when it is let go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeVar

T = TypeVar("T")
Work = Callable[[], None]


@dataclass
class FakeStreams:
    """Streams by number; None is the default one. `log` has what was asked for."""

    current: int | None = None
    held: dict[int | None, list[Work]] = field(default_factory=dict)
    graph: list[Work] | None = None
    last: list[Work] = field(default_factory=list)
    """Work of a stream that no one waits for."""
    log: list[str] = field(default_factory=list)

    @contextmanager
    def on(self, number: int) -> Iterator[None]:
        before, self.current = self.current, number
        try:
            yield
        finally:
            self.current = before

    def synchronise(self) -> None:
        if self.graph is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.log.append("synchronise")
        self._run()

    def hold(self) -> None:
        self.log.append(f"hold {self.current}")
        self.held[self.current] = []

    def let_go(self) -> None:
        self.log.append("let go")
        self._run()

    def _run(self) -> None:
        """Run one piece of work of each stream after the other."""
        queues, self.held = list(self.held.values()), {}
        for each in zip_longest(*queues):
            for work in each:
                if work is not None:
                    work()
        last, self.last = self.last, []
        for work in last:
            work()

    def request(self, work: Work) -> None:
        if self.graph is not None:
            self.graph.append(work)
        elif self.current in self.held:
            self.held[self.current].append(work)
        else:
            work()

    def captured(self, call: Callable[[], T]) -> tuple[T, Work]:
        self.log.append("capture")
        graph: list[Work] = []
        self.graph = graph
        try:
            result = call()
        finally:
            self.graph = None

        def replay() -> None:
            self.log.append("replay")
            for work in graph:
                self.request(work)

        return result, replay
