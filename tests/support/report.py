"""A kernel with errors exactly where a test puts them, and records of runs as a campaign would leave them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from attnfuzz.harness.report.runfile import FORMAT, FailureRecord, KernelRecord, OutputRecord, RunRecord, write_run
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Built, Config, Device, Inputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.torch.reference_cpu import ReferenceCpu
from attnfuzz.strategies.case import Case

TILES = Config(tile_m=16, tile_n=32)
Spoil = Callable[[Inputs, dict[str, torch.Tensor]], None]


class Spoilt(ReferenceCpu):
    """torch.reference_cpu, whose outputs `spoil` changes in place."""

    capabilities = replace(ReferenceCpu.capabilities, dims=((8, 8), (64, 64)), slack_rows="anything")

    def __init__(self, spoil: Spoil, name: str = "test.spoilt") -> None:
        self.name, self.spoil = name, spoil  # type: ignore[misc]

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        return (TILES,)

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        return super().supports(problem, Config(), device)

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        return _Spoilt(super().build(problem, Config(), device), self.spoil)


class _Spoilt:
    def __init__(self, right: Built, spoil: Spoil) -> None:
        self.right, self.spoil = right, spoil

    def forward(self, inputs: Inputs) -> tuple[Any, Any]:
        o, lse = self.right.forward(inputs)
        self.spoil(inputs, {"o": o, "lse": lse})
        return o, lse

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Any:
        dq, dk, dv = self.right.backward(inputs, o, lse)
        self.spoil(inputs, {"dq": dq, "dk": dk, "dv": dv})
        return dq, dk, dv


def spoilt_case(spoil: Spoil, *, config: Config = TILES, check: Any = "oracle", **problem: Any) -> Case:
    """A Case of a kernel made known under its name."""
    kernel = registry.register(Spoilt(spoil))
    given = {"seqlens_q": (5, 7), "seqlens_k": (6, 9), "dim_qk": 8, "dim_v": 8, "heads": 4, "kv_heads": 2, "dtype": "float32"}
    return Case(kernel=kernel.name, problem=Problem(**{**given, **problem}), config=config, check=check)


def right(inputs: Inputs, outputs: dict[str, torch.Tensor]) -> None:
    """Leave all as it is."""


def failure(number: int = 1, kernel: str = "acme.flash", **changed: Any) -> FailureRecord:
    """One failure, shrunk."""
    given = {
        "kernel": kernel, "title": f"{kernel}: mismatch in dK ({number})", "fingerprint": f"{number:08x}", "kind": "mismatch",
        "output": "dk", "check": "element", "case_id": f"{number:010x}", "case": {"kernel": kernel}, "shrunk": True,
        "told": [("kernel", kernel), ("dtype", "float16")], "messages": [f"mismatch: dK: {number} elements are wrong"],
        "pattern": "rows 64-127: zeros", "path": f".attnfuzz/cases/{number}.json",
        "repro": f"attnfuzz repro .attnfuzz/cases/{number}.json",
    }  # fmt: skip
    return FailureRecord(**{**given, **changed})


def kernel_record(kernel: str = "acme.flash", cases: int = 10, worst: Any = 0.5, wrong: int = 0, **changed: Any) -> KernelRecord:
    """One kernel's turn: O and dK judged."""

    def output(worst: Any, wrong: int) -> OutputRecord:
        made = OutputRecord(cases=cases, worst=worst, failures=wrong)
        made.histogram[3] = cases - wrong
        made.histogram[-1] = wrong
        return made

    outputs = {"o": output(0.4, 0), "dk": output(worst, wrong)}
    given = {"cases": cases, "seconds": 2.0, "ended": True, "features": {"groups > 1": 3, "slack rows": 0},
             "drawn": {"dtype": {"float16": cases}}}  # fmt: skip
    return KernelRecord(kernel=kernel, outputs=outputs, **{**given, **changed})


def record(stamp: str = "20260101T000000Z-1-a", **changed: Any) -> RunRecord:
    """A finished run without failures."""
    environment = {"device": "cpu (x86_64)", "cores": 2, "versions": {"torch": "2.13.0"}}
    given: dict[str, Any] = {
        "format": FORMAT, "stamp": stamp, "session": "s", "started": "2026-01-01T00:00:00+00:00", "state": "finished",
        "updated": "2026-01-01T00:00:09+00:00", "seconds": 9.0, "settings": {"seed": 3}, "environment": environment,
        "kernels": [kernel_record()],
    }  # fmt: skip
    return RunRecord(**{**given, **changed})


def written(folder: Path, *runs: RunRecord) -> Path:
    """The folder, with those runs in it."""
    for each in runs:
        write_run(folder, each)
    return folder
