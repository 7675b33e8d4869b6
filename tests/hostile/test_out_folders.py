"""Names and states of the folder that `--out` names: what is printed to be copied runs, and what cannot be is known at once.

Full and read-only file systems, and files in place of folders: tests/harness/campaign/test_broken_files.py.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.disks import small_disk
from support.hostile_files import apart, attnfuzz, refused
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign import campaign
from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.core import environment
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.strategies.case import Case

KERNEL = "torch.reference_cpu"
FAILED = Verdict(
    status="fail", failures=(Failure(kernel=KERNEL, kind="mismatch", output="o", check="element", message="planted"),)
)


class Stub(FunctionExecutor):
    """Takes no time; every Case fails."""

    def __init__(self) -> None:
        super().__init__(lambda _: FAILED)

    def describe(self) -> dict[str, Any]:
        return environment.describe("cpu")


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(campaign, "executor_of", lambda *_, **__: Stub())
    with apart(tmp_path, monkeypatch):
        yield


def run(out: str) -> Result:
    return attnfuzz("run", KERNEL, "--device", "cpu", "--max-examples", "1", "--seed", "0", f"--out={out}")


def command_of(text: str) -> list[str]:
    """The words of the command that runs the failure again, as bash reads them, once it is a line."""
    line = text.partition("run it again:")[2].partition("\n")[0]
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[:3]]


NAMES = {
    "a blank": "my out",
    "a newline": "my\nout",
    "blanks at its ends": " out ",
    "unicode": "\u00fcn\u00ef\u4e2d\U0001f600",
    "a leading dash": "-out",
    "an option": "--json",
    "quotes": 'it\'s "out"',
    "a command": "$(touch EXECUTED)`touch EXECUTED`; touch EXECUTED #",
    "markup": "[bold]out[/nope]",
    "a glob": "*?[a-z]",
    "a backslash": "a\\nb",
    "an escape": "out\x1b[2J",
    "a workflow command": "::error file=x::pwn",
    "a byte that is not UTF-8": "out\udcff",
    "250 letters": "x" * 250,
    "100 levels": "/".join(["d"] * 100),
    "a way round": "a/../b/./c//d",
    "a home that is none": "~nobody-here/out",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_any_name_holds_cases_that_can_be_copied(name: str) -> None:
    result = run(NAMES[name])
    assert result.exit_code == 1, result.output
    [file] = (Path(NAMES[name]) / "cases").iterdir()
    assert read_case(file).case.kernel == KERNEL
    assert "\x1b" not in result.output
    assert not [line for line in result.output.splitlines() if line.lstrip().startswith("::")]
    program, command, path = command_of(result.stdout)
    assert (program, command) == ("attnfuzz", "repro")
    again = attnfuzz(command, path, "--device", "cpu", "--in-process")
    assert (again.exit_code, again.stdout[:5]) == (0, "FIXED"), again.output


REFUSED = {
    "empty": ("", "out="),
    "a NUL": ("a\0b", "out="),
    "256 letters": ("x" * 256, "File name too long"),
    "5,000 letters": ("/".join(["d" * 99] * 50), "File name too long"),
    "a device": ("/dev/null", "failing Cases could not be written there"),
    "below a device": ("/dev/null/out", "failing Cases could not be written there"),
    "below proc": ("/proc/self/out", "failing Cases could not be written there"),
    "a link to itself": ("loop", "failing Cases could not be written there"),
    "a link to nothing below": ("nowhere/out", "failing Cases could not be written there"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_cannot_be_is_refused_before_the_run(name: str) -> None:
    out, reason = REFUSED[name]
    Path("loop").symlink_to("loop")
    Path("nowhere").symlink_to("/proc/none")
    refused(run(out), reason)


@pytest.mark.parametrize("command", ["list", "run torch.reference_cpu --out /tmp/none", "show x.json", "--help"])
def test_a_current_folder_that_was_deleted_is_an_error_in_words(command: str, tmp_path: Path) -> None:
    """Before anything is imported: Hypothesis asks for the current folder then."""
    attnfuzz_of = f"{shlex.quote(sys.executable)} -P -m attnfuzz.harness.cli"
    script = f"mkdir gone && cd gone && rmdir ../gone && {attnfuzz_of} {command}"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the current folder cannot be used (No such file or directory); change to one that exists\n"


def test_a_folder_that_turns_read_only_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is printed with its Case where no file can be written."""
    cases = tmp_path / "out" / "cases"
    with contextlib.ExitStack() as stack:

        class Remounts(Stub):
            def begin(self, case: Case, *, patient: bool = False) -> None:
                if not cases.exists():
                    stack.enter_context(small_disk(cases, 4, read_only=True))
                super().begin(case, patient=patient)

        monkeypatch.setattr(campaign, "executor_of", lambda *_, **__: Remounts())
        result = run("out")
        assert cases.exists()
        assert result.exit_code == 2, result.output
        assert "Read-only file system" in result.output
        assert "1 failure in " in result.stdout
        program, command, blob = command_of(result.stdout)
        assert (program, command, blob[:4]) == ("attnfuzz", "repro", "AF1-")
        assert attnfuzz(command, blob, "--device", "cpu", "--in-process").exit_code == 0


@pytest.mark.parametrize("kilobytes", [4, 8, 16, 64])
def test_a_disk_of_a_few_pages_loses_nothing(kilobytes: int, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kilobytes) as disk:
        result = run(str(disk / "out"))
        assert result.exit_code in (1, 2), result.output
        if result.exit_code == 1:
            [file] = (disk / "out" / "cases").iterdir()
            assert read_case(file).case.kernel == KERNEL
        else:
            assert "No space left on device" in result.output
        if "1 failure in " in result.stdout:
            _, command, argument = command_of(result.stdout)
            assert attnfuzz(command, argument, "--device", "cpu", "--in-process").exit_code == 0
