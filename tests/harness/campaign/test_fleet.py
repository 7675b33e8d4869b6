"""A fleet outlives its actors and nodes: nothing that was found is lost, Cases in flight come first, and no process stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from support.engine import wait_for
from support.peers import Right, Skewed

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.events import CampaignFinished, CaseResumed, Event, FailureMapped, TrialFinished, WorkerDied
from attnfuzz.harness.campaign.fleet import workers as fleet
from attnfuzz.harness.campaign.fleet.cluster import Places
from attnfuzz.harness.campaign.fleet.workers import FleetWorkers, _FleetWorker
from attnfuzz.harness.campaign.journal import Journal, LeftBehind, left_behind
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.campaign.worker_group import WorkerGroup, WorkersLost
from attnfuzz.harness.cli import main as cli
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

try:
    import ray
    from ray.cluster_utils import Cluster
except ImportError:
    ray = None

needs_ray = pytest.mark.skipif(ray is None, reason="needs Ray: pip install 'attnfuzz[fleet]'")
SECONDS = 30.0
"""Until a process must have ended, on a busy machine."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A node for the campaign without CPUs for workers, and one node of a CPU."""
    config = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    nodes = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 0, "_system_config": config})
    nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def second(cluster: Any) -> Iterator[Any]:
    """Another node of a CPU."""
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield node
    if node in cluster.list_all_nodes():
        cluster.remove_node(node)


@pytest.fixture(autouse=True)
def _only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})


class Fleet:
    """A campaign on the cluster that does something to its workers after some trials, with `count` of them at work."""

    def __init__(self, act: Callable[[Fleet], None] = lambda _: None, after: int = 12, count: int = 1) -> None:
        self.act, self.after, self.count = act, after, count
        self.events: list[Event] = []
        self.trials = 0
        self.workers: Any = None
        self.pids: set[int] = set()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, TrialFinished):
            self.trials += 1
            at_work = [each for each in self.placed() if each.kernel] if self.workers else []
            if 0 < self.after <= self.trials and not self.pids and len(at_work) >= self.count:
                for each in self.placed():
                    self.pids |= family(ray.get(each.actor.pids.remote())[1])
                assert len(self.pids) > 1, "the worker and its children"
                self.act(self)

    def placed(self) -> list[Any]:
        return [each for each in self.workers._living if each.begun]

    def run(self, *kernels: Any, **changed: Any) -> CampaignFinished:
        from attnfuzz.harness.campaign.fleet.cluster import places_in

        places = places_in("cpu", "auto", None)

        def group(*arguments: Any) -> FleetWorkers:
            self.workers = FleetWorkers(*arguments, places=places)
            return self.workers

        given = {"max_examples": 60, "plain": True, "seed": 1, "out": "out", "workers": places.count}
        finished = run_campaign(
            [registry.register(each) for each in kernels], Settings(**{**given, **changed}), self, group=group
        )
        assert bool(self.pids) == (self.after > 0)
        assert gone(self.pids), "a process of a worker is left"
        return finished

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.events if isinstance(each, kind)]

    def tried(self) -> set[str]:
        return {each.case.id for each in self.of(TrialFinished) if each.phase == "generate"}


def family(pid: int) -> set[int]:
    """A process and all that descend from it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    members = {pid}
    while more := {each for each, parent in parents.items() if parent in members} - members:
        members |= more
    return members


def gone(pids: set[int]) -> bool:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if not any(alive(each) for each in pids):
            return True
        time.sleep(0.1)
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def alone(*kernels: Any) -> set[str]:
    """The Cases that one process tries."""
    fleet = Fleet(after=-1)
    settings = Settings(max_examples=60, plain=True, seed=1, out=None, in_process=True)
    run_campaign([registry.register(each) for each in kernels], settings, fleet)
    return fleet.tried()


def kill_actor(fleet: Fleet) -> None:
    os.kill(ray.get(fleet.placed()[0].actor.pids.remote())[0], signal.SIGKILL)


def kill_worker(fleet: Fleet) -> None:
    os.kill(ray.get(fleet.placed()[0].actor.pids.remote())[1], signal.SIGKILL)


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_actor, kill_worker], ids=["actor", "worker"])
def test_nothing_is_lost_with_a_process(cluster: Any, kill: Callable[[Fleet], None]) -> None:
    fleet = Fleet(kill)
    finished = fleet.run(Right("torch.right"))
    assert not finished.findings
    assert fleet.tried() | {each.case.id for each in fleet.of(CaseResumed)} == alone(Right("torch.right"))
    (resumed,) = fleet.of(CaseResumed)
    after = fleet.events[fleet.events.index(resumed) :]
    first = next(each for each in after if isinstance(each, TrialFinished))
    assert (first.case, first.phase) == (resumed.case, "replay"), "the Case in flight comes first"
    assert not list(Path("out").rglob("inflight/*"))


@needs_ray
@pytest.mark.slow
def test_nothing_is_lost_with_a_node(cluster: Any, second: Any) -> None:
    killed = []

    def remove(fleet: Fleet) -> None:
        killed.extend(fleet.placed())
        cluster.remove_node(second, allow_graceful=False)

    kernels = Right("torch.right"), Right("torch.other")
    fleet = Fleet(remove, count=2)
    finished = fleet.run(*kernels)
    assert len(killed) == 2, "both nodes had a worker"
    assert not finished.findings
    assert len(fleet.of(CaseResumed)) == 1
    assert fleet.tried() | {each.case.id for each in fleet.of(CaseResumed)} == alone(*kernels)
    assert not list(Path("out").rglob("inflight/*"))


@needs_ray
@pytest.mark.slow
def test_a_finding_is_kept_and_shrunk_here_with_its_maps(cluster: Any) -> None:
    fleet = Fleet()
    finished = fleet.run(Skewed("torch.skewed"), max_failures=1)
    (finding,) = finished.findings
    assert finding.identity.output == "dk"
    assert finding.minimal
    assert Path(finding.path).is_file()
    (mapped,) = fleet.of(FailureMapped)
    assert (Path("out") / mapped.path).is_file()


@needs_ray
@pytest.mark.slow
def test_a_finding_survives_the_death_of_its_worker_while_it_is_shrunk(cluster: Any) -> None:
    killed: list[Event] = []

    class Shrinking(Fleet):
        def __call__(self, event: Event) -> None:
            super().__call__(event)
            if isinstance(event, TrialFinished) and event.phase == "shrink" and not killed:
                killed.append(event)
                kill_actor(self)

    finished = Shrinking(after=-1).run(Skewed("torch.skewed"), max_failures=1)
    assert killed
    (finding,) = finished.findings
    assert finding.partly
    assert Path(finding.path).is_file()


@needs_ray
@pytest.mark.slow
def test_ctrl_c_keeps_what_was_found_and_ends_the_actors(cluster: Any) -> None:
    def interrupt(_: Fleet) -> None:
        times.append(time.monotonic())
        raise KeyboardInterrupt

    times: list[float] = []

    fleet = Fleet(interrupt)
    finished = fleet.run(Right("torch.right"), max_examples=5000)
    assert finished.interrupted
    assert time.monotonic() - times[0] < 12, "the workers heard of it, and were not killed for their silence"
    assert 12 <= finished.summaries[0].cases < 5000
    assert not list(left_behind("out"))


@needs_ray
@pytest.mark.slow
def test_the_next_run_begins_with_the_case_in_flight_of_a_campaign_that_was_killed(cluster: Any) -> None:
    command = [
        sys.executable,
        "-m",
        "attnfuzz.harness.cli",
        "fleet",
        "torch.reference_cpu",
        "--device",
        "cpu",
        "--budget",
        "300s",
    ]
    started = subprocess.Popen(
        [*command, "--address", cluster.address, "--json"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    end = time.monotonic() + 2 * SECONDS
    while not list(Path(".attnfuzz/inflight").glob("*-*")) and time.monotonic() < end:
        assert started.poll() is None, started.stderr and started.stderr.read()
        time.sleep(0.05)
    started.kill()
    started.wait()
    left: list[LeftBehind] = []
    # Until Ray ends it, the actor's Case is that of a run that lives.
    wait_for(lambda: left.extend(left_behind(".attnfuzz")) or left, SECONDS)
    fleet = Fleet(after=-1)
    settings = Settings(max_examples=5, plain=True, in_process=True)
    run_campaign([registry.get("torch.reference_cpu")], settings, fleet)
    first = next(each for each in fleet.events if isinstance(each, TrialFinished))
    assert first.case in {each.case for each in left}


@needs_ray
@pytest.mark.slow
def test_the_command_line(cluster: Any) -> None:
    arguments = ["torch.reference_cpu", "--device", "cpu", "--max-examples", "20", "--plain"]
    done = CliRunner().invoke(cli.main, ["fleet", *arguments])
    assert done.exit_code == 0, done.output
    assert "no failures in 20 cases" in done.output


def test_without_ray_the_message_has_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(cli.main, ["fleet", "torch.reference_cpu", "--device", "cpu"])
    assert done.exit_code == 2
    assert done.stderr == "error: fleet: Ray is not installed here; install it by: pip install 'attnfuzz[fleet]'\n"


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense://x", "127.0.0.1:99999"])
def test_an_address_without_a_cluster_ends_with_2(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    done = CliRunner().invoke(cli.main, ["fleet", "torch.reference_cpu", "--device", "cpu", "--address", address])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: address={address!r}: no Ray cluster can be reached there (")
    assert done.stderr.endswith("); start one by: ray start --head, or give --address local\n")


def test_a_fleet_in_one_process_is_refused() -> None:
    done = CliRunner().invoke(cli.main, ["fleet", "torch.reference_cpu", "--device", "cpu", "--in-process"])
    assert done.exit_code == 2
    assert "the workers of a fleet have processes of their own; use attnfuzz run" in done.stderr


class Stub:
    """An actor that is never asked anything that needs Ray."""

    def __init__(self) -> None:
        self.pids = self

    def remote(self) -> None:
        return None


class Gone(_FleetWorker):
    """A worker whose actor has died."""

    def end(self) -> None:
        pass


def in_flight(number: int, *cases: Case) -> Gone:
    worker = Gone(number, Stub(), Journal("out", durable=False))
    worker.journal.launch(*cases)
    return worker


def some_cases(count: int) -> list[Case]:
    problem = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=16, dim_v=16, dtype="float32")
    return [Case(kernel="torch.right", problem=replace(problem, seqlens_k=(1 + each,))) for each in range(count)]


def test_each_death_leaves_the_cases_of_its_own_worker(tmp_path: Path) -> None:
    """The journals of all actors are files of one process: the second death must not have the first's Cases tried again."""
    resumed: list[list[Case]] = []
    coordinator = SimpleNamespace(leave=lambda _: None, resume=lambda left: resumed.append([each.case for each in left]))
    heard: list[Event] = []
    context = SimpleNamespace(settings=Settings(out="out", workers=2), listener=heard.append)
    workers = WorkerGroup(context, 2)
    first, second, third = some_cases(3)
    workers._living = [in_flight(0, first, second), in_flight(1, third)]
    for each in list(workers._living):
        workers._gone(each, coordinator)
    assert resumed == [[first, second], [third]]
    assert [type(each) for each in heard] == [WorkerDied, WorkerDied]
    assert {each.deaths for each in left_behind("out")} == {1}


@needs_ray
def test_what_the_end_of_the_campaign_leaves_in_flight_has_ended_no_run(tmp_path: Path) -> None:
    """Two impatient Ctrl-C would have a Case counted as deadly, and never tried again."""
    context = SimpleNamespace(settings=Settings(out="out", workers=3))
    workers = FleetWorkers([], context, Places(3, 1.0, 0.0, 3))
    (case,) = some_cases(1)
    idle = in_flight(2, case)
    idle.journal.landed()
    workers._living = [in_flight(0, case), Gone(1, Stub(), None), idle]
    workers.close()
    assert [(each.case, each.deaths) for each in left_behind("out")] == [(case, 0)]
    assert len(list(Path("out/inflight").iterdir())) == 1


@needs_ray
@pytest.mark.parametrize(("room", "begun"), [(False, False), (True, False), (False, True)])
def test_a_cluster_without_nodes_ends_a_run_that_has_no_budget(room: bool, begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "has_room", lambda _: room)
    monkeypatch.setattr(fleet, "_LOOK_EVERY", 0.0)
    monkeypatch.setattr(fleet, "_PATIENCE", 0.02)
    workers = FleetWorkers([], SimpleNamespace(settings=Settings(out=None, workers=1)), Places(1, 1.0, 0.0, 1))
    worker = Gone(0, Stub(), None)
    worker.begun = begun
    workers._living = [worker]
    workers._end_without_nodes()
    time.sleep(0.03)
    if room or begun:
        workers._end_without_nodes()
        return
    with pytest.raises(WorkersLost, match="the cluster has had no node for a worker for 0 s"):
        workers._end_without_nodes()
