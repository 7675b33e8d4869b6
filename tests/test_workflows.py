"""The workflows: sound YAML, commands that exist, least rights, and nothing that a stranger may choose inside a script."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from attnfuzz.harness.cli.main import main

FOLDER = Path(__file__).parents[1] / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
NAMES = [file.name for file in FILES]
INPUTS = ("package", "attnfuzz", "kernel", "base", "budget", "python", "gpu-runner", "corpus")


def scripts(text: str) -> list[str]:
    """The text of each `run:`, whole blocks included."""
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        match = re.match(r"(\s*)(?:- )?run: (.*)", line)
        if match is None:
            continue
        if match[2] not in ("|", ">-"):
            found.append(match[2].strip("'"))
            continue
        indent = len(match[1])
        block = []
        for inner in lines[number + 1 :]:
            if inner.strip() and len(inner) - len(inner.lstrip()) <= indent:
                break
            block.append(inner.strip())
        found.append("\n".join(block))
    return found


def test_there_are_both() -> None:
    assert NAMES == ["attnfuzz-gate.yml", "ci.yml"]


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_they_are_yaml(file: Path) -> None:
    """By PyYAML where that is installed; else by what breaks most often: tabs, odd indentation, keys twice at one level."""
    text = file.read_text()
    assert "\t" not in text
    try:
        import yaml  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        assert all((len(line) - len(line.lstrip())) % 2 == 0 for line in text.splitlines() if line.strip())
        top = re.findall(r"^([\w-]+):", text, re.MULTILINE)
        assert len(top) == len(set(top))
        assert {"name", "on", "permissions", "jobs"} <= set(top)
    else:
        found: dict[Any, Any] = yaml.safe_load(text)
        assert found["permissions"] == {"contents": "read"}
        assert all("runs-on" in job or "uses" in job for job in found["jobs"].values())


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_nothing_untrusted_reaches_a_script_and_rights_are_least(file: Path) -> None:
    text = file.read_text()
    for script in scripts(text):
        assert "${{" not in script, "inputs go through env:"
    assert re.findall(r"^permissions:\n((?:  .*\n)+)", text, re.MULTILINE) == ["  contents: read\n"]
    assert "pull_request_target" not in text
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")
    assert all(re.search(r"@v\d+$|^\./", each) for each in re.findall(r"uses: (\S+)", text))


def test_our_own_commands_parse() -> None:
    """Every option of an `attnfuzz` call in the workflows is one of the command's."""
    calls = [
        line for file in FILES for script in scripts(file.read_text()) for line in script.splitlines() if 'attnfuzz" ' in line
    ]
    assert calls
    for line in calls:
        words = shlex.split(line.split('attnfuzz" ', 1)[1])
        command = main.commands[words[0]]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line
        arguments = [word for word in words[1:] if "arguments[@]" not in word]
        command.make_context(words[0], arguments, resilient_parsing=False)
    added = set(re.findall(r"arguments\+=\((--[\w-]+)", (FOLDER / "attnfuzz-gate.yml").read_text()))
    assert added == {"--kernel", "--corpus", "--device"}
    assert added <= {option for parameter in main.commands["gate"].params for option in parameter.opts}


def test_the_tox_environments_and_scripts_that_ci_calls_exist() -> None:
    text = (FOLDER / "ci.yml").read_text()
    tox = (FOLDER.parents[1] / "tox.ini").read_text()
    for name in re.findall(r"-e ([\w-]+)", text):
        assert f"[testenv:{name}]" in tox
    assert (FOLDER.parents[1] / ".ci" / "run").exists()


def test_the_inputs_are_those_that_docs_and_ci_name() -> None:
    text = (FOLDER / "attnfuzz-gate.yml").read_text()
    block = text.split("    inputs:\n")[1].split("\npermissions:")[0]
    declared = re.findall(r"^      ([\w-]+):$", block, re.MULTILINE)
    assert tuple(declared) == INPUTS
    docs = (FOLDER.parents[1] / "docs" / "gate.md").read_text()
    assert all(f"| `{name}` |" in docs for name in declared)
    given = re.search(r"attnfuzz-gate.yml\n    with:\n((?:      .*\n)+)", (FOLDER / "ci.yml").read_text())
    assert given is not None
    assert set(re.findall(r"^      ([\w-]+):", given[1], re.MULTILINE)) <= set(declared)


def test_the_cache_is_keyed_by_branch_and_run() -> None:
    text = (FOLDER / "attnfuzz-gate.yml").read_text()
    keys = re.findall(r"^ +key: (.*)$", text, re.MULTILINE)
    assert len(keys) == 2
    assert keys[0] == keys[1]
    assert all(part in keys[0] for part in ("github.ref_name", "github.run_id", "github.run_attempt", "gpu-runner"))
