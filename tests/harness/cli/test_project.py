"""`[tool.attnfuzz]`: the command line beats it, it beats the defaults, and every command has its settings from the same file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.small import small_cases

from attnfuzz.harness.campaign.options import OPTIONS
from attnfuzz.harness.campaign.project import KEYS, find_project
from attnfuzz.harness.cli import main as cli
from attnfuzz.kernels import registry

MODULE = """from support.peers import Right

class Skewed(Right):
    # dV, since dK is 0 wherever a query has one key: few Cases must show it, whatever the seed is.
    def bent(self, inputs, gradients):
        dq, dk, dv = gradients
        return dq, dk, dv * 1.1

RIGHT, SKEWED = Right('team.right'), Skewed('team.skewed')
"""
TARGETS = ["team_kernels:RIGHT", "team_kernels:SKEWED"]
PLAIN = 'device = "cpu"\nin-process = true\nplain = true\nmax-examples = 4\nprofile = "quick"\n'


@pytest.fixture(autouse=True)
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout with two kernels that nothing but its pyproject.toml names; the current folder is below it."""
    folder = tmp_path / "checkout"
    (folder / "src").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "team_kernels.py").write_text(MODULE)
    monkeypatch.chdir(folder / "src")
    # As the folder is with `attnfuzz`; PYTHONSAFEPATH, under which tests run, keeps it out.
    monkeypatch.syspath_prepend(folder)
    for name in ("_registered", "_loaded", "_origins"):
        monkeypatch.setattr(registry, name, {})
    monkeypatch.setattr(sys, "argv", ["attnfuzz"])
    small_cases(monkeypatch)
    yield folder
    sys.modules.pop("team_kernels", None)


def settings(folder: Path, text: str = PLAIN, kernels: list[str] = TARGETS) -> Path:
    path = folder / "pyproject.toml"
    named = f"kernels = {json.dumps(kernels)}\n" if kernels else ""
    path.write_text(f"[project]\nname = 'team'\n\n[tool.attnfuzz]\n{named}{text}")
    return path


def attnfuzz(*arguments: str, code: int | None = None) -> Result:
    result = CliRunner().invoke(cli.main, list(arguments))
    assert code is None or result.exit_code == code, result.output
    return result


def cases_of(result: Result) -> dict[str, int]:
    return {row["kernel"]: row["cases"] for row in json.loads(result.stdout)["kernels"]}


def test_a_run_has_its_kernels_and_settings_from_the_nearest_file(team: Path) -> None:
    path = settings(team, f'{PLAIN}out = "kept"\n')
    result = attnfuzz("run", "--json", code=1)
    assert cases_of(result) == {"team.right": 4, "team.skewed": 4}
    values = "device=cpu profile=quick max-examples=4 out=../kept in-process=True plain=True"
    assert f"from {path}: kernels={','.join(TARGETS)} {values}\n" in result.stderr
    project = json.loads(result.stdout)["project"]
    assert project["path"] == str(path)
    assert project["settings"]["kernels"] == TARGETS
    assert project["settings"]["out"] == "../kept"
    assert list((team / "kept" / "cases").glob("team.skewed-*.json")), "paths are relative to the file"


def test_the_command_line_beats_the_file(team: Path) -> None:
    settings(team)
    result = attnfuzz("run", "team_kernels:RIGHT", "--max-examples", "2", "--json", code=0)
    assert cases_of(result) == {"team.right": 2}
    assert "kernels=" not in result.stderr
    assert "max-examples=" not in result.stderr
    assert "max_examples" not in json.loads(result.stdout)["project"]["settings"]


def test_a_case_file_finds_its_kernel(team: Path) -> None:
    settings(team, f'{PLAIN}out = "kept"\n')
    attnfuzz("run", code=1)
    (path,) = (team / "kept" / "cases").glob("*.json")
    for name in ("_registered", "_loaded", "_origins"):
        getattr(registry, name).clear()
    assert "FAILED" in attnfuzz("repro", str(path), code=1).stdout
    assert "team.skewed" in attnfuzz("show", str(path), code=0).stdout
    settings(team, kernels=TARGETS[:1])
    for name in ("_registered", "_loaded", "_origins"):
        getattr(registry, name).clear()
    refused = attnfuzz("repro", str(path), code=2)
    assert "kernel='team.skewed': no kernel of that name is installed" in refused.stderr


def test_the_broken_one_of_two_kernels_does_not_hide_the_other(team: Path) -> None:
    settings(team, f'{PLAIN}out = "kept"\n')
    attnfuzz("run", code=1)
    (path,) = (team / "kept" / "cases").glob("*.json")
    (team / "team_broken.py").write_text("raise RuntimeError('not today')\n")
    settings(team, kernels=["team_broken:KERNEL", TARGETS[1]])
    attnfuzz("repro", str(path), code=1)
    run = attnfuzz("run", code=2)
    assert "RuntimeError: not today" in run.stderr
    assert f"(kernels of {team / 'pyproject.toml'})" in run.stderr
    rows = {row["kernel"]: row["reasons"] for row in json.loads(attnfuzz("list", "--json", code=0).stdout)["kernels"]}
    assert "not today" in rows["team_broken:KERNEL"]["any device"]
    assert "team.skewed" in rows


def test_a_way_that_has_no_use_for_a_setting_does_without(team: Path) -> None:
    settings(team, f'{PLAIN}out = "kept"\ndeadline = "30s"\nbudget = "30s"\n')
    attnfuzz("run", code=1)
    (path,) = (team / "kept" / "cases").glob("*.json")
    exact = ("repro", str(path), "--script", "again.py", "--exact")
    attnfuzz(*exact, code=0)
    refused = attnfuzz(*exact, "--deadline", "3s", code=2)
    assert "leave --deadline out" in refused.stderr


def test_the_report_is_of_the_projects_folder(team: Path) -> None:
    settings(team, f'{PLAIN}out = "kept"\n')
    attnfuzz("run", "team_kernels:RIGHT", code=0)
    attnfuzz("report", code=0)
    assert (team / "kept" / "report.html").exists()


def test_an_error_of_a_setting_and_an_option_together_names_the_file(team: Path) -> None:
    path = settings(team, 'device = "cpu"\nworkers = 3\n')
    result = attnfuzz("run", "--in-process", code=2)
    assert f"leave one of the two out (workers is set in {path})" in result.stderr
    result = attnfuzz("run", "--in-process", "--workers", "3", code=2)
    assert "is set in" not in result.stderr


def test_the_gate_gates_the_projects_kernels(team: Path) -> None:
    path = settings(team, 'device = "cpu"\ncorpus = ["more"]\nledger = "none.toml"\n')
    result = attnfuzz("gate", "--baseline", "none.json", code=2)
    assert str(path) in result.stdout
    assert "corpus=../more" in result.stdout
    assert "../none.toml" in result.stderr


def test_the_file_of_a_checkout_ends_the_search(team: Path) -> None:
    settings(team.parent)
    assert find_project() is None
    (team / "pyproject.toml").write_text("[tool.ruff]\n")
    assert find_project() is None
    settings(team)
    assert find_project() is not None


def test_the_table_has_every_option_of_a_run_but_what_is_of_one_run() -> None:
    assert set(KEYS) == {"kernels", "corpus", *(each.name for each in OPTIONS)} - {"kernel", "case", "events"}


def test_without_a_file_nothing_is_said(team: Path) -> None:
    result = attnfuzz("run", "team_kernels:RIGHT", "--device", "cpu", "--in-process", "--max-examples", "1", "--json", code=0)
    assert "from " not in result.stderr
    assert json.loads(result.stdout)["project"] is None
