"""The strategy of all Cases: the same Cases whatever was drawn before, no warning, and little time beyond Hypothesis's own."""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.errors import HypothesisWarning
from msgspec.structs import replace
from support.subjects import LIMITS, Subject

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import OUTPUT_NAMES, Causal, OutputName, Problem
from attnfuzz.oracles.attention import visible_keys
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import _side_of_length, _with_more_queries
from attnfuzz.strategies.draw import _draw_by_engine, draw_values
from attnfuzz.strategies.kernel_limits import Room
from attnfuzz.strategies.lengths import fits, parts_of_keys
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


def hides(problem: Problem) -> bool:
    """Whether a window hides something in some sequence."""
    whole = replace(problem, window=None)
    return any(not torch.equal(visible_keys(problem, each), visible_keys(whole, each)) for each in range(problem.batch))


@pytest.mark.parametrize(
    ("causal", "can", "least"),
    [
        (None, {"window_forms": ("right",)}, 0.65),
        (None, {"window_forms": ("equal",), "window_multiple": 8}, 0.4),
        (None, {"window_forms": ("right",), "packings": ("dense",)}, 0.6),
        (None, {"window_forms": ("left",)}, 0.5),
        ("top_left", {}, 0.45),
        ("bottom_right", {"window_forms": ("left",)}, 0.5),
        ("bottom_right", {"window_forms": ("left",), "packings": ("dense",)}, 0.5),
    ],
)
def test_most_windows_hide_something_and_some_are_as_long_as_the_keys(
    causal: Causal | None, can: dict[str, Any], least: float
) -> None:
    strategy = trial_cases(Subject({"window": True, "causal": (causal,), **can}), device="cpu", limits=LIMITS)
    cases = [case.problem for seed in range(4) for case in round_of(strategy, seed)]
    limited = [(p, p.window) for p in cases if p.window and p.window != (None, None)]
    step, forms = can.get("window_multiple", 1), can.get("window_forms")
    assert all(side is None or side % step == 0 for _, window in limited for side in window)
    assert all(left == right for _, (left, right) in limited) or forms != ("equal",)
    hiding = [(p, window) for p, window in limited if hides(p)]
    assert len(hiding) / len(limited) >= least
    number = 0 if causal == "top_left" else 1
    long = [
        (window[number], n_q, n_k) for p, window in hiding for n_q, n_k in zip(p.seqlens_q, p.seqlens_k, strict=True)
        if window[number] is not None and 0 < n_k <= (window[number] or 0) < n_q
    ]  # fmt: skip
    assert (len(long) >= 5) == (causal != "bottom_right" and forms != ("left",))


def test_which_side_of_a_window_may_be_as_long_as_the_keys() -> None:
    assert [_side_of_length("top_left", each) for each in ((3, 0), (3, None), (None, 3))] == [0, 0, None]
    assert [_side_of_length(None, each) for each in ((3, 0), (3, None), (None, 3), (None, None))] == [1, None, 1, None]
    assert [_side_of_length("bottom_right", each) for each in ((3, 0), (3, None), (3, 3))] == [None, None, None]


def test_every_sequence_gets_more_queries_than_keys_where_there_is_room() -> None:
    can, room = Subject({"window": True}).capabilities, Room(batch=3, length=200, tiles=12, heads=1, tile_m=16, tile_n=64)
    assert _with_more_queries(((5, 40), (30, 30), (0, 7)), can, room) == ((40, 5), (30, 15), (0, 7))
    assert _with_more_queries(((5, 0), (1, 1)), can, room) == ((5, 0), (1, 1))
    # 190 queries are 12 tiles, and leave none for the other sequence.
    assert _with_more_queries(((60, 190), (5, 5)), can, room) == ((60, 30), (5, 2))
    assert _with_more_queries(((4, 190), (1, 5)), can, room) == ((4, 190), (1, 5)), "decoding"
    equal = Subject({"window": True, "unequal": False}).capabilities
    assert _with_more_queries(((30, 30),), equal, room) == ((30, 30),)


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
    tiles = [each for each in few if max(each.problem.seqlens_k) <= 2 * each.config.tile("tile_n")]
    assert sum(each.check == "twice" for each in tiles) / len(tiles) < 0.5


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
