"""The allowed error of each output of a Case, measured when its script is written, packed as text."""

from __future__ import annotations

import base64
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.problem import reject
from attnfuzz.strategies.case import CALLS, Case

if TYPE_CHECKING:
    import torch

__all__ = ["ScriptBudgets", "measured_budgets"]

_MOST_SCORES = 1 << 25
"""Scores of a batch that a script's plain float64 reference can hold with what autograd keeps of them."""
_ELEMENTWISE = 1 << 17
"""Budgets up to which each element's own is written; beyond, the largest of each row."""
_FULL_PRECISION = 1 << 13
"""Budgets up to which they are written in float32; beyond, rounded up to 8 bits."""


@dataclass(frozen=True, slots=True)
class ScriptBudgets:
    """Packed budgets by output: text, and the shape of what it holds, heads first. `reorder`: of two equal calls."""

    allowed: dict[str, tuple[str, tuple[int, ...]]]
    reorder: dict[str, tuple[str, tuple[int, ...]]]
    limits: dict[str, float]
    """The largest budget of an output over its largest expected value: for inputs that were edited."""
    by_row: bool


def measured_budgets(case: Case, kernel: Kernel, device: Device) -> ScriptBudgets:
    """The budgets of a Case's outputs by the float64 oracle, equal values counted. No kernel is run.

    Raises:
        BadArgument: the Case is too large for a script.
    """
    problem = case.problem
    scores = problem.heads * sum(n_q * n_k for n_q, n_k in zip(problem.seqlens_q, problem.seqlens_k, strict=True))
    if scores > _MOST_SCORES:
        raise reject(
            "script", f"{scores} scores", f"a script's plain float64 reference holds {_MOST_SCORES} at most",
            "make the case smaller first: attnfuzz repro CASE --shrink",
        )  # fmt: skip
    from attnfuzz.harness.judge.truth import Truths
    from attnfuzz.harness.trial.inputs import materialise

    truths = Truths(materialise(problem, case.recipe, "cpu"), kernel.capabilities.deviations, device)
    truths.count_ties()
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    found |= {name: (each.expected, each.allowed) for name, each in truths.items()}
    found |= {f"d {name}": (each.expected, each.allowed) for name, each in truths.captured.items()}
    count = sum(allowed.numel() for _, allowed in found.values())
    by_row = count > _ELEMENTWISE
    bits = 23 if count <= _FULL_PRECISION else 7
    packed = {
        name: _packed(allowed.amax(-1, keepdim=True) if by_row and allowed.ndim == 3 and allowed.numel() else allowed, bits)
        for name, (_, allowed) in found.items()
    }
    limits = {name: _limit(*pair) for name, pair in found.items()}
    reorder: dict[str, tuple[str, tuple[int, ...]]] = {}
    if case.check in CALLS and not by_row:
        for name, true in truths.items():
            error = true.allowed if true.budget is None or true.budget.reorder is None else true.budget.reorder
            reorder[name] = _packed(error.masked_fill(true.allowed.isinf(), math.inf), bits)
    return ScriptBudgets(packed, reorder, limits, by_row)


def _packed(x: torch.Tensor, bits: int) -> tuple[str, tuple[int, ...]]:
    """float64 as text, each number rounded up to float32 with `bits` bits behind the leading one."""
    import torch

    plain = x.float()
    plain = torch.where(plain.double() < x, torch.nextafter(plain, torch.tensor(torch.inf)), plain).contiguous()
    if bits < 23:
        step = 1 << (23 - bits)
        words = plain.view(torch.int32)
        plain = ((words + step - 1) // step * step).view(torch.float32)
        plain = torch.where(plain.isnan(), torch.inf, plain)
    return base64.b85encode(zlib.compress(bytes(plain.contiguous().view(torch.uint8).flatten().tolist()), 9)).decode(), tuple(
        x.shape
    )


def _limit(expected: torch.Tensor, allowed: torch.Tensor) -> float:
    judged = allowed[~allowed.isinf()]
    size = float(expected[~expected.isinf()].abs().max()) if bool((~expected.isinf()).any()) else 0.0
    return float(judged.max()) / (size or 1.0) if judged.numel() else 0.0
