"""The MPS server of a run: when there is none, how it ends, and that it outlives nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from support.engine import alive, wait_for
from support.mps import QUIT, FakeServer, mps_variables, task

from attnfuzz.harness.isolation import reaper, sharing
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.outcomes import Death
from attnfuzz.harness.isolation.sharing import NotShared
from attnfuzz.harness.isolation.supervisor import Supervisor

DEAF = """#!/bin/sh
trap '' TERM
if [ "$1" = -f ]; then
    echo $$ > "$(dirname "$0")/pid"
    touch "$CUDA_MPS_PIPE_DIRECTORY/control"
    sleep 61 &
    echo $! > "$(dirname "$0")/pid-of-other"
    wait
else
    echo "said by ${ATTNFUZZ_RUN-no run}" >> "$(dirname "$0")/calls"
    exec sleep 62
fi
"""
SLOW_TO_END = """#!/bin/sh
here=$(dirname "$0")
if [ "$1" = -f ]; then
    echo $$ > "$here/pid"
    touch "$CUDA_MPS_PIPE_DIRECTORY/control"
    while [ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ]; do sleep 0.05; done
    sleep 0.4
    echo ended >> "$here/calls"
else
    rm -f "$CUDA_MPS_PIPE_DIRECTORY/control"
fi
"""


def test_a_server_that_does_not_answer_is_killed_with_what_it_has_started(
    server: FakeServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = FakeServer(tmp_path / "bin", monkeypatch, DEAF)
    made = sharing.start(folder, {reaper.MARK: "a run"}, [])
    wait_for(lambda: (tmp_path / "bin" / "pid-of-other").exists())
    processes = [deaf.pid, int((tmp_path / "bin" / "pid-of-other").read_text())]
    assert alive(processes) == processes
    start = time.monotonic()
    made.close()
    assert time.monotonic() - start < 3.5
    assert deaf.calls == ["said by a run"], "it was asked first"
    wait_for(lambda: not alive(processes))


def test_a_server_that_takes_its_time_to_end_is_not_killed(
    server: FakeServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = FakeServer(tmp_path / "bin", monkeypatch, SLOW_TO_END)
    sharing.start(folder, {}, []).close()
    assert slow.calls == ["ended"]


def test_the_end_of_a_server_that_cannot_be_killed_is_not_waited_for(
    server: FakeServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int, _: int) -> None:
        refusals.append(pid)
        raise PermissionError

    refusals: list[int] = []
    deaf = FakeServer(tmp_path / "bin", monkeypatch, DEAF)
    made = sharing.start(folder, {}, [])
    monkeypatch.setattr(sharing, "_QUIT_SECONDS", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(sharing.os, "killpg", refused)
        start = time.monotonic()
        made.close()
    assert time.monotonic() - start < 10
    assert refusals == [deaf.pid]
    os.killpg(deaf.pid, signal.SIGKILL)


def test_a_server_of_the_users_is_left_alone(server: FakeServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    own = dict.fromkeys(sharing.VARIABLES, str(folder))
    for name, value in own.items():
        monkeypatch.setenv(name, value)
        with pytest.raises(NotShared, match=f"{name} is set"):
            sharing.start(folder / "ours", {}, [])
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    with closing(Supervisor(Forkserver(["json"]), memory=1 << 29)) as supervisor:
        assert mps_variables(supervisor) == own
        assert isinstance(supervisor.run(task("dies", how="exit")), Death)
        assert mps_variables(supervisor) == own
    assert server.calls == []


def test_a_server_with_the_usual_folder_is_left_alone(
    server: FakeServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / "control").touch()
    monkeypatch.setattr(sharing, "_USUAL", tmp_path / "usual")
    with pytest.raises(NotShared, match="MPS server of the user's"):
        sharing.start(folder, {}, [])
    assert server.calls == []


def test_why_there_is_no_server(folder: Path, tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotShared, match="too long"):
        sharing.start(folder / ("x" * 100), {}, [])
    FakeServer(tmp_path / "bin", monkeypatch, "#!/bin/sh\nexit 3\n")
    with pytest.raises(NotShared, match="ended with exit code 3"):
        sharing.start(folder, {}, [])
    FakeServer(tmp_path / "bin", monkeypatch, "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(sharing, "_START_SECONDS", 0.3)
    with pytest.raises(NotShared, match="did not start"):
        sharing.start(folder.with_name("other"), {}, [])
    full = FakeServer(tmp_path / "bin", monkeypatch, DEAF)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(NotShared, match="No space left"):
            sharing.start(folder.with_name("full"), {}, [])
    assert not alive([full.pid])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotShared, match="not on the PATH"):
        sharing.start(folder, {}, [])


@pytest.mark.parametrize(("usable", "visible"), [(["1"], "all"), (["GPU-1"], "GPU-1"), ([], "all")])
def test_the_server_counts_gpus_as_its_clients_do(
    server: FakeServer, folder: Path, monkeypatch: pytest.MonkeyPatch, usable: list[str], visible: str
) -> None:
    if usable:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", usable[0])
    sharing.start(folder, {}, usable).close()
    assert server.calls == [f"start {visible}", QUIT]


PROGRAM = """
import sys, time
from pathlib import Path
from attnfuzz.harness.isolation import reaper, sharing
from attnfuzz.harness.isolation.deadlines import Deadlines
from attnfuzz.harness.isolation.forkserver import Forkserver
sharing._USUAL = Path("/nowhere")
lender = Forkserver(["json"])
lender.prepare()
made = sharing.start(Path(lender.folder) / "mps", {reaper.MARK: lender.run}, [])
print(lender.run, lender.folder, flush=True)
time.sleep(600)
"""


def test_kill_9_leaves_neither_the_server_nor_its_folder(server: FakeServer) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        run, folder = process.stdout.readline().split()
        assert server.pid in {each.pid for each in reaper.marked(run)}
        assert Path(folder, "mps", "control").exists()
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not list(reaper.marked(run)) and not Path(folder).exists())
    assert not alive([server.pid])
