"""Cases of published models: heads, dims, masks, scale and modifiers as their configurations have them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.subjects import Subject

from attnfuzz.harness.campaign.plan import plan_of
from attnfuzz.harness.campaign.settings import PROFILES, Settings
from attnfuzz.harness.campaign.undrawn import models_left_out, never_drawn_line
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import SINK_VALUES, Case
from attnfuzz.strategies.cases import Limits
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.models import MODELS, Model, left_out, model_cases, model_variants
from attnfuzz.strategies.trials import trial_cases
from attnfuzz.strategies.variants import Variant

LIMITS = Limits(batch=3, heads=8, length=300, tiles=16)
ANY = {"dim_multiple": 8, "window": True, "softcap": True, "sinks": True, "dtypes": ("float32", "float16", "bfloat16")}


def of_model(problem: Problem) -> list[Model]:
    """The models whose attention a Problem may be, by all but the number of heads and the width of a window."""
    numbers = (problem.dim_qk, problem.dim_v), problem.softcap, problem.softmax_scale
    masks = problem.causal is not None, problem.window is None, problem.sinks

    def fits(model: Model) -> bool:
        alike = (model.dims, model.softcap, model.softmax_scale) == numbers and (
            model.causal,
            model.window is None,
            model.sinks,
        ) == masks
        return alike and model.heads // model.kv_heads == problem.groups and model.kv_heads % problem.kv_heads == 0

    return [each for each in MODELS if fits(each)]


def draw_models(subject: Subject, variants: Sequence[Variant] | None = None, count: int = 200) -> list[Case]:
    drawn: list[Case] = []
    chosen = tuple(variants or model_variants(subject, "cpu", LIMITS.length))
    draw_values(model_cases(subject, device="cpu", limits=LIMITS, variants=chosen), drawn.append, seed=2, examples=count)
    return drawn


def test_every_case_is_of_a_model_and_every_model_is_drawn() -> None:
    subject, names = Subject(ANY), set[str]()
    assert left_out(subject, "cpu", LIMITS.length) == {}
    for case in draw_models(subject, count=400):
        problem = case.problem
        models = of_model(problem)
        assert models, problem
        names |= {each.name for each in models}
        assert problem.dtype != "float32"
        assert subject.supports(problem, case.config, "cpu") is None
        assert problem.heads <= max(LIMITS.heads, problem.groups)
        assert problem.window is None or (problem.window[0] or 0) < LIMITS.length
    assert names == {each.name for each in MODELS}


def test_heads_are_reduced_by_a_common_factor_and_never_below_a_group() -> None:
    falcon = [each.problem for each in draw_models(Subject(ANY), count=400) if each.problem.groups == 71]
    assert falcon
    assert {(each.heads, each.kv_heads, each.dim_qk) for each in falcon} == {(71, 1, 64)}


def test_large_limits_leave_all_heads() -> None:
    limits = Limits(batch=2, heads=128, length=300, tiles=256)
    subject, drawn = Subject(ANY), list[Case]()
    variants = model_variants(subject, "cpu", 300)
    draw_values(model_cases(subject, device="cpu", limits=limits, variants=variants), drawn.append, seed=2, examples=300)
    assert {(128, 128), (64, 8)} <= {(each.problem.heads, each.problem.kv_heads) for each in drawn}


def test_windows_are_as_published_where_lengths_allow_it() -> None:
    subject = Subject(ANY)

    def windows(longest: int) -> set[int]:
        modifiers = (dict(each.modifiers or ()) for each in model_variants(subject, "cpu", longest))
        return {each["window"][0] for each in modifiers if "window" in each}

    assert windows(8192) == {4095, 2046, 1023, 511, 127}
    assert windows(300) == {255, 254, 127}


def test_gpt_oss_has_sinks_beside_its_masks() -> None:
    drawn = [each for each in draw_models(Subject(ANY), count=400) if each.problem.sinks]
    assert {(each.problem.groups, each.problem.dim_qk, each.problem.window) for each in drawn} == {
        (8, 64, (127, 0)),
        (8, 64, None),
    }
    assert {each.recipe.sinks for each in drawn} == set(SINK_VALUES)
    without = Subject({**ANY, "sinks": False})
    reasons = left_out(without, "cpu", LIMITS.length)
    assert reasons == dict.fromkeys(("gpt-oss (local)", "gpt-oss (global)"), "sinks=True: not supported")
    assert not any(each.problem.sinks for each in draw_models(without, count=60))


def test_models_that_a_kernel_does_not_take_are_named_with_the_reason() -> None:
    subject = Subject({"dim_multiple": None, "dims": ((128, 128),), "groups": (1, 4)})
    reasons = left_out(subject, "cpu", 300)
    assert reasons["Gemma 2 27B (global)"] == "groups=2: supports 1, 4"
    assert reasons["GPT-2"] == "dim_qk, dim_v=(64, 64): supports (128, 128)"
    assert reasons["Mistral 7B v0.1"] == "window=(255, 0): not supported"
    assert "Llama 3 8B" not in reasons
    line = never_drawn_line(models_left_out(subject, "cpu", 300))
    assert line.startswith("models left out GPT-2, GPT-2 XL")
    assert "Mistral 7B v0.1" in line
    groups = {(each.problem.groups, each.problem.dim_qk) for each in draw_models(subject, count=60)}
    assert groups == {(1, 128), (4, 128)}


def test_a_kernel_without_a_mask_takes_the_models_without_one() -> None:
    subject = Subject({**ANY, "causal": (None,)})
    assert {each.problem.dim_qk for each in draw_models(subject, count=60)} == {64, 80, 40}
    assert "causal='bottom_right': supports None" in left_out(subject, "cpu", 300)["Llama 3 8B"]


def test_a_kernel_that_takes_no_model_is_refused() -> None:
    with pytest.raises(BadArgument, match=r"it takes no model's attention on cpu: .*use another profile"):
        model_variants(Subject({"dims": ((24, 24),)}), "cpu", 300)


def test_the_top_left_mask_has_as_many_keys_as_queries() -> None:
    for case in draw_models(Subject({**ANY, "causal": (None, "top_left")})):
        if case.problem.causal:
            assert case.problem.seqlens_q == case.problem.seqlens_k


def test_the_profile_plans_models_and_has_calls_but_no_relations() -> None:
    subject = Subject({**ANY, "compiles_on": ("cpu",)})
    settings = Settings(profile="models")
    plan = plan_of(subject, settings)
    assert len(plan.variants) == PROFILES["models"].variants["cpu"]
    drawn: list[Case] = []
    strategy = trial_cases(subject, device="cpu", limits=plan.limits, variants=plan.variants, models=True)
    draw_values(strategy, drawn.append, seed=1, examples=200)
    compiled = {(each.config, each.dtype, each.dims) for each in plan.variants}
    assert {(each.config, each.problem.dtype, (each.problem.dim_qk, each.problem.dim_v)) for each in drawn} <= compiled
    assert {each.check for each in drawn} >= {"oracle", "twice"}
    assert not {each.check for each in drawn} & {"permuted_keys", "split_batch"}
    assert all(of_model(each.problem) for each in drawn)
