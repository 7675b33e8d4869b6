"""Whether a Case can run, and what is launched then: its kernel supports the Problem, and its check applies to both."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from attnfuzz.kernels.contract import Config, Device, Kernel, protocol_of, why_unsupported
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import CALLS, RELATIONS, STREAMS, Case, Check
from attnfuzz.strategies.earlier_calls import earlier_problems, why_not_call
from attnfuzz.strategies.relation_problems import related_problems, why_not_relation
from attnfuzz.strategies.stream_checks import why_not_streams

__all__ = ["compile_key_of", "problems_of", "why_not_case", "with_config"]


def _why_not_protocol(kernel: Kernel, case: Case, device: Device) -> str | None:  # noqa: ARG001 - as the others
    if device != "cpu":
        return "check='protocol': warp roles are executed on the CPU; give device cpu"
    return None if protocol_of(kernel) else "check='protocol': the kernel has no method `protocol`, which executes its warp roles"


_WHY_NOT: dict[Check, Callable[[Kernel, Case, Device], str | None]] = {
    **dict.fromkeys(CALLS, why_not_call),
    **dict.fromkeys(RELATIONS, why_not_relation),
    "protocol": _why_not_protocol,
    **dict.fromkeys(STREAMS, why_not_streams),
}
"""For each check but the oracle, a function that returns why it does not apply to a supported Case, or None."""


def with_config(kernel: Kernel, case: Case) -> Case:
    """Return `case` with the kernel's default Config where it names none, and none is not a choice of the kernel's."""
    if case.after:
        return replace(with_config(kernel, case.alone), after=tuple(with_config(kernel, each) for each in case.after))
    capabilities = kernel.capabilities
    if case.config or all(why_unsupported(capabilities, case.problem, each) for each in capabilities.devices):
        return case
    configs = kernel.configs(case.problem)
    return case if not configs or case.config in configs else replace(case, config=configs[0])


def compile_key_of(kernel: Kernel, problem: Problem, config: Config, device: Device) -> str | None:
    """Return the compile key, or None if the kernel does not support these, since it may not be able to read the Config."""
    return None if kernel.supports(problem, config, device) else kernel.compile_key(problem, config)


def why_not_case(kernel: Kernel, case: Case, device: Device) -> str | None:
    """Return why `case` cannot be run with `kernel` on `device`, or None. Shrinking skips such Cases."""
    if reason := kernel.supports(case.problem, case.config, device):
        return reason
    for number, each in enumerate(case.after, 1):
        if reason := why_not_case(kernel, each, device):
            return f"its failure needs earlier Cases, and number {number} of {len(case.after)} cannot run any more: {reason}"
    return _WHY_NOT[case.check](kernel, case, device) if case.check in _WHY_NOT else None


def problems_of(kernel: Kernel, case: Case, device: Device) -> tuple[Problem, ...]:
    """Return the Problems of all launches of a Case that can be run, its own first."""
    others: tuple[Problem, ...] = ()
    if case.check in CALLS:
        others = earlier_problems(kernel, case, device)
    elif case.check in RELATIONS:
        others = related_problems(case.check, case.problem, case.recipe.seed)
    return tuple(dict.fromkeys((case.problem, *others)))
