"""What a kernel's run counts as what: Cases, Cases of shrinking, reruns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.runs import FunctionExecutor, run_kernel

from attnfuzz.harness.campaign import context, coordinator, kernel_run
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.context import Batch, CampaignContext
from attnfuzz.harness.campaign.corpus import CaseFile, Corpus, read_case
from attnfuzz.harness.campaign.events import Event, Finding, TrialFinished
from attnfuzz.harness.campaign.findings import Findings
from attnfuzz.harness.campaign.kernel_state import KernelState
from attnfuzz.harness.campaign.plan import plan_of
from attnfuzz.harness.campaign.runner import TrialRunner, tries
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.executors import Compiled, Compiler, InProcess, SerialCompiler
from attnfuzz.harness.judge.failure import Failure, Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report.figures import Figures
from attnfuzz.harness.repro.reproduce import Where, repeat, reproduce
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.strategies.case import RELATIONS, Case, Recipe, with_check

KERNEL = registry.get("torch.reference_cpu")
PROBLEM = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=64, dim_v=64, dtype="float32")
CASE = Case(kernel=KERNEL.name, problem=PROBLEM, config=KERNEL.configs(PROBLEM)[0])
WRONG = Failure(kernel=KERNEL.name, kind="mismatch", output="o", check="element", message="O is wrong")
REFUSED = Failure(kernel="fault.refuses", kind="compile-error", check="build", message="refused")
RELATION = Failure(kernel=KERNEL.name, kind="relation", output="o", check="split_batch", message="O breaks split_batch")
PASS = Verdict(status="pass")


def failing(*failures: Failure) -> Verdict:
    return Verdict(status="fail", failures=failures)


def phases(
    executor: FunctionExecutor,
    most: int,
    stored: Sequence[CaseFile] = (),
    max_failures: int | None = 1,
    corpus: Corpus | None = None,
) -> tuple[KernelState, Counter[str]]:
    """A run of at most `most` Cases, and how many trials of each phase it announced."""
    events: list[Event] = []
    settings = Settings(max_examples=most, max_failures=max_failures, out=None)
    run = run_kernel(KERNEL, settings, executor, corpus, stored=stored, listener=events.append)
    return run, Counter(each.phase for each in events if isinstance(each, TrialFinished))


def test_the_runs_of_a_replay_are_not_cases_of_shrinking(tmp_path: Path) -> None:
    """A stored Case that failed in 1 of 2 runs is run 5 times; only the first is a Case of the run."""
    path = Corpus(tmp_path).write(Finding(WRONG.identity, CASE, failing(WRONG), rate=(1, 2)), seed=0)
    stored = read_case(path)
    run, announced = phases(FunctionExecutor(lambda _: PASS), 1, [stored])
    assert tries((1, 2)) == 5
    assert (announced["replay"], announced["rerun"], announced["shrink"]) == (1, 4, 0)
    summary = run.summary()
    assert (summary.cases, summary.reruns, summary.shrink_cases) == (1, 4, 0)


@pytest.mark.parametrize(("minimal", "other", "stays"), [(False, False, False), (True, False, True), (False, True, True)])
def test_a_finding_replaces_the_partly_shrunk_file_of_its_failure(
    minimal: bool, other: bool, stays: bool, tmp_path: Path
) -> None:
    """A run that dies while it shrinks leaves a file, and a Case in flight, which the next run tries first."""
    corpus = Corpus(tmp_path)
    failure = RELATION if other else WRONG
    path = corpus.write(Finding(failure.identity, CASE, failing(failure), shrunk=True, partly=not minimal), seed=0)
    settings = Settings(out=str(tmp_path))
    context = CampaignContext(settings, corpus=corpus)
    state = KernelState(KERNEL, plan_of(KERNEL, settings), context, [read_case(path)])
    in_flight = msgspec.structs.replace(CASE, problem=msgspec.structs.replace(PROBLEM, seqlens_q=(2,)))
    state.findings.open(Finding(WRONG.identity, in_flight, failing(WRONG)))
    closed = state.close(WRONG.identity)
    assert Path(str(closed.path)).exists()
    assert Path(path).exists() == stays


def test_a_relation_that_is_judged_again_is_not_a_case_of_shrinking() -> None:
    """Every relation fails, and the same Case passes by the oracle alone: that is a rerun, then shrinking begins."""
    executor = FunctionExecutor(lambda case: failing(RELATION) if case.check in RELATIONS else PASS)
    run, announced = phases(executor, 60)
    [finding] = run.findings.closed.values()
    first = next(at for at, case in enumerate(executor.cases) if case.check in RELATIONS)
    again = executor.cases[first + 1]
    assert (again.check, again.problem) == ("oracle", executor.cases[first].problem)
    assert announced["rerun"] == run.summary().reruns == 1
    assert announced["shrink"] == finding.shrink_trials
    assert finding.explanation is not None
    assert announced["explain"] == finding.explanation.trials
    assert announced["shrink"] + announced["explain"] == run.summary().shrink_cases


def test_a_replay_runs_until_its_own_failure_shows_and_keeps_the_others(tmp_path: Path) -> None:
    """What fails in another way at once does not end the runs for the failure that shows only sometimes."""
    other = Failure(kernel=KERNEL.name, kind="mismatch", output="dv", check="element", message="dV is wrong")
    verdicts = [failing(other), PASS, failing(WRONG)]
    executor = FunctionExecutor(lambda _: verdicts[len(executor.cases) - 1] if len(executor.cases) <= 3 else PASS)
    path = Corpus(tmp_path).write(Finding(WRONG.identity, CASE, failing(WRONG), rate=(1, 2)), seed=0)
    run, _ = phases(executor, 1, [read_case(path)], max_failures=None)
    assert [each.output for each in run.findings.closed] == ["dv", "o"]


def test_another_failure_does_not_remove_the_stored_case(tmp_path: Path) -> None:
    """A partly shrunk Case of O that fails in dV alone this time: its file stays, and dV's is written beside it."""
    other = Failure(kernel=KERNEL.name, kind="mismatch", output="dv", check="element", message="dV is wrong")
    corpus = Corpus(tmp_path)
    stored = read_case(corpus.write(Finding(WRONG.identity, CASE, failing(WRONG)), seed=0))
    run, _ = phases(FunctionExecutor(lambda _: failing(other)), 1, [stored], corpus=corpus)
    assert [each.output for each in run.findings.closed] == ["dv"]
    assert stored.path.exists()
    again, _ = phases(FunctionExecutor(lambda _: failing(WRONG)), 1, [stored], corpus=corpus)
    [finding] = again.findings.closed.values()
    assert finding.path != str(stored.path), "shrunk to a smaller Case"
    assert not stored.path.exists()


def test_a_full_disk_costs_no_stored_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partly shrunk Case that fails again, where the file of the smaller one cannot be written."""
    corpus = Corpus(tmp_path)
    stored = read_case(corpus.write(Finding(WRONG.identity, CASE, failing(WRONG)), seed=0))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Corpus, "write", full)
    run, _ = phases(FunctionExecutor(lambda _: failing(WRONG)), 1, [stored], corpus=corpus)
    [finding] = run.findings.closed.values()
    assert (finding.path, run.findings.not_kept) == (None, "No space left on device")
    assert stored.path.exists()


def test_a_compile_that_failed_is_kept_though_ctrl_c_ends_the_compiles() -> None:
    answers = iter([Compiled(CASE, 0.5, REFUSED)])

    def compiled(case: Case) -> Compiled:
        for each in answers:
            return replace(each, case=case)
        raise KeyboardInterrupt

    class Interrupted(FunctionExecutor):
        def compiler(self) -> Compiler:
            return SerialCompiler(compiled)

    kernel = registry.get("fault.refuses")
    settings = Settings(out=None, max_examples=1)
    done = run_campaign([kernel], settings, lambda _: None, Interrupted(lambda _: PASS))
    assert done.interrupted
    [summary] = done.summaries
    assert [each.identity for each in summary.findings] == [REFUSED.identity]
    assert (summary.compiles, summary.refused) == (1, 1)


def test_two_failures_that_differ_from_run_to_run_stay_two(tmp_path: Path) -> None:
    """A wrong O in some runs and a NaN in others: only one of them is called nondeterministic."""
    wrong, nan = WRONG, Failure(kernel=KERNEL.name, kind="nonfinite", output="o", check="element", message="O: NaN")
    findings = Findings(KERNEL, Corpus(tmp_path), lambda _: None, 0)
    for failure in (wrong, nan):
        findings.open(Finding(failure.identity, CASE, failing(failure), rate=(1, 3)))
    assert "o" in KERNEL.capabilities.deterministic
    findings.close_all()
    assert {each.kind for each in findings.closed} == {"nondeterministic", "nonfinite"}
    assert len(findings.closed) == 2


def test_a_rate_without_a_failure_is_refused() -> None:
    with pytest.raises(BadArgument, match=r"rate=\(0, 5\): the number of failed runs must be positive; give"):
        tries((0, 5))


def test_a_lost_device_is_a_failure_of_the_case_that_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(case: Case, device: str) -> Verdict:
        raise DeviceLost(case, WRONG)

    monkeypatch.setattr("attnfuzz.harness.trial.sequence.run_trial", lose)
    where = Where("cpu", in_process=True)
    assert reproduce(CASE, where).verdict.failures == (WRONG,)
    done = repeat(CASE, 3, where)
    assert (done.runs, done.failed, [each.failure for each in done.failures]) == (1, 1, [WRONG])


def test_a_rerun_is_no_further_case_of_the_figures() -> None:
    figures = Figures()
    for phase in ("generate", "rerun", "shrink"):
        figures(TrialFinished(KERNEL.name, phase, CASE, failing(WRONG)))
    assert figures.counts[KERNEL.name]["o"].wrong == 1


def test_a_runner_runs_as_often_as_the_rate_demands_and_stops_at_the_failure() -> None:
    executor = FunctionExecutor(lambda _: failing(WRONG) if len(executor.cases) == 3 else PASS)
    runner = TrialRunner(executor)
    assert runner.run(CASE, rate=(1, 2)).failures == (WRONG,)
    assert (runner.trials, runner.memo[CASE].failures) == (3, (WRONG,))
    assert runner.run(CASE).failures == ()
    assert runner.trials == 4


def test_the_first_batch_is_small_and_the_others_are_full() -> None:
    """A child that compiles for each Case of a full batch would have no Verdict before the time is over."""

    class Batches(FunctionExecutor):
        def __init__(self) -> None:
            super().__init__(lambda _: PASS)
            self.sizes: list[int] = []

        def batch(self, cases: Sequence[Case], known: Collection[Identity] | None = None) -> list[Verdict]:
            self.sizes.append(len(cases))
            return super().batch(cases, known)

    executor = Batches()
    # So many of 100 Cases are of one kind, whatever is drawn.
    run_kernel(KERNEL, Settings(max_examples=100, out=None), executor, batch=Batch(True, 8, 1e9))
    assert executor.sizes[0] <= 4
    assert max(executor.sizes) == 8


def test_what_else_fails_in_a_batch_is_not_examined_once_there_are_enough_failures() -> None:
    """A failing relation is tried against the oracle alone in a new process, which on a GPU takes seconds."""
    judged: list[Case] = []
    outputs: list[OutputName] = ["o", "lse", "dq", "dk", "dv"]
    broken: dict[Case, OutputName] = {}

    def verdict(case: Case) -> Verdict:
        judged.append(case)
        # Not in the first batches, which are small; each output is a failure of its own.
        if case.check == "oracle" or len(judged) < 40:
            return PASS
        broken[case] = outputs[len(broken) % len(outputs)]
        return failing(msgspec.structs.replace(RELATION, output=broken[case]))

    executor = FunctionExecutor(verdict)
    settings = Settings(max_examples=500, max_failures=1, shrink=0.001, out=None)
    run_kernel(KERNEL, settings, executor, batch=Batch(True, 96, 1e9))
    assert len(set(broken.values())) > 1
    assert len({with_check(each, "oracle") for each in broken}.intersection(judged)) == 1


def test_the_next_batch_is_sent_before_the_last_is_reported() -> None:
    """A child has work while its worker reports, unless something new has to be shrunk in it."""
    at_work, executor_cases = list[tuple[bool, bool]](), list[tuple[str, str]]()
    failing_seed = 7

    def heard(event: Event) -> None:
        if isinstance(event, TrialFinished):
            executor_cases.append((event.case.id, event.phase))
        if isinstance(event, TrialFinished) and event.phase == "generate":
            at_work.append((bool(event.verdict.failures), bool(executor.at_work)))
        elif isinstance(event, Finding):
            assert not executor.at_work, "shrinking needs the child"

    executor = FunctionExecutor(lambda case: failing(WRONG) if case.recipe.seed % 16 == failing_seed else PASS)
    settings = Settings(max_examples=400, out=None, shrink=0.001, max_failures=None)
    run = run_kernel(KERNEL, settings, executor, batch=Batch(True, 8, 1e9), listener=heard)
    assert len(run.findings.closed) == 1
    drawn = [each for each, phase in executor_cases if phase == "generate"]
    assert len(drawn) == len(set(drawn)) == 400, "each is tried once"
    assert sum(fails for fails, _ in at_work) > 5, "known failures"
    assert not executor.at_work
    assert sum(busy for _, busy in at_work) > 0.8 * len(at_work)
    assert any(fails and busy for fails, busy in at_work)


@pytest.mark.parametrize("spent", [True, False])
@pytest.mark.parametrize("new", [True, False])
def test_a_batch_follows_where_time_is_left_and_no_failure_is_new(spent: bool, new: bool) -> None:
    executor = FunctionExecutor(lambda case: failing(WRONG))
    runner, calls = TrialRunner(executor), list[str]()
    second = [msgspec.structs.replace(CASE, recipe=Recipe(seed=1))]

    def take() -> list[Case]:
        assert executor.at_work, "while the first runs"
        calls.append("take")
        return second

    known = set[Identity]() if new else {WRONG.identity}
    assert len(list(kernel_run._ran(runner, [CASE], Batch(True, 8, 1e9), known, take, lambda: spent))) == 1
    assert calls == ["take"]
    assert list(runner.sent) == list(executor.at_work) == ([] if spent or new else second)


def test_a_debugged_batch_is_told_which_failures_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []

    def run_batch(cases: Sequence[Case], device: str, *, known: object) -> list[Verdict]:
        heard.append((cases, device, known))
        return [PASS]

    monkeypatch.setattr("attnfuzz.harness.trial.batch.run_batch", run_batch)
    executor = InProcess("cpu")
    executor.begin_batch([CASE], {WRONG.identity})
    assert executor.finish_batch() == [PASS]
    assert heard == [([CASE], "cpu", {WRONG.identity})]


def test_a_turn_ends_with_no_batch_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn is another kernel's, in another child: `fresh` of this executor refuses a batch at work."""
    monkeypatch.setitem(context._BATCHES, "cpu", Batch(True, 8, 1e9))
    monkeypatch.setitem(coordinator._LONGEST, "cpu", 0.1)
    executor = FunctionExecutor(lambda _: PASS)
    kernels = [KERNEL, registry.get("fault.nan")]
    settings = Settings(budget=1.0, out=None, workers=1)
    turns = list[str]()

    def heard(event: Event) -> None:
        if isinstance(event, TrialFinished) and turns[-1:] != [event.kernel]:
            turns.append(event.kernel)

    done = run_campaign(kernels, settings, heard, executor)
    assert len(turns) > 2
    assert not done.broken


def test_batches_are_told_which_failures_are_known() -> None:
    """Their patterns are looked for once: that takes longer than the Cases, and a kernel may fail in each."""

    class Batches(FunctionExecutor):
        def __init__(self) -> None:
            super().__init__(lambda case: failing(WRONG) if case.problem.causal else PASS)
            self.known: list[Collection[Identity] | None] = []

        def batch(self, cases: Sequence[Case], known: Collection[Identity] | None = None) -> list[Verdict]:
            self.known.append(None if known is None else frozenset(known))
            return super().batch(cases, known)

    executor = Batches()
    run_kernel(KERNEL, Settings(max_examples=100, out=None), executor, batch=Batch(True, 24, 1e9))
    assert executor.known[0] == frozenset()
    assert executor.known[-1] == {WRONG.identity}
