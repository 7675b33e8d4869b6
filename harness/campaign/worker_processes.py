"""The workers of a campaign in processes of their own on this machine, and the servers by which they share its GPUs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.coordinator import Coordinator
from attnfuzz.harness.campaign.events import SharedGpu
from attnfuzz.harness.campaign.journal import LeftBehind
from attnfuzz.harness.campaign.worker_group import GroupWorker, WorkerGroup
from attnfuzz.harness.campaign.worker_main import Answer, Assignment, Message
from attnfuzz.harness.core.bytecode import bytecode_variables
from attnfuzz.harness.core.gpus import gpus
from attnfuzz.harness.isolation import reaper, sharing
from attnfuzz.harness.isolation.child_variables import child_variables
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.memory_cap import share_of_memory
from attnfuzz.harness.isolation.root import Root
from attnfuzz.harness.isolation.sharing import NotShared, Sharing
from attnfuzz.harness.isolation.tasks import preloads
from attnfuzz.kernels.contract import Kernel
from attnfuzz.strategies.case import BadCase, Case, case_from_json

__all__ = ["WorkerProcesses", "start_process"]

_PROGRAM = "import sys; from attnfuzz.harness.campaign.worker_main import main; main(sys.argv[1:])"
_LAST_WORDS = 15.0
"""Seconds that a worker has to end once its connection is closed."""


def start_process(
    paths: Sequence[str], variables: Mapping[str, str], root: socket.socket | None = None
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start the process of a worker; returns it with the connection to it.

    Args:
        paths: from which it imports.
        variables: of its environment, beside those of this process.
        root: of a `Root` over which its template process is forked; it is closed here.
    """
    here, there = socket.socketpair()
    with there, contextlib.ExitStack() as stack:
        passed = [there.fileno(), *([stack.enter_context(root).fileno()] if root else [])]
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid()), *map(str, passed)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
            start_new_session=True,
            env={
                **os.environ,
                **bytecode_variables(),
                "PYTHONPATH": os.pathsep.join(each for each in paths if each),
                **variables,
            },
        )
    return process, Connection(here.detach())


def _server(folder: Path, variables: Mapping[str, str], usable: Sequence[str]) -> Sharing | NotShared:
    """Start a server of MPS; returns why not."""
    try:
        return sharing.start(folder, variables, usable)
    except NotShared as reason:
        return reason


class _Process(GroupWorker):
    """One worker's process."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], connection: Connection) -> None:
        super().__init__(number)
        self.process, self.connection = process, connection

    def receive(self) -> Message:
        message: Message = self.connection.recv()
        return message

    def send(self, answer: Answer) -> None:
        self.connection.send(answer)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def died(self) -> str | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_LAST_WORDS)
        status = self.process.poll()
        if status == 0:
            return None
        return "a closed connection" if status is None else _ending(status)

    def had_in_flight(self, left: LeftBehind) -> bool:
        return left.pid == self.process.pid

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()
        self.connection.close()


class WorkerProcesses(WorkerGroup):
    """Starts some workers at once, so that they load while the campaign prepares; `work` runs the campaign.

    Args:
        kernels: what the workers will try; one that cannot be given to another process is reported by `work`.
        context: of the campaign.
    """

    def __init__(self, kernels: Sequence[Kernel], context: CampaignContext) -> None:
        settings = context.settings
        super().__init__(context, settings.workers)
        memory = settings.memory or share_of_memory(settings.device, settings.workers)
        own = replace(settings, workers=1, memory=memory)
        backends = tuple(sorted({each.backend for each in kernels}))
        self._assignment = Assignment(own, self._parcels(kernels), backends, context.end)
        self._gpus = gpus() if settings.device == "cuda" else []
        self._lender = (
            None if settings.in_process else Forkserver(preloads(settings.device, backends), child_variables(settings.device))
        )
        self._began = time.monotonic()
        self._sharing = self._started_sharing()
        # Half of the cores are the compiler's, which may have much to do.
        for _ in range(max(1, min(settings.workers, len(os.sched_getaffinity(0)) // 2))):
            self._start(self._numbers.popleft())

    def _start(self, number: int) -> None:
        more = {"CUDA_VISIBLE_DEVICES": self._gpus[number % len(self._gpus)]} if self._gpus else {}
        if self._sharing and isinstance(server := self._sharing[number % len(self._sharing)], Sharing):
            more |= server.variables
        process, connection = start_process(sys.path, more, self._lender.lend() if self._lender else None)
        self._living.append(_Process(number, process, connection))
        with contextlib.suppress(OSError):  # it is gone already, which is noticed soon
            connection.send(self._assignment)

    def _started_sharing(self) -> list[Sharing | NotShared]:
        """Start what workers share each GPU by, or say why not; none where that is not wanted, or no GPU has several workers.

        Each GPU has a server of its own: a fault breaks the GPU for all processes of a server.
        """
        if not self._context.settings.share_gpu or self._lender is None or not self._several_on_a_gpu():
            return []
        folder, names = Path(self._lender.folder), [f"mps{number}" for number in range(len(self._gpus))]
        # The mark and the folder of this run: its reaper ends the servers however this process ends.
        marks = {reaper.MARK: self._lender.run}
        return [_server(folder / name, marks, self._gpus) for name in (names if len(names) > 1 else ["mps"])]

    def _several_on_a_gpu(self) -> bool:
        return self._context.settings.device == "cuda" and max(1, len(self._gpus)) < self._count

    def shared_gpu(self) -> SharedGpu | None:
        """Return how long the workers have shared the GPU, of several GPUs the one for the shortest; None: they were not to."""
        each = [self._shared(server) for server in self._sharing]
        if not each:
            return None
        at, least = min(enumerate(each), key=lambda one: -1.0 if one[1].seconds is None else one[1].seconds)
        if least.reason is None or len(each) == 1:
            return least
        gpu = self._gpus[at]
        return replace(least, reason=f"{least.reason} ({gpu if gpu.startswith('GPU-') else f'GPU {gpu}'})")

    def ended_sharing(self) -> tuple[Case, ...]:
        """Return the Cases whose process ended the sharing of a GPU before the time of the campaign was over."""
        servers = [each for each in self._sharing if isinstance(each, Sharing) and self._shared(each).reason is not None]
        cases: list[Case] = []
        for text in (text for server in servers if (end := server.ended()) is not None for text in end.cases):
            # A kernel's process can write there as well.
            with contextlib.suppress(BadCase):
                cases.append(case_from_json(text))
        return tuple(cases)

    def _shared(self, server: Sharing | NotShared) -> SharedGpu:
        if isinstance(server, NotShared):
            return SharedGpu(None, str(server))
        if (ended := server.ended()) is None:
            return SharedGpu(time.monotonic() - self._began)
        # Tasks that are at work when the time of the campaign is over are ended, and sharing with the first of them.
        end = self._context.end
        to_the_end = end is not None and ended.at >= end
        return SharedGpu(ended.at - self._began, None if to_the_end else ended.why)

    def root(self) -> Root | None:
        """Return what forks template processes."""
        return Root(self._lender.lend()) if self._lender else None

    def close(self) -> None:
        """End every worker that is left, and what forks their template processes."""
        super().close()
        if servers := [each for each in self._sharing if isinstance(each, Sharing)]:
            # At once: each may take a second.
            with ThreadPoolExecutor(len(servers)) as pool:
                list(pool.map(Sharing.close, servers))
        if self._lender:
            self._lender.close()

    def _heard(self, seconds: float) -> Iterable[GroupWorker]:
        workers = {each.connection: each for each in self._living if isinstance(each, _Process)}
        return [workers[each] for each in wait(list(workers), seconds) if isinstance(each, Connection)]

    def _start_more(self, coordinator: Coordinator, most: int = sys.maxsize) -> None:
        # Some cores are left to the compiler.
        super()._start_more(coordinator, min(most, coordinator.compiles.room_for_workers()))
        coordinator.compiles.workers = len(self._living)


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
