"""`attnfuzz run FILE.py:FUNCTION --like dense`: a function of any file is fuzzed, and the module printed that keeps it."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from support.paths import ROOT

from attnfuzz.harness.cli.main import main

EXAMPLE = (ROOT / "examples" / "attention.py").read_text()
MASK = "keys[None, :] <= rows[:, None] + seqlen_k - seqlen_q"
DIFFERENTIABLE = """
import torch


def attention(q, k, v, softmax_scale=None):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(s, -1), v.float()).to(q.dtype)
"""


@pytest.fixture(autouse=True)
def in_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def attnfuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a fresh process."""
    command = [sys.executable, "-m", "attnfuzz.harness.cli.start", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def written(path: str, text: str) -> str:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return path


def adapter(text: str, name: str) -> ModuleType:
    """Import an adapter's module, of which attnfuzz printed the text."""
    spec = importlib.util.spec_from_file_location(name, written(f"{name}.py", text))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_right_triton_kernel_passes_and_the_printed_module_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written("deep/acme_right.py", EXAMPLE)
    options = ("--device", "cpu", "--max-examples", "8", "--seed", "3", "--json")
    done = attnfuzz("run", "deep/acme_right.py:attention", "--like", "dense", *options)
    assert done.returncode == 0, done.stderr
    assert "its O has no graph of torch's autograd; only its forward is tried" in done.stderr
    result = json.loads(done.stdout)
    [row] = result["kernels"]
    assert (row["kernel"], row["cases"] >= 8, result["failures"]) == ("acme_right.attention", True, [])
    text: str = result["adapters"]["acme_right.attention"]
    assert len(text.splitlines()) <= 5
    monkeypatch.syspath_prepend("deep")
    kernel = adapter(text, "acme_keeps").KERNEL
    assert (kernel.name, kernel.capabilities.outputs) == ("acme_right.attention", ("o",))


def test_a_fault_is_found_shrunk_and_run_again_by_the_printed_line() -> None:
    assert MASK in EXAMPLE
    written("06-fused attention.py", EXAMPLE.replace(MASK, f"{MASK} - (rows[:, None] == 7)"))
    target = "06-fused attention.py:attention"
    done = attnfuzz(
        "run", target, "--like", "dense", "--device", "cpu", "--max-examples", "60", "--max-failures", "1", "--seed", "1"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "06-fused_attention.attention: mismatch in O" in done.stdout
    assert re.search(r"seqlen_q x seqlen_k +8x8", done.stdout), done.stdout
    [line] = re.findall(r"run it again: +attnfuzz (.+)", done.stdout)
    assert f"--kernel {shlex.quote(target)} --like 'dense(gradients=False)'" in line
    again = attnfuzz(*shlex.split(line))
    assert again.returncode == 1, again.stdout + again.stderr
    assert again.stdout.startswith("FAILED ")
    # The adapter's name alone will do, and a repaired file passes.
    written("06-fused attention.py", EXAMPLE)
    case = shlex.split(line)[1]
    assert attnfuzz("repro", case, "--kernel", target, "--like", "dense").returncode == 0
    for options, remedy in {(): f"add --kernel {shlex.quote(target)} --like", ("--like", "dense"): "add --kernel FILE"}.items():
        alone = CliRunner().invoke(main, ["repro", case, *options])
        assert (alone.exit_code, remedy in alone.output) == (2, True), alone.output


def test_a_function_with_a_graph_has_its_gradients_tried() -> None:
    options = ("--like", "dense", "--device", "cpu", "--in-process", "--max-examples", "4", "--max-failures", "1", "--json")
    # O keeps the graph of q and k, and loses that of v.
    written("acme_half.py", DIFFERENTIABLE.replace("v.float()", "v.float().detach()"))
    done = CliRunner().invoke(main, ["run", "acme_half.py:attention", *options])
    assert (done.exit_code, "no graph" in done.stderr) == (1, False), done.output
    assert [each["identity"]["kind"] for each in json.loads(done.stdout)["failures"]] == ["exception"]
    written("acme_graph.py", DIFFERENTIABLE)
    done = CliRunner().invoke(main, ["run", "acme_graph.py:attention", *options])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["kernels"][0]["outputs"]["dv"]["cases"] >= 4


def test_check_adapter_takes_a_file() -> None:
    written("acme_checked.py", DIFFERENTIABLE.replace("to(q.dtype)", "to(q.dtype).detach()"))
    arguments = ["check-adapter", "acme_checked.py:attention", "--like", "dense", "--device", "cpu", "--in-process", "--json"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    rows: list[dict[str, Any]] = json.loads(done.stdout)["checks"]
    assert {each["check"]: each["found"] for each in rows}["gradients"] == "declared absent"
    assert {each["status"] for each in rows} == {"ok", "hint", "absent"}


WRONG = {
    "run triton.varlen --like dense": "it says how a function of a file is called, and no kernel is named as FILE.py:FUNCTION",
    "run attention.py --like dense": "it says how a function of a file is called, and 'attention.py' names a file",
    "run --like dense": "it says how a function of a file is called, and no kernel is named as FILE.py:FUNCTION",
    "run acme_wrong.py:attention": "attention is a function, not a kernel; say how it is called: add --like dense",
    "run acme_wrong.py:attention --like dance": "no adapter has that name; give dense, varlen or paged",
    "run acme_wrong.py:forward --like dense": "it is a Triton function, which is launched on a grid; name the Python function",
    "run acme_none.py:attention --like dense": "acme_none.py is not there; give the path of a Python file",
    "run acme_wrong.py:attention --like varlen": "did you mean --like dense?",
    "check-adapter acme_wrong.py:attention": "attention is a function, not a kernel; say how it is called: add --like dense",
    "check-adapter triton.varlen --like dense": "how a function of a file is called, and no kernel is named as FILE.py:FUNCTION",
    "check-adapter triton": "it is no kernel, but the beginning of",
    "check-adapter released.fla": "give one of released.fla.parallel, released.fla.parallel_varlen",
    "gate --write x --kernel acme_wrong.py:attention:dense": "a gate imports the kernel's module from two commits",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_use_is_exit_code_2_with_the_remedy(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNFUZZ_IMPORT_SECONDS", "0")
    monkeypatch.setattr(sys, "path", list(sys.path))
    written("acme_wrong.py", EXAMPLE)
    try:
        done = CliRunner().invoke(main, shlex.split(line))
    finally:
        sys.modules.pop("acme_wrong", None)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    assert WRONG[line] in done.output


IMPOSSIBLE = """
from msgspec.structs import replace

from attnfuzz.kernels.torch.reference_cpu import KERNEL as RIGHT


class Subject(type(RIGHT)):
    name = "acme.impossible"
    capabilities = replace(RIGHT.capabilities, multiple_q=0)


KERNEL = Subject()
"""


def test_capabilities_that_cannot_be_are_refused_before_a_case_is_drawn() -> None:
    written("acme_impossible.py", IMPOSSIBLE)
    options = ("acme_impossible.py:KERNEL", "--device", "cpu")
    done = attnfuzz("run", *options, "--max-examples", "2")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "kernel='acme.impossible': its capabilities cannot be (multiple_q=0: 1 or more); declare" in done.stderr
    done = attnfuzz("check-adapter", *options, "--json")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    rows = {each["check"]: each for each in json.loads(done.stdout)["checks"]}
    assert (rows["capabilities"]["status"], rows["capabilities"]["found"]) == ("wrong", "multiple_q=0: 1 or more")
    assert rows["calls"]["status"] == "not run"
