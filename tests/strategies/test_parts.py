"""Parts of Cases: lengths, heads, scales and recipes; and how often lengths are around tiles, and a rare Config is drawn."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drawn_cases import draw_cases, quiet
from support.subjects import CONFIGS, WIDE, Subject

from attnfuzz.kernels.contract import Capabilities, Config
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import PATTERNS, Case, Recipe
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.draw import drawn
from attnfuzz.strategies.heads import heads
from attnfuzz.strategies.kernel_limits import Room
from attnfuzz.strategies.lengths import corners, edges, fitted
from attnfuzz.strategies.recipes import recipes, scales

# --- lengths


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_edges_are_the_lengths_around_tiles(tile: int) -> None:
    lengths = edges(tile, 1000)
    assert {1, tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile, 2 * tile + 1, 999, 1000} <= set(lengths)
    assert {n % 4 for n in lengths} == set(range(4))
    assert lengths[0] == 1
    assert len(set(lengths)) == len(lengths)


@pytest.mark.parametrize("longest", [1, 2, 3, 17])
def test_edges_stay_within_the_longest(longest: int) -> None:
    lengths = edges(64, longest)
    assert lengths
    assert max(lengths) == longest
    assert min(lengths) == 1


LENGTH = st.integers(0, 400)


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(
    st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=6),
    st.builds(
        Room,
        batch=st.just(6),
        length=st.just(400),
        tiles=st.integers(1, 40),
        heads=st.integers(1, 8),
        tile_m=st.sampled_from((1, 16, 64)),
        tile_n=st.sampled_from((1, 32, 64)),
    ),
)
def test_fitted_keeps_what_fits_and_cuts_the_rest(batch: list[tuple[int, int]], room: Room) -> None:
    result = fitted(batch, room)
    assert len(result) == len(batch)
    costs = [room.heads * -(-n_q // room.tile_m) * -(-n_k // room.tile_n) for n_q, n_k in result]
    assert sum(costs) <= max(room.tiles, room.heads * len(batch))
    for (n_q, n_k), (old_q, old_k) in zip(result, batch, strict=True):
        assert n_q <= old_q
        assert n_k <= old_k
        assert (n_q == 0) == (old_q == 0)
        assert (n_k == 0) == (old_k == 0)
    wanted = sum(room.heads * -(-n_q // room.tile_m) * -(-n_k // room.tile_n) for n_q, n_k in batch)
    if wanted <= room.tiles - room.heads * (len(batch) - 1):
        assert result == tuple(batch)
    equal = fitted([(n_q, n_q) for n_q, _ in batch], room, equal=True)
    assert all(n_q == n_k for n_q, n_k in equal)


# --- heads, scales, recipes


def every(strategy: st.SearchStrategy[Any], count: int = 300) -> set[Any]:
    values: set[Any] = set()

    @hypothesis.seed(0)
    @quiet(count)
    @given(strategy)
    def draw(value: Any) -> None:
        values.add(value)

    draw()
    return values


def test_heads_are_all_pairs_that_fit() -> None:
    assert every(heads(Capabilities(groups=None), 3)) == {(1, 1), (2, 1), (2, 2), (3, 1), (3, 3)}
    assert every(heads(Capabilities(groups=(1, 2)), 4)) == {(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4)}
    assert every(heads(Capabilities(groups=(1,)), 1)) == {(1, 1)}
    assert every(heads(Capabilities(groups=(1,)), 1, 6)) == {(1, 1)}
    assert every(heads(Capabilities(groups=(1, 2, 3), heads_max=5), 1, 6)) == {(1, 1), (2, 1), (3, 1), (4, 2)}


def test_grouped_heads_are_as_many_as_groups_of_three_need() -> None:
    """They are six at least: where a Case had room for four tiles, there were none."""
    few = every(heads(Capabilities(groups=None), 4, 6))
    assert few - every(heads(Capabilities(groups=None), 4)) == {(5, 1), (6, 1), (6, 2), (6, 3)}
    for seed in range(3):
        pairs = [(each.problem.groups, each.problem.kv_heads) for each in drawn_small(seed)]
        assert sum(pair == (3, 2) for pair in pairs) >= 5


def test_grouped_heads_have_several_tiles_of_keys_too() -> None:
    """Room for four tiles in all gave three heads and more one tile each: one such Case in seven had several."""
    grouped = [each for seed in range(6) for each in drawn_small(seed) if each.problem.groups >= 3]
    several = [each for each in grouped if max(each.problem.seqlens_k) > each.config.tile("tile_n", 64)]
    assert len(several) > len(grouped) / 5


@pytest.mark.parametrize(("of_heads", "tiles"), [(3, 6), (1, 4), (6, 12)])
def test_corners_of_tiles_are_near_the_last_diagonal(of_heads: int, tiles: int) -> None:
    room = Room(batch=1, length=200, tiles=tiles, heads=of_heads, tile_m=32, tile_n=16)
    pairs = {pair for (pair,) in every(corners(Capabilities(**WIDE), room))}
    assert len(pairs) > 5
    for n_q, n_k in pairs:
        assert 1 <= min(n_q, n_k) <= max(n_q, n_k) <= 200
        assert of_heads * -(-n_q // 32) * -(-n_k // 16) <= tiles
        assert (n_k - n_q + 1) % 16 <= 3
        assert (n_q + 1) % 32 <= 2
    assert every(corners(Capabilities(**WIDE), dataclasses.replace(room, tiles=0))) == {((1, 1),)}
    alike = every(corners(Capabilities(**{**WIDE, "unequal": False}), room))
    assert all(n_q == n_k for ((n_q, n_k),) in alike)
    assert alike == every(corners(Capabilities(**WIDE), room, packed=True))


def drawn_small(seed: int) -> list[Case]:
    strategy = cases(Subject(), device="cpu", limits=Limits(batch=4, heads=6, length=300, tiles=4, grouped=6))
    return drawn(strategy, seed=seed, examples=200, quota=150)


def test_scores_far_below_0_are_drawn_more_often_under_a_mask() -> None:
    below = {masked: sum(each.pattern in ("negative", "below_sentinels") for each in several(masked)) for masked in (False, True)}
    assert below[True] > 1.3 * below[False]


def several(masked: bool) -> list[Recipe]:
    return drawn(recipes("float32", masked=masked), seed=1, examples=1500, quota=1500)


def test_scales() -> None:
    assert every(scales(Capabilities())) == {None, 1.0, 0.25, 0.1, 0.0078125}
    assert every(scales(Capabilities(scale_any=True))) >= {None, -0.125, 0.0}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_recipes_have_every_pattern_and_stay_where_the_dtype_reaches(dtype: Any) -> None:
    values = every(recipes(dtype), 1500)
    assert {recipe.pattern for recipe in values} == set(PATTERNS)
    assert sum(recipe.pattern == "normal" for recipe in values) > len(values) / 12
    assert max(recipe.do_scale for recipe in values) == (4.0 if dtype == "float16" else 16.0)
    overflowing = sum(recipe.pattern == "near_overflow" for recipe in values) / len(values)
    assert 0 < overflowing < (0.03 if dtype == "float16" else 0.1)


@pytest.mark.parametrize("packing", ["ragged", "dense"])
@pytest.mark.parametrize("tile", [32, 64])
def test_half_of_the_cases_have_lengths_around_multiples_of_the_tile(packing: str, tile: int) -> None:
    subject = Subject({"packings": (packing,)}, (Config(tile_m=tile, tile_n=tile),))
    drawn = draw_cases(subject, 300)
    around = [any(n >= tile - 1 and (n + 1) % tile < 3 for n in (*p.seqlens_q, *p.seqlens_k)) for p in (c.problem for c in drawn)]
    assert sum(around) > 0.5 * len(drawn)


def test_a_config_for_few_variants_is_not_rare() -> None:
    rare = Config(tile_m=16, tile_n=16)

    def only_float32(problem: Problem, config: Config) -> str | None:
        return "float32 of 64 alone" if config == rare and (problem.dtype, problem.dim_qk) != ("float32", 64) else None

    drawn = draw_cases(Subject(tiles=(*CONFIGS, rare), refuse=only_float32), 200)
    # One variant in 55 has it.
    assert sum(each.config == rare for each in drawn) > 0.1 * len(drawn)
