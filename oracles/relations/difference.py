"""The parts of a relation: launches, values that must be equal in their outputs, and how far off these may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from attnfuzz.kernels.contract import Deviations, Device, Inputs, Outputs
from attnfuzz.kernels.problem import OutputName, Problem

__all__ = ["Difference", "Related", "Setup"]


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """Input of a relation: a Case's inputs, the Problems of the related launches, and what the kernel declares."""

    inputs: Inputs
    problems: tuple[Problem, ...]
    seed: int
    """Selects what the relation leaves open: a permutation, a cut, a factor."""
    device: Device
    deviations: Deviations
    deterministic: tuple[OutputName, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """One output of one sequence: `got` must be `expected`.

    All are float64 `(heads, rows, dim)`, or `(heads, rows)` for LSE; `allowed` has that shape or broadcasts to it. With `noise`,
    `allowed` is the typical error of an element, and limits are multiples of it (`worst.limit`); else it is the largest allowed
    error of an element, 0 for bit by bit. `what` names the compared value if it is not the output itself.
    """

    output: OutputName
    sequence: int
    got: torch.Tensor
    expected: torch.Tensor
    allowed: torch.Tensor
    noise: bool = False
    what: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Related:
    """Inputs of the launches, and the differences of their outputs (in the same order)."""

    inputs: tuple[Inputs, ...]
    differences: Callable[[Sequence[Outputs]], Iterable[Difference]]
