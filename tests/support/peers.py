"""Kernels on the CPU that stand for peers: right, skewed, or raising; made to be found by a child process."""

from __future__ import annotations

from typing import Any

import torch

from attnfuzz.kernels.contract import Built, Config, Device, Inputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.torch.reference_cpu import ReferenceCpu

__all__ = ["Raising", "Right", "Skewed"]


class Right(ReferenceCpu):
    """`torch.reference_cpu` by another name."""

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]
        self.files = (__file__,)

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        return Bent(super().build(problem, config, device), self)

    def bent(self, inputs: Inputs, gradients: Any) -> Any:
        """What becomes of the gradients."""
        return gradients


class Bent:
    """The right kernel, its gradients put through `bent`."""

    def __init__(self, inner: Built, kernel: Right) -> None:
        self.inner, self.kernel = inner, kernel

    def forward(self, inputs: Inputs) -> Any:
        return self.inner.forward(inputs)

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Any:
        return self.kernel.bent(inputs, self.inner.backward(inputs, o, lse))


class Skewed(Right):
    """dK is a thousandth too large."""

    def bent(self, inputs: Inputs, gradients: Any) -> Any:
        dq, dk, dv = gradients
        return dq, dk * 1.001, dv


class Raising(Right):
    """Its backward raises for more than one head."""

    def bent(self, inputs: Inputs, gradients: Any) -> Any:
        if inputs.problem.heads > 1:
            raise RuntimeError("heads are too many")
        return gradients
