"""The strategy of all Cases of a campaign: mostly one call against the oracle, then sequences of calls, and relations."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hypothesis import strategies as st
from msgspec.structs import replace

from attnfuzz.kernels.contract import Config, Device, Kernel
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import CALLS, Case, Check
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.earlier_calls import other_problems, takes_call
from attnfuzz.strategies.relations import RELATION_LIMITS, relation_cases, relations_of
from attnfuzz.strategies.shapes import Variant, all_variants

__all__ = ["call_checks", "trial_cases"]

_OUT_OF = 16
_RELATIONS, _CALLS = 2, 3
"""Number of Cases in 16 that are relations, and that draw a check with or without earlier calls (`call_checks`)."""

_KIND = st.integers(0, _OUT_OF - 1)


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
    return _trials(_Compiled(kernel, device, chosen), plain, related)


@st.composite
def _trials(
    draw: st.DrawFn, compiled: _Compiled, plain: st.SearchStrategy[Case], related: st.SearchStrategy[Case] | None
) -> Case:
    kind = draw(_KIND)
    if related is not None and kind >= _OUT_OF - _RELATIONS:
        return draw(related)
    case = draw(plain)
    if kind < _OUT_OF - _RELATIONS - _CALLS:
        return case
    check = draw(call_checks(compiled.kernel, case.problem, case.config, compiled.device))
    if check == "other_mask" and not compiled.has_other_masks(case):
        check = "twice"
    return replace(case, check=check)


def call_checks(kernel: Kernel, problem: Problem, config: Config, device: Device) -> st.SearchStrategy[Check]:
    """Return the strategy of "oracle" and all of CALLS that apply to `problem`, simplest first."""
    return _one_of(("oracle", *(each for each in CALLS if takes_call(kernel, each, problem, config, device))))


@functools.cache
def _one_of(checks: tuple[Check, ...]) -> st.SearchStrategy[Check]:
    return st.sampled_from(checks)


class _Compiled:
    """The code that is compiled for the variants of a kernel. Its repr is short, since Hypothesis writes it out."""

    def __init__(self, kernel: Kernel, device: Device, variants: Sequence[Variant]) -> None:
        self.kernel, self.device, self._variants = kernel, device, variants

    def __repr__(self) -> str:
        return f"<{self.kernel.name} on {self.device}>"

    @functools.cached_property
    def _keys(self) -> frozenset[str]:
        can = self.kernel.capabilities
        return frozenset(self.kernel.compile_key(each.problem(can), each.config) for each in self._variants)

    def has_other_masks(self, case: Case) -> bool:
        """Whether every other mask of an earlier call is compiled already: a Trial must not wait for a compiler."""
        if self.device not in self.kernel.capabilities.compiles_on:
            return True
        others = other_problems(self.kernel, "other_mask", case.problem, case.config, self.device)
        return all(self.kernel.compile_key(other, case.config) in self._keys for other in others)
