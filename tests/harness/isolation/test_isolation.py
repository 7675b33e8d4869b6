"""Isolation through the real campaign: fault kernels, runs that die, failures that show only sometimes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.runs import FunctionExecutor

from attnfuzz.harness.audit.selftest import faults as selftest
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.chance import often
from attnfuzz.harness.campaign.corpus import Corpus, read_case
from attnfuzz.harness.campaign.events import CaseResumed, CaseSkipped, Event, Finding
from attnfuzz.harness.campaign.journal import Journal, left_behind
from attnfuzz.harness.campaign.runner import TrialRunner, tries
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.campaign.shrink import Shrinker
from attnfuzz.harness.isolation import reaper
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.outcomes import Death, Error, Past
from attnfuzz.harness.isolation.supervisor import Supervisor
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.repro.reproduce import Where, reproduce
from attnfuzz.harness.trial.build import build_kernel
from attnfuzz.harness.trial.errors import MEMORY_TAKEN
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

NAMES = selftest.fault_names("cpu")
COMMAND = [sys.executable, "-P", "-m", "attnfuzz.harness.cli"]


@pytest.fixture(scope="module")
def executor() -> Iterator[Isolated]:
    made = Isolated("cpu", deadline=5.0)
    yield made
    made.close()
    assert not list(reaper.marked(made.run))


def case_of(name: str, n_q: int = 1, n_k: int = 3, **changed: Any) -> Case:
    kernel = registry.get(name)
    problem = Problem(seqlens_q=(n_q,), seqlens_k=(n_k,), dim_qk=16, dim_v=16, dtype="float32", **changed)
    return Case(kernel=name, problem=problem, config=kernel.configs(problem)[0])


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(0, id="first third", marks=pytest.mark.slow),
        pytest.param(1, id="second third", marks=pytest.mark.slow),
        pytest.param(2, id="last third", marks=pytest.mark.slow),
    ],
)
def test_every_fault_is_told_shrunk_and_survived(part: int) -> None:
    third = -(-len(NAMES) // 3)
    names = NAMES[part * third : (part + 1) * third]
    done = selftest.faults("cpu", lambda _: None, names, restarts=20)
    wrong = {row.title: row.wrong for row in done.rows if row.wrong}
    assert not wrong
    assert not done.leaks.wrong
    assert done.right
    assert len(done.rows) == len(names) + (1 if any(name != "fault.four" for name in names) else 0)
    # The goal is 0.2 s with a child that stands ready; this machine may be busy.
    assert all(row.recovery is None or row.recovery < 2 for row in done.rows)


def test_a_selftest_can_fail() -> None:
    """A table that is right whatever happens would prove nothing."""
    assert selftest.Leaks(1, 1.0, (10, 11), (0, 0), ()).wrong == ("file descriptors grew from 10 to 11",)
    assert selftest.Leaks(1, 1.0, (10, 10), (0, 1 << 30), ()).wrong == ("memory grew by 1024 MiB",)
    assert selftest.Leaks(1, 1.0, (10, 10), (0, 0), ("process 3",)).wrong == ("left behind: process 3",)


def finished(name: str, tmp_path: Path, **changed: Any) -> tuple[Any, list[Event]]:
    events: list[Event] = []
    settings = Settings(**{"max_examples": 90, "max_failures": 1, "deadline": 5.0, "out": str(tmp_path), **changed})
    return run_campaign([registry.get(name)], settings, events.append), events


@pytest.mark.slow
def test_a_row_that_is_wrong_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [summary] = finished("fault.abort", tmp_path)[0].summaries
    right = selftest.row_of("cpu", summary)
    assert (right.wrong, right.got, right.minimal) == ((), "crash", "1x3")
    for fault, told in (
        ("kill", None),
        ("raises", "its kind is crash, not exception"),
        ("onelength", "the minimal case is 17x1 with 1 head"),
    ):
        wrong = selftest.row_of("cpu", _renamed(summary, fault))
        assert (told is None) == (not wrong.wrong)
        assert told is None or told in wrong.wrong
    empty = selftest.row_of("cpu", _renamed(summary, "abort", findings=()))
    assert empty.wrong == (f"nothing found in {summary.cases} cases",)
    assert selftest.row_of("cpu", _renamed(summary, "noise")).wrong[0].startswith("found fault.abort: crash in kernel")
    assert len(selftest.row_of("cpu", _renamed(summary, "four")).wrong) == 5
    assert "its Case has none before it" in selftest.row_of("cpu", _renamed(summary, "third")).wrong


def _renamed(summary: Any, fault: str, **changed: Any) -> Any:
    from dataclasses import replace

    return replace(summary, kernel=f"fault.{fault}", **changed)


@pytest.mark.parametrize("config", [Config(tile_m=16), Config(block="32")])
def test_a_config_that_the_kernel_cannot_read_is_refused_as_any_other(config: Config, executor: Isolated) -> None:
    """triton.flex's compile key needs a whole `block`: it is asked of what the kernel supports only."""
    pytest.importorskip("triton")
    kernel, problem = registry.get("triton.flex"), Problem(seqlens_q=(8,), seqlens_k=(8,), dim_qk=16, dim_v=16, packing="dense")
    with pytest.raises(BadArgument, match=r"triton.flex does not support it: config=.*: not among configs"):
        executor.trial(Case(kernel=kernel.name, problem=problem, config=config))
    with pytest.raises(BadArgument, match=r"triton.flex does not take it: config=.*: not among configs"):
        build_kernel(kernel, problem, config, "cpu")


# --- what a death says


def test_a_crash_is_a_failure_with_its_last_words(executor: Isolated) -> None:
    verdict = executor.trial(case_of("fault.abort"))
    [failure] = verdict.failures
    assert (failure.kind, failure.check, failure.message) == ("crash", "kernel", "SIGABRT at host.py:_abort")
    assert "planted: assertion `tile < tiles' failed" in failure.detail
    assert "most recent call first" in failure.detail
    assert verdict.device.startswith("cpu")
    assert verdict.versions["torch"]
    assert executor.trial(case_of("fault.abort", n_k=2)).status == "pass"


def test_a_guard_says_what_was_overstepped(executor: Isolated) -> None:
    [failure] = executor.trial(case_of("fault.bounds")).failures
    assert failure.message == "4 2-byte words were written past the end of a tensor of the kernel's own, (1, 1, 16) torch.float32"


class Answers(Supervisor):
    """Outcomes in order, whatever is asked."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes, self.limits, self.fresh, self.past = list(outcomes), list[float](), 0, Past()

    def take_late_death(self) -> None:
        return None

    def begin(self, task: Any) -> Any:
        self.limits.append(task.deadlines["kernel"])
        return SimpleNamespace(past=self.past)

    def finish(self, running: Any, until: float | None = None) -> Any:
        return self.outcomes.pop(0)

    def replace(self) -> None:
        self.fresh += 1

    def hint(self, warm: Any) -> None:
        """Not needed: no child is started."""


def death(why: Any, stage: str, limit: float = 0.5, status: int | None = -9) -> Death:
    return Death(why, stage, 0.5, limit, status, "", 0)


def answering(executor: Isolated, monkeypatch: pytest.MonkeyPatch, *outcomes: Any) -> Answers:
    executor.describe()
    answers = Answers(*outcomes)
    monkeypatch.setattr(executor, "_supervisor", answers)
    monkeypatch.setattr(executor._deadlines, "_hangs", set())
    return answers


def test_late_may_be_slow_and_is_tried_once_more_without_haste(executor: Isolated, monkeypatch: pytest.MonkeyPatch) -> None:
    good = executor.trial(case_of("fault.abort", n_k=1))
    for _ in range(3):
        executor.begin(case_of("fault.abort", n_k=1))
        good = executor.finish()
    reply = executor._supervisor.run(executor._task(case_of("fault.abort", n_k=1), executor._deadlines.full))
    answers = answering(executor, monkeypatch, death("hang", "kernel"), reply)
    executor.begin(case_of("fault.abort", n_k=2))
    assert executor.finish().status == good.status == "pass"
    hasty, full = answers.limits
    assert 0.5 <= hasty < full == 5.0, "hasty at first, the full time then"
    assert answers.fresh == 1, "in a child of its own"
    # A hang that is known needs no second look.
    answers = answering(executor, monkeypatch, death("hang", "kernel"), death("hang", "kernel", 5.0), death("hang", "kernel"))
    executor.begin(case_of("fault.abort", n_k=2))
    assert executor.finish().failures[0].kind == "hang"
    executor.begin(case_of("fault.abort", n_k=2))
    assert executor.finish().failures[0].kind == "hang"
    assert len(answers.limits) == 3


def test_the_cases_before_one_that_hung_are_run_again_without_haste(executor: Isolated, monkeypatch: pytest.MonkeyPatch) -> None:
    """On busy cores torch.flex, which compiles in its calls, took four seconds after them where one had been its most."""
    case = case_of("fault.abort", n_k=1)
    for _ in range(3):
        executor.begin(case)
        executor.finish()
    reply = executor._supervisor.run(executor._task(case, executor._deadlines.full))
    answers = answering(executor, monkeypatch, death("hang", "kernel"), reply, reply)
    answers.past = Past((case_of("fault.abort", n_k=2),))
    executor.begin(case)
    assert executor.finish().status == "pass"
    hasty, *patient = answers.limits
    assert 0.5 <= hasty < 5.0
    assert patient == [5.0, 5.0]
    assert answers.fresh == 2


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (death("hang", "oracle", 5.0), "the oracle takes too long"),
        (death("memory", "judge"), "the oracle needs too much memory"),
        (Error("OutOfMemoryError", "CUDA out of memory", ""), "the oracle needs too much memory"),
        (Error("MemoryError", f"MemoryError: {MEMORY_TAKEN}: CUDA out of memory", ""), MEMORY_TAKEN),
    ],
)
def test_what_the_harness_cannot_judge_blames_no_kernel(
    executor: Isolated, monkeypatch: pytest.MonkeyPatch, outcome: Any, why: str
) -> None:
    answers = answering(executor, monkeypatch, outcome, outcome)
    verdict = executor.trial(case_of("fault.abort"))
    assert (verdict.status, verdict.failures, answers.fresh) == ("pass", (), 1)
    assert {figures.unjudged for figures in verdict.figures.values()} == {why}
    assert set(verdict.figures) == {"o", "lse", "dq", "dk", "dv"}


def test_a_process_that_dies_twice_in_the_oracle_was_broken_by_the_kernel(
    executor: Isolated, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(executor, monkeypatch, death("exit", "oracle", status=-11), death("exit", "oracle", status=-11))
    [failure] = executor.trial(case_of("fault.abort")).failures
    assert (failure.kind, failure.check, failure.message) == ("crash", "oracle", "SIGSEGV")


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (death("exit", "judge", status=0), "exit code 0"),
        (death("exit", "oracle", status=3), "exit code 3"),
        (death("exit", "inputs", status=-11), "SIGSEGV"),
        (death("exit", "judge", status=-9), None),
        (death("exit", "judge", status=-15), None),
        (death("memory", "judge"), None),
    ],
)
def test_a_process_that_ends_itself_once_outside_of_a_call_is_a_crash_of_its_kernel(
    executor: Isolated, monkeypatch: pytest.MonkeyPatch, end: Any, kind: str | None
) -> None:
    """A thread that a call has started, say; another process may have sent SIGKILL or SIGTERM."""
    reply = executor._supervisor.run(executor._task(case_of("fault.abort", n_k=1), executor._deadlines.full))
    answering(executor, monkeypatch, end, reply)
    failures = executor.trial(case_of("fault.abort", n_k=1)).failures
    assert [(each.kind, each.check, each.message) for each in failures] == ([("crash", "afterwards", kind)] if kind else [])


# --- failures that show only sometimes


def sometimes(rate: float | None, seed: int = 1, n_k: int = 40) -> tuple[Shrinker, dict[str, int]]:
    """A Shrinker on Cases that fail, if they have three keys, at `rate`."""
    import random

    rng, counts = random.Random(seed), {"runs": 0, "fresh": 0}

    def verdict(case: Case) -> Verdict:
        counts["runs"] += 1
        shows = max(case.problem.seqlens_k) >= 3 and (rate is None or rng.random() < rate)
        return Verdict(status="fail", failures=(FAILED,)) if shows else Verdict(status="pass")

    def fresh() -> None:
        counts["fresh"] += 1

    return Shrinker(sighting(n_k), TrialRunner(FunctionExecutor(verdict, fresh)), lambda case: True, ()), counts


FAILED = Failure(kernel="acme.flash", kind="mismatch", output="o", check="element", message="")


def sighting(n_k: int = 40) -> Finding:
    problem = Problem(seqlens_q=(7, 1), seqlens_k=(n_k, 3), dim_qk=8, dim_v=8)
    verdict = Verdict(status="fail", failures=(FAILED,))
    return Finding(FAILED.identity, Case(kernel="acme.flash", problem=problem), verdict, cases_to_find=1)


def test_what_shows_every_time_has_no_rate() -> None:
    shrinker, counts = sometimes(None)
    seen = shrinker.shrink(60.0)
    # A new process for the first Case and for the last: what only a used one shows is another failure.
    assert (seen.rate, seen.partly, counts["fresh"]) == (None, False, 2)
    assert (seen.case.problem.seqlens_q, seen.case.problem.seqlens_k) == ((1,), (3,))
    assert seen.shrink_trials == counts["runs"] < 20


def test_what_shows_sometimes_is_measured_and_still_shrunk() -> None:
    measured = 0
    for seed in range(8):
        shrinker, counts = sometimes(0.4, seed)
        seen = shrinker.shrink(60.0)
        # It may show three times running: then it passes for one that shows every time.
        measured += seen.rate is not None
        if seen.rate is not None:
            assert 1 <= seen.rate[0] < seen.rate[1]
            assert counts["fresh"] >= 1
        assert max(seen.case.problem.seqlens_k) >= 3
        # Chance may show it in half of some runs: simpler Cases that show it less often do not count then.
        assert seen.partly or len(seen.case.problem.seqlens_k) == 1 or (seen.rate is not None and often(seen.rate))
    assert measured >= 5


def test_what_shows_once_is_kept_as_it_is() -> None:
    shrinker, _ = sometimes(0.0)
    seen = shrinker.shrink(60.0)
    assert (seen.rate, seen.case) == ((1, 11), sighting().case)


def test_time_that_is_up_is_told() -> None:
    shrinker, _ = sometimes(None)
    seen = shrinker.shrink(0.0)
    assert (seen.partly, seen.case, seen.shrink_trials) == (True, sighting().case, 0)


@pytest.mark.parametrize(("rate", "expected"), [(None, 1), ((11, 11), 1), ((10, 11), 2), ((1, 2), 5), ((1, 11), 12)])
def test_tries(rate: Any, expected: int) -> None:
    assert tries(rate) == expected


@pytest.mark.slow
def test_a_case_that_fails_at_every_third_call_is_kept_with_two_before_it(tmp_path: Path) -> None:
    done, _ = finished("fault.third", tmp_path, plain=True)
    [found] = done.findings
    assert (found.identity.kind, found.rate) == ("mismatch", None)
    stored = read_case(found.path)
    assert len(stored.case.after) == 2
    again = reproduce(stored.case, Where("cpu"))
    assert (again.outcome, again.runs) == ("FAILED", 1), "a fresh process fails at its third call"
    assert reproduce(stored.case.alone, Where("cpu")).outcome == "FIXED"
    back, _ = finished("fault.third", tmp_path, max_examples=1, plain=True)
    assert back.findings, "a replay runs it with those before it"


@pytest.mark.parametrize("rate", [None, "often", [1], [1, 2, 3], [0, 3], [3, 3], [1.0, 2.0], [True, 2], {"a": 1}])
def test_a_rate_that_is_none_is_no_rate(tmp_path: Path, rate: Any) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps({**case_of("fault.abort").to_object(), "found": {"rate": rate}}))
    assert read_case(path).rate is None


# --- runs that die


def in_flight(folder: Path, case: Case, deaths: int = 0) -> None:
    """As a run leaves it that dies."""
    journal = Journal(folder)
    journal.launch(case, deaths=deaths)
    os.close(journal._file)


def test_the_case_in_flight_comes_first_in_the_next_run(tmp_path: Path) -> None:
    in_flight(tmp_path, case_of("fault.raises", 5, 9))
    in_flight(tmp_path, case_of("torch.reference_cpu"))
    done, events = finished("fault.raises", tmp_path)
    assert [each for each in events if isinstance(each, CaseResumed)] == [CaseResumed(case_of("fault.raises", 5, 9), 1)]
    [found] = done.findings
    assert found.cases_to_find == 1
    assert [each.name for each in (tmp_path / "cases").iterdir()] == [Path(found.path).name]
    assert len(list((tmp_path / "inflight").iterdir())) == 1, "the other kernel's waits for a run with that kernel"


@pytest.mark.slow
def test_a_case_that_ended_two_runs_is_told_and_not_tried_again(tmp_path: Path) -> None:
    in_flight(tmp_path, case_of("fault.raises", 5, 9), deaths=1)
    done, events = finished("fault.raises", tmp_path, max_examples=1, seed=3)
    [skipped] = [each for each in events if isinstance(each, CaseSkipped)]
    assert skipped.reason == "2 runs died while this Case was in flight"
    assert read_case(skipped.path).case == case_of("fault.raises", 5, 9)
    assert not list(tmp_path.glob("inflight/*"))
    _, events = finished("fault.raises", tmp_path, max_examples=1, seed=3)
    skipped = [each for each in events if isinstance(each, CaseSkipped)]
    assert [each.reason for each in skipped] == [
        "2 runs died while this Case was in flight; only `attnfuzz repro` tries it again"
    ]
    assert done.summaries[0].cases == 1
    assert list(Corpus(tmp_path).of("fault.raises"))


def started(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    options = ["--device", "cpu", "--out", str(tmp_path / "out"), "--max-examples", "4000", "--workers", "1", "--seed", "0"]
    command = [*COMMAND, "run", *options, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "200"}
    )


def hanging(tmp_path: Path, kernel: str = "fault.pyloop") -> tuple[subprocess.Popen[str], set[str]]:
    """A campaign whose kernel hangs, and the marks of its processes."""
    run = started(tmp_path, kernel, "--deadline", "300s")
    end = time.monotonic() + 60
    inflight = tmp_path / "out" / "inflight"
    while time.monotonic() < end and not (inflight.exists() and list(inflight.iterdir())):
        time.sleep(0.1)
    time.sleep(3)
    assert run.poll() is None, run.stdout.read() if run.stdout else ""
    return run, marks(run.pid)


def left_of(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def marks(parent: int) -> set[str]:
    """The marks of the processes that `parent` has started."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) != parent:
                continue
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {value.decode().partition("=")[2] for value in variables if value.startswith(reaper.MARK.encode() + b"=")}
    return found


def wait_until_gone(runs: set[str]) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end and any(list(reaper.marked(run)) for run in runs):
        time.sleep(0.05)
    assert not [each for run in runs for each in reaper.marked(run)]


@pytest.mark.slow
def test_kill_9_of_a_run_leaves_its_case_and_no_process(tmp_path: Path) -> None:
    run, runs = hanging(tmp_path)
    assert runs
    run.kill()
    run.wait(20)
    wait_until_gone(runs)
    done, events = finished("fault.pyloop", tmp_path / "out", max_examples=1, deadline=1.0)
    [resumed] = [each for each in events if isinstance(each, CaseResumed)]
    assert max(resumed.case.problem.seqlens_k) >= 3
    [found] = done.findings
    assert (found.identity.kind, found.cases_to_find) == ("hang", 1)
    assert found.case.problem.seqlens_k == (3,)


def test_kill_9_during_a_compile_leaves_its_case_too(tmp_path: Path) -> None:
    run, runs = hanging(tmp_path, "fault.chang")
    run.kill()
    run.wait(20)
    wait_until_gone(runs)
    [left] = left_behind(tmp_path / "out")
    assert (left.case.kernel, left.case.problem.causal, left.deaths) == ("fault.chang", "top_left", 1)


def test_a_run_whose_reaper_was_killed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    executor = Isolated("cpu")
    executor.trial(case_of("fault.stray"))
    executor._forkserver._reaper.kill()
    assert left_of(tmp_path)
    executor.close()
    assert not left_of(tmp_path)
    assert not list(reaper.marked(executor.run))


def test_an_ended_compile_leaves_nothing(tmp_path: Path) -> None:
    run, runs = hanging(tmp_path, "fault.chang")
    run.send_signal(signal.SIGINT)
    told, _ = run.communicate(timeout=30)
    assert run.returncode == 130, told
    wait_until_gone(runs)
    assert left_of(tmp_path / "out") == ["runs"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_an_ended_run_reports_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    run, runs = hanging(tmp_path)
    run.send_signal(number)
    told, _ = run.communicate(timeout=30)
    assert run.returncode == 130, told
    assert "interrupted: the findings until then are above" in told
    assert "Traceback" not in told
    wait_until_gone(runs)
    assert left_of(tmp_path / "out") == ["runs"], "what the user ends is no death"


@pytest.mark.slow
def test_the_command_line_of_the_selftest() -> None:
    command = [*COMMAND, "selftest", "faults", "fault.abort", "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["right"], found["leaks"]["restarts"]) == (True, 200)
    assert [row["kernel"] for row in found["rows"]] == ["fault.abort", "torch.reference_cpu"]


def test_the_selftest_refuses_a_fault_that_there_is_not() -> None:
    command = [*COMMAND, "selftest", "faults", "fault.nothing", "--device", "cpu"]
    wrong = subprocess.run(command, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "error: fault='fault.nothing': no such fault kernel; use one of fault.raises" in wrong.stderr
