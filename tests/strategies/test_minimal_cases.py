"""Steps to simpler Cases: what does not matter to a failure goes, what matters stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.drawn_cases import draw_cases, laid_out, pairs
from support.subjects import CONFIGS, Subject

from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import LAYOUTS, Layout, Problem
from attnfuzz.strategies.case import PATTERNS, SINK_VALUES, Case, Recipe, case_from_object
from attnfuzz.strategies.shrink_steps import simpler
from attnfuzz.strategies.variants import Variant, all_variants


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
