"""Modules of kernels that leave the process, raise what is no Exception, print, or hold no kernel; and hostile names."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hostile import HARMLESS, attnfuzz, json_of, refused

from attnfuzz.kernels import registry
from attnfuzz.kernels.support import import_trial, third_party

MODULES = {
    "exit 0": ("import sys; sys.exit(0)", "failed with SystemExit: 0 ("),
    "exit 3": ("import sys; sys.exit(3)", "failed with SystemExit: 3 ("),
    "exit without a code": ("import sys; sys.exit()", "failed with SystemExit"),
    "exit with a text": ("import sys; sys.exit('no GPU here')", "failed with SystemExit: no GPU here ("),
    "its own KeyboardInterrupt": ("raise KeyboardInterrupt", "failed with KeyboardInterrupt ("),
    "GeneratorExit": ("raise GeneratorExit", "failed with GeneratorExit ("),
    "StopIteration": ("raise StopIteration", "failed with StopIteration ("),
    "recursion": ("def f(): f()\nf()", "failed with RecursionError: maximum recursion depth exceeded"),
    "click's own exit": ("import click; raise click.exceptions.Exit(0)", "failed with Exit: 0 ("),
    "pytest's exit": ("import pytest; pytest.exit('gone', returncode=0)", "failed with Exit: gone"),
    "pytest's skip": ("import pytest; pytest.skip('gone', allow_module_level=True)", "failed with Skipped: gone"),
    "no message": (
        "class Mute(BaseException):\n    def __str__(self): raise SystemExit(0)\nraise Mute",
        "failed with Mute: (its message cannot be made: SystemExit)",
    ),
    "the process ended with 0": ("import os; print('bye'); os._exit(0)", "ended the process, with exit code 0"),
    "the process ended with 7": ("import os; os._exit(7)", "ended the process, with exit code 7"),
    "killed": ("import os; os.kill(os.getpid(), 9)", "ended the process, by SIGKILL"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "ended the process, by SIGSEGV (ev_segfault.py:2)"),
    "replaced": ("import os; os.execv('/bin/true', ['true'])", "ended the process, with exit code 0"),
    "descriptors closed": ("import os; os.closerange(3, 4096)", "ended the process, with exit code 78"),
    "hang": ("import time\nwhile True: time.sleep(1)", "does not end within 1 s (ATTNFUZZ_IMPORT_SECONDS)"),
    "exit at attribute": ("def __getattr__(name): raise SystemExit(0)", "making it failed with SystemExit: 0"),
    "exit in a constructor": (
        "import sys\nclass KERNEL:\n    def __init__(self): sys.exit(0)",
        "making it failed with SystemExit: 0",
    ),
    "process ended in a maker": ("import os\ndef KERNEL(): os._exit(0)", "ended the process, with exit code 0"),
    "exit at its name": (
        "class K(Harmless):\n    @property\n    def name(self): raise SystemExit(3)\nKERNEL = K()",
        "making it failed with SystemExit: 3",
    ),
    "exit at its repr": (
        "class K:\n    def __repr__(self): raise SystemExit(0)\nKERNEL = K()",
        "kernel=<K>: it lacks name, backend",
    ),
    "name is a number": ("Harmless.name = 3\nKERNEL = Harmless()", "its name is 3; must be printable text"),
    "name is empty": ("Harmless.name = ' '\nKERNEL = Harmless()", "its name is ' '; must be printable text"),
    "name with an escape": ("Harmless.name = 'ev\\x1b[2J'\nKERNEL = Harmless()", "its name is 'ev\\x1b[2J'; must be printable"),
    "name with a newline": ("Harmless.name = 'ev\\n::error::x'\nKERNEL = Harmless()", "must be printable text"),
    "name is half a character": ("Harmless.name = '\\ud800x'\nKERNEL = Harmless()", "its name is '\\ud800x'; must be printable"),
    "name of attnfuzz's own": (
        "Harmless.name = 'torch.reference_cpu'\nKERNEL = Harmless()",
        "it calls itself 'torch.reference_cpu', as another kernel does (attnfuzz itself)",
    ),
    "capabilities are none": ("Harmless.capabilities = None\nKERNEL = Harmless()", "capabilities is a NoneType: must be"),
    "exit when asked": (
        "def unavailable(self, device): raise SystemExit(0)\nHarmless.unavailable = unavailable\nKERNEL = Harmless()",
        "asking whether it runs on cpu failed with SystemExit: 0",
    ),
    "exit when asked for configs": (
        "def configs(self, problem): raise SystemExit(0)\nHarmless.configs = configs\nKERNEL = Harmless()",
        "SystemExit: 0",
    ),
}  # fmt: skip
"""Name of a row: what stands in the module, and a part of the reason."""


def target_of(row: str) -> str:
    return f"ev_{row.replace(' ', '_').replace(chr(39), '')}:KERNEL"


@pytest.fixture(scope="module")
def fatal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The modules of all rows, on sys.path; and why some end their process, as children have tried them, few for all."""
    folder = tmp_path_factory.mktemp("modules")
    for row, (code, _) in MODULES.items():
        name = target_of(row).partition(":")[0]
        text = HARMLESS.format(name=f"ev.{name}") if "Harmless" in code else "\n"
        folder.joinpath(f"{name}.py").write_text(f"{text}{code}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        patch.setattr(import_trial, "_fatal", {})
        patch.setenv(import_trial.SECONDS, "60")
        reasons = import_trial.why_fatal([target_of(row) for row in MODULES if row != "hang"])
        patch.setenv(import_trial.SECONDS, "1")
        yield {**reasons, **import_trial.why_fatal([target_of("hang")])}


@pytest.fixture(autouse=True)
def _apart(fatal: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert fatal
    for table in ("_registered", "_loaded", "_origins"):
        monkeypatch.setattr(registry, table, {})
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv(import_trial.SECONDS, "60")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")


def test_the_child_only_accuses_what_ends_it(fatal: dict[str, str]) -> None:
    assert set(fatal) == {target_of(row) for row, (_, reason) in MODULES.items() if reason.startswith(("ended", "does not end"))}


@pytest.mark.parametrize("row", MODULES)
def test_a_module_that_gives_no_kernel_is_refused_in_words(row: str) -> None:
    result = attnfuzz("run", target_of(row), "--device", "cpu", "--max-examples", "1", "--in-process", "--json")
    refused(result, [MODULES[row][1]])
    assert "error" in json_of(result), "also for a machine"


ALIKE = ("exit 0", "the process ended with 0", "name is half a character")


@pytest.mark.parametrize("row", ALIKE)
@pytest.mark.parametrize(
    "command",
    [("list",), ("compile",), ("check-adapter",), ("check-adapter", "--in-process"), ("fleet", "--address", "local")],
    ids=" ".join,
)
def test_every_command_refuses_it_alike(row: str, command: tuple[str, ...]) -> None:
    options = ("--device", "cpu") if command[0] in ("check-adapter", "fleet") else ()
    result = attnfuzz(command[0], target_of(row), *command[1:], *options)
    if command[0] == "check-adapter" and row == "name is half a character":
        assert result.exit_code in (1, 2), result.output
        return
    refused(result, [MODULES[row][1]])


@pytest.mark.parametrize("row", ["exit 0", "the process ended with 0", "segfault", "exit in a constructor"])
def test_a_case_of_it_is_an_error_and_not_fixed(row: str, tmp_path: Path) -> None:
    case = tmp_path / "case.json"
    case.write_text('{"format": 1, "kernel": "ev.k", "problem": {"seqlens_q": [3], "seqlens_k": [3], "dim_qk": 16, "dim_v": 16}}')
    for command in (("repro", "--device", "cpu"), ("compile", "--case")):
        refused(attnfuzz(*command, str(case), "--kernel", target_of(row)), [MODULES[row][1]])


PRINTING = """
import ctypes, os, sys
print("from Python")
sys.__stdout__.write("past sys.stdout")
ctypes.CDLL(None).puts(b"from C")
os.write(1, b"to the descriptor")
sys.stdout = open(os.devnull, "w")
KERNEL = Harmless()
"""


@pytest.mark.parametrize("command", ["list", "compile", "check-adapter", "run"])
def test_what_a_module_prints_is_not_among_the_json(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Where a whole list of checks would run, one says no.
    absent = "Harmless.unavailable = lambda *_: 'absent'\n" if command == "check-adapter" else ""
    (tmp_path / f"ev_print_{command[:3]}.py").write_text(HARMLESS.format(name="ev.print") + absent + PRINTING)
    options = {"run": ("--device", "cpu", "--in-process", "--max-examples", "1"), "check-adapter": ("--device", "cpu")}
    result = attnfuzz(command, f"ev_print_{command[:3]}:KERNEL", "--json", *options.get(command, ()))
    assert json_of(result)
    assert "from Python" in result.stderr
    written = capfd.readouterr()
    assert written.out == ""
    for each in ("past sys.stdout", "from C", "to the descriptor"):
        assert each in written.err


def test_a_module_is_tried_once_and_again_once_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []
    popen = import_trial.subprocess.Popen

    def counted(*arguments: object, **options: object) -> object:
        starts.append(1)
        return popen(*arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(import_trial.subprocess, "Popen", counted)
    good, bad, other = (f"ev_{name}:KERNEL" for name in ("good", "bad", "other"))
    (tmp_path / "ev_bad.py").write_text("import os; os._exit(0)\n")
    for name in ("good", "other"):
        (tmp_path / f"ev_{name}.py").write_text("KERNEL = 1\n")
    assert list(import_trial.why_fatal([good, bad, other])) == [bad]
    assert len(starts) == 2, "one for the first two, and one for what was left"
    assert list(import_trial.why_fatal([good, bad, other])) == [bad]
    assert len(starts) == 2
    (tmp_path / "ev_bad.py").write_text("KERNEL = 1\n")
    assert import_trial.why_fatal([bad]) == {}
    assert len(starts) == 3
    registry.get("torch.reference_cpu")
    assert len(starts) == 3, "attnfuzz's own are not tried"
    monkeypatch.setenv(import_trial.SECONDS, "0")
    (tmp_path / "ev_bad.py").write_text("import os; os._exit(1)\n")
    assert import_trial.why_fatal([bad]) == {}
    assert len(starts) == 3


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(import_trial.SECONDS, value)
    refused(attnfuzz("list", target_of("exit 0")), [f"ATTNFUZZ_IMPORT_SECONDS={value!r}: it is not a number of seconds"])


SWALLOWING = "try: os.kill(os.getpid(), {number})\nexcept BaseException: {then}\n"


@pytest.mark.parametrize("then", ["raise", "pass", "raise SystemExit(0)", "raise ValueError"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_run_whatever_the_module_makes_of_it(number: signal.Signals, then: str, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    text = "import os, signal\nif os.environ.get('EV_HERE'):\n  " + SWALLOWING.format(number=int(number), then=then).replace(
        "\n", "\n  "
    )
    (tmp_path / "ev_interrupted.py").write_text(f"{text}\nKERNEL = 1\n")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(import_trial.SECONDS, "0")
            patch.setenv("EV_HERE", "1")
            patch.delitem(sys.modules, "ev_interrupted", raising=False)
            result = attnfuzz("list", "ev_interrupted:KERNEL")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.exit_code == 130, result.output
    assert "interrupted" in result.stderr


def test_a_third_party_keeps_no_handler_of_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGINT)
    third_party.guarded(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert signal.getsignal(signal.SIGINT) is before


def test_stdout_may_be_closed(capfd: pytest.CaptureFixture[str]) -> None:
    kept = os.dup(1)
    os.close(1)
    try:
        assert third_party.guarded(lambda: 3) == 3
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert capfd.readouterr().out == ""
