"""Nothing of a run is left where the processes that clean up after it are killed as well."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.paths import TESTS

from attnfuzz.harness.isolation import folders, reaper
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.outcomes import Reply, Task
from attnfuzz.harness.isolation.root import LentTemplate, Root
from attnfuzz.harness.isolation.supervisor import Supervisor

ECHO = Task("support.tasks:echo", {}, {"kernel": 30.0, "start": 30.0})

_BEGIN = """
import sys, tempfile, time
sys.path.insert(0, sys.argv[1])
tempfile.tempdir = sys.argv[2]
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.outcomes import Task
from attnfuzz.harness.isolation.supervisor import Supervisor
forkserver = Forkserver(["json"])
supervisor = Supervisor(forkserver, memory=1 << 30)
supervisor.run(Task("support.tasks:echo", {}, {}))
def ready():
    print(forkserver.run, forkserver.folder, forkserver._reaper.pid, forkserver._template.pid, flush=True)
"""

PARENT = f"""{_BEGIN}
ready()
supervisor.run(Task("support.tasks:dies", {{"how": "c loop"}}, {{"kernel": 600.0}}))
"""

PARENT_THAT_ASKS = f"""{_BEGIN}
# The template process waits 5 s for the end of a child that lives.
(child,) = forkserver._children
forkserver._template._connection.send(b'{{"reap": %d}}' % child.pid)
time.sleep(0.5)
ready()
time.sleep(600.0)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    monkeypatch.syspath_prepend(str(TESTS))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def begin() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts a run whose only task never ends; it goes with the test, also with one that fails."""
    started: list[subprocess.Popen[str]] = []

    def start(place: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PARENT, str(TESTS), str(place)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


Begin = Callable[[Path], subprocess.Popen[str]]


def wait_until(ready: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not ready():
        time.sleep(0.02)
    assert ready()


def ignores_sigterm(pid: int) -> bool:
    ignored = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_reaper_that_was_killed_is_replaced(number: signal.Signals, place: Path) -> None:
    forkserver = Forkserver(["json"])
    supervisor = Supervisor(forkserver, memory=1 << 29)
    supervisor.run(ECHO)
    first = forkserver._reaper
    # A signal that comes before it has begun ends it in any case.
    wait_until(lambda: ignores_sigterm(first.pid), 10)
    first.send_signal(number)
    if number == signal.SIGTERM:
        # Which it ignores: Ctrl-C and SIGTERM of a whole session end the run, and the reaper last.
        time.sleep(0.1)
        assert first.poll() is None
    else:
        first.wait(10)
        supervisor.replace()
        assert supervisor.run(ECHO) == Reply({})
        assert forkserver._reaper is not first
    assert forkserver._reaper.poll() is None
    supervisor.close()
    assert forkserver._reaper.returncode == 0
    assert not list(place.iterdir())
    assert not list(reaper.marked(forkserver.run))


def test_another_reaper_cleans_up_where_the_first_was_killed(place: Path, begin: Begin) -> None:
    """And then the parent itself: the second reaper has the work of the first."""
    parent = begin(place)
    assert parent.stdout is not None
    run, _, first, _ = parent.stdout.readline().split()
    os.kill(int(first), signal.SIGKILL)
    # It looks while a task is at work, of which no process ends.
    wait_until(lambda: _reapers(run) - {int(first)} != set(), 20)
    parent.kill()
    parent.wait()
    wait_until(lambda: not list(reaper.marked(run)) and not list(place.iterdir()), 10)


def _reapers(run: str) -> set[int]:
    pids = set()
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = each.read_bytes().split(b"\0")
            if run.encode() in words and any(word.endswith(b"reaper.py") for word in words):
                pids.add(int(each.parent.name))
    return pids


@pytest.mark.parametrize("at_once", [True, False], ids=["reaper and parent", "parent a moment later"])
def test_without_a_reaper_the_rest_ends_by_itself(at_once: bool, place: Path, begin: Begin) -> None:
    parent = begin(place)
    assert parent.stdout is not None
    run, folder, first, _ = parent.stdout.readline().split()
    # Stopped, the parent starts no other.
    os.kill(parent.pid, signal.SIGSTOP)
    os.kill(int(first), signal.SIGKILL)
    time.sleep(0.0 if at_once else 0.5)
    parent.kill()
    parent.wait()
    wait_until(lambda: not list(reaper.marked(run)), 10)
    wait_until(lambda: not Path(folder).exists(), 10)


def test_without_a_reaper_a_request_without_a_reader_of_its_answer_ends_the_rest(place: Path) -> None:
    """The parent is killed after it has asked the template process for something, and before it has the answer."""
    command = [sys.executable, "-c", PARENT_THAT_ASKS, str(TESTS), str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        run, folder, first, _ = parent.stdout.readline().split()
        os.kill(int(first), signal.SIGKILL)
        parent.kill()
    wait_until(lambda: not list(reaper.marked(run)), 10)
    assert not Path(folder).exists()


def test_a_template_process_that_was_given_up_touches_nothing_of_a_run_that_lives(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What forks it imports for longer than the run waits, which has started another by then."""
    (place / "slow_import.py").write_text("import time\ntime.sleep(1.5)\n")
    monkeypatch.syspath_prepend(str(place))
    settle = LentTemplate.settle
    monkeypatch.setattr(LentTemplate, "settle", lambda self, _: settle(self, 0.2))
    lender = Forkserver(["slow_import"])
    forkserver = Forkserver(["slow_import"], root=Root(lender.lend()))
    supervisor = Supervisor(forkserver, memory=1 << 29)
    try:
        assert supervisor.run(ECHO) == Reply({})
        # The late one comes, finds nobody, and lingers for a second.
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            assert Path(forkserver.folder).exists()
            time.sleep(0.05)
        assert supervisor.run(ECHO) == Reply({})
    finally:
        supervisor.close()
        lender.close()
    assert [each.name for each in place.iterdir() if each.name != "__pycache__"] == ["slow_import.py"]


def test_a_long_error_of_an_import_ends_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "fails_at_length.py").write_text("raise ValueError('x' * 400_000)\n")
    monkeypatch.syspath_prepend(str(place))
    supervisor = Supervisor(Forkserver(["fails_at_length"]), memory=1 << 29)
    assert supervisor.run(ECHO) == Reply({})
    supervisor.close()


def test_the_next_run_clears_what_nobody_could(place: Path, begin: Begin) -> None:
    parent = begin(place)
    assert parent.stdout is not None
    run, folder, first, template = parent.stdout.readline().split()
    stray = subprocess.Popen(["sleep", "600"], env={reaper.MARK: run})
    for each in (parent.pid, int(first), int(template)):
        os.kill(each, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: [each.pid for each in reaper.marked(run)] == [stray.pid], 10)
    assert Path(folder).exists()
    forkserver = Forkserver(None)
    assert not Path(folder).exists()
    assert stray.wait(10) == -signal.SIGKILL
    forkserver.close()
    assert not list(place.iterdir())


# --- folders that are none of ours, or are in use


def folder_of(place: Path, owner: str | None) -> Path:
    folder = place / "attnfuzz-abc"
    folder.mkdir()
    if owner is not None:
        (folder / ".owner").write_text(owner)
    return folder


@pytest.mark.parametrize(
    "owner",
    [
        pytest.param(None, id="without an owner"),
        pytest.param("", id="not written yet"),
        pytest.param("../../etc", id="a path"),
        pytest.param("a b", id="rubbish"),
    ],
)
def test_a_folder_of_no_known_run_is_left_alone(owner: str | None, place: Path) -> None:
    folder = folder_of(place, owner)
    assert folders.clear_left_behind() == 0
    assert folder.exists()


def test_a_folder_in_use_is_left_alone(place: Path) -> None:
    folder, descriptor = folders.folder_of("0123456789abcdef"), folders.make_folder("0123456789abcdef")
    assert folders.clear_left_behind() == 0
    assert Path(folder).exists()
    os.close(descriptor)
    assert folders.clear_left_behind() == 1
    assert not Path(folder).exists()


def test_a_process_that_is_killed_as_it_makes_its_folder_leaves_none(place: Path) -> None:
    """As a campaign does with workers that load still when it is interrupted."""
    program = (
        "import os, signal\n"
        "from attnfuzz.harness.isolation import folders, forkserver\n"
        "folders.fcntl.flock = lambda *_: (print(os.listdir(os.environ['TMPDIR'])), os.kill(os.getpid(), signal.SIGKILL))\n"
        "forkserver.Forkserver(None)\n"
    )
    paths = os.pathsep.join(each for each in sys.path if each)
    variables = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "attnfuzz-" in done.stdout, "the folder was there"
    end = time.monotonic() + 10.0
    while list(place.glob("attnfuzz-*")) and time.monotonic() < end:
        time.sleep(0.02)
    assert not list(place.glob("attnfuzz-*"))


@pytest.mark.parametrize("kind", ["link", "fifo", "file", "link to a folder"])
def test_what_only_has_its_name_is_left_alone(kind: str, place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / ".owner").write_text("0123456789abcdef")
    if kind == "file":
        (place / "attnfuzz-abc").write_text("")
    elif kind == "link to a folder":
        (place / "attnfuzz-abc").symlink_to(elsewhere)
    else:
        owner = folder_of(place, None) / ".owner"
        owner.symlink_to(elsewhere / ".owner") if kind == "link" else os.mkfifo(owner)
    assert folders.clear_left_behind() == 0
    assert (place / "attnfuzz-abc").exists()
    assert (elsewhere / ".owner").exists()


def test_a_file_system_without_locks_costs_nothing_of_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock

    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder, descriptor = folders.folder_of("0123456789abcdef"), folders.make_folder("0123456789abcdef")
    os.close(descriptor)
    assert folders.clear_left_behind() == 0
    monkeypatch.setattr(fcntl, "flock", lock)
    assert folders.clear_left_behind() == 0
    assert Path(folder).exists()


@pytest.mark.parametrize(
    "name",
    ["plain", "with blanks", "with\nnewline", "\u00fcn\u00efcode", "quote'\"s", "-dash", "x" * 200, "$(touch PWNED)"],
    ids=ascii,
)
def test_any_name_of_the_folder_of_temporary_files(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place / name))
    supervisor = Supervisor(Forkserver(["json"]), memory=1 << 29)
    assert supervisor.run(ECHO) == Reply({})
    supervisor.close()
    assert not list((place / name).iterdir())
    assert [each.name for each in place.iterdir()] == [name]
