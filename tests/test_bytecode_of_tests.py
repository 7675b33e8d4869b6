"""When the processes of pytest-xdist get bytecode before they start: where all tests are run, and it can be kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.bytecode import make_bytecode


class Option(SimpleNamespace):
    """A pytest.Config of which only options are asked."""

    rootpath = Path()

    def getoption(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the commands of the children, which are not started, of a Python that writes no bytecode."""
    commands: list[list[str]] = []

    def start(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(wait=int, kill=int)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
        monkeypatch.setenv(name, "")  # restored, whatever is set
    return commands


def test_four_processes_collect_each_file_once(started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make_bytecode(Option(numprocesses=4))
    files = [each for command in started for each in command if each.endswith(".py")]
    assert (len(started), len(files)) == (4, len(set(files)))
    assert __file__ in files


@pytest.mark.parametrize("options", [{"numprocesses": None}, {"numprocesses": 0}, {"numprocesses": 3}, {"collectonly": True}])
def test_nothing_is_made_where_few_or_no_processes_run_tests(
    options: dict[str, Any], started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make_bytecode(Option(**{"numprocesses": 4} | options))
    assert not started


def test_nothing_is_made_that_cannot_be_kept(started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    make_bytecode(Option(numprocesses=4))
    assert not started
