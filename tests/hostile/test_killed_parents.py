"""Runs that a signal ends: no process and no temporary folder is left, what was announced is on disk, the next run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.paths import TESTS

from attnfuzz.harness.campaign.corpus import read_case

HUP, QUIT, INT, TERM, KILL = signal.SIGHUP, signal.SIGQUIT, signal.SIGINT, signal.SIGTERM, signal.SIGKILL
COMMAND = [sys.executable, "-P", "-m", "attnfuzz.harness.cli"]
MARK = "ATTNFUZZ_TEST_KILLED"

PARENT = """
import sys, tempfile
sys.path.insert(0, sys.argv[1])
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.outcomes import Task
from attnfuzz.harness.isolation.supervisor import Supervisor
supervisor = Supervisor(Forkserver(["json"]), memory=1 << 30)
supervisor.run(Task("support.tasks:echo", {}, {}))
print("ready", flush=True)
supervisor.run(Task("support.tasks:dies", {"how": sys.argv[2]}, {"kernel": 600.0}))
"""


class Started:
    """A process of its own session, with its folder of temporary files; all that it starts is known by a variable."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        (folder / "tmp").mkdir()
        self.folder, self.temporary = folder, folder / "tmp"
        self.value = f"{os.getpid()}-{folder}"
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, MARK: self.value, "TMPDIR": str(self.temporary), "PYTHONPATH": path, "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def left(self) -> list[int]:
        """The process and all that it has started."""
        entry = f"{MARK}={self.value}".encode()
        pids = []
        for each in Path("/proc").glob("[0-9]*/environ"):
            try:
                if entry in each.read_bytes().split(b"\0"):
                    pids.append(int(each.parent.name))
            except OSError:
                continue
        return pids

    def wait_for(self, ready: Callable[[], bool], seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not ready():
            time.sleep(0.02)
        assert ready(), self.process.stdout.read() if self.process.poll() is not None and self.process.stdout else "too late"

    def wait_for_line(self, text: str) -> None:
        assert self.process.stdout is not None
        lines = ""
        for line in self.process.stdout:
            lines += line
            if text in line:
                return
        raise AssertionError(lines)

    def assert_nothing_left(self) -> None:
        self.process.wait(60)
        self.wait_for(lambda: not self.left(), 10)
        self.wait_for(lambda: not list(self.temporary.glob("attnfuzz-*")), 5)

    def end(self) -> None:
        """Kill what a test that fails has left."""
        for pid in self.left():
            os.kill(pid, KILL)
        self.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[list[str]], Started]]:
    started: list[Started] = []
    # What ignores them in the background, and under nohup, has children that do so too.
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (HUP, QUIT)}

    def begin(command: list[str]) -> Started:
        started.append(Started(tmp_path, command))
        return started[-1]

    yield begin
    for number, handler in before.items():
        signal.signal(number, handler)
    for each in started:
        each.end()


Start = Callable[[list[str]], Started]


@pytest.mark.parametrize("how", ["loop", "c loop"])
@pytest.mark.parametrize("number", [KILL, HUP, QUIT, TERM], ids=lambda each: each.name)
def test_children_end_with_the_process_that_started_them(number: signal.Signals, how: str, start: Start) -> None:
    """Also where they hear nothing: in a loop of Python's, and in one of C's."""
    run = start([sys.executable, "-P", "-c", PARENT, str(TESTS), how])
    run.wait_for_line("ready")
    time.sleep(0.2)
    assert len(run.left()) >= 4, "it, the reaper, the template and a child"
    run.process.send_signal(number)
    run.assert_nothing_left()
    assert run.process.returncode == -number


# --- whole runs


def options(*more: str) -> list[str]:
    return ["--device", "cpu", "--workers", "1", "--seed", "0", "--out", "out", *more]


@pytest.mark.slow
@pytest.mark.parametrize("number", [KILL, HUP, QUIT], ids=lambda each: each.name)
def test_a_run_that_ends_while_it_tries_leaves_its_case_in_flight(number: signal.Signals, start: Start) -> None:
    run = start([*COMMAND, "run", "fault.pyloop", *options("--deadline", "300s", "--max-examples", "400")])
    inflight = run.folder / "out" / "inflight"
    run.wait_for(lambda: inflight.exists() and bool(list(inflight.iterdir())))
    time.sleep(3)
    run.process.send_signal(number)
    run.assert_nothing_left()
    assert run.process.returncode == -number
    command = [*COMMAND, "run", "fault.pyloop", *options("--deadline", "1s", "--max-examples", "1")]
    again = subprocess.run(command, cwd=run.folder, capture_output=True, text=True, check=False, timeout=300)
    assert again.returncode == 1, again.stderr
    assert "was in flight" in again.stdout
    assert "Traceback" not in again.stdout + again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number", [KILL, HUP, QUIT], ids=lambda each: each.name)
def test_a_run_that_ends_while_it_shrinks_has_kept_the_failure(number: signal.Signals, workers: str, start: Start) -> None:
    kernel = "support.engine:WRONG_SLEEPER"
    run = start([*COMMAND, "run", kernel, *options("--max-examples", "400", "--workers", workers)])
    run.wait_for_line("found")
    time.sleep(1)
    run.process.send_signal(number)
    run.assert_nothing_left()
    assert run.process.returncode == -number
    [file] = (run.folder / "out" / "cases").iterdir()
    assert max(read_case(file).case.problem.seqlens_k) >= 3


TEST = """
from attnfuzz.harness.plugin import fuzz
test_one = fuzz("support.engine:SLEEPER", max_examples=4000, shards=1)
test_other = fuzz("support.engine:WRONG_SLEEPER", max_examples=4000, shards=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [INT, TERM, KILL], ids=lambda each: each.name)
def test_nothing_is_left_of_workers_of_pytest(number: signal.Signals, start: Start, tmp_path: Path) -> None:
    (tmp_path / "test_kernels.py").write_text(TEST)
    pytest_of = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "test_kernels.py"]
    run = start([*pytest_of, "--attnfuzz-device=cpu", "--attnfuzz-out=out"])
    cases = run.folder / "out" / "cases"
    run.wait_for(lambda: cases.exists() and bool(list(cases.iterdir())))
    run.process.send_signal(number)
    run.assert_nothing_left()
    assert run.process.returncode != 0
    for file in cases.iterdir():
        assert json.loads(file.read_text())["kernel"] == "test.wrong_sleeper"


@pytest.mark.slow
def test_two_runs_at_once_share_a_folder(tmp_path: Path, start: Start) -> None:
    """Both find the one failure, and keep it in one file."""
    command = [*COMMAND, "run", "fault.numbers", *options("--max-examples", "60", "--max-failures", "1", "--json")]
    runs = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [each.communicate(timeout=300) for each in runs]
    assert [each.returncode for each in runs] == [1, 1], results
    paths = {failure["path"] for out, _ in results for failure in json.loads(out)["failures"]}
    [file] = (tmp_path / "out" / "cases").iterdir()
    assert paths == {f"out/cases/{file.name}"}
    assert read_case(file).case.kernel == "fault.numbers"
    assert len(list((tmp_path / "out" / "runs").glob("*.json"))) == 2
    assert not list((tmp_path / "out").glob("inflight/*"))
    assert all("Traceback" not in err for _, err in results)
