"""Whether a Case can be run at all: its kernel takes the Problem, and its check makes sense for both."""

from __future__ import annotations

from collections.abc import Callable

from attnfuzz.kernels.contract import Config, Device, Kernel
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import CALLS, RELATIONS, Case, Check
from attnfuzz.strategies.earlier_calls import why_not_call
from attnfuzz.strategies.relation_problems import why_not_relation

__all__ = ["compile_key_of", "why_not_case"]

_WHY_NOT: dict[Check, Callable[[Kernel, Case, Device], str | None]] = {
    **dict.fromkeys(CALLS, why_not_call),
    **dict.fromkeys(RELATIONS, why_not_relation),
}
"""For each check but the oracle the reason why a Case that its kernel supports cannot be tried by it, or None."""


def compile_key_of(kernel: Kernel, problem: Problem, config: Config, device: Device) -> str | None:
    """The compile key; None of what the kernel does not support, whose Config it need not even be able to read."""
    return None if kernel.supports(problem, config, device) else kernel.compile_key(problem, config)


def why_not_case(kernel: Kernel, case: Case, device: Device) -> str | None:
    """Why `case` cannot be run with `kernel` on `device`, or None. Shrinking leaves such Cases out."""
    if reason := kernel.supports(case.problem, case.config, device):
        return reason
    return _WHY_NOT[case.check](kernel, case, device) if case.check in _WHY_NOT else None
