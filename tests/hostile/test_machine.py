"""What the machine does to a run is no fault of a kernel: processes stopped or killed from outside, too few processors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.paths import TESTS
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.core import environment
from attnfuzz.harness.isolation import stage_time
from attnfuzz.harness.isolation import supervisor as watching
from attnfuzz.harness.isolation.disturbances import Disturbances
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.outcomes import Death, Outcome, Reply, Task, death_failure
from attnfuzz.harness.isolation.stage_time import Pauses, StageTime, Usage
from attnfuzz.harness.isolation.supervisor import Supervisor
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report import machine
from attnfuzz.harness.report.terminal import Terminal
from attnfuzz.kernels import registry

COMMAND = [sys.executable, "-P", "-m", "attnfuzz.harness.cli"]


# --- the time of a stage, with a clock of the test's own

SPINS, STARVED, SLEEPS, STOPPED = "spins", "starved", "sleeps", "stopped"
Part = tuple[str, float]


def share(what: str) -> float:
    """The processor time that it has in a second."""
    return {SPINS: 1.0, STARVED: 0.25, SLEEPS: 0.0, STOPPED: 0.0}[what]


def late_after(parts: list[Part], limit: float, tick: float = 0.5) -> tuple[float | None, bool]:
    """When a stage that does this counts as late, and whether as one that was stopped; None: not at all."""
    now, cpu, times = 100.0, 7.0, StageTime(100.0, 7.0)
    times.enter("kernel", now)
    for what, seconds in parts:
        end = now + seconds
        while now < end:
            now, cpu = now + tick, cpu + tick * share(what)
            times.enter("kernel", 100.0)
            times.look(Usage(now, 0, cpu, what in (SPINS, STARVED), what == STOPPED))
            if times.stopped(limit):
                return now - 100.0, True
            if times.late(now, limit):
                return now - 100.0, False
    return None, False


@pytest.mark.parametrize(
    ("parts", "limit", "expected"),
    [
        pytest.param([(SPINS, 60)], 5.0, (5.5, False), id="spins"),
        pytest.param([(SLEEPS, 60)], 5.0, (5.5, False), id="sleeps"),
        pytest.param([(SPINS, 4), (SLEEPS, 60)], 5.0, (5.5, False), id="spins, then sleeps"),
        pytest.param([(STARVED, 19)], 5.0, (None, False), id="works on a quarter of a processor"),
        pytest.param([(STARVED, 600)], 5.0, (20.5, False), id="spins on a quarter of a processor"),
        pytest.param([(STARVED, 12), (SLEEPS, 60)], 5.0, (14.5, False), id="a quarter of a processor, then sleeps"),
        pytest.param([(STOPPED, 4), (SPINS, 4.5)], 5.0, (None, False), id="stopped for less than its limit"),
        pytest.param([(STOPPED, 60)], 5.0, (6.0, True), id="stopped for ever"),
        pytest.param([(SPINS, 3), (STOPPED, 60)], 5.0, (9.0, True), id="stopped later"),
        pytest.param([(STOPPED, 1.5), (SPINS, 60)], 0.5, (2.5, False), id="stopped for a moment with a short limit"),
        pytest.param([(SPINS, 60)], 0.5, (1.0, False), id="a short limit"),
    ],
)
def test_what_counts_against_a_deadline(parts: list[Part], limit: float, expected: tuple[float | None, bool]) -> None:
    assert late_after(parts, limit) == expected


def test_a_child_counts_as_stopped_from_the_look_on_that_has_seen_it() -> None:
    """One that has been stopped for a second of the two between three looks may be continued later than its parent."""
    times = StageTime(0.0, 0.0)
    times.enter("kernel", 0.0)
    times.look(Usage(0.95, 0, 0.95, True, False))
    times.look(Usage(1.95, 0, 1.9, False, True))
    times.look(Usage(2.96, 0, 1.9, False, True))
    assert not times.stopped(0.5)
    assert not times.late(2.96, 1.0)
    times.look(Usage(3.96, 0, 1.9, False, True))
    assert times.stopped(0.5)


def test_a_stage_without_any_processor_ends_in_bounded_time() -> None:
    times = StageTime(0.0, 0.0)
    times.enter("kernel", 0.0)
    for second in range(1, 60):
        times.look(Usage(float(second), 0, 0.001 * second, True, False))
        if times.late(float(second), 5.0):
            break
    assert second == 51


def test_the_next_stage_has_its_own_time() -> None:
    times = StageTime(0.0, 0.0)
    times.enter("kernel", 1.0)
    times.look(Usage(4.0, 0, 0.5, True, False))
    times.enter("oracle", 6.0)
    assert not times.late(10.9, 5.0)
    assert times.late(11.1, 5.0)
    # What was lost before the stage began is not the stage's.
    times.look(Usage(8.0, 0, 0.5, True, False))
    assert not times.late(12.9, 5.0)
    assert times.late(13.1, 5.0)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_a_deadline_starts_again_a_few_times(count: int) -> None:
    times = StageTime(0.0, 0.0)
    times.enter("kernel", 0.0)
    for number in range(1, count + 1):
        times.restart(15.0 * number)
    again = 15.0 * min(count, 3)
    assert not times.late(again + 4.9, 5.0)
    assert times.late(again + 5.1, 5.0)


@pytest.mark.parametrize(
    ("passed", "busy", "asked", "missing"),
    [
        pytest.param(0.05, 0.0, 0.05, 0.0, id="as asked"),
        pytest.param(0.8, 0.0, 0.05, 0.0, id="a busy machine"),
        pytest.param(15.05, 0.0, 0.05, 15.0, id="stopped"),
        pytest.param(9.0, 8.9, 0.0, 0.0, id="worked"),
        pytest.param(20.0, 5.0, 0.0, 15.0, id="worked, and stopped"),
        pytest.param(3600.0, 0.0, 0.05, 3599.95, id="suspended"),
    ],
)
def test_a_process_notices_that_it_did_not_run(passed: float, busy: float, asked: float, missing: float) -> None:
    now = [5.0, 1.0]
    pauses = Pauses(lambda: now[0], lambda: now[1])
    now[0], now[1] = now[0] + passed, now[1] + busy
    assert pauses.since(asked) == pytest.approx(missing)
    assert pauses.since(0.0) == 0.0


def test_the_clock_goes_on_while_the_machine_is_suspended() -> None:
    assert Pauses()._clock() == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=5.0)


# --- real processes, which load nothing


@pytest.fixture(params=["forked", "spawned"])
def supervisor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.syspath_prepend(str(TESTS))
    made = Supervisor(Forkserver(["json"] if request.param == "forked" else None), memory=1 << 29)
    yield made
    made.close()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.syspath_prepend(str(TESTS))
    made = Supervisor(Forkserver(["json"]), memory=1 << 29)
    yield made
    made.close()


def task(name: str, kernel: float = 30.0, **payload: object) -> Task:
    return Task(f"support.tasks:{name}", payload, {"kernel": kernel, "start": 30.0})


@contextlib.contextmanager
def beside(action: Callable[[int], None], mark: Path, times: int = 1) -> Iterator[None]:
    """Do something to each of the first `times` processes that run the task `once`."""

    def act() -> None:
        seen: set[str] = set()
        end = time.monotonic() + 30
        while len(seen) < times and time.monotonic() < end:
            for each in mark.parent.glob(f"{mark.name}.*"):
                if each.name not in seen:
                    seen.add(each.name)
                    action(int(each.suffix[1:]))
            time.sleep(0.01)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_parent(pid: int) -> None:
    """Of a forked child, the process that forks children; all of them go with it."""
    kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]))


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def once(supervisor: Supervisor, action: Callable[[int], None], folder: Path, times: int = 1, kernel: float = 30.0) -> Outcome:
    mark = folder / "mark"
    with beside(action, mark, times):
        return supervisor.run(task("once", kernel, mark=str(mark), times=times))


def test_a_child_that_was_killed_is_no_failure(supervisor: Supervisor, tmp_path: Path) -> None:
    assert once(supervisor, kill, tmp_path) == Reply("done")
    assert supervisor.statistics.disturbances == Disturbances(killed=1)
    assert supervisor.statistics.tasks == 1, "it is one task, tried twice"


def test_a_process_that_forks_children_was_killed(forked: Supervisor, tmp_path: Path) -> None:
    assert once(forked, kill_parent, tmp_path) == Reply("done")
    # The spare child that has the task next may die with that process as well, before it begins.
    assert forked.statistics.disturbances in (Disturbances(killed=1), Disturbances(killed=2))


def test_a_child_that_is_stopped_is_no_failure(supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_time, "_LEAST_STOPPED", 0.5)
    assert once(supervisor, stop, tmp_path, kernel=0.5) == Reply("done")
    assert supervisor.statistics.disturbances == Disturbances(stopped=1)


def test_a_child_that_is_stopped_for_a_moment_goes_on(
    forked: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One second of its time, of which its deadline sees nothing: it is looked at more often while it is stopped."""
    monkeypatch.setattr("attnfuzz.harness.isolation.supervisor._USAGE_TICK", 30.0)

    def stop_for_a_moment(pid: int) -> None:
        stop(pid)
        threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()

    mark = tmp_path / "mark"
    with beside(stop_for_a_moment, mark):
        outcome = forked.run(Task("support.tasks:once", {"mark": str(mark)}, {"kernel": 1.5, "start": 30.0}))
    # It sleeps for a minute: that is a hang, once it has had its time.
    assert isinstance(outcome, Death)
    assert (outcome.why, outcome.stopped, outcome.disturbance) == ("hang", False, None)
    assert outcome.seconds > 1.8
    assert forked.statistics.disturbances == Disturbances()


def test_a_task_whose_children_are_killed_twice_kills_itself(forked: Supervisor, tmp_path: Path) -> None:
    outcome = once(forked, kill, tmp_path, times=2)
    assert isinstance(outcome, Death)
    assert (outcome.signal, outcome.disturbance) == ("SIGKILL", "killed")
    assert forked.statistics.disturbances == Disturbances(), "it cannot be known: the kernel has it"


def test_a_task_that_kills_itself_is_a_failure_at_its_second_try(supervisor: Supervisor) -> None:
    outcome = supervisor.run(task("dies", how="kill"))
    assert isinstance(outcome, Death)
    assert death_failure("k", outcome).message == "SIGKILL"
    assert supervisor.statistics.disturbances == Disturbances()
    assert supervisor.statistics.tasks == 1


def test_a_task_that_kills_its_parent_is_a_failure_too(forked: Supervisor) -> None:
    outcome = forked.run(task("dies", how="parent"))
    assert isinstance(outcome, Death)
    assert death_failure("k", outcome).message == "it was killed with the process that started it"
    assert forked.statistics.disturbances == Disturbances()


def test_a_task_that_stops_itself_hangs(forked: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_time, "_LEAST_STOPPED", 0.5)
    outcome = forked.run(task("stops", 0.5))
    assert isinstance(outcome, Death)
    failure = death_failure("k", outcome)
    assert (failure.kind, failure.message) == ("hang", "kernel stopped its own process (SIGSTOP)")
    assert forked.statistics.disturbances == Disturbances()


def test_a_task_is_killed_once_and_fails_otherwise_then(forked: Supervisor, tmp_path: Path) -> None:
    """The second end is the kernel's, the first the machine's."""
    mark = tmp_path / "mark"
    outcomes: list[Outcome] = []
    with beside(kill, mark):
        outcomes.append(forked.run(task("once", 0.6, mark=str(mark), times=2)))
    [outcome] = outcomes
    assert isinstance(outcome, Death)
    assert outcome.why == "hang"
    assert forked.statistics.disturbances == Disturbances(killed=1)


@pytest.mark.parametrize("how", ["segfault", "abort", "exit"])
def test_an_end_of_the_childs_own_is_not_tried_again(how: str, forked: Supervisor) -> None:
    assert isinstance(forked.run(task("dies", how=how)), Death)
    assert forked.statistics.replaced == 1


def test_a_child_that_is_killed_between_two_tasks_is_an_event(forked: Supervisor) -> None:
    reply = forked.run(task("who"))
    assert isinstance(reply, Reply)
    kill(reply.result)
    time.sleep(0.2)
    assert isinstance(forked.run(task("who")), Reply)
    assert forked.take_late_death() is None
    assert forked.statistics.disturbances == Disturbances(killed=1)


def test_a_pause_of_the_parent_starts_the_deadline_again(forked: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had been stopped in its first wait, and the child had not."""
    ready, calls = watching.wait, []

    def waits(descriptors: Any, seconds: float) -> set[int]:
        calls.append(seconds)
        if len(calls) == 5:
            time.sleep(1.5)
        return ready(descriptors, seconds)

    forked.run(task("echo"))
    monkeypatch.setattr(watching, "wait", waits)
    monkeypatch.setattr(watching, "_LONG_PAUSE", 1.2)
    start = time.monotonic()
    outcome = forked.run(task("dies", 1.0, how="loop"))
    assert isinstance(outcome, Death)
    assert outcome.why == "hang"
    assert time.monotonic() - start > 2.6
    assert forked.statistics.disturbances.paused >= 1


def test_a_busy_machine_hangs_no_task(forked: Supervisor) -> None:
    """Beside eight busy loops, work of 0.6 s ends, whose deadline is 0.9 s; and a true hang is found."""
    forked.run(task("echo"))
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(8)]
    try:
        assert forked.run(task("works", 0.9, seconds=0.6)) == Reply("done")
        outcome = forked.run(task("dies", 0.5, how="loop"))
        assert isinstance(outcome, Death)
        assert (outcome.why, outcome.limit) == ("hang", 0.5)
        assert outcome.seconds < 25
    finally:
        for each in loops:
            each.kill()
            each.wait()


# --- what a run says of it


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (Disturbances(), ""),
        (Disturbances(killed=1), "1 child process was killed from outside"),
        (Disturbances(killed=2), "2 child processes were killed from outside"),
        (Disturbances(stopped=1), "1 child process was stopped from outside"),
        (Disturbances(paused=2), "attnfuzz itself did not run for seconds, 2 times"),
    ],
    ids=str,
)
def test_events_of_the_machine_are_in_the_summary_and_in_the_json(counts: Disturbances, words: str) -> None:
    executor = FunctionExecutor(lambda _: Verdict(status="pass"))

    def verdict(_: Any) -> Verdict:
        executor.statistics.disturbances = counts
        return Verdict(status="pass")

    executor._verdict = verdict
    executor.describe = lambda: environment.describe("cpu")  # type: ignore[method-assign]
    console = Console(file=StringIO(), width=200)
    settings = Settings(device="cpu", max_examples=2, out=None)
    done = run_campaign([registry.get("torch.reference_cpu")], settings, Terminal(console, live=False), executor)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert (f"{words}: not counted as failures, their cases were tried again" in text) == bool(words)
    [row] = machine.campaign_object(done)["kernels"]
    assert row["disturbances"] == {"killed": counts.killed, "stopped": counts.stopped, "paused": counts.paused}


# --- whole runs


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    wanted = [pid]
    for each in wanted:
        wanted += [child for child, parent in parents.items() if parent == each]
    return wanted


def stop_all(run: int, theirs: list[int]) -> None:
    for each in (run, *theirs):
        stop(each)
    time.sleep(15)
    for each in (run, *theirs):
        with contextlib.suppress(ProcessLookupError):  # attnfuzz has given it up, where only children were stopped
            os.kill(each, signal.SIGCONT)


def stop_run(run: int, theirs: list[int]) -> None:
    stop_all(run, [])


def stop_children(run: int, theirs: list[int]) -> None:
    stop_all(theirs[0], theirs[1:])


def kill_children(run: int, theirs: list[int]) -> None:
    for each in theirs:
        with contextlib.suppress(ProcessLookupError):
            kill(each)


@pytest.mark.slow
@pytest.mark.parametrize("happens", [stop_all, stop_run, stop_children, kill_children], ids=lambda each: each.__name__)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_run_of_a_right_kernel_stays_green(happens: Callable[[int, list[int]], None], workers: str, tmp_path: Path) -> None:
    command = [*COMMAND, "run", "support.engine:SLEEPER", "--device", "cpu", "--max-examples", "60", "--deadline", "5s"]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.Popen(
        [*command, "--workers", workers, "--json", "--out", "out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
    )
    end = time.monotonic() + 120
    while time.monotonic() < end and not list((tmp_path / "out").glob("inflight/*")):
        time.sleep(0.2)
    time.sleep(10)
    theirs = tree(run.pid)[1:]
    if workers == "2" and happens is kill_children:
        # The workers live; what they have started does not.
        theirs = [each for each in theirs if b"campaign.worker_main" not in Path(f"/proc/{each}/cmdline").read_bytes()]
    happens(run.pid, theirs)
    out, text = run.communicate(timeout=300)
    assert run.returncode == 0, text
    done = json.loads(out)
    assert done["failures"] == []
    if happens is kill_children:
        assert 1 <= done["kernels"][0]["disturbances"]["killed"] <= 8, text
        assert "killed from outside" in text
    assert not list(tmp_path.glob("attnfuzz-*")), "the reaper was killed too"
