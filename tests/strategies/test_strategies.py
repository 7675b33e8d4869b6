"""Whole Cases: each drawn one is supported and affordable, and everything worth trying is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from support.drawn_cases import draw_cases, laid_out, pairs, quiet, tiles
from support.subjects import CONFIGS, LIMITS, WIDE, Subject

from attnfuzz.kernels.contract import Capabilities, Config
from attnfuzz.kernels.expressions.tree import Expression
from attnfuzz.kernels.modified import mask_of, score_of
from attnfuzz.kernels.problem import LAYOUTS, Problem
from attnfuzz.kernels.triton.blockmask import BlockMask, band_of, block_mask
from attnfuzz.strategies import choices
from attnfuzz.strategies.case import PATTERNS, Case, Recipe, case_from_json
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.variants import Variant, all_variants


def test_every_case_is_supported_and_within_limits(many: list[Case]) -> None:
    for case in many:
        problem = case.problem
        assert Subject().supports(problem, case.config, "cpu") is None
        assert problem.batch <= LIMITS.batch
        assert problem.heads <= LIMITS.heads
        assert max(problem.seqlens_q + problem.seqlens_k) <= LIMITS.length
        assert tiles(case) <= max(LIMITS.tiles, problem.heads * problem.batch)


def test_every_case_survives_json(many: list[Case]) -> None:
    for case in many:
        again = case_from_json(case.canonical())
        assert again == case
        assert hash(again) == hash(case)
        assert again.id == case.id


def test_the_same_seed_draws_the_same_cases(many: list[Case]) -> None:
    assert draw_cases(Subject(), 400) == many
    assert draw_cases(Subject(), 50, seed=6) != many[:50]


def test_most_draws_are_distinct(many: list[Case]) -> None:
    assert len(set(many)) > 0.8 * len(many)


def test_nothing_is_drawn_only_to_be_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[object] = []
    reject = choices._Choices.mark_invalid

    def rejected(data: choices._Choices, why: str | None = None, *rest: Any, **named: Any) -> Any:
        reasons.append(why)
        return reject(data, why, *rest, **named)

    monkeypatch.setattr(choices._Choices, "mark_invalid", rejected)
    assert len(draw_cases(Subject(), 200)) == 200
    assert not reasons
    with pytest.raises(Unsatisfiable):
        draw_values(st.integers(0, 9).map(str).filter(lambda each: each == "x"), lambda _: None, seed=0, examples=1)
    assert reasons


# What must be reached, and how often at least among 400 draws.
REACHED: dict[str, tuple[Callable[[Case], object], int]] = {
    "several sequences": (lambda c: c.problem.batch > 1, 100),
    "one sequence": (lambda c: c.problem.batch == 1, 10),
    "a sequence without queries": (lambda c: any(q == 0 < k for q, k in pairs(c)), 20),
    "a sequence without keys": (lambda c: any(k == 0 < q for q, k in pairs(c)), 20),
    "an empty sequence": (lambda c: (0, 0) in pairs(c), 20),
    "a sequence without queries first": (lambda c: c.problem.batch > 1 and c.problem.seqlens_q[0] == 0, 5),
    "a sequence without queries last": (lambda c: c.problem.batch > 1 and c.problem.seqlens_q[-1] == 0, 5),
    "a sequence without keys in the middle": (lambda c: 0 in c.problem.seqlens_k[1:-1], 5),
    "nothing at all": (lambda c: c.problem.total_q == c.problem.total_k == 0, 1),
    "q shorter than k": (lambda c: any(0 < q < k for q, k in pairs(c)), 60),
    "q longer than k": (lambda c: any(q > k > 0 for q, k in pairs(c)), 60),
    "q as long as k": (lambda c: any(q == k > 0 for q, k in pairs(c)), 60),
    "q longer than k by one": (lambda c: any(q == k + 1 for q, k in pairs(c)), 5),
    "k longer than q by one": (lambda c: any(k == q + 1 for q, k in pairs(c)), 5),
    "groups": (lambda c: c.problem.groups > 1, 60),
    "groups other than powers of two": (lambda c: c.problem.groups in (3, 5, 6), 20),
    "groups and several kv_heads": (lambda c: c.problem.groups > 1 and c.problem.kv_heads > 1, 5),
    "one token": (lambda c: (1, 1) in pairs(c), 10),
    "slack rows of queries": (lambda c: c.problem.slack_q, 60),
    "slack rows of keys": (lambda c: c.problem.slack_k, 60),
    "an odd total": (lambda c: c.problem.total_q % 2 or c.problem.total_k % 2, 100),
    "a total no multiple of 8": (lambda c: c.problem.total_k % 8, 100),
    "a negative scale": (lambda c: c.problem.scale < 0, 10),
    "a scale of zero": (lambda c: c.problem.scale == 0, 10),
    "the default scale": (lambda c: c.problem.softmax_scale is None, 60),
    "rows that see no key": (lambda c: c.problem.causal == "bottom_right" and any(q > k for q, k in pairs(c)), 30),
    "dim_qk larger than dim_v": (lambda c: c.problem.dim_qk > c.problem.dim_v, 60),
    "the plainest recipe but for its seed": (lambda c: Recipe(seed=c.recipe.seed) == c.recipe, 3),
    "other magnitudes": (lambda c: c.recipe.q_scale != 1 and c.recipe.v_scale != 1, 30),
    **{f"dtype {name}": (lambda c, name=name: c.problem.dtype == name, 60) for name in WIDE["dtypes"]},
    **{f"causal {kind}": (lambda c, kind=kind: c.problem.causal == kind, 60) for kind in WIDE["causal"]},
    **{f"dims {dims}": (lambda c, dims=dims: (c.problem.dim_qk, c.problem.dim_v) == dims, 60) for dims in WIDE["dims"]},
    **{f"{config}": (lambda c, config=config: c.config == config, 100) for config in CONFIGS},
    "all at once": (
        lambda c: c.problem.batch > 1 and 0 in c.problem.seqlens_q and c.problem.causal and c.problem.groups > 1,
        5,
    ),
}


@pytest.mark.parametrize("name", REACHED)
def test_what_breaks_kernels_is_drawn_often(many: list[Case], name: str) -> None:
    # Half of what is usual: Hypothesis mixes constants of the installed sources into its draws, so that counts differ by place.
    holds, usual = REACHED[name]
    assert sum(bool(holds(case)) for case in many) >= usual // 2


def test_most_patterns_are_drawn_and_the_plain_one_most_often(many: list[Case]) -> None:
    counts = Counter(case.recipe.pattern for case in many)
    assert len(counts) >= len(PATTERNS) * 3 // 4
    assert counts.most_common(1)[0][0] == "normal"


@pytest.mark.parametrize("side", ["q", "k"])
def test_lengths_around_tiles_are_drawn_where_there_is_room(roomy: list[Case], side: str) -> None:
    def near(case: Case) -> set[int]:
        tile = case.config.integer("tile_m" if side == "q" else "tile_n")
        return {n - tile for n in getattr(case.problem, f"seqlens_{side}")} & {-1, 0, 1}

    differences = [difference for case in roomy for difference in near(case)]
    assert len(differences) >= 10
    assert len(set(differences)) >= 2


def test_most_cases_have_several_tiles_where_there_is_room(roomy: list[Case]) -> None:
    assert sum(tiles(case) > case.problem.heads * case.problem.batch for case in roomy) > 100


NARROW: dict[str, tuple[dict[str, Any], Callable[[Case], object]]] = {
    "no sequence without queries": ({"zero_q": False}, lambda c: 0 not in c.problem.seqlens_q),
    "no sequence without keys": ({"zero_k": False}, lambda c: 0 not in c.problem.seqlens_k),
    "neither": ({"zero_q": False, "zero_k": False}, lambda c: all(min(pair) > 0 for pair in pairs(c))),
    "equal lengths": ({"unequal": False}, lambda c: c.problem.seqlens_q == c.problem.seqlens_k),
    "equal lengths above zero": (
        {"unequal": False, "zero_q": False, "zero_k": False},
        lambda c: all(q == k > 0 for q, k in pairs(c)),
    ),
    "dense": ({"packings": ("dense",)}, lambda c: c.problem.packing == "dense" and len(set(pairs(c))) == 1),
    "no groups": ({"groups": (1,)}, lambda c: c.problem.heads == c.problem.kv_heads),
    "few groups": ({"groups": (1, 3)}, lambda c: c.problem.groups in (1, 3)),
    "no slack": ({"slack": False}, lambda c: c.problem.slack_q == c.problem.slack_k == 0),
    "positive scales": ({"scale_any": False}, lambda c: c.problem.scale > 0),
    "short": ({"length_max": 5}, lambda c: max(c.problem.seqlens_q + c.problem.seqlens_k) <= 5),
    "one token": ({"length_max": 1}, lambda c: max(c.problem.seqlens_q + c.problem.seqlens_k) <= 1),
    "one dtype": ({"dtypes": ("bfloat16",)}, lambda c: c.problem.dtype == "bfloat16"),
    "one dtype on this device": ({"dtypes_on": {"cpu": ("float32",)}}, lambda c: c.problem.dtype == "float32"),
    "always causal": ({"causal": ("bottom_right",)}, lambda c: c.problem.causal == "bottom_right"),
    "one pair of dims": ({"dims": ((40, 72),)}, lambda c: (c.problem.dim_qk, c.problem.dim_v) == (40, 72)),
    "the plainest kernel": (
        {"devices": ("cpu",)} | {name: getattr(Capabilities(), name) for name in WIDE if name != "devices"},
        lambda c: c.problem.groups == 1 and c.problem.seqlens_q == c.problem.seqlens_k and c.problem.causal is None,
    ),
}


@pytest.mark.parametrize("name", NARROW)
def test_what_is_not_declared_is_not_drawn(name: str) -> None:
    can, holds = NARROW[name]
    subject = Subject(can=can)
    for case in draw_cases(subject, 60):
        assert subject.supports(case.problem, case.config, "cpu") is None
        assert holds(case)


# Blocks of a mask: what must be reached, and how often at least, among 300 draws.
def blocks_of(case: Case) -> tuple[BlockMask, int]:
    """The block lists of a Case whose mask reads no captured tensor, and how many blocks are full."""
    problem, block = case.problem, case.config.integer("block")
    blocks = block_mask(mask_of(problem), band_of(problem), problem.sizes, {}, (block, block), "cpu")
    return blocks, int(blocks.keys_full.count.sum())


def reads(tree: Expression | None) -> set[str]:
    return {each.op for each in tree.walk()} if tree is not None else set()


@pytest.fixture(scope="module")
def blocky() -> list[Case]:
    can = {"packings": ("dense",), "score_mod": True, "mask_mod": True, "captured": True, "window": True}
    blocks = tuple(Config(tile_m=32, tile_n=32, block=block) for block in (128, 64, 32))
    limits = Limits(batch=4, heads=6, length=300, tiles=12)
    # Of one seed Cases are much alike.
    cases_of = [case for seed in (5, 6, 7) for case in draw_cases(Subject(can=can, tiles=blocks), 100, limits, seed)]
    assert all(max(case.problem.seqlens_q + case.problem.seqlens_k) <= limits.length for case in cases_of)
    assert all(tiles(case) <= max(limits.tiles, case.problem.heads * case.problem.batch) for case in cases_of)
    return [case for case in cases_of if "load" not in reads(mask_of(case.problem))]


def differ(case: Case, mask: BlockMask) -> bool:
    """Whether heads of one group have lists that differ."""
    count = mask.queries_full.count + (mask.queries_partial.count << 16)
    group = case.problem.groups
    return count.shape[1] > 1 and any(bool((count[:, h] != count[:, h // group * group]).any()) for h in range(count.shape[1]))


BLOCKS_REACHED: dict[str, tuple[Callable[[Case, BlockMask, int], object], int]] = {
    "a full block": (lambda c, mask, full: full, 20),
    "a full block, heads with different scores": (
        lambda c, mask, full: full and c.problem.groups > 1 and "h" in reads(score_of(c.problem)), 2,
    ),
    "a full block, sequences with different scores": (
        lambda c, mask, full: full and c.problem.batch > 1 and "b" in reads(score_of(c.problem)), 2,
    ),
    "lists of its own for a head of a group": (lambda c, mask, full: c.problem.groups > 1 and differ(c, mask), 2),
    "a window's corner on a block's": (
        lambda c, mask, full: c.problem.mask_mod is None and (band_of(c.problem).low + 1) % 32 == 0, 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS_REACHED)
def test_blocks_of_a_mask_are_reached(blocky: list[Case], name: str) -> None:
    holds, least = BLOCKS_REACHED[name]
    assert sum(bool(holds(case, *blocks_of(case))) for case in blocky if min(pairs(case)[0])) >= least


def test_whole_blocks_are_drawn_often_and_small_limits_hold(blocky: list[Case]) -> None:
    whole = [min(pairs(case)[0]) >= case.config.integer("block") for case in blocky]
    assert sum(whole) > len(blocky) / 4
    small = Limits(batch=2, heads=2, length=100, tiles=3)
    tile = Config(tile_m=32, tile_n=32, block=32)
    for case in draw_cases(Subject(tiles=(tile,)), 60, small):
        assert tiles(case) <= max(small.tiles, case.problem.heads * case.problem.batch)


LAYOUTS_DRAWN: dict[str, Callable[[Problem], object]] = {
    "contiguous": lambda p: not laid_out(p),
    "one tensor": lambda p: len(laid_out(p)) == 1,
    "every tensor": lambda p: len(laid_out(p)) == 4,
    "packed k, v": lambda p: p.layout_v.packed and not p.layout_q.packed,
    "packed q, k, v": lambda p: p.layout_q.packed,
    "a constant dO": lambda p: p.layout_do.expanded,
    "one head for all": lambda p: p.layout_k.expanded_heads and p.kv_heads > 1,
    "heads outermost": lambda p: p.layout_q.order == "htd",
    "heads before rows": lambda p: p.layout_q.order == "bhsd",
    "batch within rows": lambda p: p.layout_q.order == "sbhd",
    "dO other than O": lambda p: p.layout_do.order is not None,
    "padded rows": lambda p: p.layout_q.pitch,
    **{
        f"aligned to {width} bytes": lambda p, width=width: any(
            getattr(p, name).offset * (4 if p.dtype == "float32" else 2) == width for name in LAYOUTS
        )
        for width in (2, 4, 8, 16)
    },
}


@pytest.mark.parametrize("name", LAYOUTS_DRAWN)
def test_every_layout_is_drawn(strided: list[Case], name: str) -> None:
    assert sum(bool(LAYOUTS_DRAWN[name](case.problem)) for case in strided) >= 3


def test_contiguous_is_drawn_often_and_alone_where_no_other_is_declared(many: list[Case], strided: list[Case]) -> None:
    assert 0.35 < sum(not laid_out(case.problem) for case in strided) / len(strided) < 0.8
    assert not any(laid_out(case.problem) for case in many)


def test_both_packings_are_drawn() -> None:
    packings = [case.problem.packing for case in draw_cases(Subject(can={"packings": ("ragged", "dense")}), 100)]
    assert min(packings.count("ragged"), packings.count("dense")) > 10


@pytest.mark.parametrize("limits", [Limits(batch=1, heads=1, length=1, tiles=1), Limits(batch=2, heads=9, length=300, tiles=3)])
def test_small_limits_hold(limits: Limits) -> None:
    for case in draw_cases(Subject(), 60, limits):
        assert case.problem.batch <= limits.batch
        assert case.problem.heads <= min(limits.heads, limits.tiles)
        assert max(case.problem.seqlens_q + case.problem.seqlens_k) <= limits.length
        assert tiles(case) <= max(limits.tiles, case.problem.heads * case.problem.batch)


def test_a_kernel_without_tiles_is_drawn_for() -> None:
    assert {case.config for case in draw_cases(Subject(tiles=(Config(),)), 30)} == {Config()}


def test_only_the_given_variants_are_drawn() -> None:
    chosen = all_variants(Subject(), "cpu")[3:5]
    configs: set[Config] = set()

    @quiet(40)
    @given(cases(Subject(), device="cpu", variants=chosen))
    def draw(case: Case) -> None:
        problem = case.problem
        configs.add(case.config)
        assert Variant(problem.dtype, problem.causal, (problem.dim_qk, problem.dim_v), case.config) in chosen

    draw()
    assert configs == {variant.config for variant in chosen}
