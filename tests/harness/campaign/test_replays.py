"""Stored Cases obey the limits of a run, and each of them comes up some day."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign import drawer
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.coordinator import Coordinator
from attnfuzz.harness.campaign.corpus import CaseFile, Corpus, StoredFinding, read_case
from attnfuzz.harness.campaign.events import CampaignFinished, Event, Finding, ReplayStarted, TrialFinished
from attnfuzz.harness.campaign.journal import Journal, LeftBehind
from attnfuzz.harness.campaign.kernel_state import KernelState
from attnfuzz.harness.campaign.plan import plan_of
from attnfuzz.harness.campaign.replays import ReplayRecord, in_turn, most_replays
from attnfuzz.harness.campaign.rounds import Rounds
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.campaign.worker_link import Turn
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case, Recipe

KERNEL = registry.get("torch.reference_cpu")
PASS = Verdict(status="pass")
FAILURE = Failure(kernel=KERNEL.name, kind="mismatch", output="o", check="element", message="O is wrong")
PROBLEM = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=64, dim_v=64, dtype="float32")


def case_of(number: int) -> Case:
    return Case(kernel=KERNEL.name, problem=PROBLEM, config=KERNEL.configs(PROBLEM)[0], recipe=Recipe(seed=number))


def store(folder: Path, count: int) -> list[Path]:
    """Case files with the seeds 0, 1, ...; each is a second newer than the one before."""
    corpus, verdict, paths = Corpus(folder), Verdict(status="fail", failures=(FAILURE,)), []
    for number in range(count):
        paths.append(corpus.write(Finding(FAILURE.identity, case_of(number), verdict, shrunk=True), seed=0))
        os.utime(paths[-1], (1e9 + number, 1e9 + number))
    return paths


@pytest.fixture(autouse=True)
def instant_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of Cases that are not those of case files; drawing is not what is tested."""

    def drawn(*_: Any, seed: int, examples: int, quota: int) -> list[Case]:
        return [case_of(1000 + seed * examples + number) for number in range(quota)]

    monkeypatch.setattr(drawer, "drawn", drawn)


def run(folder: Path, executor: FunctionExecutor | None = None, **settings: Any) -> tuple[CampaignFinished, list[Event]]:
    events: list[Event] = []
    all_ = Settings(**{"out": str(folder), "plain": True, **settings})
    return run_campaign([KERNEL], all_, events.append, executor or FunctionExecutor(lambda _: PASS)), events


def replays(events: Sequence[Event]) -> list[int]:
    """The seeds of the stored Cases that were tried, in their order."""
    return [each.case.recipe.seed for each in events if isinstance(each, TrialFinished) and each.phase == "replay"]


# --- the order


@pytest.mark.parametrize(
    ("replayed", "expected"),
    [
        ([], "dcba"),
        (["d", "c"], "bdac"),
        (["d", "c", "b", "a"], "dcba"),
        (["a", "b", "c", "d"], "adbc"),
        (["d"], "cdba"),
        (["gone", "d", "a"], "cdba"),
    ],
)
def test_newest_first_and_by_turns_those_not_replayed_for_longest(tmp_path: Path, replayed: list[str], expected: str) -> None:
    files = []
    for number, name in enumerate("abcd"):
        path = tmp_path / name
        path.touch()
        os.utime(path, (1e9 + number, 1e9 + number))
        files.append(CaseFile(case_of(number), StoredFinding(), path))
    assert "".join(each.path.name for each in in_turn(files, replayed)) == expected


@pytest.mark.parametrize(("most", "expected"), [(None, None), (0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (100, 25)])
def test_the_part_of_a_limit_on_cases(most: int | None, expected: int | None) -> None:
    assert most_replays(most) == expected


# --- limits


@pytest.mark.parametrize(("most", "replayed"), [(1, 1), (5, 2), (40, 10), (48, 12)])
def test_max_examples_limits_stored_cases_and_drawn_ones_together(tmp_path: Path, most: int, replayed: int) -> None:
    """All of them were tried before, whatever the limit."""
    store(tmp_path, 12)
    done, events = run(tmp_path, max_examples=most)
    [row] = done.summaries
    assert (row.cases, row.replayed, row.not_replayed) == (most, replayed, 12 - replayed)
    assert replays(events) == list(range(11, 11 - replayed, -1)), "the newest first"
    assert [each for each in events if isinstance(each, ReplayStarted)] == [ReplayStarted(KERNEL.name, replayed, 12)]


def test_every_stored_case_comes_up_some_day(tmp_path: Path) -> None:
    store(tmp_path, 12)
    seen: list[list[int]] = []
    while len({each for run_ in seen for each in run_}) < 12:
        seen.append(replays(run(tmp_path, max_examples=5)[1]))
        assert len(seen) <= 12
    assert seen[0] == [11, 10]
    assert all(11 in each for each in seen), "the newest comes in every run"


def test_a_new_case_comes_first_in_the_next_run(tmp_path: Path) -> None:
    store(tmp_path, 12)
    run(tmp_path, max_examples=5)
    path = Corpus(tmp_path).write(Finding(FAILURE.identity, case_of(99), Verdict(status="fail", failures=(FAILURE,))), seed=0)
    os.utime(path, (2e9, 2e9))
    assert replays(run(tmp_path, max_examples=1)[1]) == [99]


def test_a_run_that_replays_all_leaves_no_record(tmp_path: Path) -> None:
    store(tmp_path, 3)
    run(tmp_path, max_examples=4)
    assert (tmp_path / "replayed.json").exists()
    done, _ = run(tmp_path, max_examples=12)
    assert (done.summaries[0].replayed, done.summaries[0].not_replayed) == (3, 0)
    assert not (tmp_path / "replayed.json").exists()


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only where this module sleeps, at once."""
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)


class Slow(FunctionExecutor):
    """Each Case takes a tenth of a second, and the first one waits three seconds for a child process."""

    rest = 0.1

    def __init__(self) -> None:
        super().__init__(lambda _: PASS)

    def finish(self) -> Verdict:
        if len(self.cases) == 1:
            time.sleep(3.0)
            self.statistics.start_seconds += 3.0
        time.sleep(0.1 if self.cases[-1].recipe.seed < 1000 else self.rest)
        return super().finish()


@pytest.mark.usefixtures("instant")
def test_a_budget_limits_stored_cases_to_a_quarter_of_it(tmp_path: Path) -> None:
    """Of the 8 s, two, and what the child process takes to start."""
    store(tmp_path, 60)
    done, events = run(tmp_path, Slow(), budget=8.0)
    [row] = done.summaries
    assert 19 <= row.replayed <= 21
    assert row.replayed + row.not_replayed == 60
    assert row.cases - row.replayed > 25, "the rest of the time is for new Cases"
    assert replays(events) == list(range(59, 59 - row.replayed, -1))
    assert [each for each in events if isinstance(each, ReplayStarted)] == [ReplayStarted(KERNEL.name, 60, 60, 2.0)]


@pytest.mark.usefixtures("instant")
def test_with_both_limits_cases_are_drawn_in_place_of_those_that_time_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 stored Cases would be a quarter of 120, and the time is enough for 21."""
    monkeypatch.setattr(Slow, "rest", 0.01)
    store(tmp_path, 60)
    done, _ = run(tmp_path, Slow(), budget=8.0, max_examples=120)
    [row] = done.summaries
    assert 19 <= row.replayed <= 21
    assert row.not_replayed == 60 - row.replayed
    assert row.cases == 120


def test_cases_in_flight_come_first_and_all_of_them(tmp_path: Path) -> None:
    paths = store(tmp_path, 8)
    journal = Journal(tmp_path)
    journal.launch(*[case_of(number) for number in range(50, 56)])
    journal.abandon()
    done, events = run(tmp_path, max_examples=4)
    assert replays(events) == list(range(50, 56)), "as many as were in flight, and no other"
    assert (done.summaries[0].replayed, done.summaries[0].not_replayed) == (0, len(paths))


def test_what_a_dead_worker_did_not_come_to_is_given_to_another(tmp_path: Path) -> None:
    """It had all of them, and had tried two."""
    store(tmp_path, 6)
    settings = Settings(max_examples=24, out=None, plain=True)
    context = CampaignContext(settings)
    state = KernelState(KERNEL, plan_of(KERNEL, settings), context, list(Corpus(tmp_path).of(KERNEL.name)))
    coordinator = Coordinator(context, [state], FunctionExecutor(lambda _: PASS), 2)
    first = coordinator.turn(0)
    assert isinstance(first, Turn)
    assert len(first.earlier) == 6
    for each in first.earlier[:2]:
        coordinator.trial(KERNEL.name, "replay", each.case, PASS)
    coordinator.leave(0)
    second = coordinator.turn(1)
    assert isinstance(second, Turn)
    assert second.earlier == first.earlier[2:]


@pytest.mark.parametrize("reached", ["given", "in flight", "tried"])
def test_a_case_in_flight_survives_the_death_of_the_next_worker_too(tmp_path: Path, reached: str) -> None:
    """The first worker died with it in flight; the second one, at once, before it began it, while it tried it, or afterwards."""
    settings = Settings(max_examples=24, out=None, plain=True)
    context = CampaignContext(settings)
    state = KernelState(KERNEL, plan_of(KERNEL, settings), context)
    coordinator = Coordinator(context, [state], FunctionExecutor(lambda _: PASS), 3)
    left = LeftBehind(case_of(7), 1, tmp_path / "1-first")
    coordinator.resume([left])
    first = coordinator.turn(0)
    assert isinstance(first, Turn)
    assert [each.left for each in first.earlier] == [left]
    again = [left]
    if reached == "tried":
        coordinator.trial(KERNEL.name, "replay", left.case, PASS)
        again = []
    coordinator.leave(0)
    if reached == "in flight":
        again = [LeftBehind(case_of(7), 2, tmp_path / "2-second")]
        coordinator.resume(again)
    second = coordinator.turn(1)
    assert isinstance(second, Turn)
    assert [each.left for each in second.earlier] == again


# --- the record


def broken(content: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(broken(b""), id="empty"),
        pytest.param(broken(b"[" * 200_000), id="nested"),
        pytest.param(broken(b'{"torch.reference_cpu": 3}'), id="of another type"),
        pytest.param(broken(b"\xff\xfe"), id="no text"),
        pytest.param(broken(b'{"torch.reference_cpu": ["../../etc/passwd", "\\u0000"]}'), id="names that are none"),
        pytest.param(lambda path: path.mkdir(), id="a folder"),
        pytest.param(os.mkfifo, id="a pipe"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), id="a device"),
        pytest.param(lambda path: path.symlink_to(path), id="a link to itself"),
    ],
)
def test_a_broken_record_costs_the_order_only(tmp_path: Path, spoil: Callable[[Path], Any]) -> None:
    store(tmp_path, 12)
    spoil(tmp_path / "replayed.json")
    done, events = run(tmp_path, max_examples=5)
    assert replays(events) == [11, 10]
    assert done.summaries[0].cases == 5


def test_runs_of_several_kernels_and_processes_share_the_record(tmp_path: Path) -> None:
    one, other = ReplayRecord(tmp_path), ReplayRecord(tmp_path)
    one.update({"a": ["1", "2"]}, ["a"])
    other.update({"b": ["3"]}, ["b"])
    one.update({"a": ["1"]}, ["a"])
    assert msgspec.json.decode((tmp_path / "replayed.json").read_bytes()) == {"a": ["2", "1"], "b": ["3"]}
    other.update({"a": ["2"], "b": ["3"]}, ["b"])
    assert list(ReplayRecord(tmp_path).of("a")) == []
    assert list(ReplayRecord(tmp_path).of("b")) == ["3"]


# --- what else counts them


def test_cases_that_are_forgotten_may_be_drawn_again_and_count_again() -> None:
    rounds = Rounds(10)
    rounds.know("abc")
    assert rounds.most == 7
    rounds.forget("bcz")
    assert rounds.most == 9
    round_ = rounds.take()
    assert round_ is not None
    assert rounds.drawn(round_.number, list("abcd")) == [1, 2, 3]


def test_a_case_file_names_the_runs_seed(tmp_path: Path) -> None:
    fail = Verdict(status="fail", failures=(FAILURE,))
    done, _ = run(tmp_path, FunctionExecutor(lambda _: fail), max_examples=1, seed=7)
    assert read_case(str(done.findings[0].path)).finding.seed == 7
