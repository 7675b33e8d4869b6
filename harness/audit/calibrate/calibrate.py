"""`attnfuzz calibrate`: every kernel that can run here through the isolated campaign, and how near to its budgets it came.

Correct kernels must raise no alarm: each is a false alarm of the verdict, or a defect. Defects of PyTorch's own kernels are kept
as case files (known.py), told and not counted. Kernels have their turns at once, a process each: a kernel's campaign is a
loop of its own, and a GPU waits for launches most of the time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Final

from attnfuzz.harness.audit.calibrate.turn import Asked, Plan, Progress, Told, Turn, take_turn
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.problem import BadArgument

__all__ = ["Calibration", "calibrate", "planned"]

_END_SECONDS: Final = 60.0
"""Time for a process to report and to end its children after Ctrl-C."""


def planned(jobs: int | None) -> int:
    """Kernels at a time: a quarter of the cores unless told, as a GPU waits for launches most of the time."""
    return jobs or max(1, len(os.sched_getaffinity(0)) // 4)


@dataclass(frozen=True, slots=True)
class Calibration:
    """All turns, in the order in which the kernels were asked for."""

    plan: Plan
    turns: tuple[Turn, ...]
    seconds: float

    @property
    def cases(self) -> int:
        """Distinct Cases of all kernels."""
        return sum(turn.summary.cases for turn in self.turns if turn.summary)

    @property
    def failed(self) -> bool:
        """Whether anything is wrong that is not known, or known wrongly."""
        return any(turn.alarms or turn.gone or turn.lost for turn in self.turns)

    @property
    def broken(self) -> bool:
        """Whether a turn ended by an error of the harness."""
        return any(turn.broken for turn in self.turns)

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it."""
        return any(turn.interrupted for turn in self.turns)

    @property
    def environment(self) -> dict[str, Any]:
        """What it ran on."""
        return next((turn.environment for turn in self.turns if turn.environment), {})


def calibrate(kernels: Sequence[Kernel], plan: Plan, tell: Told) -> Calibration:
    """Give every kernel its turn, `plan.jobs` at a time. Ctrl-C ends it with what was found until then.

    Raises:
        BadArgument: none of the kernels can run here, or another process could not find one.
    """
    start = time.monotonic()
    able: list[Kernel] = []
    turns: dict[str, Turn] = {}
    for kernel in kernels:
        declared = kernel.capabilities.devices
        reason = kernel.unavailable(plan.device) if plan.device in declared else f"it is declared for {', '.join(declared)} only"
        if reason is None:
            able.append(kernel)
        else:
            turns[kernel.name] = Turn(kernel.name, skipped=reason)
    if not able:
        reasons = "; ".join(f"{turn.kernel}: {turn.skipped}" for turn in turns.values()) or "no kernel was named"
        raise BadArgument(
            f"device={plan.device!r}: no kernel can run here ({reasons}); install what is missing, or choose another device"
        )
    asked = [Asked(kernel.name, shipped(kernel.name), plan) for kernel in able]
    if plan.jobs > 1 and len(asked) > 1:
        turns |= _in_processes(asked, plan.jobs, tell)
    else:
        for each in asked:
            turns[each.kernel] = take_turn(each, tell)
            if turns[each.kernel].interrupted:
                break
    order = dict.fromkeys(kernel.name for kernel in kernels)
    return Calibration(plan, tuple(turns[name] for name in order if name in turns), time.monotonic() - start)


def _in_processes(asked: Sequence[Asked], jobs: int, tell: Told) -> dict[str, Turn]:
    """Every kernel's Turn, `jobs` at a time in processes of their own. Ctrl-C ends all of them; what they report then counts."""
    context = multiprocessing.get_context("spawn")
    waiting, running = deque(asked), _Running(tell)
    turns: dict[str, Turn] = {}
    try:
        try:
            while waiting or running.names:
                while waiting and len(running.names) < jobs:
                    each = waiting.popleft()
                    ours, theirs = context.Pipe(duplex=False)
                    process = context.Process(target=_work, args=(theirs, each), name=each.kernel)
                    process.start()
                    theirs.close()
                    running.add(each.kernel, ours, process)
                turns |= running.heard(None)
        except KeyboardInterrupt:
            running.interrupt()
            deadline = time.monotonic() + _END_SECONDS
            while running.names and time.monotonic() < deadline:
                turns |= running.heard(deadline - time.monotonic())
            for name in [*running.names.values(), *(each.kernel for each in waiting)]:
                turns.setdefault(name, Turn(name, interrupted=True))
    finally:
        running.kill()
    return turns


class _Running:
    """Processes at work, by the pipe that each reports through."""

    def __init__(self, tell: Told) -> None:
        self.names: dict[Connection, str] = {}
        self._processes: dict[Connection, SpawnProcess] = {}
        self._tell = tell

    def add(self, name: str, connection: Connection, process: SpawnProcess) -> None:
        """A process that has been started."""
        self.names[connection], self._processes[connection] = name, process

    def heard(self, seconds: float | None) -> dict[str, Turn]:
        """Wait for the next reports, at most `seconds`; the Turns among them."""
        found = {}
        for connection in multiprocessing.connection.wait(list(self.names), seconds):
            assert isinstance(connection, Connection)
            try:
                report = connection.recv()
            except (EOFError, OSError):
                process = self._processes[connection]
                process.join(_END_SECONDS)
                report = Turn(self.names[connection], broken=f"its process ended without a result (exit code {process.exitcode})")
            if isinstance(report, Progress):
                self._tell(report)
                continue
            found[report.kernel] = report
            self._end(connection)
        return found

    def interrupt(self) -> None:
        """As Ctrl-C does, for those that have not heard it."""
        for process in self._processes.values():
            process.terminate()

    def kill(self) -> None:
        """End what is still there: the reaper of its children takes them along."""
        for connection in list(self.names):
            self._processes[connection].kill()
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        self._processes.pop(connection).join(_END_SECONDS)
        del self.names[connection]
        connection.close()


def _work(connection: Connection, asked: Asked) -> None:
    """One turn in this process; its result goes through `connection`."""

    def interrupt(*_: object) -> None:
        # Once: the report must not be interrupted.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)

    def tell(progress: Progress) -> None:
        with contextlib.suppress(OSError):
            connection.send(progress)

    try:
        turn = take_turn(asked, tell)
    except KeyboardInterrupt:
        turn = Turn(asked.kernel, interrupted=True)
    except Exception as error:  # attnfuzz's own fault: told with the others' results
        turn = Turn(asked.kernel, broken=f"internal error: {type(error).__name__}: {error}")
    connection.send(turn)
