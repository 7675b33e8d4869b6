"""Steps that change two parts at once, since neither change alone shows a failure; lengths and numbers that are tried."""

from __future__ import annotations

from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Config
from attnfuzz.kernels.expressions.tree import parse, to_data
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case, Recipe
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
