"""Steps that change two parts at once, since neither change alone shows a failure; lengths and numbers that are tried."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from attnfuzz.harness.campaign.plan import cases_of, plan_of
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels.contract import Capabilities, Config, Kernel
from attnfuzz.kernels.expressions.tree import parse, to_data
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.tilelang.modified import TileLangModified
from attnfuzz.kernels.triton.flex import TritonFlex
from attnfuzz.strategies.case import Case, Recipe
from attnfuzz.strategies.draw import drawn
from attnfuzz.strategies.modifiers import Chosen
from attnfuzz.strategies.shrink_steps import simpler
from attnfuzz.strategies.shrink_trees import simpler_trees
from attnfuzz.strategies.variants import Variant

LARGE, SMALL, ODD = (
    Config(block=128, tile_m=64, warps=8),
    Config(block=64, tile_m=64, warps=8),
    Config(block=48, tile_m=16, warps=4),
)
VARIANTS = [Variant("float16", None, (64, 64), each) for each in (LARGE, SMALL, ODD)]


def case_of(n_q: int, n_k: int, config: Config = LARGE, **changes: object) -> Case:
    problem = Problem(seqlens_q=(n_q,), seqlens_k=(n_k,), dim_qk=64, dim_v=64, **changes)
    return Case(kernel="acme.flash", problem=problem, config=config)


def lengths(case: Case, variants: list[Variant] = VARIANTS, can: Capabilities | None = None) -> set[tuple[Config, int, int]]:
    """Configs and lengths of the simpler Cases."""
    steps = simpler(case, variants, can or Capabilities(unequal=True))
    return {(each.config, each.problem.seqlens_q[0], each.problem.seqlens_k[0]) for each in steps}


def test_a_case_of_several_tiles_gets_smaller_ones_and_as_much_shorter_lengths() -> None:
    """A fault in the second block of 128 shows in that of 64 with half of the tokens, and with neither change alone."""
    found = lengths(case_of(129, 1))
    assert (SMALL, 65, 1) in found
    assert {(ODD, 49, 1), (ODD, 33, 1)} <= found, "by the ratio of blocks, and by that of tiles"


def test_a_case_of_two_tiles_keeps_its_config() -> None:
    assert {config for config, _, _ in lengths(case_of(128, 128))} == {LARGE}


def test_a_config_of_other_parts_or_larger_tiles_is_not_taken() -> None:
    others = [Variant("float32", None, (64, 64), SMALL), Variant("float16", "top_left", (64, 64), SMALL), VARIANTS[0]]
    assert {config for config, _, _ in lengths(case_of(129, 1), others)} == {LARGE}
    assert {(config, n_q) for config, n_q, _ in lengths(case_of(200, 1, ODD), VARIANTS[2:])} == {
        (ODD, n_q) for _, n_q, _ in lengths(case_of(200, 1, ODD), [])
    }


def test_lengths_in_smaller_tiles_are_multiples() -> None:
    found = lengths(case_of(144, 96), can=Capabilities(unequal=True, multiple_q=16, multiple_k=24))
    assert (SMALL, 80, 48) in found
    assert all(n_q % 16 == 0 == n_k % 24 for _, n_q, n_k in found)


def test_lengths_around_two_tiles_and_two_tiles_less_are_tried() -> None:
    """A fault of every second tile shows with three tiles and with five, not with four."""
    config = Config(tile_m=32, tile_n=32)
    found = {n_k for _, n_q, n_k in lengths(case_of(1, 200, config), [])}
    assert {63, 64, 65, 136, 168} <= found
    assert {150, 175} <= found, "and by parts"


def test_a_relation_with_fewer_heads_is_tried_with_other_seeds_too() -> None:
    """A seed selects the tensor whose heads lie apart: with one head for keys, another than that of K."""
    case = replace(case_of(2, 2, heads=4, kv_heads=2), check="huge_strides")
    fewer = {each.recipe.seed for each in simpler(case, []) if each.problem.kv_heads == 1 and each.problem.heads == 2}
    assert fewer == {0, 1, 2, 3}
    plain = replace(case, check="oracle", recipe=Recipe(seed=5))
    assert {each.recipe.seed for each in simpler(plain, []) if each.problem.kv_heads == 1} == {5}


def numbers_of(*tree: object) -> list[object]:
    return [to_data(each) for each in simpler_trees(parse(tree))]


def test_numbers_in_trees_get_plainer() -> None:
    assert numbers_of("const", -1e38) == [("const", -65504.0), ("const", -1e9)]
    assert numbers_of("const", 0.25) == [("const", 0.0), ("const", 1.0)]
    assert numbers_of("const", 1.0) == numbers_of("const", -65504.0) == []
    assert ("ge", ("q_idx",), ("int", -4)) in numbers_of("ge", ("q_idx",), ("int", -9))
    assert {number for *_, (_, number) in numbers_of("le", ("kv_idx",), ("int", 7))} == {0, 1, 3, 6}


def test_nothing_is_divided_by_0() -> None:
    divided = numbers_of("le", ("div", ("kv_idx",), ("int", 4)), ("q_idx",))
    assert {each[1][2][1] for each in divided if each[1][0] == "div"} == {1, 2, 3}


Part = Callable[[Case], object]
PARTS: tuple[Part, ...] = (
    lambda case: case.problem.dtype,
    lambda case: case.problem.causal,
    lambda case: case.problem.packing,
    lambda case: case.problem.softcap,
    lambda case: case.problem.batch > 1,
    lambda case: case.problem.score_mod is None,
    lambda case: case.problem.mask_mod,
    lambda case: case.config,
    lambda case: case.check,
)
"""Parts of a Case, some of which a failure may need."""


def first_step(kernel: Kernel, case: Case, variants: Sequence[Variant], kept: Sequence[tuple[Part, object]]) -> Case | None:
    """The first simpler Case that the kernel takes and that has the same parts `kept`."""
    for each in simpler(case, variants, kernel.capabilities):
        if all(part(each) == value for part, value in kept) and why_not_case(kernel, each, "cuda") is None:
            return each
    return None


@pytest.mark.parametrize("kernel", [TileLangModified(), TritonFlex()], ids=lambda each: each.name)
def test_steps_never_lead_back_where_variants_have_modifiers(kernel: Kernel) -> None:
    """Those of the variant whose code serves a Case may be larger than the Case's own, as a bare score is."""
    settings = Settings("cuda", max_examples=100)
    plan = plan_of(kernel, settings)
    assert any(each.modifiers for each in plan.variants)
    rng, walks = random.Random(0), 0
    for number in range(3):
        for start in drawn(cases_of(kernel, plan, settings), seed=number, examples=50, quota=40):
            kept = [(part, part(start)) for part in PARTS if rng.random() < 0.25]
            now, seen = start, {start}
            while (step := first_step(kernel, now, plan.variants, kept)) is not None:
                assert step not in seen, (start.canonical(), step.canonical())
                seen.add(step)
                now = step
            walks += len(seen) > 3
    assert walks > 50


def test_modifiers_of_an_earlier_variant_are_a_step_where_they_are_not_larger() -> None:
    slope = ("add", ("score",), ("mul", ("float", ("kv_idx",)), ("const", 0.5)))
    larger = ("add", ("neg", slope), ("float", ("b",)))
    pool: list[Chosen] = [(("score_mod", larger),), (("score_mod", slope),), (("window", (1, None)),)]

    def trees(score_mod: object, pool: list[Chosen]) -> set[object]:
        variants = [Variant("float16", None, (64, 64), LARGE, each) for each in pool]
        return {each.problem.score_mod for each in simpler(case_of(1, 1, score_mod=score_mod), variants)}

    assert slope in trees(larger, pool[::-1])
    assert larger not in trees(slope, pool)
    assert slope not in trees(("score",), pool), "a bare score is none: the window's variant is nearest, after the slope's"
