"""The parts of a relation: launches, values that must be equal in their outputs, and how far off these may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from attnfuzz.kernels.contract import Deviations, Device, Inputs, Outputs
from attnfuzz.kernels.problem import OutputName, Problem

__all__ = ["Difference", "Related", "Setup", "Worst", "limit", "worst"]


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
    `allowed` is the typical error of an element, and limits are multiples of it (`limit`); else it is the largest allowed error
    of an element, 0 for bit by bit. `what` names the compared value if it is not the output itself.
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


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest error of a Difference in units of what is allowed, and its place: `rule` is element, row or head.

    `bad_row` is the first row over a limit, or the worst one where none is.
    """

    ratio: float
    rule: str
    over: int
    head: int
    bad_row: int
    dim: int | None
    got: float
    expected: float
    allowed: float


def limit(elements: int) -> float:
    """Return the largest RMS error over so many elements, in units of an element's typical error: 1.2 + 5 / sqrt(elements).

    The typical error of `sizes.Noise` is an upper estimate of the deviation. A mean square of m independent errors varies by
    sqrt(2 / m) of itself, its root by 1 / sqrt(2 m): this leaves seven such deviations above 1.2.
    """
    return 1.2 + 5 / math.sqrt(elements)


def worst(difference: Difference) -> Worst | None:
    """Return the largest ratio over elements and, for noise, over rows and whole heads; None without elements."""
    got, expected = difference.got, difference.expected
    if not got.numel():
        return None
    allowed = difference.allowed.expand_as(got)
    error = torch.where(got == expected, 0.0, (got - expected).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    # A NaN or infinite limit would allow every error: values that are not finite are wrong, except equal LSEs.
    same = (got == expected) & (torch.isfinite(got) | (difference.output == "lse"))
    sound = torch.isfinite(allowed) & torch.isfinite(got) & torch.isfinite(expected) | same
    scaled = torch.where(error == 0, 0.0, error / allowed).masked_fill_(~sound, torch.inf)
    one = limit(1) if difference.noise else 1.0
    scaled = scaled.reshape(*got.shape[:2], -1)
    heads, rows, dims = scaled.shape
    by_element = scaled / one
    ratios = {"element": by_element.amax(2)}
    if difference.noise:
        square = scaled.square().mean(2).nan_to_num_(nan=torch.inf)
        ratios["row"] = square.sqrt() / limit(dims)
        ratios["head"] = (square.mean(1).sqrt() / limit(rows * dims))[:, None].expand(heads, rows)
    rule = max(ratios, key=lambda name: float(ratios[name].max()))
    by_row = torch.maximum(ratios["element"], ratios.get("row", ratios["element"]))
    over = by_row > 1
    head = int((over.any(1) if over.any() else ratios[rule].amax(1)).double().argmax())
    row = int((over[head] if over[head].any() else by_row[head]).double().argmax())
    dim = int(by_element[head, row].argmax())
    at = (head, row) if got.dim() == 2 else (head, row, dim)
    return Worst(
        ratio=float(ratios[rule].max()),
        rule=rule,
        over=int((by_element > 1).sum()),
        head=head,
        bad_row=row,
        dim=None if got.dim() == 2 else dim,
        got=float(got[at]),
        expected=float(expected[at]),
        allowed=float(allowed[at]) * one,
    )
