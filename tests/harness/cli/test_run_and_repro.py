"""`attnfuzz run`, `show` and `repro` from end to end: exit codes, messages, JSON, and a failure from finding to FIXED."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_subject import Fault, Ready, Subject, attnfuzz, files, long_keys, right, run, with_
from support.schema import wrong

from attnfuzz.harness.core import environment
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import BuildError, Built, Config, Device, Inputs, Outputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

pytestmark = pytest.mark.usefixtures("only_acme")


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
