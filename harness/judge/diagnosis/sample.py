"""A sample of wrong elements, and tests of how well a fit explains their errors."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from attnfuzz.harness.judge.diagnosis.model import Look, LookKind
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.formats import Format

__all__ = ["Fit", "Sample", "accepted", "around", "fitted", "followed", "sampled"]

_SIZE = 1 << 14
_EXPLAINED = 0.95
_MOSTLY = 0.8
_WITHIN = 0.99
_GOLDEN = 0.6180339887498949
_STRIDE = 17


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Wrong elements with finite values, all `(n,)`: their places, got, expected and allowed.

    `tolerance` is the allowed error plus one rounding; `weight` its inverse, so that a few large values do not dominate. `of_...`
    are the whole outputs, `(heads, tokens, dim)`.
    """

    head: Tensor
    token: Tensor
    dim: Tensor
    got: Tensor
    expected: Tensor
    allowed: Tensor
    tolerance: Tensor
    weight: Tensor
    of_got: Tensor
    of_expected: Tensor
    of_allowed: Tensor

    def __len__(self) -> int:
        return len(self.got)

    def where(self, chosen: Tensor) -> Sample:
        """Return the elements of `chosen`, bool or indices `(n,)`."""
        whole = {"of_got", "of_expected", "of_allowed"}
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Sample(**{name: x if name in whole else x[chosen] for name, x in values.items()})


@dataclass(frozen=True, slots=True)
class Fit:
    """An explanation of a sample's errors, and the part of their squares it explains; `covers`: its share of the sample."""

    kind: LookKind
    explained: float
    text: str
    value: float | None = None
    name: str = ""
    covers: float = 1.0

    def look(self, share: float) -> Look:
        """Return it as a Look, where the sample stands for `share` of the wrong elements."""
        share *= self.covers
        text = self.text if share >= 0.995 else f"{self.text} ({100 * share:.2g} % of them)"
        return Look(kind=self.kind, share=share, confidence=self.explained, value=self.value, name=self.name, text=text)


def sampled(problem: Problem, name: OutputName, got: Tensor, expected: Tensor, allowed: Tensor, chosen: Tensor) -> Sample | None:
    """Sample up to 16,384 of the elements `chosen`, spread evenly without a period; None if there are none."""
    flat = chosen.flatten().nonzero().flatten()
    if not len(flat):
        return None
    if len(flat) > _SIZE:
        i = torch.arange(_SIZE, dtype=torch.float64, device=flat.device)
        flat = flat[((i + (i * _GOLDEN) % 1.0) * (len(flat) / _SIZE)).long().clamp(max=len(flat) - 1)]
    head, token, dim = torch.unravel_index(flat, got.shape)
    return _taken(problem, name, head, token, dim, got, expected, allowed)


def around(problem: Problem, name: OutputName, sample: Sample) -> Sample:
    """Return finite elements of the same rows, wrong or not; for outputs without columns the sample itself."""
    dims = sample.of_got.shape[2]
    if dims == 1:
        return sample
    dim = (torch.arange(len(sample), device=sample.dim.device) * _STRIDE + sample.dim) % dims
    rows = _taken(problem, name, sample.head, sample.token, dim, sample.of_got, sample.of_expected, sample.of_allowed)
    return rows.where(torch.isfinite(rows.got) & torch.isfinite(rows.expected))


def _taken(
    problem: Problem, name: OutputName, head: Tensor, token: Tensor, dim: Tensor, got: Tensor, expected: Tensor, allowed: Tensor
) -> Sample:
    at = (head, token, dim)
    values, budget = got[at], allowed[at].nan_to_num(nan=0.0, posinf=0.0)
    true = expected[at]
    tolerance = budget + Format.of("float32" if name == "lse" else problem.dtype).u * torch.maximum(values.abs(), true.abs())
    floor = max(0.1 * float(tolerance.nan_to_num(nan=0.0, posinf=0.0).median()), 1e-60)
    weight = 1 / tolerance.clamp(min=floor)
    return Sample(head, token, dim, values, true, budget, tolerance, weight, got, expected, allowed)


def fitted(sample: Sample, rest: Tensor) -> float:
    """Return the explained part of the squared errors, in budgets, where `rest` (n,) is what remains of the errors."""
    before = (sample.got - sample.expected) * sample.weight
    return float(1 - (rest * sample.weight).square().sum() / before.square().sum())


def accepted(sample: Sample, rest: Tensor, explained: float) -> bool:
    """Whether 0.95 is explained, or 0.8 with the rest within the budget in 99 % of the elements."""
    if explained >= _EXPLAINED:
        return True
    return explained >= _MOSTLY and float((rest.abs() <= sample.tolerance).double().mean()) >= _WITHIN


def followed(sample: Sample, rest: Tensor) -> bool:
    """Whether got - `rest` follows got, to 0.95 of its variance or to within the budget.

    Otherwise a factor or an offset could fit values that are only far from the expected ones.
    """
    weights = sample.weight.square()
    mean = (weights * sample.got).sum() / weights.sum()
    if (rest.square() * weights).sum() <= (1 - _EXPLAINED) * ((sample.got - mean).square() * weights).sum():
        return True
    return float((rest.abs() <= sample.tolerance).double().mean()) >= _WITHIN
