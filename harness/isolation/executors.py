"""Where Trials and compiles happen: in child processes (isolated.py, the rule), or in this one (for a debugger)."""

from __future__ import annotations

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
    """One variant of a kernel was compiled: its Case, seconds it took, and what went wrong."""

    case: Case
    seconds: float
    failure: Failure | None = None


class Executor(Protocol):
    """Runs what a campaign wants to know."""

    statistics: Statistics

    def begin(self, case: Case, *, patient: bool = False) -> None:
        """Begin a Trial, one at a time. `patient`: what takes long is given its full time."""

    def finish(self) -> Verdict:
        """The Verdict of the Trial that was begun."""

    def compiled(self, cases: Sequence[Case], jobs: int | None, starting: Callable[[Case], None]) -> Iterator[Compiled]:
        """Compile the kernel of each Case, `jobs` at once (default: the cores). `starting` hears of each before it begins."""

    def mapped(self, case: Case) -> ErrorMaps | str:
        """Run `case` once more for maps of its errors; or why there are none. Never while a Trial is begun."""

    def fresh(self) -> None:
        """The next Trial shall not meet what earlier ones left behind in the process."""

    def describe(self) -> dict[str, Any]:
        """What the Trials run on."""

    def close(self) -> None:
        """Give back processes and files."""


class InProcess:
    """Everything in this process: a kernel that dies takes the run along, and one that hangs keeps it."""

    def __init__(self, device: Device, *, memory_check: bool = True) -> None:
        self.device = device
        self.statistics = Statistics()
        self._memory_check = memory_check
        self._begun: Case | None = None
        environment.prepare(device)

    def begin(self, case: Case, *, patient: bool = False) -> None:  # noqa: ARG002 - without deadlines
        """Note the Case."""
        self._begun = case

    def finish(self) -> Verdict:
        """The Trial itself."""
        from attnfuzz.harness.trial.trial import run_trial
        from attnfuzz.kernels.support import memory

        case, self._begun = self._begun, None
        assert case is not None
        self.statistics.tasks += 1
        before = memory.checking()
        memory.check(self._memory_check)
        try:
            return run_trial(case, self.device)
        finally:
            memory.check(before)

    def compiled(
        self,
        cases: Sequence[Case],
        jobs: int | None,  # noqa: ARG002 - one after the other
        starting: Callable[[Case], None],
    ) -> Iterator[Compiled]:
        """Compile, one after the other."""
        from attnfuzz.harness.trial.build import compile_here
        from attnfuzz.kernels import registry

        for case in cases:
            starting(case)
            seconds, error = compile_here(registry.get(case.kernel), case.problem, case.config, self.device)
            yield Compiled(case, seconds, compile_error(case, error))

    def mapped(self, case: Case) -> ErrorMaps | str:
        """Run it here."""
        from attnfuzz.harness.trial.errormaps import error_maps

        return error_maps(case, self.device)

    def fresh(self) -> None:
        """There is but one process."""

    def describe(self) -> dict[str, Any]:
        """What this process runs on."""
        return environment.describe(self.device)

    def close(self) -> None:
        """Nothing to give back."""


def compile_error(case: Case, error: str | None) -> Failure | None:
    """A compiler's refusal, if there is one, as a Failure."""
    if error is None:
        return None
    return Failure(kernel=case.kernel, kind="compile-error", check="build", message=printable(error[:2000]))
