"""The command line from end to end: exit codes, messages, JSON, and the way of a failure from finding to FIXED."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result
from support.schema import wrong
from support.small import small_cases

from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.cli import run as run_commands
from attnfuzz.harness.core import environment
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import BuildError, Built, Capabilities, Config, Device, Inputs, Outputs, why_unsupported
from attnfuzz.kernels.problem import Problem
from attnfuzz.oracles import attention
from attnfuzz.strategies.case import Case

Fault = Callable[[Inputs, Outputs], Outputs]


def right(inputs: Inputs, outputs: Outputs) -> Outputs:
    return outputs


def computed(inputs: Inputs) -> Outputs:
    """Attention in float64, sequence by sequence, rounded once to the dtype."""
    p = inputs.problem
    o = torch.zeros(p.total_q + p.slack_q, p.heads, p.dim_v, dtype=inputs.q.dtype)
    lse = torch.zeros(p.heads, p.total_q + p.slack_q)
    dq, dk, dv = (torch.zeros_like(tensor) for tensor in (inputs.q, inputs.k, inputs.v))
    at_q = at_k = 0
    for data in attention.sequences(inputs):
        with torch.enable_grad():
            truth = attention.reference(p, data)
        rows, keys = slice(at_q, at_q + data.q.shape[1]), slice(at_k, at_k + data.k.shape[1])
        lse[:, rows] = truth.lse.float()
        for out, part, found in ((o, rows, truth.o), (dq, rows, truth.dq), (dk, keys, truth.dk), (dv, keys, truth.dv)):
            out[part] = found.transpose(0, 1).to(out.dtype)
        at_q, at_k = rows.stop, keys.stop
    return Outputs(o=o, lse=lse, dq=dq, dk=dk, dv=dv)


@dataclass(frozen=True)
class Subject:
    """A correct kernel, with a fault put in on the way out."""

    fault: Fault = right
    name: str = "acme.flash"
    refuses: str | None = None
    build_error: Exception | None = None
    backend: str = "acme"
    files: tuple[str, ...] = ()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            dims=((8, 8),),
            groups=None,
            causal=(None, "bottom_right"),
            zero_q=True,
            zero_k=True,
            unequal=True,
            slack=True,
            devices=("cpu",),
            compiles_on=(),
        )

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        return (Config(tile_m=6, tile_n=6),)

    def unavailable(self, device: Device) -> str | None:
        return self.refuses

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        return why_unsupported(self.capabilities, problem, device)

    def compile_key(self, problem: Problem, config: Config) -> str:
        return f"{problem.dtype} {problem.causal}"

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        if self.build_error is not None:
            raise self.build_error
        return Ready(self.fault)


@dataclass(frozen=True)
class Ready:
    fault: Fault

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        out = self.fault(inputs, computed(inputs))
        return out.o, out.lse

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> tuple[Any, Any, Any]:
        out = self.fault(inputs, computed(inputs))
        return out.dq, out.dk, out.dv


def with_(outputs: Outputs, **changed: Any) -> Outputs:
    return Outputs(**{**{name: getattr(outputs, name) for name in ("o", "lse", "dq", "dk", "dv")}, **changed})


def long_keys(inputs: Inputs, outputs: Outputs) -> Outputs:
    if max(inputs.problem.seqlens_k) > 5:
        raise ValueError(f"no more than 5 keys, not {max(inputs.problem.seqlens_k)}")
    return outputs


@pytest.fixture(autouse=True)
def _only_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "argv", ["attnfuzz"])
    monkeypatch.setenv("COLUMNS", "200")
    small_cases(monkeypatch, shrink=60.0)


def attnfuzz(*arguments: str) -> Result:
    """`attnfuzz ARGUMENTS` in this process, Trials too: subjects with lambdas in them are known here only, and it is faster."""
    if arguments and arguments[0] in ("run", "repro"):
        arguments = (*arguments, "--in-process")
    if arguments and arguments[0] == "run" and "--seed" not in arguments:
        arguments = (*arguments, "--seed", "0")
    sys.argv = ["attnfuzz", *arguments]
    return CliRunner().invoke(cli.main, list(arguments))


def run(*arguments: str, fault: Fault = right, examples: int = 25, **changed: Any) -> Result:
    registry.register(Subject(fault, **changed))
    return attnfuzz("run", "acme.flash", "--device", "cpu", "--max-examples", str(examples), *arguments)


def files(folder: str = ".attnfuzz") -> list[Path]:
    """What a run has kept, besides what it leaves for reports."""
    kept = sorted(each for each in Path(folder).rglob("*") if each.is_file())
    return [each for each in kept if each.parent.name not in ("runs", "maps")]


def stored(**changed: Any) -> str:
    problem = {"seqlens_q": [3], "seqlens_k": [4], "dim_qk": 8, "dim_v": 8}
    path = Path("case.json")
    path.write_text(json.dumps({"format": 1, "kernel": "acme.flash", "problem": problem, **changed}))
    return str(path)


# --- wrong use


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


# --- list


def test_list() -> None:
    registry.register(Subject(refuses="its compiler is missing"))
    result = attnfuzz("list", "--json")
    assert result.exit_code == 0
    rows = {row["kernel"]: row for row in json.loads(result.stdout)["kernels"]}
    assert set(rows) == set(registry.names())
    assert rows["acme.flash"] == {
        "kernel": "acme.flash",
        "backend": "acme",
        "packings": ["ragged"],
        "dtypes": ["float16", "bfloat16"],
        "dims": [[8, 8]],
        "causal": [None, "bottom_right"],
        "outputs": ["o", "lse", "dq", "dk", "dv"],
        "runs_on": [],
        "reasons": {"cpu": "its compiler is missing", "cuda": "not declared"},
        "proof": None,
    }


def test_list_has_one_line_a_kernel_and_breaks_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "its compiler is missing, and so is what would install it: see the page on compilers of its makers"
    registry.register(Subject(refuses=reason))
    for columns in (100, 80, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = attnfuzz("list")
        assert result.exit_code == 0
        table, _, shown = result.stdout.partition("\n\n")
        head, *lines = table.splitlines()
        assert [line.split()[0] for line in lines] == list(registry.names())
        assert columns == 40 or max(map(len, shown.splitlines())) <= columns
        assert head.split()[:4] == ["kernel", "packings", "cpu", "cuda"]
        assert columns == 40 or max(map(len, lines)) <= columns
        [line] = (line for line in lines if line.startswith("acme.flash "))
        assert line.split()[1:4] == ["ragged", "no", "-"]
        assert reason.startswith(" ".join(line.split()[4:]).removesuffix(" ..."))
        assert set(line.split()[4:]) <= {*reason.split(), "..."}, "words are whole"


def test_list_says_what_was_shown_of_a_kernel_without_its_hardware() -> None:
    text = "compiled for sm_100a, run on the CPU"
    result = attnfuzz("list")
    shown = result.stdout.partition("\n\n")[2]
    rows = {row["kernel"]: row["proof"] for row in json.loads(attnfuzz("list", "--json").stdout)["kernels"]}
    for name in ("tilelang.sm100.ss", "tilelang.sm100.ts", "tilelang.sm100.wasp"):
        assert f"{name}: {text}" in shown
        assert rows[name].startswith(text)
        assert rows[name].endswith("not run on Blackwell hardware")
        assert f"   proof                 {text}" in attnfuzz("list", name).stdout
    assert {name for name, proof in rows.items() if proof is not None} == {
        line.split(":")[0] for line in shown.splitlines() if line[0] != " "
    }
    assert "proof" not in attnfuzz("list", "torch.reference_cpu").stdout


def test_list_of_a_kernel_shows_all_that_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register(Subject(refuses="its compiler is missing"))
    monkeypatch.setenv("COLUMNS", "60")
    result = attnfuzz("list", "acme.flash", "torch.reference_cpu")
    assert result.exit_code == 0
    own, peer = result.stdout.split("torch.reference_cpu (torch)\n")
    shown = {line[3:].split(maxsplit=1)[0]: line[25:] for line in own.splitlines()[1:] if line[3] != " "}
    assert own.startswith("acme.flash (acme)\n")
    assert set(shown) == {"cpu", "cuda", *(each.name for each in msgspec.structs.fields(Capabilities))}
    assert {name: shown[name] for name in ("cpu", "cuda", "packings", "dims", "causal", "unequal", "deviations")} == {
        "cpu": "its compiler is missing",
        "cuda": "not declared",
        "packings": "ragged",
        "dims": "8/8",
        "causal": "no, bottom_right",
        "unequal": "yes",
        "deviations": "none",
    }
    assert f"   files                 {registry.get('torch.reference_cpu').files[0]}\n" in peer
    assert (
        "   dims                  64/64, 32/32, 16/16, 128/128,\n                         96/96, 40/40, 7/7, 1/1, 256/256\n"
        in peer
    )


# --- run, show, repro


def test_a_correct_kernel_is_clean() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    assert "settings: max_examples=25 in_process=True; budget: no time limit" in result.stdout
    assert "acme.flash: 25 cases in " in result.stdout
    assert "no failures in 25 cases" in result.stdout
    assert result.stderr == ""
    assert files() == []
    assert [each.suffix for each in Path(".attnfuzz/runs").iterdir()] == [".json"]


def test_a_failure_is_found_shrunk_kept_reproduced_and_fixed() -> None:
    result = run("--seed", "1", fault=long_keys)
    assert result.exit_code == 1, result.output
    identity = "acme.flash: exception in forward (forward raised ValueError: no more than # keys, not #)"
    assert f"found {identity} after " in result.stdout
    assert f"1. {identity} (found after " in result.stdout
    assert "exception: forward raised ValueError: no more than 5 keys, not 6" in result.stdout
    assert "1 failure in 25 cases" in result.stdout

    [path] = files()
    assert path.parent == Path(".attnfuzz/cases")
    assert path.name.startswith("acme.flash-forward-exception-")
    assert f"run it again:        attnfuzz repro {path}" in result.stdout
    written = json.loads(path.read_text())
    assert written["problem"]["seqlens_k"] == [6]
    assert len(written["problem"]["seqlens_q"]) == 1
    assert set(written["problem"]) == {"seqlens_q", "seqlens_k", "dim_qk", "dim_v"}
    assert written["recipe"] == {}
    assert written["found"]["minimal"] is True

    shown = attnfuzz("show", str(path))
    assert shown.exit_code == 0
    assert "   found                forward raised ValueError: no more than 5 keys, not 6\n" in shown.stdout
    assert f"   run it again         attnfuzz repro {path}\n" in shown.stdout
    assert json.loads(shown.stdout.splitlines()[-1]) == {name: each for name, each in written.items() if name != "found"}

    again = attnfuzz("repro", str(path), "--device", "cpu")
    assert again.exit_code == 1
    assert again.stdout.startswith(f"FAILED {path} on cpu\n")
    assert "not 6" in again.stdout

    registry.register(Subject())
    mended = attnfuzz("repro", str(path), "--device", "cpu")
    assert mended.exit_code == 0
    assert mended.stdout.startswith(f"FIXED {path} on cpu\n")

    back = run(fault=long_keys, examples=1)
    assert back.exit_code == 1
    assert "1 failure in 1 case, " in back.stdout


def test_json_of_the_whole_way() -> None:
    result = run("--json", fault=long_keys)
    assert result.exit_code == 1
    assert "attnfuzz on cpu" in result.stderr
    found = json.loads(result.stdout)
    # Neither a key more nor one less.
    assert not list(wrong(found, "Run"))
    assert (found["skipped"], found["interrupted"], found["lost"]) == ([], False, None)
    [row] = found["kernels"]
    assert (row["kernel"], row["cases"], row["failures"]) == ("acme.flash", 25, 1)
    assert set(row["outputs"]) == {"o", "lse", "dq", "dk", "dv"}
    assert set(row["times"]) == {"worker", "child", "checks", "cases", "batches", "children", "lost"}
    assert set(row["times"]["worker"]) == {"turn", "campaign", "draw", "journal", "start", "trial", "shrink", "other"}
    assert set(row["times"]["child"]) == {"compile", "inputs", "kernel", "oracle", "judge"}
    assert row["times"]["cases"] > 0 < row["times"]["worker"]["shrink"]
    assert sum(each["cases"] for each in row["times"]["checks"].values()) == row["times"]["cases"]
    spent = sum(each["seconds"] for each in row["times"]["checks"].values())
    assert spent == pytest.approx(sum(row["times"]["child"].values()))
    [failure] = found["failures"]
    assert failure["identity"]["kind"] == "exception"
    assert failure["repro"] == f"attnfuzz repro {failure['path']}"
    assert Path(failure["path"]).is_file()

    shown = json.loads(attnfuzz("show", failure["path"], "--json").stdout)
    assert set(shown) == {"format", "command", "case", "found", "path"}
    assert shown["case"] == failure["case"]
    again = attnfuzz("repro", failure["path"], "--device", "cpu", "--json")
    assert again.exit_code == 1
    reproduced = json.loads(again.stdout)
    assert not list(wrong(reproduced, "ReproOnce"))
    assert (reproduced["outcome"], reproduced["device"]) == ("FAILED", "cpu")
    registry.register(Subject())
    again = attnfuzz("repro", failure["path"], "--device", "cpu", "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["outcome"] == "FIXED"


def two_bugs(inputs: Inputs, outputs: Outputs) -> Outputs:
    if inputs.problem.causal:
        return with_(outputs, lse=outputs.lse + 1)
    if inputs.problem.batch > 1:
        raise RuntimeError("one sequence at a time")
    return outputs


def test_two_bugs_are_two_failures() -> None:
    result = run("--json", fault=two_bugs, examples=30)
    assert result.exit_code == 1
    found = {failure["identity"]["kind"]: failure for failure in json.loads(result.stdout)["failures"]}
    assert set(found) == {"exception", "mismatch"}
    assert found["mismatch"]["identity"]["output"] == "lse"
    assert found["mismatch"]["case"]["problem"]["causal"] == "bottom_right"
    assert len(found["exception"]["case"]["problem"]["seqlens_q"]) == 2
    assert len(files()) == 2


WRONG_OUTPUTS: dict[str, tuple[Fault, str, str]] = {
    "shape": (
        lambda inputs, out: with_(out, lse=out.lse.T.contiguous()[:0]),
        "contract in LSE",
        "lse-contract",
    ),
    "dtype": (
        lambda inputs, out: with_(out, dq=out.dq.double()),
        "contract in dQ",
        "dq-contract",
    ),
    "nothing": (
        lambda inputs, out: with_(out, dv=None),
        "contract in dV",
        "dv-contract",
    ),
    "a number": (
        lambda inputs, out: with_(out, lse=0.5),
        "contract in LSE",
        "lse-contract",
    ),
    "NaN": (lambda inputs, out: with_(out, dk=out.dk * float("nan")), "nonfinite in dK", "dk-nonfinite"),
    "a wrong value": (lambda inputs, out: with_(out, o=out.o + 1), "mismatch in O", "o-mismatch"),
}


@pytest.mark.parametrize("name", WRONG_OUTPUTS)
def test_every_kind_of_wrong_output_is_found(name: str) -> None:
    fault, identity, slug = WRONG_OUTPUTS[name]
    result = run(fault=fault, examples=8)
    assert result.exit_code == 1, result.output
    assert f"acme.flash: {identity} (found after " in result.stdout
    path = next(each for each in files() if each.name.startswith(f"acme.flash-{slug}-"))
    json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert attnfuzz("repro", str(path), "--device", "cpu").exit_code == 1


def test_a_forward_that_returns_one_tensor_is_a_failure() -> None:
    class One(Ready):
        def forward(self, inputs: Inputs) -> Any:
            return 3

    class Wrong(Subject):
        def build(self, problem: Problem, config: Config, device: Device) -> Built:
            return One(right)

    registry.register(Wrong())
    result = attnfuzz("run", "acme.flash", "--device", "cpu", "--max-examples", "3")
    assert result.exit_code == 1
    assert "acme.flash: exception in forward (forward raised TypeError: cannot unpack" in result.stdout


@pytest.mark.parametrize("error", [BuildError("ptxas: too many registers"), AttributeError("no tile of 64")])
def test_what_does_not_compile_is_a_failure(error: Exception) -> None:
    result = run(build_error=error, examples=3)
    assert result.exit_code == 1
    assert "acme.flash: compile-error in build (" in result.stdout
    assert str(error) in result.stdout


def test_a_lost_device_ends_the_run_with_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "alive", lambda device: False)
    result = run(fault=long_keys)
    assert result.exit_code == 1
    assert "acme.flash: illegal-access in forward" in result.stdout
    assert "stopped early: forward raised ValueError: no more than 5 keys, not " in result.stdout
    assert "the device context is lost, so this process can run no further Case" in result.stdout
    assert len(files()) == 1


def test_an_interrupted_run_reports_what_it_has() -> None:
    def interrupted(inputs: Inputs, outputs: Outputs) -> Outputs:
        if max(inputs.problem.seqlens_k) > 5:
            raise KeyboardInterrupt
        return outputs

    result = run(fault=interrupted)
    assert "interrupted: the findings until then are above" in result.stdout
    assert "Traceback" not in result.output


def test_a_kernel_that_cannot_run_is_skipped_beside_one_that_can() -> None:
    registry.register(Subject(name="acme.other", refuses="its compiler is missing"))
    result = run("acme.other", examples=3)
    assert result.exit_code == 0
    assert "acme.other: not run here: its compiler is missing" in result.stdout


def test_stored_cases_are_tried_first() -> None:
    folder = Path(".attnfuzz/cases")
    folder.mkdir(parents=True)
    case = Case(kernel="acme.flash", problem=Problem(seqlens_q=(2,), seqlens_k=(5,), dim_qk=8, dim_v=8))
    (folder / "acme.flash-mine.json").write_text(case.canonical())
    result = run("--json", fault=lambda inputs, out: with_(out, o=out.o + 1), examples=1)
    [failure] = json.loads(result.stdout)["failures"]
    assert failure["cases_to_find"] == 1
    assert failure["case"]["problem"] == {**json.loads(case.canonical())["problem"], "seqlens_q": [1], "seqlens_k": [1]}


def test_a_stored_case_beyond_the_capabilities_is_named_with_the_reason() -> None:
    folder = Path(".attnfuzz/cases")
    folder.mkdir(parents=True)
    case = Case(kernel="acme.flash", problem=Problem(seqlens_q=(2,), seqlens_k=(5,), dim_qk=7, dim_v=7))
    (folder / "acme.flash-mine.json").write_text(case.canonical())
    result = run(examples=3)
    assert result.exit_code == 0
    assert ".attnfuzz/cases/acme.flash-mine.json: not tried again here: dim_qk, dim_v=(7, 7): supports" in result.stdout


def test_a_broken_stored_case_ends_the_run_with_its_path() -> None:
    folder = Path(".attnfuzz/cases")
    folder.mkdir(parents=True)
    (folder / "acme.flash-mine.json").write_text("{")
    result = run()
    assert result.exit_code == 2
    assert "case='.attnfuzz/cases/acme.flash-mine.json': not JSON (" in result.stderr


def test_failures_that_cannot_be_written_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    result = run("--out", "taken", fault=long_keys)
    assert result.exit_code == 2
    assert "error: out='taken': failing Cases could not be written there (Not a directory)" in result.stderr
    assert "Traceback" not in result.output
    assert (tmp_path / "taken").read_text() == "a file"


def test_the_same_seed_finds_the_same_cases() -> None:
    one, other, third = (run("--json", "--seed", seed, "--out", out, fault=long_keys) for seed, out in ("3a", "3b", "4c"))
    found = [json.loads(each.stdout)["kernels"][0]["features"] for each in (one, other, third)]
    assert found[0] == found[1]
    assert found[0] != found[2]
