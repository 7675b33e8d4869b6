"""One Case again: whether it still fails, how often, and maps of its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from attnfuzz.harness.campaign.coverage import Phase
from attnfuzz.harness.campaign.events import Rate
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.core import environment
from attnfuzz.harness.core.signals import ending
from attnfuzz.harness.core.statistics import interval
from attnfuzz.harness.isolation.child import ChildError
from attnfuzz.harness.isolation.executors import Executor, InProcess
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.outcomes import ExecutionError
from attnfuzz.harness.judge.errormap import ErrorMaps
from attnfuzz.harness.judge.failure import Failure, Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.harness.trial.supports import with_config
from attnfuzz.harness.trial.trial import check_runnable
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.problem import OutputName
from attnfuzz.strategies.case import Case

__all__ = [
    "FailureCount",
    "Repetition",
    "Reproduction",
    "Where",
    "map_errors",
    "outcome_of",
    "repeat",
    "reproduce",
    "verdict_or_lost",
]


Outcome = Literal["FIXED", "FAILED", "UNJUDGED"]


@dataclass(frozen=True, slots=True)
class Where:
    """Where and how a Case is run again."""

    device: str = "auto"
    """auto, cpu or cuda; auto: CUDA if this machine and the kernel have it, else the CPU."""
    in_process: bool = False
    """Run in this process, for a debugger; by default in a child, which may die of it."""
    deadline: float | None = None
    """Seconds that a stage may take; None: 60."""
    memory_check: bool = True
    """Check every access to memory of an interpreted kernel."""

    def device_for(self, case: Case) -> tuple[Device, Kernel]:
        """The device that the Case runs on, and its kernel.

        Raises:
            BadArgument: the kernel is absent or cannot run there.
        """
        device = environment.resolve_device(self.device)
        kernel = registry.get(case.kernel)
        if self.device == "auto" and device == "cuda" and "cuda" not in kernel.capabilities.devices:
            device = "cpu"
        if reason := kernel.unavailable(device):
            raise BadArgument(f"kernel={kernel.name!r}: it cannot run on {device} here: {reason}")
        return device, kernel

    def prepared(self, case: Case) -> tuple[Device, Kernel, Case]:
        """The device that the Case runs on, its kernel, and the Case with the kernel's default Config if it names none.

        Raises:
            BadArgument: the kernel is absent, cannot run there, or does not support the Problem.
        """
        device, kernel = self.device_for(case)
        check_runnable(case, device)
        return device, kernel, with_config(kernel, case)

    @contextmanager
    def runner(
        self, device: Device, kernel: Kernel, finished: Callable[[Phase, Case, Verdict], None] = lambda *_: None
    ) -> Iterator[TrialRunner]:
        """Run Cases of `kernel`; its processes end with the block. `finished`: called after each trial."""
        executor: Executor
        if self.in_process:
            executor = InProcess(device, memory_check=self.memory_check)
        else:
            executor = Isolated(device, backends=[kernel.backend], deadline=self.deadline, memory_check=self.memory_check)
        try:
            yield TrialRunner(executor, finished=finished)
        finally:
            executor.close()


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A Case run again on `device`: the last Verdict of `runs`."""

    outcome: Outcome
    """UNJUDGED: nothing failed, but the output that failed before (or, where that is not known, none) could be judged."""
    device: Device
    verdict: Verdict
    runs: int = 1


def reproduce(
    case: Case, where: Where | None = None, *, rate: Rate | None = None, output: OutputName | None = None
) -> Reproduction:
    """Run `case` again, in a child process unless `where` says otherwise.

    Args:
        case: what to run.
        where: device, deadline and checks; None: the defaults.
        rate: (runs that failed, all runs), where it did not fail every time: it runs until it fails, or as often as that demands.
        output: the one that was wrong before; None: not known, or not one output's failure.

    Raises:
        BadArgument: the kernel is absent, cannot run here, or does not support the Problem.
    """
    where = where or Where()
    device, kernel, case = where.prepared(case)
    with where.runner(device, kernel) as runner:
        verdict, _ = verdict_or_lost(runner, case, rate)
    return Reproduction(outcome_of(verdict, output), device, verdict, max(1, runner.trials))


def outcome_of(verdict: Verdict, output: OutputName | None) -> Outcome:
    """What a Verdict says of a failure of `output`, or of any where it is None."""
    if verdict.failure:
        return "FAILED"
    return "UNJUDGED" if _unjudged(verdict, output) else "FIXED"


def verdict_or_lost(runner: TrialRunner, case: Case, rate: Rate | None = None) -> tuple[Verdict, bool]:
    """Run a Case as often as its rate demands; returns the last Verdict, and whether the device is lost for this process."""
    try:
        return runner.run(case, rate=rate, patient=True), False
    except DeviceLost as lost:
        return Verdict(status="fail", failures=(lost.failure,)), True


def _unjudged(verdict: Verdict, output: OutputName | None) -> bool:
    """Whether to pass says nothing of a failure of `output`, or of any."""
    concerned = [figures for name, figures in verdict.figures.items() if output in (None, name)]
    return bool(concerned) and all(figures.unjudged for figures in concerned)


@dataclass(slots=True)
class FailureCount:
    """One failure among the runs of a Case, as it was in the `first` run that had it; `runs` had it."""

    failure: Failure
    runs: int
    first: int


@dataclass(frozen=True, slots=True)
class Repetition:
    """A Case run `runs` times of `count` on `device`; `failed` of them failed. `interrupted`: by the user."""

    device: Device
    count: int
    runs: int
    failed: int
    failures: tuple[FailureCount, ...]
    interrupted: bool

    @property
    def interval(self) -> tuple[float, float]:
        """The failure rate's confidence interval of 95 %."""
        return interval(self.failed, self.runs)


def repeat(case: Case, count: int, where: Where, on_run: Callable[[int, Verdict], None] = lambda *_: None) -> Repetition:
    """Run `case` `count` times, one run after the other; Ctrl-C or a device that is lost ends it with the result until then.

    Args:
        case: what to run.
        count: runs.
        where: device, deadline and checks.
        on_run: called after every run with its number, from 1, and its Verdict.

    Raises:
        BadArgument: the kernel is absent, cannot run here, or does not support the Problem; or `count` is not positive.
    """
    if count < 1:
        raise reject("repeat", count, "must be positive", "give 1 or more")
    device, kernel, case = where.prepared(case)
    failures: dict[Identity, FailureCount] = {}
    runs, failed, interrupted = 0, 0, False
    with where.runner(device, kernel) as runner:
        try:
            lost = False
            while runs < count and not lost:
                verdict, lost = verdict_or_lost(runner, case)
                runs += 1
                failed += verdict.failure is not None
                for failure in {each.identity: each for each in verdict.failures}.values():
                    failures.setdefault(failure.identity, FailureCount(failure, 0, runs)).runs += 1
                on_run(runs, verdict)
            ending()
        except KeyboardInterrupt:
            ending()
            interrupted = True
    return Repetition(device, count, runs, failed, tuple(failures.values()), interrupted)


def map_errors(case: Case, where: Where, *, rate: Rate | None = None) -> ErrorMaps | str:
    """Run `case` once more, or as often as its `rate` demands, and map its errors; or why there is nothing to map."""
    try:
        device, kernel, case = where.prepared(case)
        with where.runner(device, kernel) as runner:
            return runner.map_errors(case, rate)
    except (BadArgument, ChildError, ExecutionError) as error:
        return str(error)
