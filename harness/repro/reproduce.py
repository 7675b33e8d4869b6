"""One Case again: FIXED (it passes now), FAILED (it still fails), or an error; and how often it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from attnfuzz.harness.campaign.shrink import Rate, tries
from attnfuzz.harness.core import environment
from attnfuzz.harness.core.statistics import interval
from attnfuzz.harness.isolation.child import ChildError
from attnfuzz.harness.isolation.executors import Executor, InProcess
from attnfuzz.harness.isolation.isolated import ExecutionError, Isolated
from attnfuzz.harness.judge.errormap import ErrorMaps
from attnfuzz.harness.judge.failure import Failure, Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.problem import BadArgument, reject
from attnfuzz.strategies.case import Case

__all__ = ["Repetition", "Reproduction", "Seen", "Where", "mapped", "repeat", "reproduce"]


@dataclass(frozen=True, slots=True)
class Where:
    """How a Case is run again."""

    asked: str = "auto"
    """auto, cpu or cuda; auto: CUDA if this machine and the kernel have it, else the CPU."""
    in_process: bool = False
    """In this process, for a debugger; else in a child, which may die of it."""
    deadline: float | None = None
    """Seconds that a stage may take; None: 60."""
    memory_check: bool = True
    """Check every access to memory of an interpreted kernel."""

    def device_for(self, case: Case) -> tuple[Device, Kernel]:
        """Where the Case runs, and its kernel.

        Raises:
            BadArgument: the kernel is absent or cannot run there.
        """
        device = environment.resolve_device(self.asked)
        kernel = registry.get(case.kernel)
        if self.asked == "auto" and device == "cuda" and "cuda" not in kernel.capabilities.devices:
            device = "cpu"
        if reason := kernel.unavailable(device):
            raise BadArgument(f"kernel={kernel.name!r}: it cannot run on {device} here: {reason}")
        return device, kernel

    @contextmanager
    def executor(self, device: Device, kernel: Kernel) -> Iterator[Executor]:
        """Where Trials run, closed at the end."""
        made: Executor
        if self.in_process:
            made = InProcess(device, memory_check=self.memory_check)
        else:
            made = Isolated(device, backends=[kernel.backend], deadline=self.deadline, memory_check=self.memory_check)
        try:
            yield made
        finally:
            made.close()


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What came of running a Case again on `device`: the last Verdict of `runs`."""

    outcome: Literal["FIXED", "FAILED", "UNJUDGED"]
    """UNJUDGED: nothing failed, but what failed before (or, where that is not known, every output) could not be judged."""
    device: Device
    verdict: Verdict
    runs: int = 1


def reproduce(
    case: Case,
    asked: str,
    *,
    rate: Rate | None = None,
    in_process: bool = False,
    deadline: float | None = None,
    memory_check: bool = True,
    output: object = None,
) -> Reproduction:
    """Run `case` again on `asked` ("auto": CUDA if this machine and the kernel have it, else the CPU).

    Args:
        case: what to run.
        asked: auto, cpu or cuda.
        rate: how often it failed, where that was not every time: it is run until it fails, or as often as that rate demands.
        in_process: in this process, for a debugger; else in a child, which may die of it.
        deadline: seconds that a stage may take; None: 60.
        memory_check: check every access to memory of an interpreted kernel.
        output: the name of the one that was wrong, as the case file tells; None: not known, or not one output's.

    Raises:
        BadArgument: the kernel is absent, cannot run here, or does not support the Problem.
    """
    where = Where(asked, in_process, deadline, memory_check)
    device, kernel = where.device_for(case)
    with where.executor(device, kernel) as executor:
        most = tries(rate)
        for runs in range(1, most + 1):
            executor.begin(case, patient=True)
            verdict = executor.finish()
            if verdict.failure is not None or runs == most:
                break
    outcome: Literal["FIXED", "FAILED", "UNJUDGED"] = "FAILED" if verdict.failure else "FIXED"
    if outcome == "FIXED" and _unjudged(verdict, output):
        outcome = "UNJUDGED"
    return Reproduction(outcome, device, verdict, runs)


def _unjudged(verdict: Verdict, output: object) -> bool:
    """Whether to pass says nothing of a failure of `output`, or of any."""
    concerned = [figures for name, figures in verdict.figures.items() if output in (None, name)]
    return bool(concerned) and all(figures.unjudged for figures in concerned)


@dataclass(slots=True)
class Seen:
    """One failure among the runs of a Case: how many of them showed it, the first that did, and what it said there."""

    failure: Failure
    runs: int
    first: int


@dataclass(frozen=True, slots=True)
class Repetition:
    """What came of running a Case `runs` times on `device`; `failed` of them failed. `interrupted`: of `asked` runs."""

    device: Device
    asked: int
    runs: int
    failed: int
    seen: tuple[Seen, ...]
    interrupted: bool

    @property
    def interval(self) -> tuple[float, float]:
        """The rate's confidence interval of 95 %."""
        return interval(self.failed, self.runs)


def repeat(case: Case, count: int, where: Where, each: Callable[[int, Verdict], None] = lambda *_: None) -> Repetition:
    """Run `case` `count` times, one run after the other; Ctrl-C ends it with what was seen until then.

    Args:
        case: what to run.
        count: runs.
        where: on what device, and how.
        each: hears of every run, counted from 1, and its Verdict.

    Raises:
        BadArgument: the kernel is absent, cannot run here, or does not support the Problem; or `count` is not positive.
    """
    if count < 1:
        raise reject("repeat", count, "nothing would be run", "give 1 or more")
    device, kernel = where.device_for(case)
    seen: dict[Identity, Seen] = {}
    runs = failed = 0
    interrupted = False
    with where.executor(device, kernel) as executor:
        try:
            while runs < count:
                executor.begin(case, patient=True)
                verdict = executor.finish()
                runs += 1
                failed += verdict.failure is not None
                for failure in {each.identity: each for each in verdict.failures}.values():
                    seen.setdefault(failure.identity, Seen(failure, 0, runs)).runs += 1
                each(runs, verdict)
        except KeyboardInterrupt:
            interrupted = True
    return Repetition(device, count, runs, failed, tuple(seen.values()), interrupted)


def mapped(
    case: Case, device: Device, *, rate: Rate | None = None, deadline: float | None = None, in_process: bool = False
) -> ErrorMaps | str:
    """Run `case` once more on `device` and map its errors; or why there is nothing to map.

    Args:
        case: what to run; its kernel can run there.
        device: where.
        rate: how often it fails, where that is not every time: it is run until errors show, or as often as that demands.
        deadline: seconds that a stage may take; None: 60.
        in_process: in this process; else in a child, which may die of it.
    """
    backends = [registry.get(case.kernel).backend]
    executor: Executor = InProcess(device) if in_process else Isolated(device, backends=backends, deadline=deadline)
    try:
        for _ in range(tries(rate)):
            maps = executor.mapped(case)
            if isinstance(maps, str) or maps.over:
                break
    except (BadArgument, ChildError, ExecutionError) as error:
        return str(error)
    finally:
        executor.close()
    return maps
