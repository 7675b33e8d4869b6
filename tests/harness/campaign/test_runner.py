"""Batches in the journal: what a run leaves behind that dies in one, and how the next run tries it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.campaign.events import CampaignFinished, CaseResumed, CaseSkipped, Event, TrialFinished
from attnfuzz.harness.campaign.journal import Journal, left_behind
from attnfuzz.harness.campaign.runner import Memo, TrialRunner
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.child import ChildError
from attnfuzz.harness.isolation.outcomes import OutOfTime
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case, Recipe

KERNEL = registry.get("torch.reference_cpu")
PASS = Verdict(status="pass")
WRONG = Verdict(
    status="fail", failures=(Failure(kernel=KERNEL.name, kind="mismatch", output="o", check="element", message="O is wrong"),)
)


def case(number: int) -> Case:
    problem = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=64, dim_v=64, dtype="float32")
    return Case(kernel=KERNEL.name, problem=problem, config=KERNEL.configs(problem)[0], recipe=Recipe(seed=number))


def die(journal: Journal) -> None:
    """As a process that is killed: its lock goes with it, its file stays."""
    os.close(journal._file)


def left_in(folder: Path) -> list[tuple[int, int]]:
    """The Cases that are left behind, by number, and how many runs have died of each."""
    return [(each.case.recipe.seed, each.deaths) for each in left_behind(folder)]


# --- a run that dies in a batch


@pytest.mark.parametrize("count", [1, 4])
def test_a_batch_in_flight_is_left_behind_whole(count: int, tmp_path: Path) -> None:
    class Dies(FunctionExecutor):
        def finish(self) -> Verdict:
            raise SystemError

        def batch(self, cases: object, known: object = None) -> list[Verdict]:
            raise SystemError

    journal = Journal(tmp_path)
    with pytest.raises(SystemError):
        list(TrialRunner(Dies(lambda _: PASS), journal).run_all([case(each) for each in range(count)], "generate"))
    die(journal)
    assert left_in(tmp_path) == [(number, 1) for number in range(count)]


@pytest.mark.parametrize(("count", "failing"), [(1, {0}), (4, {1, 3}), (4, set())])
def test_failing_cases_are_left_behind_until_they_are_examined(count: int, failing: set[int], tmp_path: Path) -> None:
    """While the first is shrunk, the others are in no case file: a run that dies then must not lose them."""
    executor = FunctionExecutor(lambda each: WRONG if each.recipe.seed in failing or each.recipe.seed > 9 else PASS)
    journal = Journal(tmp_path)
    runner, states = TrialRunner(executor, journal), list[set[int]]()
    path = None
    for each, verdict in runner.run_all([case(number) for number in range(count)], "generate"):
        number = each.recipe.seed
        path = path or next((tmp_path / "inflight").iterdir())
        now = _cases_in(path, tmp_path)
        assert now == {other for other in failing if other >= number}
        if verdict.failures:
            runner.begin(case(99))
            assert _cases_in(path, tmp_path) == now | {99}, "a Case of shrinking is in flight with them"
            runner.finish("shrink")
            assert _cases_in(path, tmp_path) == now
        states.append(now)
    assert len(states) == count
    journal.close()
    assert not list(tmp_path.glob("inflight/*"))


def test_the_batch_that_follows_is_at_work_while_the_first_is_examined(tmp_path: Path) -> None:
    """It stays in the journal when the first is examined, whose failures are all known where another batch is sent."""
    executor = FunctionExecutor(lambda each: WRONG if each.recipe.seed in (1, 3) else PASS)
    journal, calls, heard = Journal(tmp_path), list[str](), list[int]()
    runner = TrialRunner(executor, journal, lambda phase, of, verdict: heard.append(of.recipe.seed))
    second = [case(number) for number in (10, 11)]

    def following(verdicts: Sequence[Verdict]) -> Sequence[Case]:
        assert [each.status for each in verdicts] == ["pass", "fail", "pass", "fail"]
        assert not heard, "the next batch is sent before anything else is done with these Verdicts"
        calls.append("following")
        return second

    first = [case(number) for number in range(4)]
    path = None
    for _ in runner.run_all(first, "generate", set(), lambda: calls.append("meanwhile"), following):
        assert runner.sent is second
        assert executor.at_work == second
        path = path or next((tmp_path / "inflight").iterdir())
        assert _cases_in(path, tmp_path) == {10, 11}
    assert path is not None
    assert _cases_in(path, tmp_path) == {10, 11}
    assert calls == ["meanwhile", "following"]
    assert [each.recipe.seed for each, _ in runner.run_all(runner.sent, "generate", set())] == [10, 11]
    assert (heard, runner.trials, runner.sent) == ([0, 1, 2, 3, 10, 11], 6, ())
    assert _cases_in(path, tmp_path) == set()
    journal.close()


def test_an_error_is_not_lost_where_time_ends_before_the_batch(tmp_path: Path) -> None:
    class Late(FunctionExecutor):
        def finish_batch(self) -> list[Verdict]:
            raise OutOfTime

    def meanwhile() -> None:
        raise BadArgument("the strategy is wrong")

    runner = TrialRunner(Late(lambda _: PASS), Journal(tmp_path))
    with pytest.raises(BadArgument, match="the strategy is wrong"):
        list(runner.run_all([case(0)], "generate", set(), meanwhile))
    assert not runner.sent


def test_ctrl_c_while_a_batch_is_at_work_waits_for_nothing(tmp_path: Path) -> None:
    def meanwhile() -> None:
        raise KeyboardInterrupt

    executor = FunctionExecutor(lambda _: PASS)
    with pytest.raises(KeyboardInterrupt):
        list(TrialRunner(executor, Journal(tmp_path)).run_all([case(0)], "generate", set(), meanwhile))
    assert executor.at_work, "it was not waited for"


def test_no_batch_is_sent_after_one_that_no_child_took() -> None:
    class Refuses(FunctionExecutor):
        def begin_batch(self, cases: Sequence[Case], known: object = None) -> None:
            if not self.cases or cases[0].recipe.seed:
                raise ChildError("no process can be started")
            super().begin_batch(cases, None)

    executor = Refuses(lambda _: PASS)
    runner = TrialRunner(executor)
    with pytest.raises(ChildError):
        list(runner.run_all([case(0)], "generate"))
    assert not runner.sent
    executor.cases.append(case(9))
    steps = runner.run_all([case(0), case(0)], "generate", following=lambda _: [case(1)])
    next(steps)
    steps.close()
    assert not runner.sent, "also where the rest is not asked for"


@pytest.mark.parametrize("where", ["meanwhile", "send"])
def test_an_error_costs_no_verdict_that_has_arrived(where: str, tmp_path: Path) -> None:
    """Drawing the Cases that follow fails, or no child takes them: the batch at work is reported and examined first."""

    class Refuses(FunctionExecutor):
        def begin_batch(self, cases: Sequence[Case], known: object = None) -> None:
            if self.cases and where == "send":
                raise ChildError("no process can be started")
            super().begin_batch(cases, None)

    def meanwhile() -> None:
        if where == "meanwhile":
            raise BadArgument("the strategy is wrong")

    heard = list[int]()
    executor, journal = Refuses(lambda each: WRONG if each.recipe.seed == 1 else PASS), Journal(tmp_path)
    runner = TrialRunner(executor, journal, lambda phase, of, verdict: heard.append(of.recipe.seed))
    steps = runner.run_all([case(0), case(1), case(2)], "generate", set(), meanwhile, lambda _: [case(10)])
    seen = [next(steps)[0].recipe.seed for _ in range(3)]
    assert seen == heard == [0, 1, 2]
    with pytest.raises(BadArgument if where == "meanwhile" else ChildError):
        next(steps)
    assert not runner.sent
    assert not executor.at_work
    die(journal)
    # What no child took is tried by the next run.
    assert left_in(tmp_path) == ([(10, 1)] if where == "send" else [])


def test_time_that_ends_with_a_batch_at_work_leaves_nothing(tmp_path: Path) -> None:
    class Late(FunctionExecutor):
        def finish_batch(self) -> list[Verdict]:
            if self.cases:
                raise OutOfTime
            return super().finish_batch()

    journal = Journal(tmp_path)
    runner = TrialRunner(Late(lambda _: PASS), journal)
    assert len(list(runner.run_all([case(0)], "generate", following=lambda _: [case(1)]))) == 1
    with pytest.raises(OutOfTime):
        list(runner.run_all(runner.sent, "generate"))
    assert not runner.sent
    die(journal)
    assert left_in(tmp_path) == []


def _cases_in(path: Path, folder: Path) -> set[int]:
    """What a run would leave behind that dies now."""
    copy = folder / "copy" / "inflight" / "1-copy"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(path.read_bytes())
    return {number for number, _ in left_in(folder / "copy")}


# --- the next run


def finished(folder: Path, executor: FunctionExecutor, most: int = 4) -> list[Event]:
    events: list[Event] = []
    run_campaign([KERNEL], Settings(max_examples=most, out=str(folder), plain=True), events.append, executor)
    return events


def test_all_cases_of_a_batch_come_first_each_once(tmp_path: Path) -> None:
    """Its file stays until the last of them has begun: the run may die again meanwhile."""
    journal = Journal(tmp_path)
    journal.launch(case(1), case(2), case(3))
    [path] = (tmp_path / "inflight").iterdir()
    die(journal)
    there: list[bool] = []

    def verdict(_: Case) -> Verdict:
        there.append(path.exists())
        return PASS

    events = finished(tmp_path, FunctionExecutor(verdict), most=5)
    trials = [each for each in events if isinstance(each, TrialFinished)]
    assert [(each.case.recipe.seed, each.phase) for each in trials[:3]] == [(1, "replay"), (2, "replay"), (3, "replay")]
    assert [each.phase for each in trials[3:]] == ["generate", "generate"]
    assert len({each.case for each in trials}) == 5
    assert [each.deaths for each in events if isinstance(each, CaseResumed)] == [1, 1, 1]
    assert there[:4] == [True, True, False, False]
    assert not list(tmp_path.glob("inflight/*"))


def test_a_resumed_case_is_compared_with_the_oracle_alone_as_a_drawn_one_is(tmp_path: Path) -> None:
    """Else one bug was a finding by the oracle and one by each relation that happened to be in flight."""
    relation = Failure(kernel=KERNEL.name, kind="relation", output="o", check="split_batch", message="O breaks split_batch")

    def verdict(each: Case) -> Verdict:
        return Verdict(status="fail", failures=(relation,)) if each.check == "split_batch" else WRONG

    two = msgspec.structs.replace(case(1).problem, seqlens_q=(3, 2), seqlens_k=(3, 2))
    journal = Journal(tmp_path)
    journal.launch(msgspec.structs.replace(case(1), problem=two, check="split_batch"))
    die(journal)
    events = finished(tmp_path, FunctionExecutor(verdict), most=1)
    [summary] = next(each for each in events if isinstance(each, CampaignFinished)).summaries
    assert [each.identity for each in summary.findings] == [WRONG.failures[0].identity]


def test_a_run_that_dies_again_leaves_those_that_it_has_not_tried(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.launch(case(1), case(2), case(3))
    die(journal)

    def verdict(each: Case) -> Verdict:
        if each.recipe.seed == 2:
            raise SystemError
        return PASS

    with pytest.raises(SystemError):
        finished(tmp_path, FunctionExecutor(verdict))
    assert dict(left_in(tmp_path)) == {1: 1, 2: 1, 3: 1}, "an error of attnfuzz is no death"


def test_a_case_of_a_batch_that_ended_two_runs_is_reported_and_the_others_are_tried(tmp_path: Path) -> None:
    """The first run died in the batch, the second in its second Case, which runs alone then."""
    for cases, deaths in (((case(1), case(2), case(3)), 0), ((case(2),), 1)):
        journal = Journal(tmp_path)
        journal.launch(*cases, deaths=deaths)
        die(journal)
    executor = FunctionExecutor(lambda _: PASS)
    events = finished(tmp_path, executor)
    [skipped] = [each for each in events if isinstance(each, CaseSkipped)]
    assert skipped.reason == "2 runs died while this Case was in flight"
    assert read_case(skipped.path).case == case(2)
    assert [each.recipe.seed for each in executor.cases[:2]] == [1, 3]
    assert case(2) not in executor.cases
    assert not list(tmp_path.glob("inflight/*"))


def test_verdicts_are_remembered_up_to_a_number() -> None:
    memo = Memo()
    for number in range(2500):
        memo[case(number)] = PASS
    assert len(memo) == 2000
    assert case(2499) in memo
    assert case(0) not in memo


def test_of_drawn_cases_that_pass_fewer_are_remembered() -> None:
    """A run of many kernels remembers them for each, and grows until all have as many."""
    runner = TrialRunner(FunctionExecutor(lambda each: WRONG if each.recipe.seed % 100 == 0 else PASS))
    for _ in runner.run_each([case(number) for number in range(1500)], "generate"):
        pass
    for _ in runner.run_each([case(number) for number in range(2000, 2400)], "shrink"):
        pass
    remembered = {each.recipe.seed for each in runner.memo}
    failed = set(range(0, 1500, 100))
    assert remembered == failed | {*range(995, 1500)} | {*range(2000, 2400)}


def test_a_case_that_failed_after_it_had_passed_is_no_longer_one_that_passed() -> None:
    memo = Memo()
    memo.drawn(case(0), PASS)
    memo[case(0)] = WRONG
    for number in range(1, 600):
        memo.drawn(case(number), PASS)
    assert memo[case(0)] == WRONG
    assert case(1) not in memo


def test_remembered_verdicts_share_what_is_the_same_in_all() -> None:
    """Each message of a child has its own copy of the device and the versions, a third of the memory of a Verdict."""
    memo = Memo()

    def verdict(torch: str) -> Verdict:
        text = f'{{"status": "pass", "device": "cpu (of a kind)", "versions": {{"python": "3.11.7", "torch": "{torch}"}}}}'
        return msgspec.json.decode(text, type=Verdict)

    for number, torch in enumerate(("2.13.0", "2.13.0", "2.13.1", "2.13.1")):
        memo[case(number)] = verdict(torch)
    first, second, third, fourth = memo.values()
    assert first.versions is second.versions
    assert first.device is second.device
    assert third == verdict("2.13.1")
    assert third.versions is fourth.versions


def test_a_case_that_was_in_flight_and_has_no_verdict_in_time_stays_so_for_the_next_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.launch(case(1))
    die(journal)

    class Late(FunctionExecutor):
        def finish(self) -> Verdict:
            raise OutOfTime

    for _ in range(2):
        settings = Settings(budget=0.2, out=str(tmp_path), plain=True)
        run_campaign([KERNEL], settings, lambda _: None, Late(lambda _: PASS))
        assert left_in(tmp_path) == [(1, 1)], "no death is counted"
    executor = FunctionExecutor(lambda _: PASS)
    finished(tmp_path, executor)
    assert executor.cases[0] == case(1)
    assert not list(tmp_path.glob("inflight/*"))


def test_what_processes_had_run_before_stored_failures_is_forgotten() -> None:
    """Of the stored Case at work alone it is held, and then until the next drawn one that fails is examined."""
    pasts: list[int] = []

    class Remembers(FunctionExecutor):
        def finish(self) -> Verdict:
            pasts.append(self.cases[-1].recipe.seed)
            return super().finish()

        def forget_pasts(self) -> None:
            pasts.clear()

    runner = TrialRunner(Remembers(lambda _: WRONG))
    for number in range(3):
        runner.run(case(number), "replay")
        runner.run(case(10 + number), "shrink")
        assert pasts == [number, 10 + number]
    for _ in runner.run_each([case(20)], "generate"):
        assert pasts == [2, 12, 20]
    assert not pasts
