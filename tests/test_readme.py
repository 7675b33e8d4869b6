"""The README is right: its session is the demo's, its commands and files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.paths import ROOT

from attnfuzz.harness.campaign.options import OPTIONS
from attnfuzz.harness.cli.main import main
from attnfuzz.harness.core import environment
from attnfuzz.kernels import registry

README = (ROOT / "README.md").read_text()


def lines_of_session(text: str) -> list[str]:
    """The lines of a demo session that are the same everywhere: no figures of time, no versions, no tables."""
    changing = re.compile(
        r"cases/s|attnfuzz on |┃|━|│|└|settings:| in \d+ cases|after \d+ cases|demo.varlen │|on cpu$"
        # What else is explained depends on the time that is left for it.
        r"|does not matter|explained in part"
        # On a slow machine: lines of progress.
        r"|^after \d+ s: "
    )
    return [line.rstrip() for line in text.splitlines() if line.strip() and not changing.search(line)]


@pytest.mark.skipif(environment.has_cuda(), reason="the session shown is the CPU's")
def test_the_session_shown_is_the_demos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := registry.get("demo.varlen").unavailable("cpu"):
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    shown = README.split("$ attnfuzz demo\n")[1].split("\n```")[0]
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 0, result.output
    assert lines_of_session(shown) == lines_of_session(result.output)


def test_the_commands_named_exist() -> None:
    named = set(re.findall(r"(?:`|^|\$ )attnfuzz ([\w-]+)", README, re.MULTILINE)) - {"on"}
    assert named <= set(main.commands), named - set(main.commands)
    tox = (ROOT / "tox.ini").read_text()
    for name in re.findall(r"tox -e ([\w-]+)", README):
        assert f"[testenv:{name}]" in tox
    options = set(re.findall(r"(--attnfuzz-[\w-]+)", README))
    assert options <= {f"--attnfuzz-{option.name}" for option in OPTIONS}


def test_the_files_named_exist() -> None:
    for name in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", README):
        assert (ROOT / name).exists(), name


def test_ci_calls_the_test_command_of_the_readme() -> None:
    assert "pip install tox && tox " in README
    script = (ROOT / ".ci" / "run").read_text()
    assert 'pip" install --quiet --disable-pip-version-check tox' in script
    assert '"$venv/bin/tox"\n' in script
