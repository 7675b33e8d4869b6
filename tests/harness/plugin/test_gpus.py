"""One GPU for each xdist worker, and how many workers `-n auto` starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.pytest_config import config

from attnfuzz.harness.core import gpus as core_gpus
from attnfuzz.harness.plugin import gpus as plugin_gpus


@pytest.mark.parametrize(
    ("worker", "gpus", "expected"),
    [
        ("gw0", ["0", "1", "2"], "0"),
        ("gw2", ["0", "1", "2"], "2"),
        ("gw3", ["0", "1", "2"], "0"),
        ("gw11", ["0", "1", "2", "3", "4", "5", "6", "7"], "3"),
        ("gw1", ["4", "6"], "6"),
        ("gw1", ["GPU-8f1c", "GPU-a2d0"], "GPU-a2d0"),
        ("gw5", ["0"], "0"),
        ("gw0", [], None),
        ("master", ["0"], None),
        (None, ["0"], None),
    ],
)
def test_worker_n_gets_gpu_n_mod_gpus(
    monkeypatch: pytest.MonkeyPatch, worker: str | None, gpus: list[str], expected: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as before")
    monkeypatch.setattr(plugin_gpus, "gpus", lambda: gpus)
    plugin_gpus.pin_worker(worker)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == (expected or "as before")


def test_pinning_again_in_a_child_process_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    plugin_gpus.pin_worker("gw1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    plugin_gpus.pin_worker("gw1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0,1", ["0", "1"]), ("3", ["3"]), ("", []), ("-1", []), ("GPU-8f1c,GPU-a2d0", ["GPU-8f1c", "GPU-a2d0"])],
)
def test_the_gpus_are_those_that_the_user_chose(monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert plugin_gpus.gpus() == expected


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A tool of the driver of our own."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "nvidia-smi"


def write_tool(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_gpus_are_those_that_the_driver_lists(tool: Path) -> None:
    write_tool(tool, 'echo "GPU 0: NVIDIA X (UUID: GPU-1)"\necho "  MIG 1g.10gb Device 0: (UUID: MIG-1)"\necho "GPU 1: NVIDIA X"')
    assert plugin_gpus.gpus() == ["0", "1"]


def test_a_driver_that_fails_has_no_gpus(tool: Path) -> None:
    write_tool(tool, 'echo "NVIDIA-SMI has failed because it could not communicate with the driver"\nexit 9')
    assert plugin_gpus.gpus() == []


def test_a_driver_that_hangs_has_no_gpus(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    write_tool(tool, "true")
    monkeypatch.setattr(core_gpus.subprocess, "run", hang)
    assert plugin_gpus.gpus() == []


def test_a_machine_without_the_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(core_gpus.shutil, "which", lambda name: None)
    assert plugin_gpus.gpus() == []


def test_the_free_memory_is_that_of_the_fullest_gpu_chosen(tool: Path) -> None:
    write_tool(tool, '[ "$2" = 1,GPU-8f1c ] && echo "$3" | grep -q memory.free && printf "143000\\n81000\\n"')
    assert plugin_gpus.free_memory(["1", "GPU-8f1c"]) == 81_000
    assert plugin_gpus.free_memory(["0"]) is None


@pytest.mark.parametrize("text", ['echo "[N/A]"', "echo No devices were found; exit 6"])
def test_a_gpu_whose_free_memory_is_unknown_bounds_nothing(tool: Path, text: str) -> None:
    write_tool(tool, text)
    assert plugin_gpus.free_memory(["0"]) is None


@pytest.mark.parametrize(
    ("gpus", "cores", "memory", "device", "expected"),
    [
        (0, 8, None, "auto", None),
        (1, 16, 143_000, "auto", 16),
        (1, 16, None, "auto", 16),
        (1, 16, 24_000, "auto", 5),
        (1, 16, 2_000, "auto", 1),
        (1, 64, 143_000, "auto", 16),
        (8, 128, 143_000, "auto", 128),
        (8, 16, 143_000, "auto", 16),
        (8, 4, 143_000, "auto", 8),
        (8, 128, 143_000, "cuda", 128),
        (8, 128, 143_000, "cpu", None),
    ],
)
def test_automatic_workers_follow_cores_gpus_and_their_memory(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, memory: int | None, device: str, expected: int | None
) -> None:
    monkeypatch.setattr(plugin_gpus, "gpus", lambda: [str(index) for index in range(gpus)])
    monkeypatch.setattr(plugin_gpus, "free_memory", lambda usable: memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert plugin_gpus.pytest_xdist_auto_num_workers(config(device)) == expected
