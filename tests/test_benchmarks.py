"""The benchmarks' arithmetic and their words where they cannot run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from msgspec.structs import replace

from attnfuzz.harness.environment import has_cuda
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_kernels", FOLDER / "kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_operations_are_those_of_visible_scores(kernels: ModuleType) -> None:
    problem = Problem(seqlens_q=(4, 2), seqlens_k=(6, 1), heads=3, dim_qk=8, dim_v=5)
    assert kernels.visible(problem) == 3 * (24 + 2)
    assert kernels.operations(problem) == (78 * 2 * 13, 78 * 2 * (24 + 10))
    assert kernels.visible(replace(problem, causal="bottom_right")) == 3 * (3 + 4 + 5 + 6 + 0 + 1)
    assert kernels.visible(replace(problem, causal="top_left")) == 3 * (1 + 2 + 3 + 4 + 1 + 1)


def test_ratios_are_speeds(kernels: ModuleType) -> None:
    problem = Problem(seqlens_q=(1000,), seqlens_k=(1000,), packing="dense", dim_qk=50, dim_v=50)
    rows = kernels.rows_of(problem, {"sdpa flash": (2.0, 5.0), "mine": (1.0, 10.0)})
    mine = [row for row in rows if row["kernel"] == "mine"]
    assert [row["x sdpa flash"] for row in mine] == [2.0, 0.5]
    assert [row["x sdpa cudnn"] for row in mine] == [None, None]
    assert mine[0]["tflops"] == pytest.approx(1e6 * 200 / 1e-3 / 1e12)


@pytest.mark.skipif(has_cuda(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, str(FOLDER / "kernels.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cuda" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_memory_checkers_cost_is_a_ratio(tmp_path: Path) -> None:
    if reason := registry.get("triton.varlen").unavailable("cpu"):
        pytest.skip(reason)
    file = tmp_path / "cost.json"
    command = [sys.executable, str(FOLDER / "memory_check.py"), "--cases", "3", "--rounds", "1", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = json.loads(file.read_text())
    assert told["cases"] == 3
    assert told["total"] == pytest.approx(sum(on for on, _ in told["seconds"]) / sum(off for _, off in told["seconds"]))
    assert f"with the memory checker {told['median']:.3f} x the time without" in done.stdout
    assert done.returncode == (told["median"] > 1.25)


def test_the_memory_checkers_cost_needs_a_kernel_that_runs_here() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "memory_check.py"), "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "kernel='nothing'" in done.stderr
    assert "Traceback" not in done.stderr
