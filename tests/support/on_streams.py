"""triton.varlen on a GPU within a wrapper that is right, or does on other streams what it must not."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from msgspec.structs import replace

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Built, Config, Device, Inputs
from attnfuzz.kernels.problem import Problem


class Around:
    """triton.varlen within a wrapper that is right, or has a fault of its own."""

    backend = "triton"
    name = "test.around"
    files = (__file__,)

    def __init__(self, fault: str = "") -> None:
        self._kernel, self._fault = registry.get("triton.varlen"), fault
        self.capabilities = replace(self._kernel.capabilities, cuda_graphs=("forward", "backward"))
        self.kept: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        return _Around(self._kernel.build(problem, config, device), self._fault, self.kept)


class _Around:
    def __init__(self, built: Built, fault: str, kept: dict[Any, Any]) -> None:
        self._built, self._fault, self._kept = built, fault, kept

    def forward(self, inputs: Inputs) -> Any:
        match self._fault:
            case "default stream":
                with torch.cuda.stream(torch.cuda.default_stream()):
                    return self._built.forward(inputs)
            case "own stream":
                own = self._kept.setdefault("own", torch.cuda.Stream())
                own.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(own):
                    torch.cuda._sleep(2_000_000)
                    return self._built.forward(inputs)
            case "waits":
                inputs.cu_seqlens_q.tolist()
            case "kept value":
                first = self._kept.setdefault(inputs.v.data_ptr(), inputs.v.clone())
                return self._built.forward(dataclasses.replace(inputs, v=first))
        o, lse = self._built.forward(inputs)
        if self._fault == "workspace":
            kept = self._kept.setdefault("workspace", torch.empty_like(o))
            kept.copy_(o)
            torch.cuda._sleep(2_000_000)
            o.copy_(kept)
        return o, lse

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Any:
        return self._built.backward(inputs, o, lse)
