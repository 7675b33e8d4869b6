"""Hostile and broken pyproject.toml files: refused with file, key, value, reason and remedy, before anything is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attnfuzz.harness.cli import main as cli

TRAP = "import pathlib\npathlib.Path('executed').touch()\n"
ROWS: dict[str, tuple[str, str]] = {
    "an unknown key": ('devise = "cpu"', "[tool.attnfuzz] devise='cpu': there is no such key; did you mean device?"),
    "a key with an underscore": ("max_examples = 5", "max_examples=5: there is no such key; did you mean max-examples?"),
    "one kernel": ('kernel = "a:B"', "[tool.attnfuzz] kernel='a:B': there is no such key; did you mean kernels?"),
    "a case": ('case = ["x.json"]', "[tool.attnfuzz] case=['x.json']: there is no such key; "),
    "a table in it": ("[tool.attnfuzz.run]\nseed = 1", "[tool.attnfuzz] run={'seed': 1}: there is no such key; "),
    "a key of escapes": ('"\\u001b[2J" = 1', "[tool.attnfuzz] \\x1b[2J=1: there is no such key; "),
    "kernels as text": ('kernels = "a:B"', "kernels='a:B': it is not a list; give a list, such as kernels = ["),
    "kernels of numbers": ("kernels = [1]", "kernels=1: it is not a string; "),
    "no kernels": ("kernels = []", "kernels=[]: it is empty; "),
    "an empty kernel": ('kernels = [""]', "kernels='': it is empty; "),
    "a kernel with NUL": ('kernels = ["a\\u0000:B"]', "kernels='a\\x00:B': it has characters that cannot be printed; "),
    "a kernel that turns text round": ('kernels = ["a\\u202e:B"]', "it has characters that cannot be printed; "),
    "a device of another kind": ("device = 1", 'device=1: it is not a string; give a string, such as device = "auto"'),
    "an unknown device": ('device = "tpu"', "device='tpu': no such device; use auto, cpu or cuda"),
    "a number for a budget": ("budget = 60", 'budget=60: it is not a string; give a string, such as budget = "60s"'),
    "a budget without unit": ('budget = "60"', "budget='60': it is not a duration; give a number and a unit"),
    "no time": ('budget = "0s"', "budget='0s': must be positive; "),
    "a wrong deadline": ('deadline = "soon"', "deadline='soon': it is not a duration; "),
    "an unknown profile": ('profile = "x"', "profile='x': there is no such profile; use one of quick, gate, nightly, models"),
    "text for a number": ('seed = "1"', "seed='1': it is not an integer; give an integer, such as seed = 8"),
    "true for a number": ("seed = true", "seed=True: it is not an integer; "),
    "a fraction for a number": ("max-examples = 1.5", "max-examples=1.5: it is not an integer; "),
    "a negative seed": ("seed = -1", "seed=-1: must not be negative; give 0 or more"),
    "no examples": ("max-examples = 0", "max-examples=0: must be positive; give 1 or more"),
    "no jobs": ("jobs = 0", "jobs=0: must be at least 1; "),
    "no memory": ("memory = 0", "memory=0.0: must be at least 1 and at most "),
    "infinite memory": ("memory = inf", "memory=inf: must be at least 1 and at most "),
    "NaN for memory": ("memory = nan", "memory=nan: must be at least 1 and at most "),
    "endless memory": (f"memory = 1{'0' * 400}", "it is not a number; "),
    "text for a flag": ('in-process = "yes"', "in-process='yes': it is not true or false; "),
    "one for a flag": ("plain = 1", "plain=1: it is not true or false; "),
    "a date": ("seed = 2026-01-01", "it is not an integer; "),
    "a wrong shard": ('shard = "3/2"', "shard='3/2': it is not I/N with I from 1 to N; "),
    "no workers": ("workers = 0", "workers='0': it is not a number from 1 to 1024, nor auto; "),
    "many workers": ('workers = "999999"', "workers='999999': it is not a number from 1 to 1024, nor auto; "),
    "an empty folder": ('out = ""', "out='': it is empty; "),
    "a folder with escapes": ('out = "\\u001b]52;c;x\\u0007"', "it has characters that cannot be printed; "),
    "a corpus as text": ('corpus = "x"', "corpus='x': it is not a list; give a list, such as corpus = ["),
    "settings that contradict": ("workers = 2\nin-process = true", "workers=2: with --in-process all runs in this process; "),
    "a long value": (f'device = "{"x" * 9999}"', "...: no such device; "),
}  # fmt: skip
WHOLE: dict[str, tuple[bytes, str]] = {
    "no TOML": (b"[tool.attnfuzz\n", "it is not TOML ("),
    "a key twice": (b"[tool.attnfuzz]\nseed = 1\nseed = 2\n", "it is not TOML ("),
    "no text": (b"[tool.attnfuzz]\nseed = \xff\n", "it is not TOML ("),
    "a number of 5,000 digits": (b"[tool.attnfuzz]\nseed = " + b"9" * 5000, "it is not TOML ("),
    "deep nesting": (b"[tool.attnfuzz]\nseed = " + b"[" * 50_000, "it is nested too deeply; "),
    "a value in place of the table": (b'[tool]\nattnfuzz = "x"\n', "tool.attnfuzz='x': it is not a table; begin it with"),
    "a list of tables": (b"[[tool.attnfuzz]]\nseed = 1\n", "tool.attnfuzz=[{'seed': 1}]: it is not a table; "),
    "tool is a number": (b"tool = 3 # attnfuzz\n", "tool.attnfuzz=3: it is not a table; "),
    "two MiB": (b"# attnfuzz\n" + b"#" * (2 << 20), "it has more than 1 MiB; make it smaller"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("trap.py").write_text(TRAP)


def refused(result: Result, text: str, name: str = "pyproject.toml") -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {Path(name).absolute()}: ")
    assert text in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 1500
    assert "fault of attnfuzz" not in result.stderr
    assert result.stderr.rstrip("\n").isprintable()
    assert not Path("executed").exists()
    assert not result.stdout


@pytest.mark.parametrize(("lines", "text"), list(ROWS.values()), ids=list(ROWS))
def test_a_wrong_setting_is_refused(lines: str, text: str) -> None:
    kernels = "" if "kernel" in lines else 'kernels = ["trap:KERNEL"]\n'
    Path("pyproject.toml").write_text(f"[tool.attnfuzz]\n{kernels}{lines}\n")
    refused(CliRunner().invoke(cli.main, ["list"]), text)


@pytest.mark.parametrize(("content", "text"), list(WHOLE.values()), ids=list(WHOLE))
def test_a_file_that_cannot_be_read_as_settings_is_refused(content: bytes, text: str) -> None:
    Path("pyproject.toml").write_bytes(content)
    refused(CliRunner().invoke(cli.main, ["run"]), text)


@pytest.mark.parametrize("kind", ["FIFO", "device", "link to nothing"])
def test_what_is_no_file_is_refused_and_not_read_for_ever(kind: str) -> None:
    path = Path("pyproject.toml")
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    refused(
        CliRunner().invoke(cli.main, ["gate", "--base", "main"]),
        "it is not a regular file; " if kind != "link to nothing" else "",
    )


def test_a_file_of_another_user_where_all_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("pyproject.toml").write_text('[tool.attnfuzz]\nkernels = ["trap:KERNEL"]\n')
    tmp_path.chmod(0o777)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if os.stat("pyproject.toml").st_uid == 0:  # noqa: PTH116
        os.chown("pyproject.toml", 54321, 54321)
    refused(CliRunner().invoke(cli.main, ["run"]), "another user owns it, in a folder that all can write to; ")


def test_a_parent_that_all_can_write_to_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("pyproject.toml").write_text('[tool.attnfuzz]\nkernels = ["trap:KERNEL"]\n')
    Path("mine").mkdir()
    tmp_path.chmod(0o777)
    monkeypatch.chdir("mine")
    result = CliRunner().invoke(cli.main, ["list"])
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "executed").exists()


def test_a_case_file_does_not_say_what_is_imported() -> None:
    """Its target is shown; only the user's own file and options are imported from."""
    Path("pyproject.toml").write_text('[tool.attnfuzz]\ndevice = "cpu"\n')
    problem = '{"seqlens_q": [1], "seqlens_k": [1], "dim_qk": 8, "dim_v": 8}'
    Path("case.json").write_text(f'{{"format": 1, "kernel": "trap", "problem": {problem}, "found": {{"target": "trap:KERNEL"}}}}')
    result = CliRunner().invoke(cli.main, ["repro", "case.json"])
    assert result.exit_code == 2
    assert "add --kernel trap:KERNEL" in result.stderr
    assert not Path("executed").exists()


@pytest.mark.parametrize("command", ["run", "repro", "gate", "list"])
def test_help_is_shown_beside_a_broken_file(command: str) -> None:
    Path("pyproject.toml").write_text("[tool.attnfuzz]\ndevise = 1\n")
    result = CliRunner().invoke(cli.main, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize("content", ["[broken\n", "[tool.ruff]\nline-length = 3\n", "[tool]\n", ""])
def test_a_file_without_settings_of_attnfuzz_changes_nothing(content: str) -> None:
    Path("pyproject.toml").write_text(content)
    assert CliRunner().invoke(cli.main, ["list"]).exit_code == 0
