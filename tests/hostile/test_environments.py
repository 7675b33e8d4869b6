"""Environments and streams as cron, containers and pipes have them: the verdict is the same, and no failure is lost."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.hostile_files import FAULTS, case, written

from attnfuzz.harness.campaign.corpus import read_case

Row = tuple[dict[str, str | None], tuple[str, ...]]
"""What is changed in the environment, None: taken from it; and options of Python."""
LOCALE = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LANG": None, "LC_CTYPE": None, "PYTHONIOENCODING": None}
ENVIRONMENTS: dict[str, Row] = {
    "no HOME": ({"HOME": None}, ()),
    "a HOME that is absent": ({"HOME": "/nonexistent/home"}, ()),
    "a HOME that cannot be written": ({"HOME": "/proc/self"}, ()),
    "an empty HOME": ({"HOME": ""}, ()),
    "nothing": (dict.fromkeys(set(os.environ) - {"PYTHONPATH"}), ()),
    "an empty PATH": ({"PATH": ""}, ()),
    "a dumb terminal": ({"TERM": "dumb"}, ()),
    "an unknown terminal": ({"TERM": "\x1b[31m"}, ()),
    "the C locale": ({**LOCALE, "LC_ALL": "C"}, ()),
    "an unknown locale": ({**LOCALE, "LC_ALL": "xx_YY.nope"}, ()),
    "latin-1": ({**LOCALE, "PYTHONIOENCODING": "latin-1"}, ()),
    "UTF-16": ({**LOCALE, "PYTHONIOENCODING": "utf-16"}, ()),
    "10 columns": ({"COLUMNS": "10"}, ()),
    "1 column": ({"COLUMNS": "1"}, ()),
    "no column": ({"COLUMNS": "0", "LINES": "0"}, ()),
    "columns in words": ({"COLUMNS": "many"}, ()),
    "forced colour": ({"FORCE_COLOR": "1", "COLUMNS": "80"}, ()),
    "no colour": ({"NO_COLOR": "1", "TERM": "xterm-256color"}, ()),
    "no assertions and docstrings": ({}, ("-OO",)),
    "warnings as errors": ({}, ("-W", "error")),
    "Python's development mode": ({}, ("-X", "dev")),
    "no bytecode": ({"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/proc/none"}, ()),
    "an unknown time zone": ({"TZ": "Nowhere/Nothing"}, ()),
}
QUICK = ("nothing", "the C locale", "latin-1", "1 column", "no assertions and docstrings", "warnings as errors")
"""The rows that start a process by default."""
TEXT = "\u00e9\u4e2d\U0001f600"
FOUND = {"message": f"planted {TEXT}", "device": "cpu"}


def python(row: Row, *arguments: str) -> tuple[list[str], dict[str, str]]:
    changed, options = row
    environment = {name: value for name, value in {**os.environ, **changed}.items() if value is not None}
    return [sys.executable, "-P", *options, "-m", "attnfuzz.harness.cli", *arguments], environment


def ran(row: Row, folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command, environment = python(row, *arguments)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False, timeout=300)
    # JSON has the traceback of a kernel that raises.
    printed = done.stderr if "--json" in arguments else done.stdout + done.stderr
    assert not any(fault.encode() in printed for fault in FAULTS), done.stderr
    return done


@pytest.mark.parametrize("name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in ENVIRONMENTS])
def test_a_case_is_shown_in_any_environment(name: str, tmp_path: Path) -> None:
    """Letters that the terminal has not stand as something else."""
    (tmp_path / "case.json").write_bytes(written(case(found=FOUND)))
    done = ran(ENVIRONMENTS[name], tmp_path, "show", "case.json")
    assert done.returncode == 0, done.stderr
    encoding = {"UTF-16": "utf-16", "latin-1": "latin-1"}.get(name, "utf-8")
    text = done.stdout.decode(encoding)
    assert "planted" in re.sub(r"\x1b\[[\d;]*m|\s", "", text)
    done = ran(ENVIRONMENTS[name], tmp_path, "show", "case.json", "--json")
    assert json.loads(done.stdout.decode(encoding))["found"]["message"] == FOUND["message"]


RUN = ("run", "fault.raises", "--device", "cpu", "--max-examples", "30", "--workers", "1", "--seed", "0", "--out", "out")


def assert_kept(folder: Path) -> None:
    [file] = (folder / "out" / "cases").iterdir()
    assert read_case(file).case.kernel == "fault.raises"


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_run_finds_the_same_in_any_environment(name: str, tmp_path: Path) -> None:
    done = ran(ENVIRONMENTS[name], tmp_path, *RUN, "--json")
    assert done.returncode == 1, done.stderr
    [failure] = json.loads(done.stdout.decode("utf-16" if name == "UTF-16" else "latin-1"))["failures"]
    assert failure["case"]["problem"]["seqlens_k"] == [3]
    assert_kept(tmp_path)


# --- streams, as a shell gives them

STREAMS: dict[str, tuple[str, int | None]] = {
    "no stdin": ("<&-", None),
    "no stdout": (">&-", None),
    "no stderr": ("2>&-", None),
    "none at all": ("<&- >&- 2>&-", None),
    "nobody reads": ("| head -c 0; exit ${PIPESTATUS[0]}", None),
    "a line is read": ("| head -1; exit ${PIPESTATUS[0]}", None),
    "a line of all is read": ("2>&1 | head -1; exit ${PIPESTATUS[0]}", None),
    "a full stdout": ("> /dev/full", 2),
    "a full stderr": ("2> /dev/full", None),
    "both full": ("> /dev/full 2>&1", 2),
    "stdout that can only be read": ("1< /dev/null", 2),
}
"""A redirection, and the exit code; None: as without it."""
QUICK_STREAMS = ("no stdin", "none at all", "a full stderr", "both full")


def shell(row: tuple[str, int | None], folder: Path, *arguments: str) -> tuple[int, int | None, str]:
    redirection, code = row
    command = shlex.join([sys.executable, "-P", "-m", "attnfuzz.harness.cli", *arguments])
    script = f"{command} {redirection}"
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    printed = done.stderr if "--json" in arguments else done.stdout + done.stderr
    assert not any(fault in printed for fault in (*FAULTS, "Exception ignored")), done.stderr
    return done.returncode, code, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", [each if each in QUICK_STREAMS else pytest.param(each, marks=pytest.mark.slow) for each in STREAMS]
)
def test_a_case_is_shown_whatever_the_streams_are(name: str, tmp_path: Path) -> None:
    (tmp_path / "case.json").write_bytes(written(case()))
    found, code, text = shell(STREAMS[name], tmp_path, "show", "case.json")
    assert found == (code or 0), text


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("name", STREAMS)
def test_a_failure_is_kept_whatever_the_streams_are(name: str, more: tuple[str, ...], tmp_path: Path) -> None:
    found, code, text = shell(STREAMS[name], tmp_path, *RUN, *more)
    assert found == (code or 1), text
    if found == 2 and not more:
        # The run ends with its first line, before it has tried anything.
        assert not (tmp_path / "out").exists()
    else:
        assert_kept(tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"stdin": subprocess.PIPE}, {"start_new_session": True}, {"umask": 0o777}, {"umask": 0o077}],
    ids=["an open stdin", "a session of its own", "an umask that forbids all", "an umask"],
)
@pytest.mark.slow
def test_a_failure_is_kept_however_the_process_was_started(options: dict[str, Any], tmp_path: Path) -> None:
    command, environment = python(({}, ()), *RUN)
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    assert process.stdout is not None
    text = process.stdout.read()
    assert process.wait(60) == 1, text
    assert_kept(tmp_path)
