"""Children that share the GPU: what happens to one is no result; sharing ends, and its task runs again without."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.engine import wait_for
from support.mps import DEADLINES, DIES_WHERE_SHARED, QUIT, SLOW_AT_THREE_KEYS, START, FakeServer, mps_variables, task

from attnfuzz.harness.isolation import child_main, sharing
from attnfuzz.harness.isolation import supervisor as supervisor_module
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.outcomes import Death, Error, Reply, Task
from attnfuzz.harness.isolation.root import Root
from attnfuzz.harness.isolation.sharing import Sharing
from attnfuzz.harness.isolation.supervisor import Supervisor
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case, Recipe


@pytest.fixture(params=["forked", "lent", "spawned"])
def supervisor(request: pytest.FixtureRequest, shared: Sharing) -> Iterator[Supervisor]:
    with closing(Forkserver(["json"])) as lender:
        root = Root(lender.lend()) if request.param == "lent" else None
        preload = None if request.param == "spawned" else ["json"]
        with closing(Supervisor(Forkserver(preload, shared.variables, root), memory=1 << 29)) as made:
            yield made


def assert_ended(shared: Sharing, server: FakeServer, supervisor: Supervisor, why: str) -> None:
    ended = shared.ended()
    assert ended is not None
    assert why in ended.why
    assert abs(ended.at - time.monotonic()) < 60
    assert not shared.on()
    assert server.calls == [START, QUIT], "once"
    assert not mps_variables(supervisor)
    assert not any(each.shares for each in supervisor._children.living)


def test_children_share_until_sharing_ends(supervisor: Supervisor, shared: Sharing, server: FakeServer) -> None:
    assert mps_variables(supervisor) == shared.variables
    assert supervisor.run(task("who")) == supervisor.run(task("who"))
    assert shared.on()
    assert shared.ended() is None
    shared.end("planted")
    assert_ended(shared, server, supervisor, "planted")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("segfault", "a process ended in stage kernel"),
        ("kill", "a process ended in stage kernel"),
        ("exit", "a process ended in stage kernel"),
        ("loop", "hang in stage kernel"),
        ("rubbish", "pipe in stage kernel"),
    ],
)
def test_a_death_is_no_result(supervisor: Supervisor, shared: Sharing, server: FakeServer, how: str, why: str) -> None:
    assert supervisor.run(task("dies_sharing", 1.0 if how == "loop" else 20.0, how=how)) == Reply("alone")
    assert_ended(shared, server, supervisor, why)
    assert supervisor.statistics.disturbances.killed == 0
    assert supervisor.take_late_death() is None


def test_what_ends_a_process_that_has_the_gpu_for_itself_is_a_result(supervisor: Supervisor, shared: Sharing) -> None:
    found = supervisor.run(task("dies", how="segfault"))
    assert isinstance(found, Death)
    assert found.signal == "SIGSEGV"
    assert not shared.on()
    assert supervisor.statistics.children >= 2


def test_a_lack_of_host_memory_is_a_result_and_ends_nothing(supervisor: Supervisor, shared: Sharing) -> None:
    found = supervisor.run(task("dies_sharing", how="memory"))
    assert isinstance(found, Death)
    assert found.why == "memory"
    assert shared.on()


@pytest.mark.parametrize("how", ["raise", "replace", "reply"])
def test_an_answer_of_a_broken_device_is_no_result(supervisor: Supervisor, shared: Sharing, server: FakeServer, how: str) -> None:
    assert supervisor.run(task("breaks_sharing", how=how)) == Reply("alone")
    assert_ended(shared, server, supervisor, "the GPU no longer worked")


def test_a_device_that_does_not_answer_is_broken(shared: Sharing, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Supervisor(Forkserver(["support.tasks:impatient"], shared.variables), memory=1 << 29)) as supervisor:
        assert supervisor.run(task("breaks_sharing", how="replace", for_ever=True)) == Reply("alone")
        assert_ended(shared, server, supervisor, "the GPU no longer worked")


def test_an_error_of_a_device_that_works_is_a_result(supervisor: Supervisor, shared: Sharing) -> None:
    assert isinstance(supervisor.run(task("dies", how="raise")), Error)
    assert shared.on()
    assert mps_variables(supervisor) == shared.variables


def test_an_error_of_a_broken_device_that_is_not_shared_is_a_result(supervisor: Supervisor, shared: Sharing) -> None:
    found = supervisor.run(task("breaks_sharing", how="raise", anyway=True))
    assert isinstance(found, Error), "of the second run: it ends"
    assert not shared.on()


def test_a_death_between_two_tasks_is_not_the_kernels(supervisor: Supervisor, shared: Sharing, server: FakeServer) -> None:
    reply = supervisor.run(task("ends_later"))
    assert isinstance(reply, Reply)
    [child] = supervisor._children.idle
    wait_for(child.gone)
    assert supervisor.run(task("echo", number=3)) == Reply({"number": 3})
    assert supervisor.take_late_death() is None
    assert_ended(shared, server, supervisor, "between two tasks")


@pytest.mark.parametrize("name", ["dies_sharing", "breaks_sharing"])
def test_a_first_task_that_fails_is_tried_without_sharing(shared: Sharing, server: FakeServer, name: str) -> None:
    warm = task(name, how="exit" if name == "dies_sharing" else "raise")
    with closing(Supervisor(Forkserver(["json"], shared.variables), memory=1 << 29, warm=warm)) as supervisor:
        assert supervisor.run(task("echo", number=3)) == Reply({"number": 3})
        assert_ended(shared, server, supervisor, "could not be made ready")


def test_the_task_of_another_worker_is_run_again_as_well(shared: Sharing, server: FakeServer, tmp_path: Path) -> None:
    """One's fault ends the server, which ends the other's process: here the test kills it."""
    one, other = (Supervisor(Forkserver(["json"], shared.variables), memory=1 << 29) for _ in range(2))
    with closing(one), closing(other):
        running = other.begin(task("once", mark=str(tmp_path / "mark")))
        wait_for(lambda: list(tmp_path.glob("mark.*")))
        assert one.run(task("dies_sharing", how="exit")) == Reply("alone")
        assert running.child.shares
        os.kill(running.child.pid, signal.SIGKILL)
        assert other.finish(running) == Reply("done")
        assert not running.child.shares
        assert other.statistics.disturbances.killed == 0
        assert_ended(shared, server, other, "a process ended")


def test_a_task_that_waits_for_a_server_that_is_gone_is_run_again(
    shared: Sharing, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_AFTER_SHARING", 0.3)
    with closing(Supervisor(Forkserver(["json"], shared.variables), memory=1 << 29)) as supervisor:
        running = supervisor.begin(task("once", mark=str(tmp_path / "mark")))
        wait_for(lambda: list(tmp_path.glob("mark.*")))
        shared.end("planted")
        assert supervisor.finish(running) == Reply("done")
        assert not running.child.shares
        assert_ended(shared, server, supervisor, "planted")


def test_a_batch_that_is_lost_is_run_again_as_the_same_batch(shared: Sharing) -> None:
    registry.register(DIES_WHERE_SHARED)
    try:
        with closing(Isolated("cpu", variables=shared.variables, spares=0)) as executor:
            problem = Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=16, dim_v=16, dtype="float32")
            [config] = DIES_WHERE_SHARED.configs(problem)[:1]
            alone = Case(kernel=DIES_WHERE_SHARED.name, problem=problem, config=config)
            cases = [replace(alone, recipe=Recipe(seed=number)) for number in range(5)]
            verdicts = executor.batch(cases)
            assert [each.failures for each in verdicts] == [()] * 5
            assert executor.statistics.tasks == 2, "what describes the device, and the batch"
            assert executor.statistics.batches_lost == 0
        assert not shared.on()
    finally:
        registry.unregister(DIES_WHERE_SHARED.name)


def test_a_stage_that_only_takes_longer_than_usual_ends_no_sharing(shared: Sharing) -> None:
    """Two of three runs of 120 s on an H200 shared the GPU for 34 and 64 s: half a second counted as a hang."""
    registry.register(SLOW_AT_THREE_KEYS)
    try:
        with closing(Isolated("cpu", variables=shared.variables, spares=0)) as executor:
            problem = Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=16, dim_v=16, dtype="float32")
            [config] = SLOW_AT_THREE_KEYS.configs(problem)[:1]
            case = Case(kernel=SLOW_AT_THREE_KEYS.name, problem=problem, config=config)
            for number in range(3):
                executor.begin(replace(case, recipe=Recipe(seed=number)))
                executor.finish()
            children = executor.statistics.children
            executor.begin(replace(case, problem=replace(problem, seqlens_k=(3,))))
            assert executor.finish().failures == ()
            assert executor.statistics.children == children
        assert shared.on()
    finally:
        registry.unregister(SLOW_AT_THREE_KEYS.name)


def test_each_task_has_a_least_time_where_its_child_shares(shared: Sharing, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[Task] = []
    begin = Supervisor.begin
    monkeypatch.setattr(Supervisor, "begin", lambda self, task, **more: (tasks.append(task), begin(self, task, **more))[1])
    kernel = registry.get("torch.reference_cpu")
    problem = Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=16, dim_v=16, dtype="float32")
    case = Case(kernel=kernel.name, problem=problem, config=kernel.configs(problem)[0])
    with closing(Isolated("cpu", variables=shared.variables, spares=0)) as executor:
        for number in range(4):
            executor.begin(replace(case, recipe=Recipe(seed=number)))
            executor.finish()
        executor.batch([case, replace(case, recipe=Recipe(seed=1))])
    last = {each.target.partition(":")[2]: each for each in tasks}
    for name in ("trial", "trials"):
        assert last[name].deadlines_of(shares=False)["kernel"] < 10
        assert last[name].deadlines_of(shares=True)["kernel"] == 30


def test_a_hang_has_its_own_limit_in_a_child_that_shares(shared: Sharing, server: FakeServer) -> None:
    with closing(Supervisor(Forkserver(["json"], shared.variables), memory=1 << 29)) as supervisor:
        quick = dataclasses.replace(task("nap", 0.3, seconds=1.5), shared={**DEADLINES, "kernel": 20.0})
        assert supervisor.run(quick) == Reply("woken")
        assert shared.on()
        shared.end("planted")
        found = supervisor.run(quick)
        assert isinstance(found, Death)
        assert (found.why, found.limit) == ("hang", 0.3)


@pytest.mark.parametrize(
    ("count", "config", "what"),
    [
        (1, Config(), r"1 Case, dims 16 x 8, float32"),
        (3, Config(tile_m=16, num_warps=4), r"3 Cases, dims 16 x 8, float32, num_warps=4 tile_m=16"),
    ],
)
def test_the_reason_names_what_was_run_the_time_and_the_place(count: int, config: Config, what: str, shared: Sharing) -> None:
    problem = Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=16, dim_v=8, dtype="float32")
    with closing(Supervisor(Forkserver(["json"], shared.variables), memory=1 << 29)) as supervisor:
        loop = task("dies_sharing", 0.3, how="loop")
        supervisor.run(dataclasses.replace(loop, cases=(Case(kernel="acme.one", problem=problem, config=config),) * count))
    ended = shared.ended()
    assert ended is not None
    expected = rf"hang in stage kernel of acme\.one \({what}\), after \d\.\d s, at tasks\.py:\w+"
    assert re.fullmatch(expected, ended.why), ended.why


def test_a_task_whose_time_is_over_may_end_for_some_seconds(shared: Sharing, server: FakeServer) -> None:
    with closing(Supervisor(Forkserver(["json"], shared.variables), memory=1 << 29)) as supervisor:
        supervisor.run(task("echo"))
        assert supervisor.finish(supervisor.begin(task("nap", seconds=0.5)), until=time.monotonic()) is not None
        assert shared.on()
        shared.end("planted")
        supervisor.run(task("echo"))
        assert supervisor.finish(supervisor.begin(task("nap", seconds=20.0)), until=time.monotonic()) is None, "it has the GPU"


def test_sharing_ends_before_a_task_at_work_is_ended(
    shared: Sharing, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_TO_END", 0.3)
    with closing(Supervisor(Forkserver(["json"], shared.variables), memory=1 << 29)) as supervisor:
        running = supervisor.begin(task("dies", how="loop"))
        assert supervisor.finish(running, until=time.monotonic() + 0.3) is None
        ended = shared.ended()
        assert ended is not None
        assert "the time of a task was over" in ended.why
        assert not mps_variables(supervisor)
        assert server.calls == [START], "workers do not wait for the server's end, least of all at that of a budget"


def test_spares_that_share_are_not_used_after_its_end(shared: Sharing, server: FakeServer) -> None:
    with closing(Supervisor(Forkserver(["json"], shared.variables), memory=1 << 29, spares=2)) as supervisor:
        supervisor.run(task("echo"))
        supervisor.settle()
        assert len(supervisor._children._ready) == 2
        shared.end("planted")
        assert_ended(shared, server, supervisor, "planted")


def test_sharing_ends_where_others_cannot_be_told(shared: Sharing, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def full(path: object, *rest: int) -> int:
        if str(path).endswith("off"):
            raise OSError(28, os.strerror(28))
        return opened(path, *rest)  # type: ignore[call-overload]

    with closing(Supervisor(Forkserver(["json"], shared.variables), memory=1 << 29)) as supervisor:
        with monkeypatch.context() as patch:
            patch.setattr(sharing.os, "open", full)
            assert supervisor._forkserver.sharing is not None
            supervisor._forkserver.sharing.end("planted")
        assert server.calls == [START, QUIT]
        assert not mps_variables(supervisor)


def test_a_process_without_the_variables_does_not_share(shared: Sharing) -> None:
    with closing(Supervisor(Forkserver(["json"]), memory=1 << 29)) as supervisor:
        assert supervisor._forkserver.sharing is None
        assert not mps_variables(supervisor)


def test_the_variables_may_differ_between_template_processes() -> None:
    assert set(sharing.VARIABLES) <= child_main._OF_A_TEMPLATE
