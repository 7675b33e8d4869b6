"""Lines of a kernel's Triton functions that Cases reach, run by the interpreter in a child process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from attnfuzz.harness.audit.coverage.source import FunctionCoverage, compared, device_functions
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.harness.isolation.outcomes import Error, Reply, exception_of
from attnfuzz.harness.isolation.tasks import trial
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.support import cache
from attnfuzz.strategies.case import Case

__all__ = ["LineCoverage", "check_lines", "lines_of", "trial_reached"]

_TASK = f"{__name__}:trial_reached"
_ENOUGH = 3
"""Cases after which a kernel without an interpreted launch counts as one that has none."""


@dataclass(frozen=True, slots=True)
class LineCoverage:
    """What ran of a kernel's Triton functions, by file. `reason`: why nothing is known of them."""

    cases: int
    failed: int = 0
    """Cases whose trial failed or ended its process."""
    files: dict[str, tuple[FunctionCoverage, ...]] = field(default_factory=dict)
    reason: str = ""


def trial_reached(payload: dict[str, Any], enter: Callable[..., None]) -> tuple[Any, bool]:
    """Run one Trial, with its payload, and record which lines of device code it runs: a task of a child process."""
    from attnfuzz.kernels.triton import runtime
    from attnfuzz.kernels.triton.interpreter.reached import recording

    runtime.load("cpu")
    with recording() as reached:
        verdict, replace = trial(payload, enter)
    failed = msgspec.convert(verdict, Verdict).failure is not None
    steps = {path: sorted(each) for path, each in reached.steps.items()}
    return {"failed": failed, "steps": steps, "masks": [[*key, sorted(values)] for key, values in reached.masks.items()]}, replace


def check_lines(kernel: Kernel, device: Device) -> None:
    """Check that the kernel can run where Triton is interpreted.

    Raises:
        BadArgument: it cannot, or `device` is not the CPU.
    """
    if device != "cpu":
        raise reject("device", device, "Triton is interpreted on the CPU alone", "leave --lines out, or use cpu")
    if reason := kernel.unavailable(device):
        raise reject("kernel", kernel.name, f"it cannot run on {device} here: {reason}", "leave --lines out")


def lines_of(kernel: Kernel, cases: Sequence[Case], device: Device, finished: Callable[[int], None]) -> LineCoverage:
    """Run Cases in a child process and return which lines of the kernel's Triton functions ran.

    Args:
        kernel: what the Cases are of.
        cases: those to run.
        device: where: one that `check_lines` accepts.
        finished: called with the number of Cases that have run.

    Raises:
        BadArgument: a child cannot find the kernel.
        ExecutionError: the harness itself failed in the child.
    """
    if not any(map(device_functions, kernel.files)):
        return LineCoverage(0, reason="no source file of it has Triton functions, and only those are interpreted")
    record = _Record()
    with contextlib.closing(Isolated(device, backends=[kernel.backend, "triton"])) as executor:
        described = executor.describe()["device"]
        for number, case in enumerate(cases, 1):
            payload = {"kernel": shipped(kernel.name), "case": case.canonical(), "device": device}
            record.add(executor.ask(_TASK, {**payload, "device_name": described, "memory_check": True}))
            finished(number)
            if number >= min(_ENOUGH, len(cases)) and not record.steps and record.failed < number:
                return LineCoverage(number, reason="its Triton functions were not launched through the interpreter")
    # Modifiers are functions too, generated into a folder of their own.
    others = (path for path in record.steps if not Path(path).is_relative_to(cache.folder("triton")))
    paths = dict.fromkeys((*filter(device_functions, kernel.files), *others))
    return LineCoverage(len(cases), record.failed, {path: tuple(record.of(path)) for path in paths})


class _Record:
    """What the Cases have reached together."""

    def __init__(self) -> None:
        self.failed = 0
        self.steps: dict[str, set[tuple[int, int]]] = {}
        self._masks: dict[str, dict[tuple[int, str], set[bool]]] = {}

    def add(self, outcome: Any) -> None:
        """Add what one Case has reached; a child that died has reported nothing."""
        if isinstance(outcome, Error):
            raise exception_of(outcome)
        if not isinstance(outcome, Reply):
            self.failed += 1
            return
        result = outcome.result
        self.failed += bool(result["failed"])
        for path, steps in result["steps"].items():
            self.steps.setdefault(path, set()).update(map(tuple, steps))
        for path, line, operation, values in result["masks"]:
            self._masks.setdefault(path, {}).setdefault((line, operation), set()).update(values)

    def of(self, path: str) -> Iterator[FunctionCoverage]:
        """Yield what ran of each Triton function of a file."""
        return compared(device_functions(path), self.steps.get(path, ()), self._masks.get(path, {}))
