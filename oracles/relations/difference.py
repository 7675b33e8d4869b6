"""The parts of a relation: launches, values that must be equal in their outputs, and how far off these may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from attnfuzz.kernels.contract import Deviations, Device, Inputs, Outputs
from attnfuzz.kernels.problem import OutputName, Problem

__all__ = ["Difference", "Related", "Setup", "exactly"]


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
    error of an element, 0 for bit by bit. `what` names the compared value if it is not the output itself. `terms`: of how many
    terms each row is the sum (`sizes.Noise`); None: of at least as many as a row has elements.
    """

    output: OutputName
    sequence: int
    got: torch.Tensor
    expected: torch.Tensor
    allowed: torch.Tensor
    noise: bool = False
    what: str = ""
    terms: float | torch.Tensor | None = None

    def prefix(self, rows: int) -> Difference:
        """Return that of the first `rows` rows; `allowed` must have the shape of the values."""
        terms = self.terms[:rows] if isinstance(self.terms, torch.Tensor) else self.terms
        got, expected, allowed = (each[:, :rows] for each in (self.got, self.expected, self.allowed))
        return replace(self, got=got, expected=expected, allowed=allowed, terms=terms)


def exactly(output: OutputName, sequence: int, got: torch.Tensor, expected: torch.Tensor) -> Difference:
    """Return the Difference of values that must be equal bit by bit."""
    return Difference(output, sequence, got, expected, torch.zeros_like(expected))


@dataclass(frozen=True, slots=True, eq=False)
class Related:
    """Inputs of the launches, and the differences of their outputs (in the same order)."""

    inputs: tuple[Inputs, ...]
    differences: Callable[[Sequence[Outputs]], Iterable[Difference]]
