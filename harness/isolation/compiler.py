"""Compiles in child processes, in the background: several at once while Trials run in other children."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import msgspec

from attnfuzz.harness.isolation.executors import Compiled, compile_error
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.harness.isolation.outcomes import Death, Error, Task, death_failure, exception_of
from attnfuzz.harness.isolation.supervisor import Running, Supervisor
from attnfuzz.kernels.contract import Device
from attnfuzz.strategies.case import Case

__all__ = ["BackgroundCompiler"]


class BackgroundCompiler:
    """Compiles the kernels of Cases, each in a child; `poll` must be called again and again.

    Args:
        supervisor: of the children; closed with the compiler.
        device: to compile for.
        deadlines: seconds that each stage may take.
    """

    def __init__(self, supervisor: Supervisor, device: Device, deadlines: Mapping[str, float]) -> None:
        self._supervisor, self._device, self._deadlines = supervisor, device, deadlines
        self._numbers = itertools.count()
        self._cases: dict[int, Case] = {}
        self._active: dict[int, Running] = {}
        self._kernels: set[str] = set()

    def start(self, case: Case) -> None:
        """Begin to compile the kernel of a Case.

        Raises:
            BadArgument: a child cannot find the kernel.
            ChildError: a child process cannot be started.
        """
        payload = {
            "kernel": shipped(case.kernel),
            "problem": msgspec.to_builtins(case.problem),
            "config": dict(case.config),
            "device": self._device,
            # Trials of the kernel can begin with its first variant: the others must not take their cores.
            "later": case.kernel in self._kernels,
        }
        number = next(self._numbers)
        task = Task("attnfuzz.harness.isolation.tasks:compile_variant", payload, self._deadlines)
        self._active[number] = self._supervisor.begin(task)
        self._cases[number] = case
        self._kernels.add(case.kernel)

    def poll(self, seconds: float) -> list[Compiled]:
        """Return what has been compiled since, after waiting for it for at most `seconds`."""
        results = []
        for number, outcome in self._supervisor.ended(self._active, seconds):
            case = self._cases.pop(number)
            if isinstance(outcome, Error):
                results.append(Compiled(case, 0.0, error=exception_of(outcome)))
            elif isinstance(outcome, Death):
                results.append(Compiled(case, outcome.seconds, death_failure(case.kernel, outcome)))
            else:
                results.append(Compiled(case, outcome.result["seconds"], compile_error(case, outcome.result["error"])))
        return results

    def close(self) -> None:
        """End the compiles that are at work, and their children."""
        self._supervisor.close()
