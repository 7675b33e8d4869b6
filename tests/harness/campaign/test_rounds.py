"""Rounds of draws: which Cases they give depends on the limit alone, whoever draws them, in whatever order."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from attnfuzz.harness.campaign.rounds import EXAMPLES, Round, Rounds

Draw = Callable[[Round], list[str]]


def space(size: int, simplest: bool = True) -> Draw:
    """Draws as Hypothesis does: each round begins with the simplest Case, and the others are any of `size`."""

    def draw(round_: Round) -> list[str]:
        rng = random.Random(round_.number)
        values = [0] if simplest else []
        values += [rng.randrange(size) for _ in range(EXAMPLES - len(values))]
        return [str(each) for each in dict.fromkeys(values)][: round_.quota]

    return draw


def given(rounds: Rounds, draw: Draw, workers: int, seed: int = 0, dies: float = 0.0) -> tuple[list[str], int]:
    """The Cases that `workers` try, and how many rounds they drew, in an order that `seed` decides; some die at a rate."""
    rng, busy, tried = random.Random(seed), list[Round](), list[str]()
    count = 0
    while not rounds.over or busy:
        if len(busy) < workers and rounds.may_give() and (not busy or rng.random() < 0.6):
            round_ = rounds.take()
            assert round_ is not None
            busy.append(round_)
            continue
        assert busy, "nothing is given out, and nothing is being drawn"
        round_ = busy.pop(rng.randrange(len(busy)))
        if rng.random() < dies:
            rounds.give_back(round_.number)
            continue
        ids, count = draw(round_), count + 1
        new = [ids[index] for index in rounds.drawn(round_.number, ids)]
        if new and rng.random() < dies:
            cut = rng.randrange(len(new))
            for each in new[:cut]:
                rounds.tried(each)
            tried += new[:cut]
            rounds.give_back(round_.number)
            continue
        tried += new
        rounds.finish(round_.number)
    assert rounds.take() is None
    return tried, count


@pytest.mark.parametrize("most", [1, 30, 99, 100, 101, 150, 230, 2345])
def test_the_cases_do_not_depend_on_who_draws(most: int) -> None:
    """In a space where many draws are equal: most of all there the order of the rounds decides whose a Case is."""
    draw = space(3 * most)
    alone, _ = given(Rounds(most), draw, 1)
    assert len(alone) == len(set(alone)) == most
    for workers in (2, 3, 16):
        for seed in range(5):
            tried, _ = given(Rounds(most), draw, workers, seed)
            assert len(tried) == len(set(tried))
            assert set(tried) == set(alone), (workers, seed)


@pytest.mark.parametrize(("size", "most"), [(1, 1), (1, 50), (20, 230), (90, 230), (90, 5000), (700, 800)])
def test_a_space_that_is_nearly_tried_out_ends_alike(size: int, most: int) -> None:
    draw = space(size)
    alone, drawn = given(Rounds(most), draw, 1)
    assert len(alone) == len(set(alone)) <= min(size, most)
    if size < EXAMPLES // 4:
        assert len(alone) == min(size, most)
    assert drawn < 60, "a space that is tried out is not drawn from without end"
    for workers in (2, 3, 16):
        for seed in range(5):
            tried, rounds = given(Rounds(most), draw, workers, seed)
            assert (set(tried), rounds) == (set(alone), drawn), (workers, seed)


def test_a_simplest_case_that_every_round_has_costs_no_case() -> None:
    """150 Cases of a large space are 150, not 149: the last round draws more than the one Case that is lacking."""
    tried, rounds = given(Rounds(150), space(10**9), 1)
    assert (len(set(tried)), rounds) == (150, 2)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_round_of_a_worker_that_is_gone_gives_what_was_not_tried(workers: int) -> None:
    draw = space(10**9)
    alone, _ = given(Rounds(230), draw, 1)
    for seed in range(20):
        tried, _ = given(Rounds(230), draw, workers, seed, dies=0.3)
        assert len(tried) == len(set(tried)), "no Case twice"
        assert set(tried) == set(alone)


def test_a_case_that_ended_a_worker_is_not_given_again() -> None:
    rounds, draw = Rounds(30), space(10**9)
    first = rounds.take()
    assert first is not None
    ids = draw(first)
    assert rounds.drawn(0, ids) == list(range(30))
    for each in ids[:5]:
        rounds.tried(each)
    rounds.give_back(0)
    rounds.know([ids[5]])
    again = rounds.take()
    assert again is not None
    assert [ids[index] for index in rounds.drawn(0, draw(again))] == ids[6:30]
    assert rounds.over, "the Case that was known is one of the 30"


def test_cases_of_earlier_runs_count() -> None:
    rounds = Rounds(30)
    rounds.know(["0", "x"])
    tried, _ = given(rounds, space(10**9), 1)
    assert len(set(tried)) == 28
    assert "0" not in tried


def test_rounds_without_a_limit_end_with_the_space_only() -> None:
    tried, rounds = given(Rounds(), space(5), 1)
    assert (len(tried), rounds) == (5, 4)
    rounds_of_a_large = Rounds()
    for _ in range(1000):
        assert rounds_of_a_large.take() is not None
    assert rounds_of_a_large.many


def test_one_worker_is_enough_for_few_cases() -> None:
    rounds = Rounds(100)
    assert rounds.may_give()
    assert not rounds.many
    rounds.take()
    assert not rounds.may_give()
    assert rounds.take() is None
    assert not rounds.over, "the round that is being drawn may lack some"
    assert Rounds(101).many


@pytest.mark.parametrize("most", [None, 4000])
def test_what_is_remembered_is_bounded(most: int | None) -> None:
    """Only ids of Cases of unfinished rounds are kept apart, and without a limit those of all Cases have an end."""
    rounds, draw = Rounds(most), space(10**12)
    for _ in range(400):
        if (round_ := rounds.take()) is None:
            break
        ids = draw(round_)
        for index in rounds.drawn(round_.number, ids):
            rounds.tried(ids[index])
        rounds.finish(round_.number)
    assert not rounds._untried
    assert not rounds._round_of
    assert len(rounds._known) <= (4000 if most else (1 << 12) + EXAMPLES)
    assert len(rounds._together) <= 16
