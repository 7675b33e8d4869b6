"""What a kernel's run counts as what: Cases, Cases of shrinking, reruns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from support.runs import FunctionExecutor

from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.corpus import CaseFile, Corpus, read_case
from attnfuzz.harness.campaign.events import Event, Finding, TrialFinished
from attnfuzz.harness.campaign.kernel_run import KernelRun
from attnfuzz.harness.campaign.runner import TrialRunner, tries
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

KERNEL = registry.get("torch.reference_cpu")
PROBLEM = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=64, dim_v=64, dtype="float32")
CASE = Case(kernel=KERNEL.name, problem=PROBLEM, config=KERNEL.configs(PROBLEM)[0])
WRONG = Failure(kernel=KERNEL.name, kind="mismatch", output="o", check="element", message="O is wrong")
RELATION = Failure(kernel=KERNEL.name, kind="relation", output="o", check="split_batch", message="O breaks split_batch")
PASS = Verdict(status="pass")


def failing(*failures: Failure) -> Verdict:
    return Verdict(status="fail", failures=failures)


def phases(executor: FunctionExecutor, most: int, stored: Sequence[CaseFile] = ()) -> tuple[KernelRun, Counter[str]]:
    """A run of at most `most` Cases, and how many trials of each phase it announced."""
    events: list[Event] = []
    settings = Settings(max_examples=most, max_failures=1, out=None)
    run = KernelRun(KERNEL, CampaignContext(settings, executor, events.append), stored)
    run.run()
    return run, Counter(each.phase for each in events if isinstance(each, TrialFinished))


def test_the_runs_of_a_replay_are_not_cases_of_shrinking(tmp_path: object) -> None:
    """A stored Case that failed in 1 of 2 runs is run 5 times; only the first is a Case of the run."""
    path = Corpus(str(tmp_path)).write(Finding(WRONG.identity, CASE, failing(WRONG), rate=(1, 2)), seed=0)
    stored = read_case(path)
    run, announced = phases(FunctionExecutor(lambda _: PASS), 1, [stored])
    assert tries((1, 2)) == 5
    assert (announced["replay"], announced["rerun"], announced["shrink"]) == (1, 4, 0)
    summary = run.summary()
    assert (summary.cases, summary.reruns, summary.shrink_cases) == (1, 4, 0)


def test_a_relation_that_is_judged_again_is_not_a_case_of_shrinking() -> None:
    """Every relation fails, and the same Case passes by the oracle alone: that is a rerun, then shrinking begins."""
    executor = FunctionExecutor(lambda case: PASS if case.check == "oracle" else failing(RELATION))
    run, announced = phases(executor, 60)
    [finding] = run.findings.closed.values()
    first = next(at for at, case in enumerate(executor.cases) if case.check != "oracle")
    again = executor.cases[first + 1]
    assert (again.check, again.problem) == ("oracle", executor.cases[first].problem)
    assert announced["rerun"] == run.summary().reruns == 1
    assert announced["shrink"] == run.summary().shrink_cases == finding.shrink_trials


def test_a_runner_runs_as_often_as_the_rate_demands_and_stops_at_the_failure() -> None:
    executor = FunctionExecutor(lambda _: failing(WRONG) if len(executor.cases) == 3 else PASS)
    runner = TrialRunner(executor)
    assert runner.run(CASE, rate=(1, 2)).failures == (WRONG,)
    assert (runner.trials, runner.memo[CASE].failures) == (3, (WRONG,))
    assert runner.run(CASE).failures == ()
    assert runner.trials == 4
