"""Child processes: tasks and replies, every way to die, and what is left afterwards. Nothing here imports torch in a child."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.engine import wait_for
from support.paths import TESTS

from attnfuzz.harness.isolation import reaper
from attnfuzz.harness.isolation.child import Child, ChildError
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.outcomes import Death, Error, Past, Reply, Task
from attnfuzz.harness.isolation.root import Root
from attnfuzz.harness.isolation.supervisor import Supervisor
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

HERE = str(TESTS)


@pytest.fixture(params=["forked", "lent", "spawned"])
def supervisor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """`lent`: from a template process that another one has forked."""
    monkeypatch.syspath_prepend(HERE)
    lender = Forkserver(["json"])
    root = Root(lender.lend()) if request.param == "lent" else None
    forkserver = Forkserver(None if request.param == "spawned" else ["json"], root=root)
    made = Supervisor(forkserver, memory=1 << 29)
    yield made
    made.close()
    lender.close()
    assert not list(reaper.marked(forkserver.run))
    assert not Path(forkserver.folder).exists()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.syspath_prepend(HERE)
    made = Supervisor(Forkserver(["json"]), memory=1 << 29)
    yield made
    made.close()


def task(name: str, kernel: float = 20.0, **payload: object) -> Task:
    return Task(f"support.tasks:{name}", payload, {"kernel": kernel, "start": 20.0})


def died(supervisor: Supervisor, how: str, kernel: float = 20.0) -> Death:
    found = supervisor.run(task("dies", kernel, how=how))
    assert isinstance(found, Death), found
    # Whatever it was, the next task is done.
    assert supervisor.run(task("echo", number=3)) == Reply({"number": 3})
    return found


def test_a_task_has_a_reply_and_its_child_goes_on(supervisor: Supervisor) -> None:
    assert supervisor.run(task("echo", text="\u00e9\n", number=1.5)) == Reply({"text": "\u00e9\n", "number": 1.5})
    first, second = supervisor.run(task("who")), supervisor.run(task("who"))
    assert first == second
    supervisor.replace()
    assert supervisor.run(task("who")) != first


def test_a_child_that_asks_for_it_is_replaced(forked: Supervisor) -> None:
    first = forked.run(task("who"))
    forked.run(task("echo", replace=True))
    assert forked.run(task("who")) != first


def test_what_a_task_prints_is_no_part_of_the_protocol(supervisor: Supervisor, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervisor.run(task("noisy")) == Reply("quiet")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("how", "name"), [("segfault", "SIGSEGV"), ("abort", "SIGABRT"), ("kill", "SIGKILL")])
def test_a_signal_is_told_with_its_stage(supervisor: Supervisor, how: str, name: str) -> None:
    found = died(supervisor, how)
    assert (found.why, found.stage, found.signal, found.status) == ("exit", "kernel", name, -signal.Signals[name])
    if how != "kill":
        assert "most recent call first" in found.output
        assert (found.site or "").startswith("tasks.py:")


def test_an_exit_code_is_told(supervisor: Supervisor) -> None:
    found = died(supervisor, "exit")
    assert (found.why, found.status, found.signal, found.site) == ("exit", 3, None, None)


@pytest.mark.parametrize(("how", "kind"), [("raise", "ValueError"), ("leave", "SystemExit")])
def test_what_a_task_raises_is_an_error_of_the_parents_side(supervisor: Supervisor, how: str, kind: str) -> None:
    found = supervisor.run(task("dies", how=how))
    assert isinstance(found, Error)
    assert found.type == kind
    assert "support/tasks.py" in found.trace
    assert isinstance(supervisor.run(Task("support.tasks:no_such", {}, {})), Error)
    assert isinstance(supervisor.run(Task("no_such_module:task", {}, {})), Error)


@pytest.mark.parametrize("how", ["loop", "c loop"])
def test_a_hang_ends_at_its_deadline(supervisor: Supervisor, how: str) -> None:
    start = time.monotonic()
    found = died(supervisor, how, kernel=0.4)
    assert time.monotonic() - start < 5
    assert (found.why, found.stage, found.limit, found.signal) == ("hang", "kernel", 0.4, "SIGKILL")
    assert 0.4 <= found.seconds < 3
    assert ("in _loop" in found.output) == (how == "loop"), "a stack where signals are not blocked"


def test_a_page_that_was_written_over_holds_no_deadline_off(supervisor: Supervisor) -> None:
    start = time.monotonic()
    found = died(supervisor, "scribble", kernel=0.5)
    assert (found.why, found.stage) == ("hang", "kernel")
    assert time.monotonic() - start < 10


def test_the_deadline_is_the_stages_own(forked: Supervisor) -> None:
    limits = dict.fromkeys(("compile", "inputs", "kernel", "oracle", "judge", "end"), 1.0)
    assert forked.run(Task("support.tasks:late", {}, limits)) == Reply("done")
    found = forked.run(Task("support.tasks:late", {}, {**limits, "oracle": 0.1}))
    assert isinstance(found, Death)
    assert (found.why, found.stage) == ("hang", "oracle")


def test_memory_without_end_is_cut_off(supervisor: Supervisor) -> None:
    found = died(supervisor, "memory")
    assert (found.why, found.limit) == ("memory", 1 << 29)


def test_memory_of_a_process_that_a_child_has_started_counts(forked: Supervisor) -> None:
    found = died(forked, "memory of another process")
    assert (found.why, found.limit) == ("memory", 1 << 29)
    assert found.seconds < 10


def test_a_flood_is_kept_short_and_its_end_told(forked: Supervisor) -> None:
    found = died(forked, "flood", kernel=1.0)
    assert found.why == "hang"
    assert found.printed > 1 << 20
    assert len(found.output) <= 6000


@pytest.mark.parametrize("how", ["pipes", pytest.param("half a message", marks=pytest.mark.slow), "rubbish"])
def test_a_broken_connection_is_the_childs_end(supervisor: Supervisor, how: str) -> None:
    start = time.monotonic()
    found = died(supervisor, how)
    assert found.why == ("exit" if how == "pipes" else "pipe")
    assert time.monotonic() - start < 15


def test_what_a_child_leaves_behind_goes_with_it(supervisor: Supervisor) -> None:
    found = died(supervisor, "daemon")
    assert (found.why, found.status) == ("exit", 4)
    alive = {each.pid for each in reaper.marked(supervisor._forkserver.run)}
    template = supervisor._forkserver._template
    assert alive == {child.pid for child in supervisor._children.living} | ({template.pid} if template else set())


def test_a_template_process_that_was_killed_is_replaced(forked: Supervisor) -> None:
    found = forked.run(task("dies", how="parent"))
    assert isinstance(found, Death)
    assert forked.run(task("echo")) == Reply({})


def test_a_child_that_died_between_tasks_costs_no_task(supervisor: Supervisor) -> None:
    found = supervisor.run(task("who"))
    assert isinstance(found, Reply)
    for child in list(supervisor._children.living):
        os.kill(child.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert supervisor.run(task("echo")) == Reply({})


def test_tasks_intern_no_strings(forked: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python replaces a table of a megabyte when such strings have filled it, and its place is lost to what lies behind it."""
    forked.run(task("who"))
    interned: list[str] = []
    monkeypatch.setattr(sys, "intern", lambda text: interned.append(text) or text)
    for _ in range(3):
        forked.run(task("who"))
    assert not interned


def test_several_tasks_at_once(forked: Supervisor) -> None:
    start = time.monotonic()
    tasks = [*(task("late") for _ in range(4)), task("dies", how="abort"), task("dies", how="raise"), task("echo")]
    found = dict(forked.run_all(tasks, 7))
    assert time.monotonic() - start < 2 * 2.0
    assert [type(found[index]) for index in range(7)] == [Reply, Reply, Reply, Reply, Death, Error, Reply]
    forked.idle(1)
    assert len(forked._children.idle) == 1


def test_children_share_one_look_at_the_processes_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator looks at each of its compiles once a second: with a look for each, its workers waited for it."""
    forkserver, looks, look = Forkserver(None), list[float](), reaper.living

    def counted() -> dict[int, reaper.Process]:
        looks.append(time.monotonic())
        return look()

    monkeypatch.setattr(reaper, "living", counted)
    try:
        children = [forkserver.start() for _ in range(3)]
        wait_for(lambda: all(each.memory() for each in children))
        usages = [forkserver.usage_of(each, 60.0) for each in children]
        assert len(looks) == 1
        assert {each.at for each in usages} == {usages[0].at}
        assert looks[0] <= usages[0].at
        assert all(each.memory > 0 for each in usages)
        later = forkserver.start()
        wait_for(later.memory)
        assert forkserver.usage_of(later, 60.0).memory > 0, "a child that the last look has not seen is looked for"
        assert forkserver.usage_of(children[0]).at > usages[0].at
        assert len(looks) == 3
    finally:
        forkserver.close()


@pytest.mark.slow
def test_200_restarts_leak_nothing(forked: Supervisor) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(list(Path("/proc/self/fd").iterdir())), pages

    for _ in range(5):
        forked.run(task("dies", how="abort"))
    before = held()
    for _ in range(200):
        assert isinstance(forked.run(task("dies", how="abort")), Death)
    after = held()
    assert after[0] == before[0]
    assert after[1] - before[1] < (16 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert forked.statistics.replaced >= 205


def test_recovery_is_measured(forked: Supervisor) -> None:
    died(forked, "abort")
    died(forked, "exit")
    assert len(forked.statistics.recoveries) == 2
    assert all(0 < each < 5 for each in forked.statistics.recoveries)


@pytest.mark.parametrize("spares", [0, 1, 2])
def test_a_new_child_has_built_nothing_and_any_other_says_what(spares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    made = Supervisor(Forkserver(["json"]), memory=1 << 29, spares=spares, warm=task("echo"))
    problem = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=8, dim_v=8)
    built, run = (replace(task("echo"), cases=(Case(kernel=name, problem=problem),)) for name in ("built", "run"))
    made.hint(built)
    try:
        for _ in range(3):
            made.replace()
            for past in (Past(), Past(run.cases)):
                running = made.begin(run)
                assert running.past == past
                assert made.finish(running) == Reply({})
            # What ends its process has the next task in one that may have built in advance.
            died = made.begin(task("dies", how="abort"))
            assert isinstance(made.finish(died), Death)
            assert made.begin(run).past in (Past(), Past(built.cases))
    finally:
        made.close()


@pytest.mark.parametrize(("how", "again"), [("hint", True), ("once", True), ("exit", False), ("raise", False)])
def test_the_first_task_of_a_kernels_children_outlives_one_death(
    how: str, again: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without it a kernel that sets its processes up would find one that has tensors on the device."""
    monkeypatch.syspath_prepend(HERE)
    made = Supervisor(Forkserver(["json"]), memory=1 << 29, warm=task("echo"))
    first = task("dies_once", marker=str(tmp_path / "marker")) if how == "once" else task("dies", how=how)
    own = task("echo", own=True) if how == "hint" else first
    made.renew(own)
    if how == "hint":
        made.hint(task("dies", how="exit"))
    try:
        assert isinstance(made.run(task("who")), Reply)
        assert (made._children._warm == own) == again
    finally:
        made.close()


def test_a_child_that_cannot_be_made_ready_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    made = Supervisor(Forkserver(["json"]), memory=1 << 30, warm=task("dies", how="raise"))
    with pytest.raises(ChildError, match="ValueError: seven"):
        made.run(task("echo"))
    made.close()


def test_an_interpreter_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    forkserver = Forkserver(["json"])
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ChildError, match="no process can be started: No such file"):
        Supervisor(forkserver, memory=1 << 30).run(task("echo"))
    forkserver.close()


def test_another_thread_may_start_children_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system ties a child's life to the thread that started it: only the main thread may ask for that."""
    monkeypatch.syspath_prepend(HERE)
    found: list[Supervisor] = []

    def start() -> None:
        found.append(Supervisor(Forkserver(["json"]), memory=1 << 30))
        found[0].run(task("who"))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert all(not child.gone() for child in found[0]._children.living)
    assert found[0].run(task("echo")) == Reply({})
    found[0].close()


PARENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.outcomes import Task
from attnfuzz.harness.isolation.supervisor import Supervisor
forkserver = Forkserver(["json"] if sys.argv[2] == "forked" else None)
supervisor = Supervisor(forkserver, memory=1 << 30)
supervisor.run(Task("support.tasks:echo", {}, {}))
print(forkserver.run, forkserver.folder, flush=True)
supervisor.run(Task("support.tasks:dies", {"how": sys.argv[3]}, {"kernel": 600.0}))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("how", ["forked", "spawned"])
def test_nothing_outlives_the_parent(how: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, HERE, how, "c loop"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert parent.stdout is not None
    run, folder = parent.stdout.readline().split()
    time.sleep(0.3)
    assert len(list(reaper.marked(run))) >= 2
    assert Path(folder).is_dir()
    parent.send_signal(number)
    parent.wait(20)
    end = time.monotonic() + 5
    while time.monotonic() < end and (list(reaper.marked(run)) or Path(folder).exists()):
        time.sleep(0.02)
    assert not list(reaper.marked(run))
    assert not Path(folder).exists()


def test_a_child_that_takes_long_to_end_is_waited_for_at_the_end_alone(
    forked: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = waits(monkeypatch)
    first = forked.run(task("who"))
    assert isinstance(first, Reply)
    with monkeypatch.context() as patch:
        # As a process that a driver holds.
        patch.setattr(Child, "gone", lambda child: False)
        forked.replace()
        second = forked.run(task("who"))
        assert isinstance(second, Reply)
        assert second.result != first.result
        assert not waited
        forked.close()
        assert first.result in waited


def test_of_many_children_that_take_long_to_end_the_first_are_waited_for(
    forked: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, before = waits(monkeypatch), 0
    with monkeypatch.context() as patch:
        patch.setattr(Child, "gone", lambda child: False)
        for number in range(60):
            assert isinstance(forked.run(task("echo", replace=True)), Reply)
            if number == 30:
                before = descriptors()
        assert descriptors() <= before
        assert 40 <= len(waited) < 60


def test_a_child_that_has_ended_gets_no_signal(forked: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, plain = [], Child.end

    def end(child: Child) -> None:
        ends.append((child.pid, child.gone()))
        plain(child)

    monkeypatch.setattr(Child, "end", end)
    for _ in range(5):
        forked.run(task("echo", replace=True))
    forked.close()
    # Whoever waits for it, its number may be another process's after that.
    assert len(ends) == len({pid for pid, _ in ends}) >= 5
    assert not any(gone for _, gone in ends)


def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the children that are waited for from now on."""
    waited, plain = [], Child.wait

    def wait(child: Child) -> int | None:
        waited.append(child.pid)
        return plain(child)

    monkeypatch.setattr(Child, "wait", wait)
    return waited


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))
