"""The strategy of all Cases: the same Cases whatever was drawn before, no warning, and little time beyond Hypothesis's own."""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.errors import HypothesisWarning
from support.subjects import LIMITS, Subject

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import OUTPUT_NAMES, OutputName, Problem
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.draw import _draw_by_engine, draw_values
from attnfuzz.strategies.lengths import Room, fits, parts_of_keys
from attnfuzz.strategies.trials import trial_cases
from attnfuzz.strategies.variants import all_variants

MANY = tuple(Config(tile_m=m, tile_n=n, stages=s) for m, n, s in itertools.product((16, 32, 64), (16, 32, 64), range(1, 12)))
EVERYTHING: dict[str, Any] = {
    "score_mod": True,
    "mask_mod": True,
    "captured": True,
    "captured_gradients": True,
    "softcap": True,
    "window": True,
    "layouts": True,
    "dlse": True,
    "packings": ("ragged", "dense"),
}


def round_of(strategy: st.SearchStrategy[Case], seed: int = 3, examples: int = 100) -> list[Case]:
    values: list[Case] = []
    draw_values(strategy, values.append, seed=seed, examples=examples)
    return values


def no_thirds(problem: Problem, _: Config) -> str | None:
    """Refuse many Problems, so that Hypothesis draws a part of the Case again."""
    return "a multiple of three" if problem.total_q and problem.total_q % 3 == 0 else None


@pytest.mark.parametrize(
    "build", [Subject, lambda: Subject(refuse=no_thirds), lambda: Subject(EVERYTHING)], ids=["wide", "refusing", "all"]
)
def test_a_seed_draws_the_same_cases_whatever_was_drawn_before(build: Callable[[], Subject]) -> None:
    first = [case.canonical() for case in round_of(trial_cases(build(), device="cpu", limits=LIMITS))]
    # Other strategies, and memory used in another way.
    others = [round_of(trial_cases(Subject(EVERYTHING), device="cpu", limits=LIMITS), seed, 40) for seed in (1, 2)]
    assert len(others) == 2
    assert first == [case.canonical() for case in round_of(trial_cases(build(), device="cpu", limits=LIMITS))]


def test_many_variants_give_no_warning_of_a_large_repr() -> None:
    subject = Subject(EVERYTHING, tiles=MANY, refuse=no_thirds)
    variants = all_variants(subject, "cpu")
    assert len(variants) > 800
    with warnings.catch_warnings():
        warnings.simplefilter("error", HypothesisWarning)
        strategy = trial_cases(subject, device="cpu", limits=LIMITS, variants=variants)
        assert len(repr(strategy)) < 500
        assert round_of(strategy)


def test_the_strategy_of_the_round_before_is_kept() -> None:
    subject = Subject(EVERYTHING, tiles=MANY)
    variants = all_variants(subject, "cpu")
    strategy = trial_cases(subject, device="cpu", limits=LIMITS, variants=variants)
    assert trial_cases(subject, device="cpu", limits=LIMITS, variants=list(variants)) is strategy
    # Another kernel of the same name, fewer variants, other capabilities: each has a strategy of its own.
    assert trial_cases(Subject(EVERYTHING, tiles=MANY), device="cpu", limits=LIMITS, variants=variants) is not strategy
    fewer = trial_cases(subject, device="cpu", limits=LIMITS, variants=variants[:1])
    assert {case.config for case in round_of(fewer)} == {variants[0].config}
    subject.can["slack"] = False
    changed = trial_cases(subject, device="cpu", limits=LIMITS, variants=variants)
    assert not any(case.problem.slack_q or case.problem.slack_k for case in round_of(changed))


def seconds(draw: Callable[..., None], strategy: st.SearchStrategy[Any], seed: int) -> float:
    start = time.process_time()
    draw(strategy, lambda _: None, seed=seed, examples=100)
    return time.process_time() - start


@pytest.mark.slow
@pytest.mark.parametrize("name", ["triton.varlen", "triton.flex", "torch.reference_cpu"])
def test_a_case_takes_less_than_the_engine_takes_for_its_choices(name: str) -> None:
    kernel = registry.get(name)
    if reason := kernel.unavailable("cpu"):
        pytest.skip(reason)
    # A Case makes some 50 choices. Measured: a third to half of their time by the engine; several times it where strategies are
    # built anew.
    choices = st.tuples(*[st.sampled_from(range(7))] * 50)
    strategy = trial_cases(kernel, device="cpu", limits=LIMITS)
    for seed in (100, 101):
        seconds(draw_values, strategy, seed)
        seconds(_draw_by_engine, choices, seed)
    ratios = [seconds(draw_values, strategy, seed) / seconds(_draw_by_engine, choices, seed) for seed in range(7)]
    assert statistics.median(ratios) < 1.0


@pytest.mark.parametrize(
    "can", [{}, {"window_multiple": 8}, {"window_forms": ("left", "right")}], ids=["any", "eights", "one side"]
)
def test_windows_end_at_lengths_where_queries_are_more_than_keys(can: dict[str, Any]) -> None:
    step = can.get("window_multiple", 1)
    strategy = trial_cases(Subject({"window": True, **can}), device="cpu", limits=LIMITS)
    cases = [case.problem for seed in range(4) for case in round_of(strategy, seed)]
    limited = [p for p in cases if p.window and p.window != (None, None)]
    assert all(side % step == 0 for p in limited for side in p.window or () if side is not None)
    longer = [(p, n_q, n_k) for p in limited for n_q, n_k in zip(p.seqlens_q, p.seqlens_k, strict=True) if 0 < n_k < n_q]
    # As long as the keys, or longer, and shorter than the queries: such a side hides something.
    hides = [p for p, n_q, n_k in longer if any(side is not None and n_k <= side < n_q for side in p.window or ())]
    assert len(hides) >= len(limited) // 20 >= 3
    forms = {tuple(side is None for side in p.window or ()) for p in limited}
    assert forms == ({(False, True), (True, False)} if "window_forms" in can else {(False, True), (True, False), (False, False)})


def test_no_window_changes_the_lengths_of_a_kernel_without_unequal_ones() -> None:
    strategy = trial_cases(Subject({"window": True, "unequal": False}), device="cpu", limits=LIMITS)
    assert all(case.problem.seqlens_q == case.problem.seqlens_k for case in round_of(strategy))


@pytest.mark.parametrize(("outputs", "more"), [(OUTPUT_NAMES, True), (("o", "lse", "dk", "dv"), False)])
def test_two_equal_calls_show_an_order_of_additions(outputs: tuple[OutputName, ...], more: bool) -> None:
    """Three terms of a sum that gives equal bits each time, in float32, whose last bits are seen."""
    can = {"dtypes": ("float16", "float32"), "groups": None, "deterministic": outputs}
    cases = [each for seed in range(4) for each in round_of(trial_cases(Subject(can), device="cpu", limits=LIMITS), seed)]

    def shares(dtype: str, least: int) -> float:
        own = [each for each in cases if each.problem.dtype == dtype and each.problem.groups >= least and plain(each)]
        return sum(each.check == "twice" for each in own) / len(own)

    def plain(case: Case) -> bool:
        return case.check in ("oracle", "twice")

    assert (shares("float32", 3) == 1.0) == more
    assert 0 < shares("float16", 1) < 0.3
    few = [each for each in cases if each.problem.dtype == "float32" and each.problem.groups < 3 and plain(each)]
    assert any(each.check == "oracle" for each in few)


def test_keys_that_a_config_divides_are_of_several_sequences_and_heads_in_some_cases() -> None:
    """Sums of parts have a stride for each; of triton.flex, whose Configs do that."""
    strategy = trial_cases(registry.get("triton.flex"), device="cpu", limits=LIMITS)
    cases = [case for seed in range(4) for case in round_of(strategy, seed) if case.config.tile("split") > 1]

    def parts(case: Case) -> int:
        return sum(min(case.config.integer("split"), -(-n // case.config.integer("block"))) for n in case.problem.seqlens_k if n)

    several = [each for each in cases if each.problem.heads > 1 and parts(each) > each.problem.batch > 1]
    assert len(cases) >= 20
    assert len(several) >= 3
    dense = [each.problem for each in cases if each.problem.packing == "dense"]
    assert all(len({*zip(each.seqlens_q, each.seqlens_k, strict=True)}) == 1 for each in dense)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("tiles", [1, 6, 24, 96])
def test_parts_of_keys_stay_in_their_room(tiles: int, dense: bool) -> None:
    room = Room(batch=2, length=300, tiles=tiles, heads=2, tile_m=16, tile_n=32)
    drawn: list[tuple[tuple[int, int], ...]] = []
    draw_values(parts_of_keys(room, 64, dense=dense), drawn.append, seed=1, examples=60)
    assert all(len(pairs) == 2 and all(0 < n_q <= 17 and 64 < n_k <= 129 for n_q, n_k in pairs) for pairs in drawn)
    assert all(fits(pairs, room) for pairs in drawn) or tiles < 12
    assert not dense or all(first == second for first, second in drawn)
    if tiles < 12:
        assert set(drawn) == {((1, 65), (1, 65))}, "the cheapest, where none fits"
