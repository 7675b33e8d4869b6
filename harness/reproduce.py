"""One Case again: FIXED (it passes now), FAILED (it still fails), or an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attnfuzz.harness import environment
from attnfuzz.harness.children import ChildError
from attnfuzz.harness.errormap import ErrorMaps
from attnfuzz.harness.executors import Executor, InProcess
from attnfuzz.harness.isolated import ExecutionError, Isolated
from attnfuzz.harness.shrink import Rate, tries
from attnfuzz.harness.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import BadArgument
from attnfuzz.strategies.case import Case

__all__ = ["Reproduction", "mapped", "reproduce"]


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What came of running a Case again on `device`: the last Verdict of `runs`."""

    outcome: Literal["FIXED", "FAILED"]
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
) -> Reproduction:
    """Run `case` again on `asked` ("auto": CUDA if this machine and the kernel have it, else the CPU).

    Args:
        case: what to run.
        asked: auto, cpu or cuda.
        rate: how often it failed, where that was not every time: it is run until it fails, or as often as that rate demands.
        in_process: in this process, for a debugger; else in a child, which may die of it.
        deadline: seconds that a stage may take; None: 60.
        memory_check: check every access to memory of an interpreted kernel.

    Raises:
        BadArgument: the kernel is absent, cannot run here, or does not support the Problem.
    """
    device = environment.resolve_device(asked)
    kernel = registry.get(case.kernel)
    if asked == "auto" and device == "cuda" and "cuda" not in kernel.capabilities.devices:
        device = "cpu"
    if reason := kernel.unavailable(device):
        raise BadArgument(f"kernel={kernel.name!r}: it cannot run on {device} here: {reason}")
    executor: Executor
    if in_process:
        executor = InProcess(device, memory_check=memory_check)
    else:
        executor = Isolated(device, backends=[kernel.backend], deadline=deadline, memory_check=memory_check)
    try:
        most = tries(rate)
        for runs in range(1, most + 1):
            executor.begin(case, patient=True)
            verdict = executor.finish()
            if verdict.failure is not None or runs == most:
                break
    finally:
        executor.close()
    return Reproduction("FIXED" if verdict.failure is None else "FAILED", device, verdict, runs)


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
