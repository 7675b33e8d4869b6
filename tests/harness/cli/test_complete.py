"""Shell completion: names of kernels and case files, fast, and without importing a backend."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from attnfuzz.harness.cli import main as cli

HEAVY = {"torch", "triton", "tilelang", "hypothesis", "numpy", "pytest", "rich.table"}
VARIABLE = "_ATTNFUZZ_COMPLETE"


def completions(*words: str) -> list[tuple[str, str]]:
    """(type, value) of what completes the last word."""
    *given, incomplete = words
    items = BashComplete(cli.main, {}, "attnfuzz", VARIABLE).get_completions(given, incomplete)
    return [(item.type, item.value) for item in items]


@pytest.fixture
def _cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".attnfuzz" / "cases").mkdir(parents=True)
    for name in (".attnfuzz/cases/mine-o-mismatch-1.json", "case.json", "case.txt", "two\nlines.json"):
        (tmp_path / name).write_text("{}")


FLEX = [("plain", "triton.flex"), ("plain", "triton.flex.prescaled"), ("plain", "triton.flex.tf32")]


@pytest.mark.parametrize(
    "words",
    [
        ("run", "triton.fl"), ("list", "triton.fl"), ("compile", "triton.fl"), ("check-adapter", "triton.fl"),
        ("corpus", "prune", "triton.fl"), ("run", "--kernel", "triton.fl"), ("gate", "--kernel", "triton.fl"),
        ("repro", "case.json", "--kernel", "triton.fl"), ("run", "triton.varlen", "triton.fl"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_kernels(words: tuple[str, ...]) -> None:
    assert completions(*words) == FLEX


def test_a_kernel_that_is_given_is_not_offered_again() -> None:
    assert completions("run", "triton.flex", "triton.fl") == FLEX[1:]
    assert completions("run", "no.such") == []


@pytest.mark.usefixtures("_cases")
@pytest.mark.parametrize("words", [("repro",), ("show",), ("compile", "--case"), ("repro", "--device", "cpu")], ids=" ".join)
def test_case_files(words: tuple[str, ...]) -> None:
    assert completions(*words, "") == [("plain", ".attnfuzz/cases/mine-o-mismatch-1.json"), ("plain", "case.json")]
    assert completions(*words, "ca") == [("plain", "case.json")]
    assert completions(*words, "/elsewhere/ca") == [("file", "/elsewhere/ca")]


def test_commands_and_options() -> None:
    assert ("plain", "prune") in completions("corpus", "")
    assert ("plain", "--exact") in completions("repro", "--ex")


@pytest.mark.parametrize("shell", [BashComplete, ZshComplete, FishComplete])
def test_each_shell_has_its_source(shell: type[BashComplete]) -> None:
    assert VARIABLE in shell(cli.main, {}, "attnfuzz", VARIABLE).source_vars().values()


def test_it_is_fast_and_imports_no_backend() -> None:
    """Thrice half a second, in time of a core: other tests run at the same time."""
    program = (
        "import atexit, sys\natexit.register(lambda: print('\\n', *sys.modules))\n"
        "from attnfuzz.harness.cli.main import main\nmain(prog_name='attnfuzz')"
    )
    environment = {**os.environ, VARIABLE: "bash_complete", "COMP_WORDS": "attnfuzz run triton.v", "COMP_CWORD": "2"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/", env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3 * 0.5
    assert done.stdout.splitlines()[0] == "plain,triton.varlen"
    assert not HEAVY & set(done.stdout.splitlines()[-1].split())
