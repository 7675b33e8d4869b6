"""The workers of a campaign in processes of their own: started, answered, replaced where one dies, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.coordinator import Coordinator
from attnfuzz.harness.campaign.journal import left_behind
from attnfuzz.harness.campaign.process import Answer, Assignment, Message
from attnfuzz.harness.campaign.rounds import Round
from attnfuzz.harness.core.gpus import gpus
from attnfuzz.harness.isolation.isolated import memory_cap
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.problem import BadArgument

__all__ = ["WorkerProcesses", "WorkersLost"]

_PROGRAM = "import sys; from attnfuzz.harness.campaign.process import main; main(sys.argv[1:])"
_TICK = 0.05
_LEAST_MEMORY: dict[Device, int] = {"cpu": 2 << 30, "cuda": 16 << 30}
"""Bytes that a child of a worker may hold at least: CUDA's libraries alone are 3 GiB, in memory that the children share."""
_LAST_WORDS = 15.0
"""Seconds that a worker has to end after it was interrupted, or after the time of the campaign and its grace are over."""
_MOST_DEATHS = 3
"""Workers that are replaced, as a multiple of their number."""


class WorkersLost(Exception):
    """Too many worker processes have died; the text says how many, and what to do."""


class _Process:
    """One worker's process, and what it is at."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self.number, self.process, self.connection = number, process, connection
        self.kernel: str | None = None
        self.rounds: set[tuple[str, int]] = set()
        self.open: set[tuple[str, Identity]] = set()
        self.begun = self.tried = self.interrupted = False
        """Whether it has sent anything, whether that was a trial, and whether it was interrupted since the time is over."""
        self.waits = False
        """Whether it has asked for a turn and has no answer yet."""

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGINT)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()
        self.connection.close()


class WorkerProcesses:
    """Starts some workers at once, so that they load while the campaign prepares; `work` runs the campaign.

    Args:
        kernels: what the workers will try; one that cannot be given to another process is reported by `work`.
        context: of the campaign.
    """

    def __init__(self, kernels: Sequence[Kernel], context: CampaignContext) -> None:
        settings = context.settings
        memory = settings.memory or max(_LEAST_MEMORY[settings.device], memory_cap() // settings.workers)
        self._context = context
        own = replace(settings, workers=1, memory=memory)
        backends = tuple(sorted({each.backend for each in kernels}))
        self._refused: dict[str, BadArgument] = {}
        parcels = {}
        for each in kernels:
            try:
                parcels[each.name] = shipped(each.name)
            except BadArgument as error:
                self._refused[each.name] = error
        self._assignment = Assignment(own, parcels, backends, context.end)
        self._gpus = gpus() if settings.device == "cuda" else []
        self._living: dict[Connection, _Process] = {}
        self._deaths, self._last_status = 0, ""
        self._numbers = deque(range(settings.workers))
        # Half of the cores are the compiler's, which may have much to do.
        for _ in range(max(1, min(settings.workers, len(os.sched_getaffinity(0)) // 2))):
            self._start(self._numbers.popleft())

    def _start(self, number: int) -> None:
        here, there = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[number % len(self._gpus)]
        with there:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(there.fileno()), str(os.getpid())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
        connection = Connection(here.detach())
        self._living[connection] = _Process(number, process, connection)
        with contextlib.suppress(OSError):  # it is gone already, which is noticed soon
            connection.send(self._assignment)

    def work(self, coordinator: Coordinator) -> None:
        """Answer the workers until all have ended.

        Raises:
            KeyboardInterrupt: by the user; what the workers have reported until then is kept.
            WorkersLost: too many workers have died.
        """
        for name, error in self._refused.items():
            coordinator.broke(-1, name, error)
        try:
            while self._living or coordinator.unfinished():
                self._step(coordinator)
        except KeyboardInterrupt:
            self._interrupt(coordinator)
            raise

    def _step(self, coordinator: Coordinator) -> None:
        coordinator.poll()
        for connection in wait(list(self._living), _TICK):
            assert isinstance(connection, Connection)
            self._receive(self._living[connection], coordinator)
        for each in list(self._living.values()):
            if each.waits:
                self._give_turn(each, coordinator)
        self._start_more(coordinator)
        end = self._context.end
        if not all(each.tried for each in self._living.values()) and not coordinator.unfinished():
            self._end_unbegun()
            if end is not None:
                self._interrupt_untried()
        if end is not None and time.monotonic() > end + self._context.settings.grace + _LAST_WORDS:
            self._interrupt(coordinator)

    def _start_more(self, coordinator: Coordinator) -> None:
        """Start a worker where there is more to try than workers that are free; some cores are left to the compiler."""
        idle = sum(each.kernel is None for each in self._living.values())
        while self._numbers and idle < coordinator.able() and len(self._living) < coordinator.compiles.room_for_workers():
            self._start(self._numbers.popleft())
            idle += 1
        if not self._living and not self._numbers and coordinator.unfinished():
            raise WorkersLost(
                f"{self._deaths} worker processes died, the last with {self._last_status}; the next run begins with "
                "their Cases in flight; --workers 1 tries the kernels without worker processes"
            )
        coordinator.compiles.workers = len(self._living)

    def _receive(self, worker: _Process, coordinator: Coordinator) -> None:
        try:
            message: Message = worker.connection.recv()
        except (EOFError, OSError):
            self._gone(worker, coordinator)
            return
        worker.begun = True
        *reports, (method, arguments) = message.reports
        for name, values in reports:
            self._call(worker, coordinator, name, values)
        if method == "turn":
            worker.waits = True
            return
        value = self._call(worker, coordinator, method, arguments)
        if message.asks:
            self._answer(worker, coordinator, value)

    def _call(self, worker: _Process, coordinator: Coordinator, method: str, arguments: tuple[Any, ...]) -> Any:
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

    def _answer(self, worker: _Process, coordinator: Coordinator, value: Any) -> None:
        over = frozenset(name for name in coordinator.states if coordinator.over(name))
        with contextlib.suppress(OSError):
            worker.connection.send(Answer(value, over))

    def _give_turn(self, worker: _Process, coordinator: Coordinator) -> None:
        turn = coordinator.turn(worker.number)
        if turn == "wait":
            return
        worker.waits = False
        worker.kernel = turn.kernel if turn is not None else None
        self._answer(worker, coordinator, turn)

    def _gone(self, worker: _Process, coordinator: Coordinator) -> None:
        """Give out again what a worker that has ended or died was at, and start another in its place if it died."""
        del self._living[worker.connection]
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_LAST_WORDS)
        died = worker.process.poll() != 0
        worker.end()
        self._last_status = _ending(worker.process.returncode)
        for kernel, identity in worker.open:
            coordinator.close(kernel, identity)
        for kernel, number in worker.rounds:
            coordinator.give_back(kernel, number)
        coordinator.leave(worker.number)
        if died:
            self._deaths += 1
            if self._context.settings.out:
                left = left_behind(self._context.settings.out)
                coordinator.resume([each for each in left if each.pid == worker.process.pid])
            if self._deaths <= _MOST_DEATHS * self._context.settings.workers:
                self._numbers.append(worker.number)

    def _interrupt(self, coordinator: Coordinator) -> None:
        """End the workers, and keep what they report until they have ended."""
        self._end_unbegun()
        for each in self._living.values():
            each.interrupt()
        end = time.monotonic() + _LAST_WORDS
        while self._living and time.monotonic() < end:
            for connection in wait(list(self._living), _TICK):
                assert isinstance(connection, Connection)
                worker = self._living[connection]
                try:
                    message: Message = connection.recv()
                except (EOFError, OSError):
                    del self._living[connection]
                    worker.end()
                    continue
                for name, values in message.reports:
                    if name != "turn":
                        self._call(worker, coordinator, name, values)
        self.close()

    def _end_unbegun(self) -> None:
        """End the workers that load still: they have nothing to report, and an interrupt would print a traceback."""
        for each in [each for each in self._living.values() if not each.begun]:
            del self._living[each.connection]
            each.end()

    def _interrupt_untried(self) -> None:
        """End the workers that wait for their first child process: no limit on trials ends that."""
        for each in self._living.values():
            if not (each.tried or each.interrupted):
                each.interrupted = True
                each.interrupt()

    def close(self) -> None:
        """End every worker that is left; their children end with them."""
        for each in self._living.values():
            each.end()
        self._living.clear()


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
