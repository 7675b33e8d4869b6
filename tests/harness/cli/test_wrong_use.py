"""Wrong use and faults of the harness: exit code 2 and one clear line, as text and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from support.cli_subject import Subject, attnfuzz, run, stored

from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.cli import run as run_commands
from attnfuzz.harness.core import environment
from attnfuzz.kernels import registry

pytestmark = pytest.mark.usefixtures("only_acme")


def assert_refused(result: Result, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr == f"error: {message}\n"
    assert [each for each in result.stdout.splitlines() if not each.endswith(" ...")] == [], "but for what was announced"
    assert "Traceback" not in result.output


NO_DURATION = "it is not a duration; give a number and a unit, such as 60s, 5m or 1h"
WRONG: dict[str, tuple[list[str], str]] = {
    "an unknown kernel": (
        ["run", "triton.varlan"],
        "kernel='triton.varlan': no kernel of that name is installed; did you mean 'triton.varlen'?",
    ),
    "an unknown kernel beside a known one": (
        ["run", "acme.flash", "acme.flush"],
        "kernel='acme.flush': no kernel of that name is installed; did you mean 'acme.flash'?",
    ),
    "an unknown device": (["run", "--device", "tpu"], "device='tpu': no such device; use auto, cpu or cuda"),
    "a device in capitals": (["run", "--device", "CPU"], "device='CPU': no such device; use auto, cpu or cuda"),
    "no CUDA": (
        ["run", "--device", "cuda"],
        "device='cuda': torch sees no CUDA device; use --device cpu, or a machine with a GPU and a CUDA build of torch",
    ),
    "a fruit for a budget": (["run", "--budget", "banana"], f"budget='banana': {NO_DURATION}"),
    "a budget without unit": (["run", "--budget", "60"], f"budget='60': {NO_DURATION}"),
    "a negative budget": (["run", "--budget", "-5s"], f"budget='-5s': {NO_DURATION}"),
    "an empty budget": (["run", "--budget", ""], f"budget='': {NO_DURATION}"),
    "no time": (
        ["run", "--budget", "0s"],
        "budget='0s': must be positive; give a positive duration, such as 60s",
    ),
    "no examples": (["run", "--max-examples", "0"], "max_examples=0: must be positive; give 1 or more"),
    "fewer than no examples": (["run", "--max-examples", "-3"], "max_examples=-3: must be positive; give 1 or more"),
    "an unknown profile": (
        ["run", "--profile", "x"],
        "profile='x': there is no such profile; use one of quick, gate, nightly, models",
    ),
    "a negative seed": (["run", "--seed", "-1"], "seed=-1: must not be negative; give 0 or more"),
    "show what is missing": (
        ["show", "none.json"],
        "case='none.json': it cannot be read (No such file or directory); give the path of a case file",
    ),
    "show a folder": (["show", "."], "case='.': it cannot be read (Is a directory); give the path of a case file"),
    "repro what is missing": (
        ["repro", "none.json"],
        "case='none.json': it cannot be read (No such file or directory); give the path of a case file",
    ),
}


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_ends_with_2_and_one_clear_line(name: str, as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "has_cuda", lambda: False)
    registry.register(Subject())
    arguments, message = WRONG[name]
    if as_json:
        result = attnfuzz(*arguments, "--json")
        assert json.loads(result.stdout) == {"format": 1, "error": message}
        assert result.stderr == f"error: {message}\n"
        assert result.exit_code == 2
    else:
        assert_refused(attnfuzz(*arguments), message)
    assert not Path(".attnfuzz").exists()


@pytest.mark.parametrize("command", ["show", "repro"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "case='case.json': not JSON (Input data was truncated); give a file that `attnfuzz run` wrote"),
        ("[1]", "case='case.json': case: not a JSON object; give a file that `attnfuzz run` wrote"),
        (
            '{"format": 7}',
            "case='case.json': case.format=7: this attnfuzz reads format 1; "
            "reproduce it with the version that wrote it, or find it again",
        ),
    ],
    ids=["empty", "list", "version"],
)
def test_a_broken_case_file_is_refused(command: str, content: str, message: str) -> None:
    Path("case.json").write_text(content)
    assert_refused(attnfuzz(command, "case.json"), message)
    result = attnfuzz(command, "case.json", "--json")
    assert json.loads(result.stdout) == {"format": 1, "error": message}
    assert result.exit_code == 2


def test_repro_of_an_absent_kernel() -> None:
    path = stored(kernel="triton.varlan")
    assert_refused(
        attnfuzz("repro", path, "--device", "cpu"),
        "case.json: kernel='triton.varlan': no kernel of that name is installed; did you mean 'triton.varlen'?",
    )


def test_repro_of_a_problem_outside_the_capabilities() -> None:
    registry.register(Subject())
    path = stored(problem={"seqlens_q": [3], "seqlens_k": [4], "dim_qk": 16, "dim_v": 8})
    result = attnfuzz("repro", path, "--device", "cpu")
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: case.json: case={read_case(path).case.id!r}: acme.flash does not support it: dim_qk, dim_v=(16, 8): "
        "supports (8, 8); give a Case within its capabilities\n"
    )


def test_repro_of_a_kernel_that_cannot_run_here() -> None:
    registry.register(Subject(refuses="its compiler is missing"))
    assert_refused(
        attnfuzz("repro", stored(), "--device", "cpu"),
        "case.json: kernel='acme.flash': it cannot run on cpu here: its compiler is missing",
    )


def test_a_run_of_nothing_that_can_run_here() -> None:
    assert_refused(
        run(refuses="its compiler is missing"),
        "device='cpu': no kernel can run here (acme.flash: its compiler is missing); "
        "install what is missing, or choose another device",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["run", "--max-examples", "few"], "'few' is not a valid integer"),
        (["run", "--jobs", "0"], "0 is not in the range x>=1"),
        (["run", "--frob"], "No such option"),
        (["show"], "Missing argument 'CASE'"),
        (["repro", "a.json", "b.json"], "unexpected extra argument"),
    ],
)
def test_usage_errors_end_with_2(arguments: list[str], message: str) -> None:
    result = attnfuzz(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Usage: " in result.stderr


def test_a_kernel_that_the_gate_is_given_without_its_option() -> None:
    assert_refused(
        attnfuzz("gate", "triton.varlen", "my kernel"),
        "arguments='triton.varlen my kernel': `gate` takes options only; "
        "to gate a kernel, changed or not, give --kernel triton.varlen --kernel 'my kernel'",
    )


def test_a_fault_of_the_harness_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.delenv("ATTNFUZZ_DEBUG", raising=False)
    monkeypatch.setattr(run_commands, "campaign", lambda *_, **__: broken())
    result = run()
    assert_refused(
        result,
        "internal error: ZeroDivisionError: division by zero\n"
        "This is a fault of attnfuzz, not of a kernel; set ATTNFUZZ_DEBUG=1 to see where.",
    )
    monkeypatch.setenv("ATTNFUZZ_DEBUG", "1")
    assert isinstance(run().exception, ZeroDivisionError)


def test_the_module_is_the_command_and_keeps_its_streams_apart(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "attnfuzz.harness.cli", "show", "none.json", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    message = "case='none.json': it cannot be read (No such file or directory); give the path of a case file"
    assert done.returncode == 2
    assert json.loads(done.stdout) == {"format": 1, "error": message}
    assert done.stderr == f"error: {message}\n"


def test_help_and_version() -> None:
    result = attnfuzz("-h")
    assert result.exit_code == 0
    for command in ("list", "run", "show", "repro", "demo"):
        assert f"\n  {command} " in result.stdout
        assert attnfuzz(command, "--help").exit_code == 0
    result = attnfuzz("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("attnfuzz, version ")
