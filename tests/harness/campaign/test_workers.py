"""Worker processes: the same Cases and findings as without them, whatever ends a worker, its child or the campaign."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.engine import (
    SLEEPER,
    WRONG_SLEEPER,
    Deadly,
    NotHere,
    Sleeper,
    alive,
    campaign,
    descendants,
    in_flight,
    resumed,
    started,
    tidy,
    tried,
    wait_for,
    workers_of,
)

from attnfuzz.harness.audit.selftest import faults as selftest
from attnfuzz.harness.campaign import corpus, worker_group
from attnfuzz.harness.campaign.corpus import Corpus
from attnfuzz.harness.campaign.events import (
    CampaignFinished,
    CampaignStarted,
    CaseSkipped,
    Event,
    FailureFound,
    KernelBroke,
    KernelFinished,
    Shrunk,
    TrialFinished,
    WorkerDied,
)
from attnfuzz.harness.campaign.journal import left_behind
from attnfuzz.harness.isolation.outcomes import ExecutionError
from attnfuzz.kernels.errors import BadArgument

__all__ = ["tidy"]


# --- the same Cases


@pytest.mark.parametrize(
    ("names", "most", "workers"),
    [
        pytest.param(["torch.reference_cpu"], 40, 2, id="40"),
        pytest.param(["torch.reference_cpu"], 150, 2, id="150", marks=pytest.mark.slow),
        pytest.param(["torch.reference_cpu"], 230, 3, id="230", marks=pytest.mark.slow),
        pytest.param(["torch.reference_cpu", "fault.nan"], 30, 3, id="two-kernels", marks=pytest.mark.slow),
        pytest.param(["fault.refuses"], 30, 2, id="a-variant-refused", marks=pytest.mark.slow),
        pytest.param(["triton.varlen"], 6, 2, id="triton", marks=pytest.mark.slow),
    ],
)
def test_the_cases_do_not_depend_on_the_number_of_workers(names: list[str], most: int, workers: int, tidy: Path) -> None:
    if "triton.varlen" in names:
        pytest.importorskip("triton")
    (alone, events), (done, theirs) = (campaign(names, None, max_examples=most, workers=each) for each in (1, workers))
    ids = tried(events)
    assert sorted(ids) == sorted(tried(theirs))
    assert len(ids) == len(set(ids))
    if "fault.refuses" not in names:
        assert len(ids) == most * len(names)
    for each, one in zip(done.summaries, alone.summaries, strict=True):
        assert (each.cases, each.features, each.drawn, each.captured) == (one.cases, one.features, one.drawn, one.captured)
        assert (each.outputs, each.failed_unjudged) == (one.outputs, one.failed_unjudged)
    assert {each.identity for each in done.findings} == {each.identity for each in alone.findings}


# --- one finding for one failure


@pytest.mark.slow
def test_a_failure_that_two_workers_show_is_shrunk_once(tidy: Path) -> None:
    done, events = campaign(["fault.numbers"], tidy, max_examples=300, workers=2)
    found = [each.finding.identity for each in events if isinstance(each, FailureFound)]
    assert len(found) == len(set(found)) == len([each for each in events if isinstance(each, Shrunk)])
    assert [each.identity for each in done.findings] == found
    assert not selftest.row_of("cpu", done.summaries[0]).wrong
    assert len(list((tidy / "cases").iterdir())) == len(found)


@pytest.mark.slow
def test_no_more_failures_are_kept_than_wanted(tidy: Path) -> None:
    """fault.four has four: while one worker shrinks the first, the other finds the next."""
    done, events = campaign(["fault.four"], tidy, max_examples=300, max_failures=1, workers=2, deadline=2.0)
    assert len(done.findings) == 1
    assert len([each for each in events if isinstance(each, FailureFound)]) == 1
    assert len(tried(events)) < 300, "the kernel is not tried further"


QUICK = ["raises", "bounds", "abort"]
ALL = [each.removeprefix("fault.") for each in selftest.fault_names("cpu")]


@pytest.mark.parametrize(
    "slugs", [pytest.param(QUICK, id="quick", marks=pytest.mark.slow), pytest.param(ALL, id="all", marks=pytest.mark.slow)]
)
def test_the_planted_faults_are_found_and_shrunk_by_workers(slugs: list[str], tidy: Path) -> None:
    names = [f"fault.{each}" for each in slugs if each != "four"]
    # Half of a machine's memory is not full within the deadline.
    done, _ = campaign(names, tidy, max_examples=90, max_failures=1, workers=2, plain=False, memory=1 << 30)
    wrong = {row.title: row.wrong for each in done.summaries if (row := selftest.row_of("cpu", each)).wrong}
    assert not wrong
    assert len(done.summaries) == len(names)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["fault.abort"], id="abort", marks=pytest.mark.slow),
        pytest.param(selftest.fault_names("cpu"), id="all", marks=pytest.mark.slow),
    ],
)
def test_the_selftest_is_as_right_with_workers(names: list[str], tidy: Path) -> None:
    events: list[Event] = []
    done = selftest.faults("cpu", events.append, names, restarts=5, workers=2)
    assert not {row.title: row.wrong for row in done.rows if row.wrong}
    assert done.right
    assert [row.kernel for row in done.rows if row.kernel.startswith("fault.")] == list(names)
    assert {each.settings["workers"] for each in events if isinstance(each, CampaignStarted)} == {2}


@pytest.mark.slow
def test_a_selftest_whose_workers_die_is_not_right(tidy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(events: Event) -> None:
        for each in workers_of(os.getpid()):
            os.kill(each, signal.SIGKILL)

    monkeypatch.setattr(worker_group, "_MOST_DEATHS", 0)
    with pytest.raises(ExecutionError, match="2 worker processes died, the last with SIGKILL"):
        selftest.faults("cpu", die, ["fault.abort"], restarts=0, workers=2)


# --- what ends a worker


def kill_later(seconds: float, pids: Any) -> None:
    """Kill what `pids` returns then: a listener is called between two Cases, and one is to be in flight."""
    threading.Timer(seconds, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids()]).start()


def after(trials: int, act: Any) -> Any:
    """A listener that acts once, after so many trials."""
    seen: list[Event] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished):
            seen.append(event)
            if len(seen) == trials:
                act()

    return listen


def test_kill_9_of_a_worker_costs_nothing(tidy: Path) -> None:
    """The Case in flight comes first, once, and the others of its round are tried by another worker."""
    killed: list[int] = []

    def workers() -> list[int]:
        killed.extend(workers_of(os.getpid()))
        return killed

    alone, events = campaign([Sleeper("test.sleeper", 0.0)], None, max_examples=8)
    done, theirs = campaign([SLEEPER], tidy, after(4, lambda: kill_later(0.2, workers)), max_examples=8, workers=2)
    assert killed, "both workers run where there are cores for them; one tries the only round"
    [first] = resumed(theirs)
    assert first.deaths == 1
    died = [each for each in theirs if isinstance(each, WorkerDied)]
    assert {(each.ending, each.replaced) for each in died} == {("SIGKILL", True)}
    assert "test.sleeper" in {each.kernel for each in died}
    at = theirs.index(first)
    assert next(each for each in theirs[at:] if isinstance(each, TrialFinished)).case == first.case
    ids = tried(theirs, "generate", "replay")
    assert len(ids) == len(set(ids)) == 8
    assert set(ids) == set(tried(events))
    assert done.summaries[0].cases == alone.summaries[0].cases == 8
    assert (done.lost, done.findings) == (None, ())


@pytest.mark.slow
def test_kill_9_of_a_worker_that_shrinks_keeps_its_finding(tidy: Path) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, FailureFound):
            kill_later(1.0, lambda: workers_of(os.getpid()))

    done, events = campaign([WRONG_SLEEPER], tidy, listen, max_examples=6, workers=2)
    found = [each for each in events if isinstance(each, FailureFound)]
    assert len(found) == 1, "the failure is known to the worker that goes on"
    [finding] = done.findings
    assert finding.identity == found[0].finding.identity
    assert finding.partly
    assert [str(each) for each in (tidy / "cases").iterdir()] == [finding.path]
    assert found[0].finding.case in [each.case for each in resumed(events)], "the first may have other failures"
    assert {each.deaths for each in resumed(events)} == {1}


@pytest.mark.slow
def test_a_case_that_ends_two_workers_is_kept_and_not_tried_again(tidy: Path) -> None:
    """What no child can do, here the test does: it kills each worker that has begun to try Cases."""
    deaths: list[int] = []

    def listen(event: Event) -> None:
        if len(deaths) < 2 and (isinstance(event, TrialFinished) or resumed([event])):
            deaths.append(1)
            wait = 0.2 if isinstance(event, TrialFinished) else 2.5
            kill_later(wait, lambda: workers_of(os.getpid()))

    slow = Sleeper("test.slow", 1.5)
    done, events = campaign([slow], tidy, listen, max_examples=3, workers=2, deadline=60.0)
    assert [each.deaths for each in resumed(events)] == [1, 2]
    [skipped] = [each for each in events if isinstance(each, CaseSkipped)]
    assert skipped.reason == "2 runs died while this Case was in flight"
    case = resumed(events)[0].case
    assert Path(skipped.path).exists()
    assert case.id not in tried(events, "generate", "replay")
    assert len(set(tried(events))) == 2, "it is one of the three"
    assert done.lost is None


@pytest.mark.slow
def test_a_child_of_a_worker_that_is_killed_once_is_an_event_of_the_machine(tidy: Path) -> None:
    def children() -> list[int]:
        # A worker's children are forked by a process of the campaign, not by the worker.
        workers = workers_of(os.getpid())
        return [each for each in descendants(os.getpid()) if each not in workers and _tries(each)]

    listener = after(3, lambda: kill_later(0.2, children))
    done, events = campaign([SLEEPER], tidy, listener, max_examples=6, workers=2)
    assert not done.findings, "its Case is run again, and passes"
    assert done.summaries[0].disturbances.killed >= 1
    assert not resumed(events), "the worker lives"
    assert done.summaries[0].cases == 6


def _tries(pid: int) -> bool:
    """Whether a process is a child that runs trials: in a session of its own, neither a forkserver nor a reaper."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        session = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])
    except OSError:
        return False
    return session == pid and b"reaper" not in line and not _has_children(pid)


def _has_children(pid: int) -> bool:
    return bool(descendants(pid))


@pytest.mark.slow
def test_workers_that_die_again_and_again_end_the_run(tidy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "_MOST_DEATHS", 1)
    done, events = campaign([Deadly("test.deadly")], tidy, max_examples=6, workers=2)
    assert done.lost is not None
    assert done.lost.startswith("4 worker processes died, the last with SIGKILL; the next run begins with their Cases in flight")
    assert [each.cases for each in done.summaries] == [0]
    assert len([each for each in events if isinstance(each, KernelFinished)]) == 1


# --- the end of the campaign


@pytest.mark.slow
def test_kill_9_of_the_campaign_leaves_its_cases_and_nothing_else(tmp_path: Path) -> None:
    kernels = ["support.engine:SLEEPER", "support.engine:WRONG_SLEEPER"]
    run = started(tmp_path, *kernels, "--workers", "2", "--max-examples", "4000")
    out = tmp_path / "out"
    # Both kernels are tried, and one has failed.
    wait_for(lambda: len(in_flight(out)) == 2 and list(out.glob("cases/*")))
    time.sleep(0.5)
    theirs = descendants(run.pid)
    assert len(workers_of(run.pid)) == 2
    run.kill()
    run.wait(20)
    wait_for(lambda: not alive(theirs), 15)
    wait_for(lambda: not list((tmp_path / "tmp").glob("attnfuzz-*")), 15)
    left = [each.case for each in left_behind(out)]
    assert {each.kernel for each in left} <= {"test.sleeper", "test.wrong_sleeper"}
    assert left
    stored = {each.case.id for each in Corpus(out).of("test.wrong_sleeper")}
    assert stored
    others = [Sleeper("test.sleeper", 0.0), Sleeper("test.wrong_sleeper", 0.0, wrong=True)]
    # With one worker, since another may draw Cases while the first tries those of earlier runs.
    again, events = campaign(others, out, max_examples=5)
    assert {each.case.id for each in resumed(events)} == {each.id for each in left}
    first = [each.id for each in left] + sorted(stored)
    assert set(tried(events, "replay")) == set(first), "all of them are tried again"
    for name in ("test.sleeper", "test.wrong_sleeper"):
        phases = [each.phase for each in events if isinstance(each, TrialFinished) and each.kernel == name]
        assert phases[0] == "replay" or not any(each.kernel == name for each in left)
    assert not in_flight(out)
    assert {each.identity.kind for each in again.findings} == {"mismatch"}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [pytest.param("SLEEPER", marks=pytest.mark.slow), "WRONG_SLEEPER"])
def test_ctrl_c_ends_all_workers_and_keeps_what_they_found(kernel: str, tmp_path: Path) -> None:
    run = started(tmp_path, f"support.engine:{kernel}", "--workers", "2", "--max-examples", "4000")
    out = tmp_path / "out"
    wait_for(lambda: len(in_flight(out)) == 2 and (kernel == "SLEEPER" or list(out.glob("cases/*"))))
    time.sleep(0.5)
    theirs = descendants(run.pid)
    assert len(workers_of(run.pid)) == 2
    run.send_signal(signal.SIGINT)
    text, _ = run.communicate(timeout=40)
    assert "interrupted: the findings until then are above" in text
    assert "Traceback" not in text
    assert f"test.{kernel.lower()}" in text
    wait_for(lambda: not alive(theirs), 15)
    assert not list((tmp_path / "tmp").glob("attnfuzz-*"))
    assert not in_flight(out)
    if kernel == "SLEEPER":
        assert run.returncode == 130, text
    else:
        assert run.returncode == 1, text
        assert "mismatch in O" in text
        assert len(list(out.glob("cases/*"))) == 1


def test_ctrl_c_while_the_workers_start_says_nothing_else(tmp_path: Path) -> None:
    run = started(tmp_path, "support.engine:SLEEPER", "--workers", "2", "--max-examples", "4000")
    wait_for(lambda: workers_of(run.pid))
    theirs = descendants(run.pid)
    run.send_signal(signal.SIGINT)
    text, _ = run.communicate(timeout=40)
    assert run.returncode == 130, text
    assert "Traceback" not in text
    wait_for(lambda: not alive(theirs), 15)
    assert not list((tmp_path / "tmp").glob("attnfuzz-*"))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_while_a_finding_is_written_does_not_lose_it(workers: int, tidy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither does one at the very end, when the table is printed."""
    write = corpus.write_whole

    def interrupted(path: Path, content: str | bytes) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        write(path, content)

    def listen(event: Event) -> None:
        if isinstance(event, CampaignFinished):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(corpus, "write_whole", interrupted)
    done, events = campaign(["fault.numbers"], tidy, listen, max_examples=300, workers=workers)
    assert done.interrupted
    [finding] = done.findings
    assert [str(each) for each in (tidy / "cases").iterdir()] == [finding.path]
    assert [each.finding.identity for each in events if isinstance(each, FailureFound)] == [finding.identity]
    assert events[-1] == done


# --- kernels that another process cannot load


def unpicklable(name: str) -> Any:
    class Local(Sleeper):
        pass

    return Local(name, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(unpicklable, id="unpicklable"),
        pytest.param(lambda name: NotHere(name, 0.0), id="not-importable"),
    ],
)
def test_a_kernel_that_cannot_be_loaded_breaks_alike_with_and_without_workers(make: Any, tidy: Path) -> None:
    texts = []
    for workers in (1, 2):
        done, events = campaign([make("test.local"), Sleeper("test.other", 0.0)], None, max_examples=5, workers=workers)
        [broken] = done.broken
        assert [each for each in events if isinstance(each, KernelBroke)] == [broken]
        assert [(each.kernel, each.cases) for each in done.summaries] == [("test.local", 0), ("test.other", 5)]
        with pytest.raises(BadArgument) as raised:
            campaign([make("test.local")], None, max_examples=5, workers=workers)
        assert str(raised.value) == broken.error
        texts.append(broken.error)
    assert texts[0] == texts[1]
    assert texts[0].startswith("kernel='test.local': a child process cannot ")
