"""A correct kernel that remembers its calls, and whose outputs a test can change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace

from attnfuzz.kernels.contract import Built, Capabilities, Config, Device, Inputs, why_unsupported
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.torch.reference_cpu import KERNEL as CORRECT

Spoil = Callable[["Subject", Problem, dict[str, torch.Tensor]], Any]
PROBLEM = Problem(seqlens_q=(5, 7), seqlens_k=(6, 4), heads=2, kv_heads=1, dim_qk=16, dim_v=16, dtype="float32")
WIDE = replace(CORRECT.capabilities, dims=((16, 16),), causal=(None, "top_left"), slack=True, slack_rows="anything")


@dataclass
class Subject:
    """torch.reference_cpu, whose outputs `spoil` changes, and which remembers its calls."""

    spoil: Spoil = lambda subject, problem, out: None
    capabilities: Capabilities = WIDE
    name: str = "test.calls"
    backend: str = "torch"
    files: tuple[str, ...] = ()
    calls: list[Problem] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    refuses: Callable[[Problem], str | None] = lambda problem: None

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        return (Config(),)

    def unavailable(self, device: Device) -> str | None:
        return CORRECT.unavailable(device)

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        return why_unsupported(self.capabilities, problem, device) or self.refuses(problem)

    def compile_key(self, problem: Problem, config: Config) -> str:
        return "one"

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        return self

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.calls.append(inputs.problem)
        o, lse = CORRECT.build(inputs.problem, Config(), "cpu").forward(inputs)
        self.made = {"o": o, "lse": lse}
        return o, lse

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> tuple[Any, Any, Any]:
        gradients = CORRECT.build(inputs.problem, Config(), "cpu").backward(inputs, o, lse)
        out = {**self.made, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
        self.spoil(self, inputs.problem, out)
        return out["dq"], out["dk"], out["dv"]
