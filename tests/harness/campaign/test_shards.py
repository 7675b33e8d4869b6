"""Shards of a run: each draws rounds of its own, and has an equal part of the Cases."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.events import Event, TrialFinished
from attnfuzz.harness.campaign.options import OPTIONS, settings_from
from attnfuzz.harness.campaign.rounds import Rounds
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import BadArgument

KERNEL = "torch.reference_cpu"


def taken(rounds: Rounds) -> list[tuple[int, int]]:
    """Each Case that the rounds give, as its round and its place there."""
    cases = []
    while (round_ := rounds.take()) is not None:
        ids = [f"{round_.number} {place}" for place in range(round_.quota)]
        cases += [(round_.number, index) for index in rounds.drawn(round_.number, ids)]
        rounds.finish(round_.number)
    return cases


@pytest.mark.parametrize("most", [1, 2, 3, 60, 99, 100, 101, 250, 400, 730, 1001])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7])
def test_shards_have_equal_parts_and_rounds_of_their_own(most: int, shards: int) -> None:
    parts = [taken(Rounds(most, shard, shards)) for shard in range(shards)]
    joined = list(itertools.chain(*parts))
    assert len(joined) == len(set(joined)) == most
    assert max(map(len, parts)) - min(map(len, parts)) <= 1, "equal parts"
    assert all(number % shards == shard for shard, part in enumerate(parts) for number, _ in part)


def test_shards_without_a_limit_have_every_nth_round() -> None:
    numbers = []
    for shard in range(3):
        rounds = Rounds(None, shard, 3)
        numbers.append([each.number for each in (rounds.take() for _ in range(4)) if each])
    assert numbers == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def tried(**changed: Any) -> list[str]:
    events: list[Event] = []
    settings = Settings(device="cpu", seed=3, out=None, replay=False, maps=False, **changed)
    run_campaign([registry.get(KERNEL)], settings, events.append, FunctionExecutor(lambda _: Verdict(status="pass")))
    return [each.case.id for each in events if isinstance(each, TrialFinished)]


@pytest.mark.parametrize("shards", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_try_as_many_cases_as_one_run_and_other_ones_each(shards: int) -> None:
    parts = [tried(max_examples=70, shard=shard, shards=shards) for shard in range(shards)]
    assert sum(map(len, parts)) == len(tried(max_examples=70)) == 70
    # Each round begins with the simplest Case.
    assert len(set(itertools.chain(*parts))) >= 70 - 3 * shards


def options(**changed: Any) -> Settings:
    return settings_from({each.key: each.default for each in OPTIONS} | {"workers": "1"} | changed, "cpu")


def test_the_option_counts_from_one_and_leaves_the_budget_whole() -> None:
    settings = options(shard="2/8", budget="8s", seed=3)
    assert (settings.shard, settings.shards, settings.seconds) == (1, 8, 8.0)
    assert (options().shard, options().shards) == (0, 1)


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "/", "a/2", "-1/2", "1/2/3", "1/0", "", "1/1000001", "１/2", "1/2\n"])
def test_other_shards_are_refused(text: str) -> None:
    with pytest.raises(BadArgument) as caught:
        options(shard=text, seed=3)
    reason = "it is not I/N with I from 1 to N; give the shard and their number, 1000000 at most, such as 2/8"
    assert str(caught.value) == f"shard={text!r}: {reason}"


def test_a_number_that_python_would_not_read_is_refused() -> None:
    with pytest.raises(BadArgument, match="it is not I/N with I from 1 to N"):
        options(shard=f"1/{'9' * 5000}", seed=3)
