"""Template processes that another one forks: they have the mark, the variables and the end of their own user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.engine import wait_for
from support.paths import TESTS

from attnfuzz.harness.isolation import reaper
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.outcomes import Death, Reply, Task
from attnfuzz.harness.isolation.root import Root
from attnfuzz.harness.isolation.supervisor import Supervisor


@pytest.fixture
def lender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forkserver]:
    monkeypatch.syspath_prepend(str(TESTS))
    made = Forkserver(["json"])
    yield made
    made.close()
    assert not list(reaper.marked(made.run))


def user_of(lender: Forkserver, preload: list[str] | None = None, **variables: str) -> tuple[Forkserver, Supervisor]:
    forkserver = Forkserver(preload or ["json"], variables, Root(lender.lend()))
    return forkserver, Supervisor(forkserver, memory=1 << 29)


def task(name: str, **payload: object) -> Task:
    return Task(f"support.tasks:{name}", payload, {"kernel": 20.0, "start": 20.0})


def who(supervisor: Supervisor) -> int:
    reply = supervisor.run(task("who"))
    assert isinstance(reply, Reply)
    return int(reply.result)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def template_of(lender: Forkserver) -> int:
    assert lender._template is not None
    return lender._template.pid


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_each_user_has_a_template_process_with_its_own_mark_and_folder(lender: Forkserver) -> None:
    first, one = user_of(lender)
    second, other = user_of(lender)
    with closing(one), closing(other):
        pids = [who(one), who(other)]
        templates = [parent_of(each) for each in pids]
        assert [parent_of(each) for each in templates] == [template_of(lender)] * 2
        for forkserver, pid, template in zip((first, second), pids, templates, strict=True):
            assert {each.pid for each in reaper.marked(forkserver.run)} >= {pid, template}
            variables = one.run(task("variables")) if forkserver is first else other.run(task("variables"))
            assert isinstance(variables, Reply)
            assert variables.result["TMPDIR"] == forkserver.folder
            assert variables.result[reaper.MARK] == forkserver.run
        # One user's end is not the other's.
        one.close()
        assert [gone(each) for each in (pids[0], templates[0], pids[1], templates[1])] == [True, True, False, False]
        assert who(other) == pids[1]
    assert not any(list(reaper.marked(each.run)) or Path(each.folder).exists() for each in (first, second))


@pytest.mark.parametrize("how", ["segfault", "kill"])
def test_a_child_that_dies_is_reported_and_replaced(lender: Forkserver, how: str) -> None:
    _, supervisor = user_of(lender)
    with closing(supervisor):
        assert isinstance(supervisor.run(task("dies", how=how)), Death)
        assert supervisor.run(task("echo", number=3)) == Reply({"number": 3})


def test_only_variables_that_nothing_reads_at_its_import_may_differ(lender: Forkserver) -> None:
    _, supervisor = user_of(lender, CUDA_VISIBLE_DEVICES="1")
    with closing(supervisor):
        assert parent_of(parent_of(who(supervisor))) == template_of(lender)
        reply = supervisor.run(task("variables"))
        assert isinstance(reply, Reply)
        assert reply.result["CUDA_VISIBLE_DEVICES"] == "1"


def test_variables_that_an_import_sets_are_as_if_the_user_had_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    preload = ["support.tasks:set_variables"]
    with closing(Forkserver(preload)) as lender:
        forkserver, lent = user_of(lender, preload, CUDA_VISIBLE_DEVICES="1")
        with closing(lent), closing(Supervisor(Forkserver(preload), memory=1 << 29)) as own:
            assert parent_of(parent_of(who(lent))) == template_of(lender)
            replies = [each.run(task("variables")) for each in (lent, own)]
            assert all(isinstance(each, Reply) for each in replies)
            of_lent, of_own = (each.result for each in replies if isinstance(each, Reply))
            assert of_lent["PATH"] == of_own["PATH"] == f"/of/a/library{os.pathsep}{os.environ['PATH']}"
            assert of_lent["A_CACHE"] == f"{forkserver.folder}/cache"
            assert of_lent["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(("preload", "variables"), [(["json"], {"TRITON_INTERPRET": "yes"}), (["json", "csv"], {})])
def test_what_imports_something_else_forks_from_a_process_of_its_own(
    lender: Forkserver, preload: list[str], variables: dict[str, str]
) -> None:
    _, supervisor = user_of(lender, preload, **variables)
    with closing(supervisor):
        assert parent_of(parent_of(who(supervisor))) == os.getpid()
        reply = supervisor.run(task("variables"))
        assert isinstance(reply, Reply)
        assert variables.items() <= reply.result.items()


def test_without_the_process_that_forks_templates_users_go_on_and_start_their_own(lender: Forkserver) -> None:
    _, early = user_of(lender)
    late = Root(lender.lend())
    with closing(early):
        pid = who(early)
        template = parent_of(pid)
        os.kill(template_of(lender), signal.SIGKILL)
        wait_for(lambda: gone(template_of(lender)))
        assert who(early) == pid
        # Its template process is lost as well.
        os.kill(template, signal.SIGKILL)
        wait_for(lambda: gone(pid))
        assert parent_of(parent_of(who(early))) == os.getpid()
        with closing(Supervisor(Forkserver(["json"], root=late), memory=1 << 29)) as supervisor:
            assert parent_of(parent_of(who(supervisor))) == os.getpid()


def test_a_process_that_is_lost_as_it_is_to_fork_templates_is_started_again(
    lender: Forkserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender.prepare()
    pid = template_of(lender)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: gone(pid))
    # It lived when it was looked at.
    monkeypatch.setattr(lender._template, "alive", lambda: True)
    _, supervisor = user_of(lender)
    with closing(supervisor):
        assert template_of(lender) != pid
        assert parent_of(parent_of(who(supervisor))) == template_of(lender)


def test_a_template_process_that_was_never_used_ends_with_its_user(lender: Forkserver) -> None:
    forkserver, supervisor = user_of(lender)
    forkserver.prepare()
    supervisor.close()
    wait_for(lambda: not list(reaper.marked(forkserver.run)))
    assert not Path(forkserver.folder).exists()


USER = """
import os, socket, sys
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.outcomes import Task
from attnfuzz.harness.isolation.root import Root
from attnfuzz.harness.isolation.supervisor import Supervisor
forkserver = Forkserver(["json"], root=Root(socket.socket(fileno=int(sys.argv[1]))))
supervisor = Supervisor(forkserver, memory=1 << 30)
print(forkserver.run, supervisor.run(Task("support.tasks:who", {}, {})).result, flush=True)
supervisor.run(Task("support.tasks:dies", {"how": "loop"}, {"kernel": 600.0}))
"""


def test_a_user_that_is_killed_leaves_no_process(lender: Forkserver) -> None:
    connection = lender.lend()
    with connection:
        process = subprocess.Popen(
            [sys.executable, "-c", USER, str(connection.fileno())],
            pass_fds=[connection.fileno()],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
        )
    assert process.stdout is not None
    try:
        run, pid = process.stdout.readline().split()
        assert parent_of(parent_of(int(pid))) == template_of(lender)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not list(reaper.marked(run)))
    # The lender serves others.
    _, supervisor = user_of(lender)
    with closing(supervisor):
        assert parent_of(parent_of(who(supervisor))) == template_of(lender)
