"""Shards of a run: together they try what one run tries, each its own part, by rounds and under a limit on Cases."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.events import Event, TrialFinished
from attnfuzz.harness.campaign.options import OPTIONS, settings_from
from attnfuzz.harness.campaign.rounds import EXAMPLES, Round, Rounds
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import BadArgument

KERNEL = "torch.reference_cpu"


def taken(rounds: Rounds, repeats: int = 0) -> list[tuple[int, int]]:
    """Each Case that the rounds give, as its round and its place there; the last `repeats` of each round are the same in all."""
    cases = []
    while (round_ := rounds.take()) is not None:
        places = range(round_.skip, round_.skip + round_.quota)
        ids = [f"{'any' if place >= EXAMPLES - repeats else round_.number} {place}" for place in places]
        cases += [(round_.number, places[index]) for index in rounds.drawn(round_.number, ids)]
        rounds.finish(round_.number)
    return cases


@pytest.mark.parametrize("most", [1, 2, 3, 60, 99, 100, 101, 250, 400, 730, 1001])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7])
def test_shards_of_a_limit_are_together_one_run(most: int, shards: int) -> None:
    parts = [taken(Rounds(most, shard, shards)) for shard in range(shards)]
    joined = list(itertools.chain(*parts))
    assert len(joined) == len(set(joined)) == most
    assert set(joined) == set(taken(Rounds(most)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1, "equal parts"


def test_shards_without_a_limit_have_every_nth_round() -> None:
    numbers = []
    for shard in range(3):
        rounds = Rounds(None, shard, 3)
        numbers.append([each.number for each in (rounds.take() for _ in range(4)) if each])
    assert numbers == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_shard_tries_its_part_where_rounds_repeat_cases(shards: int) -> None:
    parts = [taken(Rounds(730, shard, shards), repeats=5) for shard in range(shards)]
    assert sum(map(len, parts)) == 730
    further = [{number for number, _ in part if number > 7} for part in parts]
    assert not any(one & other for one, other in itertools.combinations(further, 2)), "further rounds are no two shards' own"


def test_stored_cases_count_as_a_shards_own() -> None:
    rounds = Rounds(250, 1, 2)
    rounds.reduce(25)
    assert len(taken(rounds)) == 100


def test_a_round_that_is_given_back_gives_the_same_cases() -> None:
    rounds = Rounds(120, 1, 2)
    first = rounds.take()
    assert first == Round(0, 40, 60)
    assert rounds.drawn(0, ["a", "b"]) == [0, 1]
    rounds.give_back(0)
    assert rounds.take() == first
    assert rounds.drawn(0, ["a", "b"]) == [0, 1]


def tried(**changed: Any) -> list[str]:
    events: list[Event] = []
    settings = Settings(device="cpu", seed=3, out=None, replay=False, maps=False, **changed)
    run_campaign([registry.get(KERNEL)], settings, events.append, FunctionExecutor(lambda _: Verdict(status="pass")))
    return [each.case.id for each in events if isinstance(each, TrialFinished)]


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_shards_try_the_cases_of_one_run(shards: int) -> None:
    most = 70  # of a round's hundred draws, so many are distinct
    parts = [tried(max_examples=most, shard=shard, shards=shards) for shard in range(shards)]
    assert sorted(itertools.chain(*parts)) == sorted(tried(max_examples=most))
    assert all(parts)


def test_shards_draw_at_first_what_one_run_draws_at_first() -> None:
    """A round repeats some of its own Cases, so that all draw further ones, which are not the same for any number of shards."""
    one, *parts = (tried(max_examples=130, shard=shard, shards=shards) for shard, shards in ((0, 1), (0, 2), (1, 2)))
    joined = set(itertools.chain(*parts))
    assert [len(each) for each in (one, *parts)] == [pytest.approx(most, abs=2) for most in (130, 65, 65)]
    assert len(joined) >= 120, "few Cases are both shards'"
    assert len(joined & set(one)) >= 90


def options(**changed: Any) -> Settings:
    return settings_from({each.key: each.default for each in OPTIONS} | {"workers": "1"} | changed, "cpu")


def test_the_option_counts_from_one_and_leaves_the_budget_whole() -> None:
    settings = options(shard="2/8", budget="8s")
    assert (settings.shard, settings.shards, settings.seconds) == (1, 8, 8.0)
    assert (options().shard, options().shards) == (0, 1)


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "/", "a/2", "-1/2", "1/2/3", "1/0", ""])
def test_other_shards_are_refused(text: str) -> None:
    with pytest.raises(BadArgument) as caught:
        options(shard=text)
    reason = "it is not I/N with I from 1 to N; give the shard and their number, such as 2/8"
    assert str(caught.value) == f"shard={text!r}: {reason}"
