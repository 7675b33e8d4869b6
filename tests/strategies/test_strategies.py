"""The strategies: every drawn Case is supported and affordable, everything worth trying is drawn, and it shrinks to the plain."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from support.subjects import CONFIGS, LIMITS, WIDE, Subject

from attnfuzz.kernels.contract import Capabilities, Config
from attnfuzz.kernels.expressions.tree import Expression
from attnfuzz.kernels.modified import mask_of, score_of
from attnfuzz.kernels.problem import LAYOUTS, Layout, Problem
from attnfuzz.kernels.triton.blockmask import BlockMask, band_of, block_mask
from attnfuzz.strategies import choices
from attnfuzz.strategies.case import PATTERNS, SINK_VALUES, Case, Recipe, case_from_json, case_from_object
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.draw import draw_values, drawn
from attnfuzz.strategies.lengths import Room, corners, edges, fitted
from attnfuzz.strategies.recipes import recipes
from attnfuzz.strategies.shapes import Variant, all_variants, heads, scales
from attnfuzz.strategies.shrink_steps import simpler


def quiet(count: int) -> settings:
    return settings(
        max_examples=count, deadline=None, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
    )


def draw_cases(subject: Subject, count: int = 100, limits: Limits = LIMITS, seed: int = 5) -> list[Case]:
    """`count` Cases of a seed, without shrinking."""
    collected: list[Case] = []

    draw_values(cases(subject, device="cpu", limits=limits), collected.append, seed=seed, examples=count)
    return collected


@pytest.fixture(scope="module")
def many() -> list[Case]:
    return draw_cases(Subject(), 400)


def tiles(case: Case) -> int:
    problem, tile_m, tile_n = case.problem, case.config.integer("tile_m"), case.config.integer("tile_n")
    pairs = zip(problem.seqlens_q, problem.seqlens_k, strict=True)
    return problem.heads * sum(-(-n_q // tile_m) * -(-n_k // tile_n) for n_q, n_k in pairs)


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


def pairs(case: Case) -> list[tuple[int, int]]:
    return list(zip(case.problem.seqlens_q, case.problem.seqlens_k, strict=True))


@pytest.mark.parametrize("name", REACHED)
def test_what_breaks_kernels_is_drawn_often(many: list[Case], name: str) -> None:
    # Half of what is usual: Hypothesis mixes constants of the installed sources into its draws, so that counts differ by place.
    holds, usual = REACHED[name]
    assert sum(bool(holds(case)) for case in many) >= usual // 2


def test_most_patterns_are_drawn_and_the_plain_one_most_often(many: list[Case]) -> None:
    counts = Counter(case.recipe.pattern for case in many)
    assert len(counts) >= len(PATTERNS) * 3 // 4
    assert counts.most_common(1)[0][0] == "normal"


@pytest.fixture(scope="module")
def roomy() -> list[Case]:
    return draw_cases(Subject(), 400, Limits(batch=4, heads=6, length=300, tiles=200))


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


def laid_out(problem: Problem) -> list[str]:
    return [name for name in LAYOUTS if getattr(problem, name) != Layout()]


@pytest.fixture(scope="module")
def strided() -> list[Case]:
    subject = Subject(can={"layouts": True, "packings": ("ragged", "dense")})
    # Of one seed Cases are much alike: 600 of another have no expanded heads at all.
    return [case for seed in (5, 6, 7, 8) for case in draw_cases(subject, 250, seed=seed)]


@pytest.mark.parametrize("name", LAYOUTS_DRAWN)
def test_every_layout_is_drawn(strided: list[Case], name: str) -> None:
    assert sum(bool(LAYOUTS_DRAWN[name](case.problem)) for case in strided) >= 3


def test_contiguous_is_drawn_often_and_alone_where_no_other_is_declared(many: list[Case], strided: list[Case]) -> None:
    assert 0.35 < sum(not laid_out(case.problem) for case in strided) / len(strided) < 0.8
    assert not any(laid_out(case.problem) for case in many)


SHRUNK_LAYOUTS: dict[str, tuple[Callable[[Problem], object], dict[str, Layout]]] = {
    "no layout": (lambda p: p.heads, {}),
    "padded rows": (lambda p: p.layout_q.pitch, {"layout_q": Layout(pitch=1)}),
    "an offset": (lambda p: p.layout_do.offset, {"layout_do": Layout(offset=1)}),
    "an order": (lambda p: p.layout_v.order == "htd", {"layout_v": Layout(order="htd")}),
    "packed": (lambda p: p.layout_k.packed, {name: Layout(packed=True) for name in ("layout_k", "layout_v")}),
    "all packed": (lambda p: p.layout_q.packed, {name: Layout(packed=True) for name in LAYOUTS[:3]}),
    "one head for all": (lambda p: p.layout_k.expanded_heads, {"layout_k": Layout(expanded_heads=True)}),
    "a constant dO": (lambda p: p.layout_do.expanded, {"layout_do": Layout(expanded=True)}),
}


@pytest.mark.parametrize("name", SHRUNK_LAYOUTS)
def test_a_layout_that_does_not_matter_shrinks_away(strided: list[Case], name: str) -> None:
    holds, layouts = SHRUNK_LAYOUTS[name]
    starts = [case for case in strided if laid_out(case.problem) and holds(case.problem)][:8]
    assert starts
    for start in starts:
        smallest = minimal(start, lambda case: holds(case.problem), can={"layouts": True, "packings": ("ragged", "dense")})
        assert smallest.problem == plain(**layouts)


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


# --- shrinking


def minimal(start: Case, predicate: Callable[[Case], object], can: dict[str, Any] | None = None) -> Case:
    """The end of taking the first simpler Case that still fails, again and again."""
    subject = Subject(can=can or {})
    variants, now = all_variants(subject, "cpu"), start
    for _ in range(500):
        steps = (each for each in simpler(now, variants) if subject.supports(each.problem, each.config, "cpu") is None)
        better = next((each for each in steps if predicate(each)), None)
        if better is None:
            return now
        now = better
    raise AssertionError(f"no end of steps from {start.canonical()}")


def plain(**changed: Any) -> Problem:
    return Problem(**{"seqlens_q": (1,), "seqlens_k": (1,), "dim_qk": 64, "dim_v": 64, **changed})


SHRUNK: dict[str, tuple[Callable[[Case], object], Problem, Recipe, Config]] = {
    "always": (lambda c: True, plain(), Recipe(), CONFIGS[0]),
    "dtype": (lambda c: c.problem.dtype != "float16", plain(dtype="bfloat16"), Recipe(), CONFIGS[0]),
    "float32": (lambda c: c.problem.dtype == "float32", plain(dtype="float32"), Recipe(), CONFIGS[0]),
    "causal": (lambda c: c.problem.causal, plain(causal="bottom_right"), Recipe(), CONFIGS[0]),
    "top left": (lambda c: c.problem.causal == "top_left", plain(causal="top_left"), Recipe(), CONFIGS[0]),
    "dims": (lambda c: c.problem.dim_v == 128, plain(dim_qk=192, dim_v=128), Recipe(), CONFIGS[0]),
    "config": (lambda c: c.config["tile_m"] == 32, plain(), Recipe(), CONFIGS[1]),
    "dtype, causal, config": (
        lambda c: c.problem.dtype == "bfloat16" and c.problem.causal and c.config["tile_m"] == 32,
        plain(dtype="bfloat16", causal="bottom_right"),
        Recipe(),
        CONFIGS[1],
    ),
    "several sequences": (
        lambda c: c.problem.batch > 1,
        plain(seqlens_q=(1, 1), seqlens_k=(1, 1)),
        Recipe(),
        CONFIGS[0],
    ),
    "groups": (lambda c: c.problem.groups == 3, plain(heads=3), Recipe(), CONFIGS[0]),
    "heads": (lambda c: c.problem.kv_heads > 1, plain(heads=2, kv_heads=2), Recipe(), CONFIGS[0]),
    "groups and heads": (
        lambda c: c.problem.kv_heads > 1 and c.problem.groups > 1,
        plain(heads=4, kv_heads=2),
        Recipe(),
        CONFIGS[0],
    ),
    "scale": (lambda c: c.problem.scale < 0, plain(softmax_scale=-0.125), Recipe(), CONFIGS[0]),
    "pattern": (
        lambda c: c.recipe.pattern in PATTERNS[PATTERNS.index("needle") :],
        plain(),
        Recipe(pattern="needle"),
        CONFIGS[0],
    ),
    "magnitude": (lambda c: c.recipe.v_scale > 4, plain(), Recipe(v_scale=16.0), CONFIGS[0]),
    "long keys": (lambda c: max(c.problem.seqlens_k) > 5, plain(seqlens_k=(6,)), Recipe(), CONFIGS[0]),
    "more than a tile": (lambda c: max(c.problem.seqlens_k) > 64, plain(seqlens_k=(65,)), Recipe(), CONFIGS[0]),
    "q longer": (lambda c: any(q > k > 0 for q, k in pairs(c)), plain(seqlens_q=(2,)), Recipe(), CONFIGS[0]),
    "k longer": (lambda c: any(0 < q < k for q, k in pairs(c)), plain(seqlens_k=(2,)), Recipe(), CONFIGS[0]),
    "no queries": (lambda c: 0 in c.problem.seqlens_q, plain(seqlens_q=(0,)), Recipe(), CONFIGS[0]),
    "no keys": (lambda c: 0 in c.problem.seqlens_k, plain(seqlens_k=(0,)), Recipe(), CONFIGS[0]),
    "an empty sequence before others": (
        lambda c: (0, 0) in pairs(c)[:-1],
        plain(seqlens_q=(0, 1), seqlens_k=(0, 1)),
        Recipe(),
        CONFIGS[0],
    ),
}


@pytest.mark.parametrize("name", SHRUNK)
def test_what_does_not_matter_shrinks_away(many: list[Case], name: str) -> None:
    predicate, problem, recipe, config = SHRUNK[name]
    starts = [case for case in many if predicate(case)][:12]
    assert starts
    for start in starts:
        assert minimal(start, predicate) == Case(kernel="acme.flash", problem=problem, recipe=recipe, config=config)


def test_slack_shrinks_on_its_own_side(many: list[Case]) -> None:
    for start in [case for case in many if case.problem.slack_q and case.problem.slack_k][:12]:
        smallest = minimal(start, lambda case: case.problem.slack_k)
        assert smallest.problem == plain(slack_k=smallest.problem.slack_k)


def test_sinks_of_every_kind_are_drawn_and_shrink_to_moderate_ones_or_none() -> None:
    can = {"sinks": True}
    drawn = draw_cases(Subject(can=can), 200)
    assert {case.recipe.sinks for case in drawn if case.problem.sinks} == set(SINK_VALUES)
    assert {case.recipe.sinks for case in drawn if not case.problem.sinks} == {"moderate"}
    large = [case for case in drawn if case.recipe.sinks == "large"][:5]
    for start in large:
        assert minimal(start, lambda case: True, can).problem == plain()
        simpler_ones = list(simpler(start, all_variants(Subject(can=can), "cpu")))
        assert any(not each.problem.sinks for each in simpler_ones)
        # A Case without sinks whose Recipe has values of them is refused.
        assert [case_from_object(each.to_object()) for each in simpler_ones] == simpler_ones
        of_any = minimal(start, lambda case: case.problem.sinks, can)
        assert (of_any.problem, of_any.recipe) == (plain(sinks=True), Recipe())
        of_large = minimal(start, lambda case: case.problem.sinks and case.recipe.sinks == "large", can)
        assert (of_large.problem, of_large.recipe) == (plain(sinks=True), Recipe(sinks="large"))


def test_a_seed_that_matters_is_kept(many: list[Case]) -> None:
    start = next(case for case in many if case.recipe.seed > 100)
    assert minimal(start, lambda case: case.recipe.seed > 100).recipe.seed == start.recipe.seed


def test_the_plainest_case_has_no_simpler_one() -> None:
    plainest = Case(kernel="acme.flash", problem=plain(), config=CONFIGS[0])
    assert list(simpler(plainest, all_variants(Subject(), "cpu"))) == []


def test_simpler_cases_differ_and_stay_among_the_compiled_variants(many: list[Case]) -> None:
    variants = all_variants(Subject(), "cpu")[::5]
    for case in many[:60]:
        for each in simpler(case, variants):
            problem = each.problem
            assert each != case
            assert each.kernel == case.kernel
            variant = Variant(problem.dtype, problem.causal, (problem.dim_qk, problem.dim_v), each.config)
            old = case.problem
            assert variant in (*variants, Variant(old.dtype, old.causal, (old.dim_qk, old.dim_v), case.config))


def test_a_large_case_is_cut_before_its_parts_are_simplified(roomy: list[Case]) -> None:
    """Each later step runs a Case of two tokens then, not one of thousands."""
    for start in [case for case in roomy if case.problem.batch == 1 and case.problem.total_q > 100][:6]:
        now, runs = start, 0
        while (better := next(simpler(now, ()), None)) is not None:
            now = better
            runs += now.problem.total_q > 50
        assert now.problem == plain(**{name: getattr(now.problem, name) for name in ("dtype", "causal", "dim_qk", "dim_v")})
        assert runs <= 2


def test_a_dense_case_stays_of_one_length(many: list[Case]) -> None:
    start = Case(kernel="acme.flash", problem=plain(seqlens_q=(9,) * 3, seqlens_k=(40,) * 3, packing="dense"), config=CONFIGS[0])
    variants = all_variants(Subject(), "cpu")
    steps = list(simpler(start, variants))
    assert any(each.problem.packing == "dense" and each.problem.seqlens_k == (1,) * 3 for each in steps)
    assert any(each.problem.packing == "dense" and each.problem.batch == 1 for each in steps)
    assert any(each.problem.packing == "ragged" for each in steps)


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


# --- variants


@pytest.mark.parametrize(
    ("wrong", "minimal"),
    [
        (lambda window: window is not None and window[0] is not None and window[0] >= 5, (5, None)),
        (lambda window: window is not None and window[1] is not None and window[1] >= 33, (None, 33)),
        (lambda window: window is not None and None not in window and sum(window) >= 4, (0, 4)),
        (lambda window: window is not None and None not in window, (0, 0)),
        (lambda window: window is not None, (None, None)),
        (lambda window: True, None),
    ],
)
@pytest.mark.parametrize("window", [(65, 127), (64, 200)])
def test_windows_shrink_to_the_narrowest_that_fails(
    wrong: Callable[[Any], bool], minimal: tuple[int | None, int | None] | None, window: tuple[int, int]
) -> None:
    problem = Problem(seqlens_q=(300,), seqlens_k=(300,), dim_qk=64, dim_v=64, window=window)
    case = Case(kernel="acme.flash", problem=problem)
    steps = 0
    while less := next(
        (x for x in simpler(case, ()) if x.problem.window != case.problem.window and wrong(x.problem.window)), None
    ):
        case, steps = less, steps + 1
    assert case.problem.window == minimal
    assert steps < 300


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
