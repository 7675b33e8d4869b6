"""A worker in a process of its own: it is sent its kernels, and works until the campaign has no turn for it.

`main` takes the descriptor of one end of a socket pair, and the process that has the other; the messages are pickled, since both
ends are this program.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from attnfuzz.harness.campaign.compiles import KeyState
from attnfuzz.harness.campaign.context import worker_context
from attnfuzz.harness.campaign.coverage import Phase, Tally
from attnfuzz.harness.campaign.events import Event, Finding
from attnfuzz.harness.campaign.executor import executor_of
from attnfuzz.harness.campaign.far import far_context
from attnfuzz.harness.campaign.plan import KernelPlan, plan_of
from attnfuzz.harness.campaign.rounds import Round
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.campaign.worker import Worker
from attnfuzz.harness.campaign.worker_link import Turn, TurnEnd
from attnfuzz.harness.core.signals import interrupted_once
from attnfuzz.harness.isolation.child_main import bind_to
from attnfuzz.harness.isolation.kernel_ref import unpacked
from attnfuzz.harness.isolation.memory_cap import share_of_memory
from attnfuzz.harness.isolation.root import Root
from attnfuzz.harness.judge.errormap import ErrorMaps
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.errors import describe_exception
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.strategies.case import Case

__all__ = ["Answer", "Assignment", "Message", "main"]

_TOGETHER, _AT_LEAST_EVERY = 64, 0.1
"""Reports that are sent together, and seconds after which fewer are."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The first message to a worker: settings, kernels as shipped, and the end of the campaign (time.monotonic).

    `far`: the campaign is on another node, and keeps the worker's journal and its maps; a turn ends so many seconds from its
    begin, since each node has a clock of its own. `share`: workers that share the memory of the node.
    """

    settings: Settings
    kernels: dict[str, dict[str, Any]]
    backends: tuple[str, ...]
    end: float | None
    far: bool = False
    share: int = 1


@dataclass(frozen=True, slots=True)
class Message:
    """Reports of a worker, in order, each (method, arguments) of the campaign; the last is a question if `asks`."""

    reports: tuple[tuple[str, tuple[Any, ...]], ...]
    asks: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question, and the kernels that are not to be tried further."""

    value: Any
    over: frozenset[str] = frozenset()


class _RemoteCampaign:
    """The campaign, in the process that started this one (worker_link.py): reports are gathered, questions wait for an answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reports: list[tuple[str, tuple[Any, ...]]] = []
        self._sent = time.monotonic()
        self._over: frozenset[str] = frozenset()
        self.far = False

    def turn(self) -> Turn | None:
        """Return the next turn."""
        turn: Turn | None = self._ask("turn")
        if self.far and turn is not None and turn.until is not None:
            return replace(turn, until=time.monotonic() + turn.until)
        return turn

    def launch(self, cases: tuple[Case, ...], deaths: int) -> OSError | None:
        """Have Cases in the campaign's journal before they run; returns why they cannot be."""
        answer: OSError | None = self._ask("launch", cases, deaths)
        return answer

    def journal(self, method: Literal["landed", "abandon", "discard"], *cases: Case) -> None:
        """Report what becomes of the Cases in the campaign's journal."""
        self._report(method, *cases)

    def store(self, path: Path, maps: ErrorMaps) -> None:
        """Have error maps written at `path` in the campaign's folder."""
        self._report("store", path, maps)

    def end_turn(self, kernel: str, end: TurnEnd) -> None:
        """Report how a turn ended."""
        self._report("end_turn", kernel, end)

    def broke(self, kernel: str, error: Exception) -> None:
        """Report an error that ends the trials of a kernel."""
        self._report("broke", kernel, error)

    def round(self, kernel: str) -> Round | None:
        """Return the next round."""
        answer: Round | None = self._ask("round", kernel)
        return answer

    def drawn(self, kernel: str, number: int, ids: Sequence[str]) -> list[int]:
        """Return which Cases of a round are to be tried."""
        answer: list[int] = self._ask("drawn", kernel, number, ids)
        return answer

    def end_round(self, kernel: str, number: int) -> None:
        """Report that a round has been tried."""
        self._report("end_round", kernel, number)

    def want(self, kernel: str, cases: Mapping[str, Case]) -> dict[str, KeyState]:
        """Ask for compiles."""
        answer: dict[str, KeyState] = self._ask("want", kernel, dict(cases))
        return answer

    def ready(self, kernel: str, keys: Collection[str]) -> set[str]:
        """Return those of `keys` that are compiled."""
        answer: set[str] = self._ask("ready", kernel, keys)
        return answer

    def over(self, kernel: str) -> bool:
        """Whether a kernel is not to be tried further, as of the last answer."""
        return kernel in self._over

    def trial(self, kernel: str, phase: Phase, case: Case, verdict: Verdict) -> None:
        """Report a trial; `_send` adds what it counts."""
        self._report("trial", kernel, phase, case, verdict, True)

    def pass_on(self, event: Event) -> None:
        """Pass an event on."""
        self._report("pass_on", event)

    def open(self, kernel: str, finding: Finding) -> Finding | None:
        """Report a failure before it is shrunk."""
        answer: Finding | None = self._ask("open", kernel, finding)
        return answer

    def update(self, kernel: str, before: Identity, finding: Finding) -> None:
        """Report what shrinking has made of an open finding."""
        self._report("update", kernel, before, finding)

    def close(self, kernel: str, before: Identity) -> Finding:
        """End an open finding."""
        answer: Finding = self._ask("close", kernel, before)
        return answer

    def ignore(self, kernel: str, identities: set[Identity]) -> None:
        """Count failures as known without keeping them."""
        self._report("ignore", kernel, identities)

    def not_kept(self, kernel: str, case: Case, error: OSError) -> None:
        """Report a Case that could not be written to disk."""
        self._report("not_kept", kernel, case, error)

    def flush(self) -> None:
        """Send what is gathered."""
        if self._reports:
            self._send(asks=False)

    def _report(self, method: str, *arguments: Any) -> None:
        self._reports.append((method, arguments))
        if len(self._reports) >= _TOGETHER or time.monotonic() - self._sent > _AT_LEAST_EVERY:
            self._send(asks=False)

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._reports.append((method, arguments))
        self._send(asks=True)
        answer: Answer = self._connection.recv()
        self._over = answer.over
        return answer.value

    def _send(self, *, asks: bool) -> None:
        # Ctrl-C between two parts of a message would spoil what follows it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            reports, self._reports = self._reports, []
            self._sent = time.monotonic()
            self._connection.send(Message((*_counts(reports), *reports), asks))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _counts(reports: Sequence[tuple[str, tuple[Any, ...]]]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield reports of what the trials among these count, one a kernel.

    Counting a trial takes longer than receiving it, and the campaign's one process receives those of all workers.
    """
    tallies: dict[str, Tally] = {}
    for method, arguments in reports:
        if method == "trial":
            kernel, phase, case, verdict, _ = arguments
            tallies.setdefault(kernel, Tally(apart=sys.maxsize)).add(phase, case, verdict)
    yield from (("add_counts", each) for each in tallies.items())


def main(arguments: list[str]) -> None:
    """Work as a worker process until there is no turn left, or the campaign is gone.

    Args:
        arguments: the process of the campaign; the descriptor of the connection to it, and that of a `Root` where there is one.
    """
    bind_to(int(arguments[0]), bound=True)
    # Ctrl-C reaches the campaign, which sends it on; the processes of a cluster are started with that signal blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    connection = Connection(int(arguments[1]))
    campaign = _RemoteCampaign(connection)
    root = Root(socket.socket(fileno=int(arguments[2]))) if len(arguments) > 2 else None
    try:
        with interrupted_once():
            assignment: Assignment = connection.recv()
            _work(assignment, campaign, root)
            campaign.flush()
    except (EOFError, OSError):
        # The campaign is gone: the next run begins with the Cases in flight.
        os._exit(0)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        campaign.flush()


def _kernel(name: str, assignment: Assignment) -> tuple[Kernel, KernelPlan]:
    """Return a kernel and its plan, when its first turn comes: one that cannot be imported is no reason to leave out the others.

    Raises:
        BadArgument: it cannot be imported here.
    """
    try:
        kernel = unpacked(assignment.kernels[name])
    except BadArgument:
        raise
    except (Exception, SystemExit) as error:  # a third party's module: its error is the reason
        raise BadArgument(f"kernel={name!r}: a child process cannot import it: {describe_exception(error)}") from error
    return kernel, plan_of(kernel, assignment.settings)


def _work(assignment: Assignment, campaign: _RemoteCampaign, root: Root | None) -> None:
    settings = assignment.settings
    if assignment.far:
        settings = replace(settings, memory=settings.memory or share_of_memory(settings.device, assignment.share))
    # A spare takes a second of a GPU to make, and its memory; among many workers, one that waits for a new child costs little.
    spares = 0 if settings.device == "cuda" else None
    executor = executor_of(assignment.backends, settings, spares=spares, root=root)
    try:
        executor.prepare()
        context = worker_context(settings, executor, assignment.end)
        if assignment.far:
            campaign.far = True
            context = far_context(context, campaign, maps=settings.maps)
        Worker(lambda name: _kernel(name, assignment), context, campaign, campaign).work()
    finally:
        executor.close()
