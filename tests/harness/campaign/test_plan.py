"""In which order a campaign compiles: what the first of it has, for the kernels of this package on a GPU."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.subjects import Subject

from attnfuzz.harness.campaign.plan import KernelPlan, cases_of, plan_of
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.expressions.tree import parse
from attnfuzz.kernels.problem import LAYOUTS, Layout, Problem
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import cases
from attnfuzz.strategies.draw import drawn


class ByForm(Subject):
    """A kernel that compiles code for strides and for sinks."""

    def compile_key(self, problem: Problem, config: Config) -> str:
        strided = any(getattr(problem, name) != Layout() for name in LAYOUTS)
        return f"{problem.dtype} {problem.causal} {problem.dim_qk} {problem.dim_v} {config} {strided} {problem.sinks}"


COMPILED = {"compiles_on": ("cpu",)}
SEEDS = range(6)


def planned(kernel: Subject, seed: int = 0) -> tuple[KernelPlan, list[Case]]:
    plan = plan_of(kernel, Settings(device="cpu", profile="gate", seed=seed))
    return plan, list(plan.compiles(kernel).values())


def test_the_first_variants_code_for_strides_and_for_sinks_is_compiled_early() -> None:
    plan, order = planned(ByForm({**COMPILED, "layouts": True, "sinks": True}))
    first, strided, second, sinks = (each.problem for each in order[:4])
    wide = dict.fromkeys(LAYOUTS, Layout(pitch=8))
    assert (strided, sinks) == (replace(first, **wide), replace(first, sinks=True))
    assert not second.sinks
    assert second != first
    assert len(order) == len(plan.variants) + 2


@pytest.mark.parametrize("can", [{}, {"layouts": True}, {"sinks": True}])
def test_a_kernel_has_no_code_for_what_it_does_not_take(can: dict[str, bool]) -> None:
    plan, order = planned(ByForm({**COMPILED, **can}))
    assert len(order) == len(plan.variants) + len(can)
    # Nor for what is no part of its key, or for shapes that drawn Cases do not have.
    everything = {**COMPILED, "layouts": True, "sinks": True}
    assert len(planned(Subject(everything))[1]) <= len(plan.variants)
    assert len(planned(ByForm({**everything, "compiles_each_shape": True}))[1]) == len(plan.variants)
    refusing = ByForm(everything, refuse=lambda problem, _: "none here" if problem.sinks else None)
    assert len(planned(refusing)[1]) == len(plan.variants) + 1


def test_nothing_is_compiled_where_nothing_needs_to_be() -> None:
    assert planned(Subject()) == (plan_of(Subject(), Settings(device="cpu", profile="gate")), [])


def test_many_cases_of_the_first_variant_have_sinks() -> None:
    """A compile that few Cases need is too dear to come early."""
    kernel = ByForm({**COMPILED, "sinks": True})
    plan, _ = planned(kernel)
    of = plan.variants[0]
    found = drawn(cases(kernel, device="cpu", limits=plan.limits, variants=plan.variants), seed=1, examples=600, quota=400)
    own = [each for each in found if (each.problem.dtype, each.problem.causal) == (of.dtype, of.causal)]
    own = [each for each in own if each.config == of.config and (each.problem.dim_qk, each.problem.dim_v) == of.dims]
    assert 0.35 < sum(each.problem.sinks for each in own) / len(own) < 0.65
    assert sum(each.problem.sinks for each in found) < len(found) / 3


def of_a_gpu(name: str, seed: int) -> list[Case]:
    """The order of compiles of a campaign on a GPU."""
    kernel = registry.get(name)
    return list(plan_of(kernel, Settings(device="cuda", max_examples=500, seed=seed)).compiles(kernel).values())


@pytest.mark.parametrize("seed", SEEDS)
def test_what_many_bugs_depend_on_is_compiled_among_the_first_five(seed: int) -> None:
    early = [each.problem for each in of_a_gpu("triton.varlen", seed)[:5]]
    assert any(each.layout_do != Layout() for each in early[:2])
    assert any(each.sinks for each in early)
    assert any(each.dim_v > 128 for each in early)
    assert any(each.dim_qk % 8 for each in early)
    assert any(each.causal for each in early)
    assert len({each.dtype for each in early}) >= 2


@pytest.mark.parametrize("seed", SEEDS)
def test_every_modifier_is_compiled_among_the_first_nine(seed: int) -> None:
    early = of_a_gpu("triton.flex", seed)[:9]
    problems = [each.problem for each in early]
    reads = {each.op for p in problems if p.score_mod is not None for each in parse(p.score_mod).walk()}
    assert {"b", "h", "load"} <= reads
    assert all(any(getattr(each, name) for each in problems) for name in ("softcap", "window", "mask_mod"))
    assert any(each.config.tile("split") > 1 for each in early)
    assert any(p.dim_v > 128 for p in problems)
    assert {p.causal for p in problems} == {None, "bottom_right", "top_left"}
    assert len({each.canonical() for each in early}) == len(early)


@pytest.mark.parametrize("name", ["tilelang.gqa_varlen.atomic", "tilelang.mha"])
def test_dims_beside_steps_of_columns_and_every_mask_are_compiled_among_the_first_five(name: str) -> None:
    for seed in SEEDS:
        early = [each.problem for each in of_a_gpu(name, seed)[:5]]
        assert any(each.dim_v % 32 or each.dim_qk % 32 for each in early)
        assert any(each.causal == "top_left" for each in early)


@pytest.mark.parametrize("seed", SEEDS)
def test_sequences_without_keys_meet_the_dims_that_most_models_have(seed: int) -> None:
    """Three of these seeds compiled no dims of 128 alone, and RAG-04, a hang of such sequences, was not found."""
    kernel, settings = registry.get("triton.varlen"), Settings(device="cuda", seed=seed)
    found = drawn(cases_of(kernel, plan_of(kernel, settings), settings), seed=seed, examples=250, quota=250)
    usual = [each.problem for each in found if each.problem.dim_qk == each.problem.dim_v == 128]
    assert any(n_q and not n_k for problem in usual for n_q, n_k in zip(problem.seqlens_q, problem.seqlens_k, strict=True))
