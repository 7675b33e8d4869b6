"""Executors of Trials and compiles: in child processes (isolated.py, the default), or in this one (for a debugger)."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from attnfuzz.harness.core import environment
from attnfuzz.harness.core.text import encodable
from attnfuzz.harness.isolation.outcomes import Past
from attnfuzz.harness.isolation.statistics import Statistics
from attnfuzz.harness.judge.errormap import ErrorMaps
from attnfuzz.harness.judge.failure import Failure, Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Device
from attnfuzz.strategies.case import Case

__all__ = ["Compiled", "Compiler", "Executor", "InProcess", "SerialCompiler", "compile_error"]


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compiled variant of a kernel: its Case, the seconds it took, and the Failure if there is one.

    `error`: of attnfuzz or of its use, which says nothing of the kernel.
    """

    case: Case
    seconds: float
    failure: Failure | None = None
    error: Exception | None = None


class Compiler(Protocol):
    """Compiles variants while Trials run."""

    def start(self, case: Case) -> None:
        """Begin to compile the kernel of a Case."""

    def poll(self, seconds: float) -> list[Compiled]:
        """Return what has been compiled since, after waiting for it for at most `seconds`."""

    def close(self) -> None:
        """End the compiles that are at work."""


class Executor(Protocol):
    """Runs Trials and compiles."""

    statistics: Statistics

    def prepare(self) -> None:
        """Begin to load what Trials need, without waiting for it."""

    def begin(self, case: Case, *, patient: bool = False) -> None:
        """Begin a Trial, one at a time. `patient`: every stage has its full deadline."""

    def finish(self) -> Verdict:
        """Return the Verdict of the Trial that was begun.

        Raises:
            OutOfTime: the time of `limit` was over first.
        """

    def begin_batch(self, cases: Sequence[Case], known: Collection[Identity] | None = None) -> None:
        """Begin the Trials of Cases of one kernel; nothing else begins before `finish_batch`.

        `known`: failures whose pattern is not looked for; None: the pattern of every failure.
        """

    def finish_batch(self) -> list[Verdict]:
        """Return the Verdicts of the Cases that were begun, as if each had run alone.

        Raises:
            OutOfTime: the time of `limit` was over first.
        """

    def limit(self, until: float | None) -> None:
        """End each Trial at `until` (time.monotonic), with OutOfTime; None: no such time."""

    def past(self, case: Case) -> Past:
        """Return what the process that gave the latest Verdict of `case` had run before it, where that Verdict was a failure."""

    def forget_pasts(self) -> None:
        """Forget all that `past` could return: the failures so far are examined."""

    def compiler(self) -> Compiler:
        """Return a new Compiler; it is closed before the executor."""

    def mapped(self, case: Case) -> ErrorMaps | str:
        """Run `case` once more for maps of its errors, or say why there are none. Not allowed while a Trial is in flight."""

    def fresh(self) -> None:
        """Keep the next Trial apart from what earlier ones left behind in the process."""

    def describe(self) -> dict[str, Any]:
        """Return the device and the versions that Trials run on."""

    def close(self) -> None:
        """End processes and remove files."""


class SerialCompiler:
    """Compiles in this process, one variant in each `poll`.

    Args:
        compiled: compiles the kernel of a Case.
    """

    def __init__(self, compiled: Callable[[Case], Compiled]) -> None:
        self._compiled = compiled
        self._waiting: deque[Case] = deque()

    def start(self, case: Case) -> None:
        """Keep it for `poll`."""
        self._waiting.append(case)

    def poll(self, seconds: float) -> list[Compiled]:
        """Compile the next one; nothing if `seconds` is 0, since that would delay a Trial."""
        return [self._compiled(self._waiting.popleft())] if self._waiting and seconds else []

    def close(self) -> None:
        """Forget what waits."""
        self._waiting.clear()


class InProcess:
    """Runs everything in this process: a kernel that crashes ends the run, and one that hangs blocks it."""

    def __init__(self, device: Device, *, memory_check: bool = True) -> None:
        self.device = device
        self.statistics = Statistics()
        self._memory_check = memory_check
        self.case: Case | None = None
        self._batch: tuple[Sequence[Case], Collection[Identity] | None] = (), None
        environment.prepare(device)

    def prepare(self) -> None:
        """Do nothing: this process loads as it goes."""

    def begin(self, case: Case, *, patient: bool = False) -> None:  # noqa: ARG002 - without deadlines
        """Keep the Case for `finish`."""
        self.case = case

    def finish(self) -> Verdict:
        """Run the Trial."""
        from attnfuzz.harness.trial.sequence import run_sequence

        assert self.case is not None
        self.statistics.tasks += 1
        with self.memory_checked():
            return run_sequence(self.case, self.device)

    def begin_batch(self, cases: Sequence[Case], known: Collection[Identity] | None = None) -> None:
        """Keep the Cases for `finish_batch`."""
        self._batch = cases, known

    def finish_batch(self) -> list[Verdict]:
        """Run the Trials."""
        from attnfuzz.harness.trial.batch import run_batch

        cases, known = self._batch
        self.statistics.tasks += len(cases)
        with self.memory_checked():
            return run_batch(cases, self.device, known=known)

    def limit(self, until: float | None) -> None:
        """Do nothing: a Trial of this process cannot be ended."""

    def past(self, case: Case) -> Past:  # noqa: ARG002 - there is no other process in which it could be run again
        """Return nothing."""
        return Past()

    def forget_pasts(self) -> None:
        """Do nothing: there are none."""

    def compiler(self) -> Compiler:
        """Return a Compiler that compiles in this process."""
        return SerialCompiler(self._compiled)

    def _compiled(self, case: Case) -> Compiled:
        from attnfuzz.harness.trial.build import compile_here
        from attnfuzz.kernels import registry

        seconds, error = compile_here(registry.get(case.kernel), case.problem, case.config, self.device)
        return Compiled(case, seconds, compile_error(case, error))

    def mapped(self, case: Case) -> ErrorMaps | str:
        """Run it in this process."""
        from attnfuzz.harness.trial.errormaps import error_maps
        from attnfuzz.harness.trial.sequence import run_earlier

        with self.memory_checked():
            run_earlier(case, self.device)
            return error_maps(case, self.device)

    @contextlib.contextmanager
    def memory_checked(self) -> Iterator[None]:
        """Check memory accesses in this block as asked for, then restore the process's state."""
        from attnfuzz.kernels.support import memory

        before = memory.checking()
        memory.check(self._memory_check)
        try:
            yield
        finally:
            memory.check(before)

    def fresh(self) -> None:
        """Do nothing: there is only one process."""

    def describe(self) -> dict[str, Any]:
        """Return the device and the versions of this process."""
        return environment.describe(self.device)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def compile_error(case: Case, error: str | None) -> Failure | None:
    """Return a compiler's error, if there is one, as a Failure."""
    if error is None:
        return None
    return Failure(kernel=case.kernel, kind="compile-error", check="build", message=encodable(error[:2000]))
