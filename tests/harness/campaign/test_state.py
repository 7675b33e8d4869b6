"""Failures that need what earlier Cases left in the process: found, cut to few Cases, kept, and shown again in a new process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from support.mutants import kernel_of, mutants
from support.runs import FunctionExecutor
from support.state_faults import FAULTS

from attnfuzz.harness.campaign.blob import blob_of, stored_case
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.chance import often
from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.campaign.explainer import Explainer
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.campaign.shrink import Shrinker
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.gate.parts.correctness import replay
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.outcomes import Past
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.plugin.run import _run_again
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case, case_from_object
from attnfuzz.strategies.shrink_steps import simpler

SECONDS = {"tickets": 10.0}
"""Time for shrinking, where it is not 20 s: a busy machine takes several times as long as an idle one."""
OWN_CALLS = {"scale", "mask", "counter"}
"""Faults that a Case with earlier calls of its own shows as well."""
STATELESS = {"always", "sometimes"}


@pytest.fixture(autouse=True)
def _only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture(scope="module")
def children() -> Iterator[Isolated]:
    made = Isolated("cpu", deadline=4.0)
    yield made
    made.close()


@pytest.fixture
def executor(children: Isolated) -> Isolated:
    """Processes that have run nothing."""
    children.fresh()
    return children


def case_of(kernel: str, **changed: Any) -> Case:
    problem: dict[str, Any] = {"seqlens_q": (2,), "seqlens_k": (3,), "dim_qk": 16, "dim_v": 16, "dtype": "float32"}
    return Case(kernel=f"state.{kernel}", problem=Problem(**problem | changed))


def found(name: str, out: Path, executor: Isolated, **changed: Any) -> tuple[Finding, Path]:
    """The first failure of a campaign, and its case file."""
    kernel = registry.register(FAULTS[name])
    settings: dict[str, Any] = {
        "max_examples": 100,
        "max_failures": 1,
        "seed": 1,
        "shrink": SECONDS.get(name, 20.0),
        "out": str(out),
    }
    done = run_campaign([kernel], Settings(**settings | changed), lambda _: None, executor)
    assert not done.broken
    (finding,) = done.findings
    assert finding.path is not None
    return finding, Path(finding.path)


def repro(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["repro", str(path), "--device", "cpu", "--deadline", "4s", *arguments])


@pytest.mark.parametrize("name", [each for each in FAULTS if each not in STATELESS])
def test_a_failure_that_needs_earlier_cases_is_kept_with_them(name: str, tmp_path: Path, executor: Isolated) -> None:
    finding, path = found(name, tmp_path, executor)
    stored = read_case(path)
    assert stored.case == finding.case
    assert finding.rate is None
    # The fourth call is wrong after three, and a workspace has to shrink before it can grow again.
    assert len(finding.case.after) <= {"fourth": 3, "counter": 3, "workspace": 2}.get(name, 1)
    assert bool(finding.case.after) or name in OWN_CALLS
    again = repro(path)
    assert again.exit_code == 1, again.output
    if finding.case.after:
        assert "passes alone; fails after th" in again.output
        executor.fresh()
        assert not executor.trial(finding.case.alone).failures


def test_a_failure_without_state_has_no_earlier_cases(tmp_path: Path, executor: Isolated) -> None:
    finding, path = found("always", tmp_path, executor, shrink=3.0)
    assert (finding.case.after, finding.rate) == ((), None)
    assert "after" not in json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_chance_is_no_state(seed: int, tmp_path: Path, executor: Isolated) -> None:
    # It is true chance: on a busy machine, which runs the Case a few times only, it may look as if it needed earlier ones.
    finding, _ = found("sometimes", tmp_path, executor, seed=seed)
    assert finding.case.after == ()
    assert often(finding.rate) or finding.seldom or finding.partly


@pytest.mark.parametrize("bug", ["HST-40", "HST-41"])
def test_a_cache_of_compiled_code_with_a_wrong_key_is_found(bug: str, tmp_path: Path) -> None:
    """In a copy of triton.varlen, where a spare builds in advance."""
    kernel = registry.register(kernel_of(mutants()[bug]))
    settings = Settings(max_examples=80, max_failures=1, seed=2, shrink=20.0, plain=True, out=str(tmp_path))
    done = run_campaign([kernel], settings, lambda _: None)
    (finding,) = done.findings
    assert finding.rate is None
    assert len(finding.case.after) <= 1
    assert finding.case.after or finding.case.check == "other_mask"
    assert repro(Path(str(finding.path))).exit_code == 1


# --- what a child process has done


def test_a_process_keeps_what_it_has_run(executor: Isolated) -> None:
    registry.register(FAULTS["dims"])
    small, large = case_of("dims"), case_of("dims", dim_qk=32, dim_v=32)
    assert executor.trial(small).status == "pass"
    assert executor.trial(large).status == "fail"
    assert executor.past(large) == Past((small,))
    executor.fresh()
    assert executor.trial(large).status == "pass"
    assert executor.past(large) == Past()
    after = replace(large, after=(small,))
    for _ in range(2):
        assert executor.trial(after).status == "fail", "each time in a new process"
        assert executor.past(after) == Past()
    assert executor.trial(large).status == "fail", "it runs where both have run"
    assert executor.past(large) == Past((small, large))
    [_, verdict] = executor.batch([small, large])
    assert verdict.failures
    assert executor.past(large) == Past((small, large, large, small))


def test_what_processes_had_run_is_forgotten_once_failures_are_examined(executor: Isolated) -> None:
    """Each of 200 failures kept up to 256 Cases: over hours they were most of what a worker remembered."""
    registry.register(FAULTS["always"])
    runner = TrialRunner(executor)
    for case, verdict in runner.run_each([case_of("always", seqlens_q=(n,)) for n in (1, 2, 3)], "generate"):
        assert verdict.failures
        assert runner.past(case) == executor._pasts[case]
    assert not executor._pasts
    together = [case_of("always", seqlens_q=(n,)) for n in (4, 5, 6)]
    for number, (case, verdict) in enumerate(runner.run_all(together, "generate")):
        assert verdict.failures
        assert runner.past(case).cases[-number - 1 :] == (case_of("always", seqlens_q=(3,)), *together[:number])
    assert not executor._pasts


def test_a_past_is_bounded() -> None:
    cases = [case_of("dims", seqlens_q=(n,)) for n in range(1, 301)]
    past = Past().plus(cases)
    assert (past.cases, past.dropped) == (tuple(cases[-256:]), 44)
    assert past.plus([replace(cases[0], after=(cases[1],))]).cases[-2:] == (cases[1], cases[0])


def test_a_new_process_has_built_nothing(executor: Isolated) -> None:
    """A spare builds what passed last, in advance: with a wrong key, another Case would get that code."""
    registry.register(FAULTS["mask"])
    causal, plain = case_of("mask", causal="top_left", seqlens_q=(3,)), case_of("mask", seqlens_q=(3,))
    assert executor.trial(causal).status == "pass"
    executor.settle()
    executor.fresh()
    assert executor.trial(plain).status == "pass"
    for _ in range(3):
        # The next spare has built the plain one.
        executor.fresh()
        assert executor.trial(causal).status == "pass"
        executor.fresh()
        assert executor.trial(plain).status == "pass"
    assert executor.trial(causal).status == "fail"
    assert executor.past(causal) == Past((plain,))


def test_what_a_spare_has_built_is_in_its_past(executor: Isolated) -> None:
    for name in ("aborts", "mask"):
        registry.register(FAULTS[name])
    causal, plain = case_of("mask", causal="top_left", seqlens_q=(3,)), case_of("mask", seqlens_q=(3,))
    dies = replace(case_of("aborts", seqlens_q=(9,)), after=(case_of("aborts", seqlens_q=(1,)),))
    assert executor.trial(causal).status == "pass"
    executor.settle()
    # Its process, a new one, takes no spare that has built; the next task may.
    assert executor.trial(dies).failures[0].kind == "crash"
    executor._supervisor._children.idle.clear()
    executor.settle()
    verdict = executor.trial(plain)
    assert bool(verdict.failures) == bool(executor.past(plain))


def test_a_hang_that_needs_earlier_cases_is_no_slowness(executor: Isolated) -> None:
    registry.register(FAULTS["waits"])
    one, two = case_of("waits"), case_of("waits", seqlens_q=(2, 1), seqlens_k=(3, 1))
    for _ in range(4):
        executor.begin(one)
        assert executor.finish().status == "pass"
    executor.begin(two)
    executor.finish()
    executor.begin(one)
    [failure] = executor.finish().failures
    assert (failure.kind, failure.check) == ("hang", "kernel")
    assert executor.past(one).cases[-1] == two
    executor.fresh()
    executor.begin(one)
    assert executor.finish().status == "pass"


def test_an_earlier_case_that_fails_is_another_failure(executor: Isolated) -> None:
    registry.register(FAULTS["aborts"])
    small, large = case_of("aborts", seqlens_q=(1,)), case_of("aborts", seqlens_q=(9,))
    [failure] = executor.trial(replace(small, after=(small, large))).failures
    assert (failure.kind, failure.check) == ("crash", "earlier")
    assert failure.message.startswith("earlier Case 2 of 2: SIGABRT")


# --- cutting


class Process(FunctionExecutor):
    """An executor of one process, in which a Case fails after those that `needs` says."""

    def __init__(self, needs: Any, past: list[Case]) -> None:
        super().__init__(lambda _: Verdict(status="pass"), self._replace)
        self._needs, self._run = needs, list(past)
        self._pasts: dict[Case, Past] = {}
        self.longest = 0

    def _replace(self) -> None:
        self._run = []

    def finish(self) -> Verdict:
        case = self.cases[-1]
        run = list(case.after) if case.after else self._run
        self.longest = max(self.longest, len(case.after))
        past, fails = Past(tuple(run)), self._needs(run, case.alone)
        if not case.after:
            self._run.append(case)
        self._pasts[case] = past
        return Verdict(status="fail", failures=(FAILED,)) if fails else Verdict(status="pass")

    def past(self, case: Case) -> Past:
        return self._pasts.get(case, Past())


FAILED = Failure(kernel="state.any", kind="mismatch", output="o", check="element", message="")


def shrunk(executor: Process, case: Case) -> Finding:
    runner = TrialRunner(executor)
    verdict = runner.run(case)
    assert verdict.failures
    return Shrinker(Finding(FAILED.identity, case, verdict), runner, lambda _: True, ()).shrink(60.0)


def keys(case: Case) -> int:
    return max(case.problem.seqlens_k)


def test_a_long_past_is_cut_to_what_is_needed() -> None:
    past = [case_of("any", seqlens_k=(n % 40 + 1,)) for n in range(200)]

    def needs(run: list[Case], case: Case) -> bool:
        wide = [at for at, each in enumerate(run) if keys(each) >= 37]
        return keys(case) >= 5 and bool(wide) and any(keys(each) == 3 for each in run[wide[0] :])

    executor = Process(needs, past)
    finding = shrunk(executor, case_of("any", seqlens_k=(30,)))
    assert [keys(each) for each in finding.case.after] == [37, 3]
    assert (keys(finding.case), finding.rate, finding.partly) == (5, None, False)
    assert executor.longest < 200, "the latest are tried first"


def test_a_case_that_differs_little_is_tried_early() -> None:
    alike = case_of("any", seqlens_q=(4,), causal="top_left", heads=6, kv_heads=3)
    others = [case_of("any", seqlens_q=(n + 10,), dim_qk=32, softmax_scale=2.0) for n in range(200)]
    executor = Process(lambda run, case: alike in run and case.problem.causal is None, [alike, *others])
    finding = shrunk(executor, replace(alike, problem=replace(alike.problem, causal=None)))
    assert len(finding.case.after) == 1
    assert executor.longest == 1


def test_what_fails_neither_alone_nor_after_earlier_cases_has_a_rate() -> None:
    shows = itertools.cycle((True, True, False))
    finding = shrunk(Process(lambda *_: next(shows), [case_of("any")] * 3), case_of("any"))
    assert finding.case.after == ()
    assert finding.rate is not None
    assert finding.rate[0] < finding.rate[1]


def test_ctrl_c_while_earlier_cases_are_cut_keeps_those_so_far() -> None:
    past = [case_of("any", seqlens_k=(n + 1,)) for n in range(64)]
    executor = Process(lambda run, _: len(run) >= 11, past)
    runner = TrialRunner(executor)
    case = case_of("any")
    shrinker = Shrinker(Finding(FAILED.identity, case, runner.run(case)), runner, lambda _: True, ())
    trials = itertools.count()

    def interrupt(*_: Any) -> None:
        if shrinker.finding.case.after and next(trials) == 3:
            raise KeyboardInterrupt

    runner._finished = interrupt
    with pytest.raises(KeyboardInterrupt):
        shrinker.shrink(60.0)
    assert 11 <= len(shrinker.finding.case.after) <= 16
    assert (shrinker.finding.partly, shrinker.finding.rate) == (True, None)


def test_a_step_to_a_failure_that_needs_no_earlier_case_drops_them() -> None:
    finding = shrunk(
        Process(lambda run, case: keys(case) >= 2 and (bool(run) or keys(case) == 2), [case_of("any")]),
        case_of("any", seqlens_k=(7,)),
    )
    assert (finding.case.after, keys(finding.case), finding.rate) == ((), 2, None)


def test_what_ran_too_long_ago_is_said() -> None:
    executor = Process(lambda *_: executor.longest == 0 and len(executor.cases) < 3, [case_of("any")])
    runner = TrialRunner(executor)
    case = case_of("any")
    verdict = runner.run(case)
    executor._pasts[case] = Past((case,), 44)
    finding = Shrinker(Finding(FAILED.identity, case, verdict), runner, lambda _: True, ()).shrink(60.0)
    assert (finding.rate, finding.untried) == ((2, 11), 44)
    explanation = Explainer(finding, runner, {}, lambda _: True).explain(60.0, 60.0)
    assert explanation.ended.endswith("; 44 Cases that its process had run before could not be run again")


def test_no_time_is_no_search() -> None:
    executor = Process(lambda run, _: bool(run), [case_of("any")])
    runner = TrialRunner(executor)
    case = case_of("any")
    finding = Shrinker(Finding(FAILED.identity, case, runner.run(case)), runner, lambda _: True, ()).shrink(0.0)
    assert (finding.case, finding.partly, runner.trials) == (case, True, 1)


def test_steps_change_what_cases_have_in_common_together() -> None:
    case = case_of("any", heads=4, kv_heads=2)
    steps = list(simpler(replace(case, after=(case, replace(case, check="twice"))), ()))
    assert any(each.problem.heads == 1 == each.after[0].problem.heads == each.after[1].problem.heads for each in steps)
    assert any(each.problem.heads == 4 and each.after[0].problem.heads == 1 for each in steps)
    assert {len(each.after) for each in steps} == {1, 2}, "one stays: alone it does not fail"


# --- case files


def kept(folder: Path, **changed: Any) -> Path:
    registry.register(FAULTS["dims"])
    data = {**case_of("dims", dim_qk=32, dim_v=32).to_object(), "after": [{"problem": case_of("dims").to_object()["problem"]}]}
    path = folder / "case.json"
    path.write_text(json.dumps({**data, **changed}))
    return path


def test_every_way_to_run_a_case_again_runs_its_earlier_cases(tmp_path: Path) -> None:
    path = kept(tmp_path)
    case = read_case(path).case
    assert stored_case(blob_of(case)).case == case
    for arguments in (("--in-process", "--repeat", "2"), ("--in-process", "--json")):
        result = repro(path, *arguments)
        assert result.exit_code == 1, result.output
    assert case_from_object(json.loads(result.output)["case"]) == case
    shown = CliRunner().invoke(cli.main, ["show", str(path)]).output
    assert "passes alone; fails after this Case in the same process" in shown
    assert "1 of 1            dims: 16 x 16" in shown


def test_a_script_says_that_it_makes_one_call(tmp_path: Path) -> None:
    path = kept(tmp_path)
    result = CliRunner().invoke(cli.main, ["repro", str(path), "--device", "cpu", "--script", str(tmp_path / "x.py")])
    assert result.exit_code == 2
    assert "passes alone; fails after this Case in the same process; a short script makes one call" in result.output
    assert "run it by attnfuzz repro CASE" in result.output


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (7, "case.after=7: not a list of at most 1000 earlier Cases; give a file that `attnfuzz run` wrote"),
        ({"0": {}}, "case.after={"),
        ([7], "case.after[0]=7: it has no problem; an earlier Case has problem, recipe, config, check and schedule"),
        ([{"problem": {"seqlens_q": [1]}}], "case.after[0].problem: Object missing required field `seqlens_k`"),
        (
            [{"problem": {}, "after": []}],
            "case.after[0].after: no such part; an earlier Case has problem, recipe, config, check and schedule",
        ),
        ([{"problem": {}}] * 1001, "not a list of at most 1000 earlier Cases"),
    ],
)
def test_a_damaged_sequence_is_refused(after: Any, message: str, tmp_path: Path) -> None:
    path = kept(tmp_path, after=after)
    for command in ("repro", "show"):
        result = CliRunner().invoke(cli.main, [command, str(path)])
        assert (result.exit_code, message in result.output) == (2, True), result.output


def test_an_earlier_case_that_cannot_run_any_more_is_named(tmp_path: Path) -> None:
    problem = case_of("dims").to_object()["problem"]
    path = kept(tmp_path, after=[{"problem": problem}, {"problem": problem, "config": {"tile": 64}}])
    result = repro(path)
    assert result.exit_code == 2
    assert "its failure needs earlier Cases, and number 2 of 2 cannot run any more: config=" in result.output


def test_a_campaign_replays_a_case_with_its_earlier_ones(tmp_path: Path, executor: Isolated) -> None:
    kernel = registry.register(FAULTS["dims"])
    (tmp_path / "cases").mkdir()
    stored = kept(tmp_path).rename(tmp_path / "cases" / "state.dims-o-mismatch-0.json")
    settings = Settings(max_examples=1, max_failures=1, shrink=2.0, out=str(tmp_path))
    (finding,) = run_campaign([kernel], settings, lambda _: None, executor).findings
    assert len(finding.case.after) == 1
    assert finding.rate is None
    assert stored.exists()


def test_the_gate_and_pytest_replay_earlier_cases_too(tmp_path: Path, executor: Isolated) -> None:
    stored = read_case(kept(tmp_path))
    part = replay(FAULTS["dims"], "cpu", [stored], executor)
    assert part.outcome == "fail"
    with pytest.raises(pytest.fail.Exception, match=r"FAILED .*case.json(.|\n)*passes alone; fails after this Case"):
        _run_again(stored, Settings(in_process=True))
