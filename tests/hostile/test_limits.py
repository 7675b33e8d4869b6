"""Limits of the process (ulimit): what cannot run under them says so in one line, with exit code 2; the rest runs."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.paths import TESTS

from attnfuzz.harness.cli.main import main
from attnfuzz.harness.isolation import forkserver, limits
from attnfuzz.harness.isolation.outcomes import Task
from attnfuzz.harness.isolation.supervisor import Supervisor
from attnfuzz.kernels.errors import BadArgument

KERNEL = "torch.reference_cpu"
UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Limits on open files of the test's own."""
    state: dict[str, Any] = {"limits": (1024, 4096), "set": []}

    def set_limits(_: int, values: tuple[int, int]) -> None:
        state["limits"] = values
        state["set"].append(values)

    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: state["limits"])
    monkeypatch.setattr(limits.resource, "setrlimit", set_limits)
    return state


@pytest.mark.parametrize(
    ("command", "most"),
    [
        *(("run", most) for most in (16, 32, 48, 64, 100, 128, 200, 255)),
        *((command, 64) for command in ("repro", "check-adapter", "selftest")),
    ],
)
def test_too_few_open_files_are_refused_in_one_line(command: str, most: int, files: dict[str, Any], tmp_path: Path) -> None:
    files["limits"] = (most, most)
    case = tmp_path / "case.json"
    problem = '{"seqlens_q": [3], "seqlens_k": [3], "dim_qk": 16, "dim_v": 16, "dtype": "float32"}'
    case.write_text(f'{{"format": 1, "kernel": "{KERNEL}", "problem": {problem}}}')
    arguments = {
        "run": ["run", KERNEL, "--max-examples", "2", "--out", str(tmp_path / "out")],
        "repro": ["repro", str(case)],
        "check-adapter": ["check-adapter", KERNEL],
        "selftest": ["selftest", "faults", "fault.abort"],
    }[command]
    result = CliRunner().invoke(main, [*arguments, "--device", "cpu"])
    assert result.exit_code == 2, result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(
        f"ulimit -n={most}: child processes need at least 256 open files each; "
        "raise the limit (ulimit -n 1024, or nofile in /etc/security/limits.conf)"
    )
    assert not files["set"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((64, 256), (256, 256)),
        ((64, 4096), (1024, 4096)),
        ((64, UNLIMITED), (1024, UNLIMITED)),
        ((300, 300), (300, 300)),
        ((300, 65536), (1024, 65536)),
        ((1024, 4096), (1024, 4096)),
        ((UNLIMITED, UNLIMITED), (UNLIMITED, UNLIMITED)),
    ],
    ids=str,
)
def test_a_soft_limit_is_raised(before: tuple[int, int], after: tuple[int, int], files: dict[str, Any]) -> None:
    files["limits"] = before
    limits.check_open_files()
    assert files["limits"] == after
    assert len(files["set"]) == (before != after)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.EAGAIN, "ulimit -u=77: the process that cleans up cannot be started; end other processes, or raise"),
        (errno.EMFILE, "ulimit -n=77: the process that cleans up cannot be started: too many open files; raise the limit"),
    ],
    ids=["processes", "files"],
)
def test_a_process_that_cannot_be_started_names_the_limit(
    number: int, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(forkserver.subprocess, "Popen", refuses)
    monkeypatch.setattr(forkserver, "check_open_files", lambda: None)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (77, 77))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(BadArgument) as raised:
        forkserver.Forkserver(["json"])
    assert str(raised.value).startswith(text)
    assert not list(tmp_path.iterdir()), "no folder is left"


def test_a_child_that_cannot_be_forked_names_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    supervisor = Supervisor(forkserver.Forkserver(["support.tasks:refuse_forks"]), memory=1 << 29)
    with pytest.raises(BadArgument, match=r"^ulimit -u=\w+: a child process cannot be started; end other processes"):
        supervisor.run(Task("support.tasks:echo", {}, {}))
    supervisor.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "code", "text"),
    [
        ("-n 24", 2, "ulimit -n=24: child processes need at least 256 open files each"),
        ("-n 32", 2, "ulimit -n=32: child processes need at least 256 open files each"),
        ("-n 64", 2, "ulimit -n=64: child processes need at least 256 open files each"),
        ("-n 100", 2, "ulimit -n=100: child processes need at least 256 open files each"),
        ("-Sn 64", 0, "no failures"),
        ("-n 256", 0, "no failures"),
        ("-f 8", 2, "the case in flight cannot be noted on disk any more: File too large"),
        ("-f 0", 2, "error: No usable temporary directory found"),
        ("-v 3000000", 0, "no failures"),
        ("-s 512", 0, "no failures"),
        ("-c unlimited", 0, "no failures"),
    ],
)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_run_under_a_limit(limit: str, code: int, text: str, workers: str, tmp_path: Path) -> None:
    run = shlex.join([sys.executable, "-P", "-m", "attnfuzz.harness.cli", "run", KERNEL, "--device", "cpu", "--out", "out"])
    command = f"ulimit {limit} && {run} --max-examples 6 --workers {workers}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    assert text in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "fault of attnfuzz" not in done.stderr
    if code == 2:
        # Of a run that could begin, the summary is the result.
        assert done.stderr.count("\n") == ("no failures in 6 cases" not in done.stdout)
