"""Workers that share a GPU by CUDA's MPS, with a stand-in for its server and on the CPU: who shares, until when, what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from support.engine import Compiling, Sleeper, alive, campaign, descendants, tried, wait_for, workers_of
from support.mps import DIES_WHERE_SHARED, QUIT, START, FakeServer

from attnfuzz.harness.audit.selftest import faults as selftest
from attnfuzz.harness.campaign import worker_processes
from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.coordinator import Coordinator
from attnfuzz.harness.campaign.corpus import Corpus, read_case
from attnfuzz.harness.campaign.events import CampaignFinished, Event, Finding, SharedGpu, TrialFinished
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.cli.main import main
from attnfuzz.harness.isolation import reaper, sharing
from attnfuzz.harness.isolation.sharing import Sharing
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Built, Config, Device
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

_several_on_a_gpu = worker_processes.WorkerProcesses._several_on_a_gpu


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """On the CPU as on a GPU that all workers use."""
    for name in sharing.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sharing, "_USUAL", tmp_path / "none")
    # What is marked there as compiled is not compiled again.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(worker_processes.WorkerProcesses, "_several_on_a_gpu", lambda _: True)
    # A short path: pytest's own may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="mps-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        made = FakeServer(tmp_path / "bin", monkeypatch)
        yield made
        assert not made.calls or not alive([made.pid])
        assert not list(Path(folder).glob("attnfuzz-*"))


def shared_gpu(done: CampaignFinished) -> SharedGpu:
    assert done.shared_gpu is not None
    return done.shared_gpu


class Telling(Compiling):
    """Leaves a file for each process that builds it, which says whether it shares the GPU, in a folder of its run."""

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        run = self.folder / os.environ[reaper.MARK]
        run.mkdir(exist_ok=True)
        (run / str(os.getpid())).write_text(os.environ.get(sharing.VARIABLES[0], "alone"))
        return super().build(problem, config, device)


def test_the_children_of_workers_share_and_those_that_compile_do_not(tmp_path: Path, server: FakeServer) -> None:
    folder = tmp_path / "told"
    folder.mkdir()
    done, events = campaign([Telling("test.telling", 0.0, folder)], None, max_examples=8, workers=2, share_gpu=True)
    assert len(tried(events)) == 8
    found = shared_gpu(done)
    assert found.reason is None
    assert found.seconds is not None
    assert 0 < found.seconds < 600
    told = [{each.read_text() for each in run.iterdir()} for run in folder.iterdir() if run.is_dir()]
    assert all(len(each) == 1 for each in told)
    assert [each for each in told if each == {"alone"}] == [{"alone"}], "the campaign's own"
    assert {Path(name).name for each in told for name in each if each != {"alone"}} == {"mps"}
    assert server.calls == [START, QUIT]


def test_a_crash_ends_sharing_and_is_found_by_a_process_that_does_not(server: FakeServer, tmp_path: Path) -> None:
    done, _ = campaign(["fault.abort"], tmp_path / "out", max_examples=30, max_failures=1, shrink=1.0, workers=2, share_gpu=True)
    assert {each.identity.kind for each in done.findings} == {"crash"}
    alone, _ = campaign(["fault.abort"], None, max_examples=30, max_failures=1, shrink=1.0)
    assert {each.identity for each in done.findings} == {each.identity for each in alone.findings}
    found = shared_gpu(done)
    assert found.reason is not None
    assert "a process ended in stage kernel" in found.describe()
    assert found.cases == (), "it is explained"
    assert not (tmp_path / "out" / "unexplained").exists()
    assert server.calls == [START, QUIT], "once"
    assert not any(each.disturbances.killed for each in done.summaries)
    assert alone.shared_gpu is None


def test_a_crash_that_does_not_show_again_leaves_its_cases(server: FakeServer, tmp_path: Path) -> None:
    done, events = campaign([DIES_WHERE_SHARED], tmp_path / "out", max_examples=12, workers=2, share_gpu=True)
    assert not done.findings
    found = shared_gpu(done)
    assert found.cases
    kept = [read_case(Path(each)).case for each in found.cases]
    assert all(Path(each).parent == tmp_path / "out" / "unexplained" for each in found.cases)
    assert {each.id for each in kept} <= set(tried(events))
    assert f"no crash, hang or illegal access of its kernel was found ({len(kept)} Case" in found.describe()
    assert found.describe().endswith(f"attnfuzz repro {found.cases[0]} --repeat 100"), "as it is the kernel of an object"
    assert server.calls == [START, QUIT]


SMALL = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=16, dim_v=16)
KNOWN = [
    *((kind, "mine", True) for kind in ("crash", "hang", "illegal-access")),
    *((kind, "mine", False) for kind in ("mismatch", "exception")),
    ("crash", "other", False),
]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another shard"])
@pytest.mark.parametrize(("kind", "of", "explains"), KNOWN)
def test_what_explains_the_end_of_sharing(kind: Any, of: str, explains: bool, elsewhere: bool, tmp_path: Path) -> None:
    finding = Finding(
        Identity(kernel=of, kind=kind, output=None, check="forward"), Case(kernel=of, problem=SMALL), Verdict(status="fail")
    )
    summary = SimpleNamespace(findings=() if elsewhere else (finding,), elsewhere=(finding,) if elsewhere else ())
    coordinator = Coordinator.__new__(Coordinator)
    coordinator.context = CampaignContext(Settings("cpu"), corpus=Corpus(tmp_path))
    coordinator.ended_sharing = lambda: (Case(kernel="mine", problem=SMALL),)
    found = coordinator._with_unexplained(SharedGpu(1.0, "hang"), [summary])  # type: ignore[list-item]
    assert bool(found.cases) is not explains
    assert len(list(tmp_path.glob("unexplained/*.json"))) == len(found.cases)


def test_a_disk_that_is_full_costs_the_unexplained_cases_only(tmp_path: Path) -> None:
    (tmp_path / "unexplained").write_text("no folder")
    coordinator = Coordinator.__new__(Coordinator)
    coordinator.context = CampaignContext(Settings("cpu"), corpus=Corpus(tmp_path))
    coordinator.ended_sharing = lambda: (
        Case(kernel="mine", problem=Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=16, dim_v=16)),
    )
    assert coordinator._with_unexplained(SharedGpu(1.0, "hang"), []).cases == ()


@pytest.mark.parametrize("left", [60.0, 0.0])
def test_cases_of_an_end_with_a_reason_are_those_that_can_be_read(left: float, tmp_path: Path) -> None:
    case = Case(kernel="mine", problem=SMALL)
    group = processes_of(tmp_path, time.monotonic() + left)
    assert group.ended_sharing() == ()
    group._sharing[0].end("hang", ["junk", case.canonical(), "{}"])
    assert group.ended_sharing() == ((case,) if left else ())


def processes_of(folder: Path, end: float) -> worker_processes.WorkerProcesses:
    group = worker_processes.WorkerProcesses.__new__(worker_processes.WorkerProcesses)
    group._context, group._began = CampaignContext(Settings("cpu"), end=end), time.monotonic() - 5
    group._sharing, group._gpus = [Sharing(folder)], []
    return group


def test_tasks_that_the_end_of_the_budget_ends_are_no_reason(server: FakeServer) -> None:
    start = time.monotonic()
    done, _ = campaign([Sleeper("test.long", 60.0)], None, budget=4.0, workers=2, share_gpu=True)
    found = shared_gpu(done)
    assert (found.reason, server.calls) == (None, [START, QUIT])
    assert found.seconds is not None
    assert 3.5 <= found.seconds <= time.monotonic() - start


@pytest.mark.parametrize(("left", "reason"), [(None, "hang"), (60.0, "hang"), (0.0, None)])
def test_an_end_before_that_of_the_budget_has_its_reason(left: float | None, reason: str | None, tmp_path: Path) -> None:
    group = worker_processes.WorkerProcesses.__new__(worker_processes.WorkerProcesses)
    now = time.monotonic()
    group._context, group._began = CampaignContext(Settings("cpu"), end=None if left is None else now + left), now - 5
    group._sharing, group._gpus = [Sharing(tmp_path)], []
    assert shared_for(group.shared_gpu()) == (pytest.approx(5, abs=1), None), "it goes on"
    group._sharing[0].end("hang")
    assert shared_for(group.shared_gpu()) == (pytest.approx(5, abs=1), reason)


def shared_for(found: SharedGpu | None) -> tuple[float | None, str | None]:
    assert found is not None
    return found.seconds, found.reason


def test_without_a_server_the_workers_do_not_share(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/of/the/user")
    done, events = campaign(["torch.reference_cpu"], None, max_examples=4, workers=2, share_gpu=True)
    assert len(tried(events)) == 4
    text = "the workers did not share the GPU by MPS: CUDA_MPS_PIPE_DIRECTORY is set"
    assert shared_gpu(done).describe().startswith(text)
    assert server.calls == []


@pytest.mark.slow
def test_one_worker_on_each_gpu_shares_nothing(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes.WorkerProcesses, "_several_on_a_gpu", _several_on_a_gpu)
    done, _ = campaign(["torch.reference_cpu"], None, max_examples=2, workers=2, share_gpu=True)
    assert done.shared_gpu is None
    assert server.calls == []


def test_no_server_is_started_where_none_is_wanted(server: FakeServer, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--max-examples", "2", "--workers", "2", "--no-share-gpu", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, ["run", "torch.reference_cpu", *options, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["shared_gpu"] is None
    assert server.calls == []


@pytest.mark.parametrize("as_json", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_says_for_how_long_its_workers_shared_the_gpu(as_json: bool, server: FakeServer, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--max-examples", "2", "--workers", "2", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, ["run", "torch.reference_cpu", *options, *(["--json"] if as_json else [])])
    assert result.exit_code == 0, result.output
    if as_json:
        found = json.loads(result.stdout)["shared_gpu"]
        assert found["seconds"] > 0
        assert found["reason"] is None
    else:
        assert "the workers shared the GPU by MPS for " in result.output
    assert server.calls == [START, QUIT]


@pytest.mark.parametrize(
    ("device", "gpus", "workers", "several"),
    [("cuda", ["0"], 2, True), ("cuda", [], 2, True), ("cuda", ["0", "1"], 2, False), ("cpu", [], 2, False)],
)
def test_where_a_gpu_has_several_workers(device: Device, gpus: list[str], workers: int, several: bool) -> None:
    group = worker_processes.WorkerProcesses.__new__(worker_processes.WorkerProcesses)
    group._context, group._count = CampaignContext(Settings(device, workers=workers)), workers
    group._gpus = gpus
    assert _several_on_a_gpu(group) == several


def test_each_gpu_has_a_server_of_its_own(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    group = worker_processes.WorkerProcesses.__new__(worker_processes.WorkerProcesses)
    started: list[str] = []
    monkeypatch.setattr(
        worker_processes,
        "start_process",
        lambda _, has, __: started.append(Path(has[sharing.VARIABLES[0]]).name) or (None, PIPE),
    )
    group._context, group._began = CampaignContext(Settings("cuda", workers=5)), time.monotonic() - 5
    group._gpus, group._count, group._living, group._assignment = ["GPU-a", "GPU-b"], 5, [], None
    with tempfile.TemporaryDirectory() as folder:
        group._lender = SimpleNamespace(folder=folder, run="a run", lend=lambda: None, close=lambda: None)
        group._sharing = group._started_sharing()
        assert server.calls == [START, START]
        for number in range(4):
            group._start(number)
        assert started == ["mps0", "mps1", "mps0", "mps1"]
        assert shared_for(group.shared_gpu()) == (pytest.approx(5, abs=2), None)
        _, other = group._sharing
        other.end("hang in stage kernel")
        assert group._sharing[0].on()
        assert shared_for(group.shared_gpu()) == (pytest.approx(5, abs=2), "hang in stage kernel (GPU-b)")
        group._living.clear()
        group.close()
        assert server.calls[:3] == [START, START, QUIT]
        assert all(each._process.poll() is not None for each in (other, group._sharing[0]))
        group._gpus[1] = "1"
        assert shared_for(group.shared_gpu())[1] == "hang in stage kernel (GPU 1)"


PIPE = SimpleNamespace(send=lambda _: None)
PROGRAM = """
import sys, tempfile
from pathlib import Path
from support.engine import SLEEPER, campaign
from attnfuzz.harness.audit.selftest import faults as selftest
from attnfuzz.harness.campaign import worker_processes
from attnfuzz.harness.isolation import sharing
sharing._USUAL = Path("/nowhere")
worker_processes.WorkerProcesses._several_on_a_gpu = lambda _: True
campaign([SLEEPER], None, lambda each: print(type(each).__name__, flush=True), max_examples=4000, workers=2, share_gpu=True)
"""


def test_kill_9_of_the_campaign_leaves_neither_the_server_nor_its_folder(server: FakeServer) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": tempfile.gettempdir(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert run.stdout is not None
    try:
        while "TrialFinished" not in (line := run.stdout.readline()):
            assert line, "it has ended"
        theirs = descendants(run.pid)
        assert workers_of(run.pid)
        assert server.pid in theirs
        assert list(Path(tempfile.gettempdir()).glob("attnfuzz-*/mps/control"))
    finally:
        run.kill()
        run.wait()
    wait_for(lambda: not alive(theirs), 15)
    wait_for(lambda: not list(Path(tempfile.gettempdir()).glob("attnfuzz-*")), 15)
    assert server.calls == [START]


# --- on a GPU, with the server itself


def clients_of(folder: str) -> list[str]:
    """The lines of the server's clients, each with the number of a process."""
    environment = {**os.environ, **dict.fromkeys(sharing.VARIABLES, folder)}

    def said(text: str) -> list[str]:
        done = subprocess.run([sharing.CONTROL], input=text, capture_output=True, text=True, timeout=20, env=environment)
        return done.stdout.split()

    return [client for each in said("get_server_list\n") for client in said(f"get_client_list {each}\n")]


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of temporary files whose path is short, empty afterwards."""
    with tempfile.TemporaryDirectory(prefix="mps-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield Path(folder)
        wait_for(lambda: not list(Path(folder).glob("attnfuzz-*")), 15)


ON_A_GPU: dict[str, Any] = {"device": "cuda", "workers": 4, "share_gpu": True, "deadline": 5.0, "maps": False}


@pytest.mark.gpu
def test_on_a_gpu_the_children_of_all_workers_are_clients_of_the_server(short: Path) -> None:
    seen: list[set[str]] = []

    def listen(event: Event) -> None:
        wanted = isinstance(event, TrialFinished) and (not seen or len(seen[-1]) < 2)
        if wanted and (folders := list(short.glob("attnfuzz-*/mps"))):
            seen.append(set(clients_of(str(folders[0]))))

    # The first trial came after more than 25 s beside 15 other processes of a suite.
    done, events = campaign(["triton.varlen"], None, listen, budget=60.0, **ON_A_GPU)
    assert not done.findings
    assert tried(events)
    assert seen
    assert max(map(len, seen)) >= 2, seen
    print(shared_gpu(done).describe())
    assert shared_gpu(done).seconds is not None


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize(("slug", "ends"), [("address", True), ("endless", True), ("assert", True), ("none", False)])
def test_on_a_gpu_a_fault_is_found_and_is_not_another_kernels(slug: str, ends: bool, short: Path, tmp_path: Path) -> None:
    names = [f"fault.triton.{slug}", "triton.varlen"]
    # The first processes of a machine import for 15 s, and while compilers are at work a hang is known after as long.
    done, _ = campaign(names, tmp_path / "out", budget=90.0, max_failures=1, **ON_A_GPU)
    rows = {each.kernel: each for each in done.summaries}
    assert not rows["triton.varlen"].findings, [each.case.canonical() for each in rows["triton.varlen"].findings]
    assert not selftest.row_of("cuda", rows[names[0]]).wrong
    print(shared_gpu(done).describe())
    assert shared_gpu(done).seconds is not None
    assert (shared_gpu(done).reason is not None) == ends


PROGRAM_ON_A_GPU = """
from support.engine import campaign
names = ["fault.triton.endless", "triton.varlen"]
say = lambda each: print(type(each).__name__, flush=True)
campaign(names, None, say, budget=60.0, device="cuda", workers=4, share_gpu=True, deadline=20.0, maps=False)
"""


@pytest.mark.slow
@pytest.mark.gpu
def test_on_a_gpu_kill_9_of_a_campaign_that_shares_leaves_a_gpu_that_works(short: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM_ON_A_GPU],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert run.stdout is not None
    try:
        while "TrialFinished" not in (line := run.stdout.readline()):
            assert line, "it has ended"
        # The endless kernel of another child is at work meanwhile.
        time.sleep(8.0)
        theirs = descendants(run.pid)
    finally:
        run.kill()
        run.wait()
    wait_for(lambda: not alive(theirs), 30)
    done, events = campaign(["triton.varlen"], None, budget=30.0, device="cuda", workers=4)
    assert tried(events)
    assert not done.findings
    assert done.lost is None
    assert not done.broken
