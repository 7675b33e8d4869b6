"""What Cases of a kernel are drawn from: its variants, their limits, and the seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from attnfuzz.harness.campaign.settings import PROFILES, Settings
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.problem import LAYOUTS, Layout
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.models import model_cases, model_variants
from attnfuzz.strategies.other_values import values_of_a_shape
from attnfuzz.strategies.pools import compile_order, pool
from attnfuzz.strategies.trials import trial_cases
from attnfuzz.strategies.variants import MODIFIED, Variant, all_variants, modified, other_dims

__all__ = ["KernelPlan", "cases_of", "every_variant", "plan_of", "variants_of"]

_OTHERS, _ONE_OF = 2, 8
"""Variants with dims that a kernel does not list: two for each dtype and mask; an eighth of the pool where each is compiled."""
_PITCH = 8
"""Elements between the rows of tensors that are not contiguous."""


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Variants, simplest first, limits and seed of a kernel's Cases.

    `compiled`: code is compiled before its trials; `values`: how many Cases share a shape.
    """

    variants: tuple[Variant, ...]
    limits: Limits
    seed: int
    compiled: bool = False
    values: int = 1
    device: Device = "cpu"

    def case(self, kernel: Kernel, variant: Variant) -> Case:
        """Return the smallest Case of a variant."""
        return Case(kernel=kernel.name, problem=variant.problem(kernel.capabilities), config=variant.config)

    def key(self, kernel: Kernel, variant: Variant) -> str:
        """Return the compile key of that Case."""
        return kernel.compile_key(variant.problem(kernel.capabilities), variant.config)

    def compiles(self, kernel: Kernel) -> dict[str, Case]:
        """Return the smallest Case of each compile key, in the order of compiles; none where nothing is compiled.

        The first variant's code for strides comes after that variant's own, and its code for sinks after the second variant's:
        more Cases need them than any other variant's. Which other forms of code there are is for drawn Cases to ask.
        """
        if not self.compiled:
            return {}
        first, *rest = (self.case(kernel, each) for each in compile_order(self.variants))
        strided, sinks = self._forms(kernel, first)
        cases: dict[str, Case] = {}
        for each in (first, *strided, *rest[:1], *sinks, *rest[1:]):
            cases.setdefault(kernel.compile_key(each.problem, each.config), each)
        return cases

    def _forms(self, kernel: Kernel, case: Case) -> tuple[list[Case], list[Case]]:
        """Return a variant's smallest Case with strides, and that with sinks; none where drawn Cases need no such code."""
        can = kernel.capabilities
        if can.compiles_each_shape:
            return [], []
        names = ("layout_q", "layout_do") if case.problem.page_size else LAYOUTS
        strided = self._taken(kernel, case, dict.fromkeys(names, Layout(pitch=_PITCH))) if can.layouts else []
        return strided, self._taken(kernel, case, {"sinks": True}) if can.sinks else []

    def _taken(self, kernel: Kernel, case: Case, changes: Mapping[str, Any]) -> list[Case]:
        """Return `case` with changes to its Problem; none where the kernel does not take them."""
        changed = replace(case, problem=replace(case.problem, **changes))
        return [changed] if kernel.supports(changed.problem, changed.config, self.device) is None else []


def plan_of(kernel: Kernel, settings: Settings) -> KernelPlan:
    """Return the plan of `kernel`; the same in every process.

    Raises:
        BadArgument: the kernel declares nothing that can be drawn.
    """
    return KernelPlan(
        variants=variants_of(kernel, settings),
        limits=PROFILES[settings.profile].limits[settings.device],
        seed=settings.seed * 1000003,
        compiled=settings.device in kernel.capabilities.compiles_on,
        values=values_of_a_shape(kernel.capabilities, settings.device),
        device=settings.device,
    )


def variants_of(kernel: Kernel, settings: Settings) -> tuple[Variant, ...]:
    """Return all variants that the kernel declares, or a pool where each is compiled, and some of dims that it does not list.

    A run of few Cases waits for no more kinds of modifiers than it has Cases.
    """
    device, seed = settings.device, settings.seed
    if device not in kernel.capabilities.compiles_on:
        return every_variant(kernel, settings)
    count = PROFILES[settings.profile].variants[device]
    if PROFILES[settings.profile].models:
        return pool(every_variant(kernel, settings), count, seed)
    variants, others = all_variants(kernel, device), other_dims(kernel, device, seed, count // _ONE_OF)
    most = MODIFIED if settings.max_examples is None else min(MODIFIED, settings.max_examples)
    return modified((*pool(variants, count - len(others), seed), *others), kernel, device, seed, most)


def every_variant(kernel: Kernel, settings: Settings) -> tuple[Variant, ...]:
    """Return all variants that the kernel declares, and some of dims that it does not list; with the profile models, theirs.

    Raises:
        BadArgument: the kernel declares nothing that can be drawn, or takes no model.
    """
    profile, device = PROFILES[settings.profile], settings.device
    if profile.models:
        return model_variants(kernel, device, profile.limits[device].length)
    variants = all_variants(kernel, device)
    kinds = {(each.dtype, each.causal) for each in variants}
    return (*variants, *other_dims(kernel, device, settings.seed, _OTHERS * len(kinds)))


def cases_of(
    kernel: Kernel, plan: KernelPlan, settings: Settings, variants: tuple[Variant, ...] | None = None
) -> st.SearchStrategy[Case]:
    """Return the strategy of Cases of the plan's variants, or of some of them."""
    chosen, limits, models = plan.variants if variants is None else variants, plan.limits, PROFILES[settings.profile].models
    if not settings.plain:
        return trial_cases(kernel, device=settings.device, limits=limits, variants=chosen, models=models)
    strategy = model_cases if models else cases
    return strategy(kernel, device=settings.device, limits=limits, variants=chosen)
