"""The strategy of all Cases of a campaign: mostly one call against the oracle, then sequences of calls, and relations."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from msgspec.structs import replace

from attnfuzz.kernels.contract import Config, Device, Kernel
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import CALLS, Case, Check
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.earlier_calls import other_problems, why_not_call
from attnfuzz.strategies.relations import RELATION_LIMITS, relation_cases, relations_of
from attnfuzz.strategies.shapes import Variant, all_variants

__all__ = ["call_checks", "trial_cases"]

_OUT_OF = 16
_RELATIONS, _CALLS = 2, 3
"""Number of Cases in 16 that are relations, and that draw a check with or without earlier calls (`call_checks`)."""


def trial_cases(
    kernel: Kernel, *, device: Device, limits: Limits | None = None, variants: Sequence[Variant] | None = None
) -> st.SearchStrategy[Case]:
    """Return the strategy of Cases of `kernel` on `device` with all checks that apply, within `variants` (default: all).

    Raises:
        BadArgument: the kernel declares nothing that can be drawn.
    """
    chosen = tuple(variants) if variants is not None else all_variants(kernel, device)
    plain = cases(kernel, device=device, limits=limits, variants=chosen)
    related = None
    if relations_of(kernel, chosen, device):
        room = limits if limits is not None and device == "cpu" else RELATION_LIMITS[device]
        related = relation_cases(kernel, device=device, limits=room, variants=chosen)
    return _trials(kernel, device, chosen, plain, related)


@st.composite
def _trials(
    draw: st.DrawFn,
    kernel: Kernel,
    device: Device,
    variants: tuple[Variant, ...],
    plain: st.SearchStrategy[Case],
    related: st.SearchStrategy[Case] | None,
) -> Case:
    kind = draw(st.integers(0, _OUT_OF - 1))
    if related is not None and kind >= _OUT_OF - _RELATIONS:
        return draw(related)
    case = draw(plain)
    if kind < _OUT_OF - _RELATIONS - _CALLS:
        return case
    check = draw(call_checks(kernel, case.problem, case.config, device))
    if check == "other_mask" and not _compiled(kernel, device, variants, case):
        check = "twice"
    return replace(case, check=check)


def call_checks(kernel: Kernel, problem: Problem, config: Config, device: Device) -> st.SearchStrategy[Check]:
    """Return the strategy of "oracle" and all of CALLS that apply to `problem`, simplest first."""
    checks: list[Check] = ["oracle"]
    for check in CALLS:
        case = Case(kernel=kernel.name, problem=problem, config=config, check=check)
        if why_not_call(kernel, case, device) is None:
            checks.append(check)
    return st.sampled_from(checks)


def _compiled(kernel: Kernel, device: Device, variants: tuple[Variant, ...], case: Case) -> bool:
    """Whether every other mask of an earlier call is compiled already: a Trial must not wait for a compiler."""
    if device not in kernel.capabilities.compiles_on:
        return True
    keys = {kernel.compile_key(each.problem(kernel.capabilities), each.config) for each in variants}
    others = other_problems(kernel, "other_mask", case.problem, case.config, device)
    return all(kernel.compile_key(other, case.config) in keys for other in others)
