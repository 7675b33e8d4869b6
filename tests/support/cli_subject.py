"""`acme.flash`, a correct kernel with room for a fault, and `attnfuzz` called in the process of a test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from support.small import small_cases

from attnfuzz.harness.cli import main as cli
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Built, Capabilities, Config, Device, Inputs, Outputs, why_unsupported
from attnfuzz.kernels.problem import Problem
from attnfuzz.oracles import attention

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


@pytest.fixture
def only_acme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No other kernel of an adapter's, small Cases, a folder and a command line of the test's own."""
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
