"""Cases of one shape with other values."""

from __future__ import annotations

import pytest

from attnfuzz.harness.campaign.drawer import draw_round
from attnfuzz.harness.campaign.plan import cases_of, plan_of
from attnfuzz.harness.campaign.rounds import Round
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Capabilities
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import RELATIONS, Case, Recipe
from attnfuzz.strategies.other_values import values_of_a_shape, with_other_values

SLOW = "released.fla.parallel"


def plain(length: int, *, sinks: bool = False) -> Problem:
    return Problem(seqlens_q=(length,), seqlens_k=(length,), dim_qk=64, dim_v=64, sinks=sinks)


def shape_of(case: Case) -> tuple[object, ...]:
    return case.problem, case.config, case.check


def test_a_case_is_followed_by_others_of_its_shape() -> None:
    bases = [Case(kernel="any", problem=plain(n), recipe=Recipe(seed=n)) for n in (3, 5)]
    cases = with_other_values(bases, 4, seed=1)
    assert [shape_of(each) for each in cases] == [shape_of(each) for each in bases for _ in range(4)]
    assert cases[0] == bases[0]
    assert cases[4] == bases[1]
    assert len(set(cases)) == 8
    assert cases == with_other_values(bases, 4, seed=1)
    assert with_other_values(bases, 1, seed=1) == bases


def test_no_other_recipe_needs_a_scale_that_was_not_drawn_with_it() -> None:
    base = Case(kernel="any", problem=plain(3, sinks=True), recipe=Recipe(sinks="large"))
    others = with_other_values([base], 200, seed=2)[1:]
    assert len({each.recipe.pattern for each in others}) > 10
    assert "large_products" not in {each.recipe.pattern for each in others}
    assert {each.recipe.sinks for each in others} == {"large"}


@pytest.mark.parametrize(("declared", "device", "values"), [(True, "cuda", 8), (True, "cpu", 1), (False, "cuda", 1)])
def test_only_where_each_shape_compiles(declared: bool, device: str, values: int) -> None:
    can = Capabilities(compiles_each_shape=declared)
    assert values_of_a_shape(can, device) == values  # type: ignore[arg-type]


@pytest.mark.parametrize(("quota", "shapes"), [(100, 14), (50, 14), (20, 20), (3, 3)])
def test_a_round_has_its_number_of_cases_and_few_have_a_shape_each(quota: int, shapes: int) -> None:
    cases = [each for number in range(3) for each in round_of(number, quota)]
    assert [len({each.id for each in cases[at : at + quota]}) for at in range(0, len(cases), quota)] == [quota] * 3
    assert len({shape_of(each) for each in cases[quota : 2 * quota]}) == shapes


def test_the_simplest_case_with_which_each_round_begins_is_alone_of_its_shape() -> None:
    cases = [each for number in range(4) for each in round_of(number, 100)]
    assert [shape_of(each) for each in cases].count(shape_of(cases[0])) == 4


def round_of(number: int, quota: int) -> list[Case]:
    """Cases of a round on a GPU."""
    kernel = registry.get(SLOW)
    settings = Settings(device="cuda", seed=3)
    plan = plan_of(kernel, settings)
    return draw_round(cases_of(kernel, plan, settings), plan.seed, Round(number, quota, quota), plan.values)


@pytest.mark.parametrize(
    "name",
    [
        "released.fla.parallel",
        "released.flag_gems.varlen",
        "released.liger.neighborhood",
        "torch.cudnn",
        "torch.cudnn_varlen",
        "torch.flex",
        "torch.flex_modified",
    ],
)
def test_the_kernel_and_the_check_take_every_case(name: str) -> None:
    kernel = registry.get(name)
    settings = Settings(device="cuda", seed=5)
    plan = plan_of(kernel, settings)
    strategy = cases_of(kernel, plan, settings)

    def takes(case: Case) -> bool:
        return why_not_case(kernel, case, "cuda") is None

    cases = [each for number in range(8) for each in draw_round(strategy, plan.seed, Round(number), plan.values, takes)]
    assert [each for each in cases if why_not_case(kernel, each, "cuda")] == []
    checks = {each.check for each in cases}
    assert "oracle" in checks
    assert checks & set(RELATIONS)


def test_a_case_that_is_not_taken_is_left_out() -> None:
    bases = [Case(kernel="any", problem=plain(n)) for n in (3, 5)]
    cases = with_other_values(bases, 4, seed=1, takes=lambda each: each.problem.seqlens_q == (5,))
    lengths = [each.problem.seqlens_q for each in cases]
    assert lengths[:2] == [(3,), (5,)]
    assert set(lengths[2:]) == {(5,)}
