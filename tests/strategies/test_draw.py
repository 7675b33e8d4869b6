"""Values by seed, with and without Hypothesis's engine: imports do not change them, and errors are raised unchanged."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType

import hypothesis
import hypothesis.errors
import pytest
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine

from attnfuzz.kernels.errors import BadArgument
from attnfuzz.strategies import choices
from attnfuzz.strategies.draw import draw_values, drawn

BY_ENGINE = ("by the engine", "without the engine")


@pytest.fixture(params=BY_ENGINE, autouse=True)
def engine_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == BY_ENGINE[0]:
        monkeypatch.setattr(choices, "usable", lambda: False)


def draws(seed: int, examples: int = 60) -> list[int]:
    values: list[int] = []
    draw_values(st.integers(0, 10**12), values.append, seed=seed, examples=examples)
    return values


def test_a_seed_draws_the_same_values_whatever_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = draws(3)
    floats: list[float] = []
    draw_values(st.floats(), floats.append, seed=3, examples=200)
    path = tmp_path / "acme_constants.py"
    path.write_text("VALUES = [" + ", ".join(f"{77_000_000_000 + i}, {i}.125" for i in range(400)) + "]\n")
    module = ModuleType("acme_constants")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "acme_constants", module)
    assert before == draws(3)
    again: list[float] = []
    draw_values(st.floats(), again.append, seed=3, examples=200)
    assert repr(floats) == repr(again)
    assert draws(4) != before


def test_true_ends_the_draw() -> None:
    values: list[int] = []

    def consume(value: int) -> bool:
        values.append(value)
        return len(values) == 5

    draw_values(st.integers(), consume, seed=0, examples=60)
    assert len(values) == 5


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_what_the_consumer_raises_comes_out_unchanged_after_one_call(error: BaseException) -> None:
    calls: list[int] = []

    def consume(value: int) -> None:
        calls.append(value)
        raise error

    with pytest.raises(type(error)) as caught:
        draw_values(st.integers(), consume, seed=0, examples=60)
    assert caught.value is error
    assert len(calls) == 1


def test_drawn_returns_the_distinct_values_of_a_round_in_order() -> None:
    modulo = st.integers(0, 10**12).map(lambda number: number % 20)
    values: list[int] = []
    draw_values(modulo, values.append, seed=7, examples=60)
    distinct = list(dict.fromkeys(values))
    assert len(distinct) < len(values)
    assert distinct != sorted(distinct)
    assert drawn(modulo, seed=7, examples=60, quota=60) == distinct
    assert drawn(modulo, seed=7, examples=60, quota=5) == distinct[:5]


def test_drawn_stops_at_its_quota() -> None:
    calls: list[int] = []

    def counted(value: int) -> int:
        calls.append(value)
        return value

    drawn(st.integers(0, 10**12).map(counted), seed=0, examples=60, quota=3)
    assert len(set(calls)) == 3
    assert calls[-1] not in calls[:-1]


def test_drawn_returns_fewer_where_there_are_no_more() -> None:
    assert sorted(drawn(st.sampled_from("abc"), seed=0, examples=60, quota=60)) == ["a", "b", "c"]


@pytest.mark.parametrize("limits", [{"examples": 5, "quota": 0}, {"examples": 0, "quota": 5}])
def test_drawn_refuses_a_round_without_values(limits: dict[str, int]) -> None:
    with pytest.raises(BadArgument, match=r"=0: no value could be drawn; give 1 or more"):
        drawn(st.integers(), seed=0, **limits)


def test_each_value_is_drawn_anew() -> None:
    """Hypothesis would copy parts of a value onto others of it: most values would have equal parts."""
    pairs: list[tuple[int, ...]] = []
    draw_values(st.tuples(*[st.integers(0, 999)] * 4), pairs.append, seed=5, examples=300)
    equal = sum(len(set(each)) < 4 for each in pairs)
    assert len(pairs) > 250
    assert equal < 60, "Hypothesis draws equal and extreme integers by itself, but not most of the time"


def test_what_a_strategy_raises_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        draw_values(st.integers(1, 9).map(lambda each: each // 0), print, seed=0, examples=3)


def test_values_that_a_strategy_rejects_are_left_out() -> None:
    @st.composite
    def odd(draw: st.DrawFn) -> int:
        number = draw(st.integers(0, 99))
        hypothesis.assume(number % 2)
        return number

    values: list[int] = []
    draw_values(odd(), values.append, seed=0, examples=40)
    assert len(values) > 20
    assert all(each % 2 for each in values)
    with pytest.raises(hypothesis.errors.Unsatisfiable):
        draw_values(st.integers(0, 9).map(str).filter(lambda each: each == "x"), print, seed=0, examples=40)


def test_the_first_value_is_the_simplest() -> None:
    parts = st.tuples(st.integers(-5, 900), st.sampled_from("abc"), st.booleans(), st.lists(st.integers(3, 9), min_size=1))
    for seed in range(3):
        values: list[object] = []
        draw_values(parts, values.append, seed=seed, examples=20)
        assert values[0] == (0, "a", False, [3])


def test_a_choice_is_drawn_as_often_as_any_other() -> None:
    counts: Counter[str] = Counter()
    for seed in range(5):
        draw_values(
            st.tuples(st.sampled_from("abcd"), st.integers(0, 10**9)), lambda x: counts.update(x[0]), seed=seed, examples=200
        )
    assert counts.total() > 900
    assert all(0.18 < counts[each] / counts.total() < 0.36 for each in "abcd"), counts


def test_every_kind_of_strategy_can_be_drawn() -> None:
    kinds = st.tuples(
        st.integers(), st.integers(min_value=5), st.integers(max_value=-5), st.integers(0, 1 << 64), st.floats(0, 1),
        st.text(max_size=4), st.binary(max_size=3), st.sets(st.integers(0, 9), min_size=2),
        st.lists(st.sampled_from(range(9)), unique=True, max_size=5), st.permutations("abc"),
        st.dictionaries(st.booleans(), st.none()), st.one_of(st.none(), st.just(1)), st.data(),
    )  # fmt: skip
    values: list[tuple[object, ...]] = []
    draw_values(kinds, values.append, seed=2, examples=40)
    assert len(values) > 30
    for _, least, most, wide, ratio, text, binary, some, unique, order, *_ in values:
        assert least >= 5
        assert most <= -5
        assert 0 <= wide <= 1 << 64
        assert 0 <= ratio <= 1
        assert len(text) <= 4
        assert len(binary) <= 3
        assert len(some) >= 2
        assert len(set(unique)) == len(unique)
        assert sorted(order) == ["a", "b", "c"]


def test_a_draw_leaves_hypothesis_as_it_was() -> None:
    before = engine.ConjectureRunner.generate_mutations_from
    with pytest.raises(KeyError):
        draw_values(st.integers(), lambda _: {}["planted"], seed=0, examples=3)
    assert engine.ConjectureRunner.generate_mutations_from is before


def test_draws_of_two_threads_leave_hypothesis_as_it_was() -> None:
    before, entered, leave = engine.ConjectureRunner.generate_mutations_from, threading.Event(), threading.Event()

    def wait(_: int) -> bool:
        entered.set()
        return leave.wait(10)

    first = threading.Thread(target=draw_values, args=(st.integers(), wait), kwargs={"seed": 0, "examples": 2})
    second = threading.Thread(target=draws, args=(1,))
    first.start()
    assert entered.wait(10)
    second.start()
    leave.set()
    first.join()
    second.join()
    assert engine.ConjectureRunner.generate_mutations_from is before
