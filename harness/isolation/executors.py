"""Executors of Trials and compiles: in child processes (isolated.py, the default), or in this one (for a debugger)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from attnfuzz.harness.core import environment
from attnfuzz.harness.core.text import printable
from attnfuzz.harness.isolation.supervisor import Statistics
from attnfuzz.harness.judge.errormap import ErrorMaps
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Device
from attnfuzz.strategies.case import Case

__all__ = ["Compiled", "Executor", "InProcess", "compile_error"]


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compiled variant of a kernel: its Case, the seconds it took, and the Failure if there is one."""

    case: Case
    seconds: float
    failure: Failure | None = None


class Executor(Protocol):
    """Runs Trials and compiles."""

    statistics: Statistics

    def begin(self, case: Case, *, patient: bool = False) -> None:
        """Begin a Trial, one at a time. `patient`: every stage has its full deadline."""

    def finish(self) -> Verdict:
        """Return the Verdict of the Trial that was begun."""

    def compiled(self, cases: Sequence[Case], jobs: int | None, starting: Callable[[Case], None]) -> Iterator[Compiled]:
        """Compile the kernel of each Case, `jobs` at once (default: the cores). `starting` gets each before it begins."""

    def mapped(self, case: Case) -> ErrorMaps | str:
        """Run `case` once more for maps of its errors, or say why there are none. Not allowed while a Trial is in flight."""

    def fresh(self) -> None:
        """Keep the next Trial apart from what earlier ones left behind in the process."""

    def describe(self) -> dict[str, Any]:
        """Return the device and the versions that Trials run on."""

    def close(self) -> None:
        """End processes and remove files."""


class InProcess:
    """Runs everything in this process: a kernel that crashes ends the run, and one that hangs blocks it."""

    def __init__(self, device: Device, *, memory_check: bool = True) -> None:
        self.device = device
        self.statistics = Statistics()
        self._memory_check = memory_check
        self.case: Case | None = None
        environment.prepare(device)

    def begin(self, case: Case, *, patient: bool = False) -> None:  # noqa: ARG002 - without deadlines
        """Keep the Case for `finish`."""
        self.case = case

    def finish(self) -> Verdict:
        """Run the Trial."""
        from attnfuzz.harness.trial.trial import run_trial

        assert self.case is not None
        self.statistics.tasks += 1
        with self.memory_checked():
            return run_trial(self.case, self.device)

    def compiled(
        self,
        cases: Sequence[Case],
        jobs: int | None,  # noqa: ARG002 - one after the other
        starting: Callable[[Case], None],
    ) -> Iterator[Compiled]:
        """Compile one after the other."""
        from attnfuzz.harness.trial.build import compile_here
        from attnfuzz.kernels import registry

        for case in cases:
            starting(case)
            seconds, error = compile_here(registry.get(case.kernel), case.problem, case.config, self.device)
            yield Compiled(case, seconds, compile_error(case, error))

    def mapped(self, case: Case) -> ErrorMaps | str:
        """Run it in this process."""
        from attnfuzz.harness.trial.errormaps import error_maps

        with self.memory_checked():
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
    return Failure(kernel=case.kernel, kind="compile-error", check="build", message=printable(error[:2000]))
