"""Campaigns with worker processes, their processes and temporary files, and kernels that are slow or end their workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.coverage import Phase
from attnfuzz.harness.campaign.events import CampaignFinished, CaseResumed, Event, TrialFinished
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Built, Config, Device, Kernel
from attnfuzz.kernels.faults.host import FaultyReference
from attnfuzz.kernels.problem import Problem

_WORKER = b"attnfuzz.harness.campaign.worker_main"


class Sleeper(FaultyReference):
    """Right, or wrong where there are three keys; each forward takes `seconds`."""

    def __init__(self, name: str, seconds: float, wrong: bool = False) -> None:
        super().__init__(name, self._sleep)
        self.files = (__file__,)
        self.seconds, self.wrong = seconds, wrong

    def _sleep(self, problem: Problem, outputs: Any) -> None:
        time.sleep(self.seconds)
        if self.wrong and max(problem.seqlens_k) >= 3:
            outputs[0].mul_(1.5)


SLEEPER = Sleeper("test.sleeper", 0.3)
WRONG_SLEEPER = Sleeper("test.wrong_sleeper", 0.3, wrong=True)


class Deadly(Sleeper):
    """Ends every process but its maker's that asks for its Configs, which a worker does before its first trial."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 0.0)
        self.maker = os.getpid()

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        if os.getpid() != self.maker:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().configs(problem)


class NotHere(Sleeper):
    """Cannot be loaded by another process."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ImportError("planted: no module named acme")


class Compiling(FaultyReference):
    """Its compiler takes `seconds` for each of its two keys, and none for what is in its cache, `folder`."""

    def __init__(self, name: str, seconds: float, folder: Path) -> None:
        super().__init__(name, _nothing, _compiled)
        self.files = (__file__,)
        self.seconds, self.folder = seconds, folder

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        cached = self.folder / f"{self.name}.{problem.causal}"
        if not cached.exists():
            time.sleep(self.seconds)
            cached.write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))
        return super().build(problem, config, device)


def _nothing(_: Problem, __: Any) -> None:
    pass


def _compiled() -> None:
    pass


def campaign(
    kernels: Sequence[Kernel | str], out: Path | None, listen: Callable[[Event], None] = lambda _: None, **changed: Any
) -> tuple[CampaignFinished, list[Event]]:
    """Run `kernels`, registered for the while, with their plain Cases."""
    events: list[Event] = []

    def listener(event: Event) -> None:
        events.append(event)
        listen(event)

    own = [each for each in kernels if not isinstance(each, str)]
    for each in own:
        registry.register(each)
    try:
        settings = Settings(**{"plain": True, "deadline": 5.0, "share_gpu": False, "out": str(out) if out else None, **changed})
        names = [each if isinstance(each, str) else each.name for each in kernels]
        return run_campaign([registry.get(name) for name in names], settings, listener), events
    finally:
        for each in own:
            registry.unregister(each.name)


def tried(events: Sequence[Event], *phases: Phase) -> list[str]:
    """The ids of the Cases that were tried, by default those that were drawn."""
    wanted = phases or ("generate",)
    return [each.case.id for each in events if isinstance(each, TrialFinished) and each.phase in wanted]


def resumed(events: Sequence[Event]) -> list[CaseResumed]:
    """What came first since a process had died."""
    return [each for each in events if isinstance(each, CaseResumed)]


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`attnfuzz run` with its results in `folder`/out and its temporary files in `folder`/tmp."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "attnfuzz.harness.cli",
        "run",
        "--device",
        "cpu",
        "--plain",
        "--no-maps",
        "--seed",
        "0",
    ]
    (folder / "tmp").mkdir(exist_ok=True)
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [*command, "--out", str(folder / "out"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200", "TMPDIR": str(folder / "tmp"), "PYTHONPATH": path},
    )


def descendants(pid: int) -> list[int]:
    """The processes that `pid` has started, and those that they have."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            parents[int(folder.name)] = int(fields[1])
    found, frontier = list[int](), [pid]
    while frontier:
        frontier = [each for each, parent in parents.items() if parent in frontier]
        found += frontier
    return found


def workers_of(pid: int) -> list[int]:
    """The worker processes of the campaign in process `pid`."""
    found = []
    for each in descendants(pid):
        try:
            line = Path(f"/proc/{each}/cmdline").read_bytes()
        except OSError:
            continue
        found += [each] if _WORKER in line else []
    return found


def wait_for(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `holds` returns something that is true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def alive(pids: Sequence[int]) -> list[int]:
    """Those of `pids` that are no zombies."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and f"{_state(pid)}" not in "ZX"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def in_flight(out: Path) -> list[Path]:
    """The files of Cases in flight."""
    return [each for each in out.glob("inflight/*") if not each.name.startswith(".")]


@pytest.fixture
def tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for results. Afterwards no process that the test has started lives, and no temporary file is left."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    # What is marked there as compiled is not compiled again.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = set(descendants(os.getpid()))
    yield tmp_path / "out"
    wait_for(lambda: not set(descendants(os.getpid())) - before, 15)
    wait_for(lambda: not list(temporary.glob("attnfuzz-*")), 15)
    assert not list((tmp_path / "out").glob("inflight/*")), "a Case in flight is left"
