"""Draws without Hypothesis's engine: used with this version of Hypothesis, and not with one of another form."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from hypothesis.internal.conjecture.data import ConjectureData

from attnfuzz import strategies
from attnfuzz.strategies import choices
from attnfuzz.strategies.draw import _values_without_engine, draw_values


@pytest.fixture
def asked_anew() -> Iterator[None]:
    choices.usable.cache_clear()
    yield
    choices.usable.cache_clear()


def test_this_version_of_hypothesis_is_known() -> None:
    assert choices.usable()


def raises(*_: Any, **__: Any) -> None:
    raise TypeError("planted")


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("draw_integer", raises),
        ("draw_integer", lambda *_, **__: 400),
        ("draw_integer", lambda *_, **__: 0),
        ("draw", raises),
        ("draw_boolean", lambda *_, forced=None, **__: 7 if forced is None else forced),
        ("start_span", raises),
        ("track_arg_label", raises),
    ],
)
def test_another_form_is_noticed_and_the_engine_draws(
    monkeypatch: pytest.MonkeyPatch, asked_anew: None, name: str, other: Callable[..., Any]
) -> None:
    monkeypatch.setattr(choices._Choices, name, other)
    assert not choices.usable()
    values: list[int] = []
    draw_values(st.integers(1, 9), values.append, seed=0, examples=5)
    assert {*values} <= {*range(1, 10)}


def test_another_constructor_is_noticed(monkeypatch: pytest.MonkeyPatch, asked_anew: None) -> None:
    monkeypatch.setattr(ConjectureData, "__init__", raises)
    assert not choices.usable()


def test_where_the_internal_modules_lie_elsewhere_the_engine_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(strategies, "choices")
    monkeypatch.setitem(sys.modules, "attnfuzz.strategies.choices", None)
    assert _values_without_engine() is None
    values: list[int] = []
    draw_values(st.integers(1, 9), values.append, seed=0, examples=5)
    assert {*values} <= {*range(1, 10)}


def test_weights_of_integers_are_kept() -> None:
    random = Random(3)
    draws = Counter(choices._Choices(random, None).draw_integer(0, 9, weights={0: 0.5, 9: 0.25}) for _ in range(4000))
    assert 0.48 < draws[0] / 4000 < 0.57
    assert 0.24 < draws[9] / 4000 < 0.31
    assert all(draws[each] for each in range(10))


def test_booleans_have_their_probability() -> None:
    data = choices._Choices(Random(4), None)
    assert 0.08 < sum(data.draw_boolean(0.1) for _ in range(3000)) / 3000 < 0.12
    assert data.draw_boolean(0.1, forced=True)
    assert data.draw_boolean(1.0)
    assert not data.draw_boolean(0.0)


def test_some_values_have_few_choices_that_are_not_the_simplest() -> None:
    wide = st.tuples(*[st.integers(0, 10**6)] * 20)
    plain = [sum(map(bool, each)) for each in choices.values(wide, seed=5, examples=200)]
    assert plain[0] == 0
    assert 8 <= sum(each <= 8 for each in plain) <= 20
    assert sum(each > 15 for each in plain) > 150


@pytest.mark.parametrize(
    "strategy", [st.nothing(), st.tuples(st.integers(0, 9), st.nothing().map(str)), st.nothing() | st.nothing()]
)
def test_a_strategy_without_values_is_rejected(strategy: st.SearchStrategy[Any]) -> None:
    with pytest.raises(Unsatisfiable):
        list(choices.values(strategy, seed=0, examples=1))


def test_a_value_without_end_is_rejected() -> None:
    endless = st.deferred(lambda: st.tuples(st.integers(0, 9), endless))
    long = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=5000)
    for strategy in (endless, long):
        with pytest.raises(Unsatisfiable):
            list(choices.values(strategy, seed=0, examples=1))
