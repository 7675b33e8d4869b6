"""Which sequence of calls a Trial makes."""

from __future__ import annotations

from hypothesis import strategies as st

from attnfuzz.kernels.contract import Config, Device, Kernel
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import CALLS, Case, Check
from attnfuzz.strategies.earlier_calls import why_not_call

__all__ = ["drawn_call"]


def drawn_call(kernel: Kernel, problem: Problem, config: Config, device: Device) -> st.SearchStrategy[Check]:
    """ "oracle", the simplest, or one of CALLS that makes sense for `problem`, "twice" first."""
    checks: list[Check] = ["oracle"]
    for check in CALLS:
        case = Case(kernel=kernel.name, problem=problem, config=config, check=check)
        if why_not_call(kernel, case, device) is None:
            checks.append(check)
    return st.sampled_from(checks)
