"""Machine code of kernels that come by an adapter: their launches are captured, or the reason why not is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.adapted import LAUNCHING, PLAIN
from support.paths import TESTS

from attnfuzz.harness.cli import main as cli
from attnfuzz.kernels import registry
from attnfuzz.kernels.lowering import Lowers
from attnfuzz.kernels.problem import Layout, Problem
from attnfuzz.kernels.triton.machine_code.capture import plain_inputs


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for table in ("_registered", "_loaded", "_origins"):
        monkeypatch.setattr(registry, table, {})
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(TESTS)


def compiled(tmp_path: Path, *arguments: str) -> Result:
    fixed = ["--arch", "sm_90a", "--max", "1", "--jobs", "1", "--out", str(tmp_path / "out"), "--json"]
    return CliRunner().invoke(cli.main, ["compile", *arguments, *fixed])


def test_launches_of_a_function_are_captured_and_compiled_and_what_cannot_be_is_said(tmp_path: Path) -> None:
    kernels = ["support.adapted:LAUNCHING", "support.adapted:ON_GPUS", "support.adapted:WITHOUT"]
    result = compiled(tmp_path, *kernels[:2], "--kernel", kernels[2])
    assert result.exit_code == 2, result.output
    content = json.loads(result.stdout)
    # The second launch of `scaled` is the first once more; the autotuned function has two configs of another number of warps.
    assert [(each["kernel"], each["function"], each["ok"]) for each in content["rows"]] == [
        ("acme.launching", "scaled", True),
        ("acme.launching", "scaled (2)", True),
        ("acme.launching", "scaled (3)", True),
    ]
    reasons = {each["kernel"]: each["reason"] for each in content["left"]}
    assert reasons == {
        "acme.on_gpus": "not lowered: its launches cannot be captured: without a GPU, on CPU tensors, it raises "
        "AssertionError: the GPU is needed",
        "acme.without_launches": "not lowered: its launches cannot be captured: it launches no Triton function",
    }


@pytest.mark.parametrize("arguments", [("support.adapted:PLAIN",), ("--kernel", "support.adapted:PLAIN")], ids=" ".join)
def test_an_adapter_without_triton_is_not_compiled_and_says_why(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = compiled(tmp_path, *arguments)
    assert result.exit_code == 2, result.output
    reason = json.loads(result.stdout)["left"][0]["reason"]
    assert reason == (
        'not lowered: it has no `lower` (attnfuzz.kernels.lowering.Lowers; an adapter has one with backend="triton")'
    )


def test_only_adapters_of_triton_kernels_are_lowered() -> None:
    assert isinstance(LAUNCHING, Lowers)
    assert not isinstance(PLAIN, Lowers)


@pytest.mark.parametrize("packing", ["dense", "ragged"])
def test_inputs_of_a_capture_have_the_shapes_and_the_pitch_of_a_problem(packing: str) -> None:
    problem = Problem(
        seqlens_q=(3, 3), seqlens_k=(2, 2), heads=4, kv_heads=2, dim_qk=8, dim_v=16, packing=packing,  # type: ignore[arg-type]
        layout_k=Layout(pitch=8),
    )  # fmt: skip
    inputs = plain_inputs(problem)
    rows = {"dense": ((2, 3), (2, 2)), "ragged": ((6,), (4,))}[packing]
    assert inputs.q.shape == (*rows[0], 4, 8)
    assert inputs.k.shape == (*rows[1], 2, 8)
    assert inputs.v.shape == (*rows[1], 2, 16)
    assert inputs.d_o.shape == (*rows[0], 4, 16)
    assert inputs.k.stride()[-3:] == (2 * 8 + 8, 8, 1)
    assert inputs.cu_seqlens_q.tolist() == [0, 3, 6]
    assert str(inputs.cu_seqlens_k.dtype) == "torch.int32"
