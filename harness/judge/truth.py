"""The truth of a Case's outputs: oracle values and budgets over the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnfuzz.harness.judge.failure import BY_QUERY
from attnfuzz.harness.judge.host import on_host
from attnfuzz.kernels.contract import Deviations, Inputs
from attnfuzz.kernels.problem import Dtype, OutputName, Problem
from attnfuzz.oracles import attention, blockwise
from attnfuzz.oracles.budgets.bounds import Budget, Budgets, budgets
from attnfuzz.oracles.budgets.independence import Independence
from attnfuzz.oracles.budgets.repeats import Repeats
from attnfuzz.oracles.formats import TINY, Format, half_ulp

__all__ = ["LOG_2", "WHOLE", "HeadTruths", "Truth", "Truths", "flushed_sums", "is_tiny", "truth"]

LOG_2 = 0.6931471805599453
_SINGLE = Format.of("float32")
WHOLE = 1 << 24
"""Scores of one sequence, all heads, above which the oracle works in blocks."""
_HOST_PRODUCTS, _HOST_ELEMENTS = 1 << 18, 1 << 15
"""Up to these a Case is judged on the host: the some 800 launches take longer on a GPU than all the work on a CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """Expected values and allowed errors of one output over the whole batch, float64, heads first: (heads, tokens[, dim]).

    Where `allowed` is infinite, nothing is judged: dS may exceed the dtype's range, or mask_mod is in doubt.
    """

    expected: torch.Tensor
    allowed: torch.Tensor
    budget: Budget | None = None
    form: Format = _SINGLE
    doubted: int = 0
    """Elements not judged because float32 may decide mask_mod's comparisons of floats either way."""

    def reorder(self, one: torch.Tensor, other: torch.Tensor, flushed: float) -> torch.Tensor:
        """Return how far outputs of two runs may differ that add in different orders: two sums' errors, two last roundings."""
        largest = torch.maximum(one.abs(), other.abs()).nan_to_num(nan=0.0, posinf=self.form.largest)
        return 2 * (self.order_error(flushed) + half_ulp(largest, self.form))

    def order_error(self, flushed: float) -> torch.Tensor:
        """Return what the order of a sum's additions may change, infinite where nothing is judged; `flushed`: `flushed_sums`."""
        error = self.allowed if self.budget is None or self.budget.reorder is None else self.budget.reorder
        return (error + flushed).masked_fill_(self.allowed == torch.inf, torch.inf)


class Truths(dict[OutputName, Truth]):
    """The Truth of every output, by default with the budget without ties. `captured`: that of captured tensors' gradients.

    For a tiny Problem, whether values are generic is computed on demand (`look_for_repeats`).
    """

    def __init__(self, inputs: Inputs, deviations: Deviations, device: str, *, lean: bool = False) -> None:
        super().__init__()
        self.captured: dict[str, Truth] = {}
        self._inputs, self._deviations, self._device, self._lean = inputs, deviations, device, lean
        self.ties = False
        self.generic_known = lean or not is_tiny(inputs.problem)
        self.budgets: Budgets
        # In this order, since the temporaries of budgets need the most memory.
        all_budgets = self._budgets()
        expected, captured = _reference(inputs)
        if "lse" in expected and deviations.lse_base2:
            expected["lse"] = expected["lse"] / LOG_2
        self._fill(expected, all_budgets)
        for name, x in captured.items():
            # A tensor that no score reads has gradient 0 without an error.
            self.captured[name] = Truth(x, all_budgets.captured.get(name, torch.zeros_like(x)))

    @property
    def dtype(self) -> Dtype:
        """That of q, k and v."""
        return self._inputs.problem.dtype

    def count_ties(self) -> None:
        """Recompute the budgets with tau, the part for repeated values."""
        self.ties = True
        expected = {name: true.expected for name, true in self.items()}
        self.clear()
        all_budgets = self._budgets()
        self._fill(expected, all_budgets)
        for name, true in self.captured.items():
            self.captured[name] = dataclasses.replace(true, allowed=all_budgets.captured.get(name, true.allowed))

    def look_for_repeats(self) -> Repeats | None:
        """Return whether the values are generic, for the statistics over a whole output."""
        if not self.generic_known:
            self.generic_known = True
            self.budgets = dataclasses.replace(self.budgets, repeats=self._budgets().repeats)
        return self.budgets.repeats

    def look_for_dependence(self) -> Independence | None:
        """Compute whether errors are independent; needed where a statistic over a whole output is beyond its limit."""
        return budgets(
            self._inputs, self._deviations, self._device, ties=False, lean=self._lean, generic=False, independent=True
        ).independence

    def _budgets(self) -> Budgets:
        return budgets(self._inputs, self._deviations, self._device, ties=self.ties, lean=self._lean, generic=self.generic_known)

    def _fill(self, expected: dict[OutputName, torch.Tensor], all_budgets: Budgets) -> None:
        self.budgets = all_budgets
        form = Format.of(self._inputs.problem.dtype)
        for name in self._inputs.problem.needs.outputs:
            if name == "lse":
                allowed = all_budgets.lse / (LOG_2 if self._deviations.lse_base2 else 1.0)
                self[name] = Truth(expected[name], allowed, doubted=_left_out(allowed, all_budgets))
            else:
                allowed = all_budgets.outputs[name].allowed
                self[name] = Truth(expected[name], allowed, all_budgets.outputs[name], form, _left_out(allowed, all_budgets))


def _left_out(allowed: torch.Tensor, all_budgets: Budgets) -> int:
    """Count elements that are not judged, if a mask is in doubt anywhere."""
    return int(torch.isinf(allowed).sum()) if any(all_budgets.doubted.values()) else 0


class HeadTruths(dict[OutputName, Truth]):
    """The truth of a batch too large to hold all heads at once: computed head by head, while judging."""

    def __init__(self, inputs: Inputs, deviations: Deviations, device: str) -> None:
        super().__init__()
        self._inputs, self._deviations, self._device = inputs, deviations, device

    def parts(self) -> Iterator[tuple[int, Inputs, Truths]]:
        """Yield (number, inputs, truth) of each key/value head with its query heads."""
        for head, inputs in blockwise.by_head(self._inputs):
            yield head, inputs, Truths(inputs, self._deviations, self._device, lean=True)


def truth(inputs: Inputs, deviations: Deviations, device: str) -> Truths | HeadTruths:
    """Compute oracle and budgets of every output the Problem needs; tokens of all sequences one after the other.

    Runs on the inputs' device, or on the host for a tiny Problem (`is_tiny`).
    """
    if blockwise.is_large(inputs.problem):
        return HeadTruths(inputs, deviations, device)
    return Truths(_on_host(inputs) if inputs.q.is_cuda and is_tiny(inputs.problem) else inputs, deviations, device)


def is_tiny(problem: Problem) -> bool:
    """Whether the truth is computed on the host, regardless of the kernel's device."""
    rows, keys, dims = max(problem.seqlens_q), max(problem.seqlens_k), problem.dim_qk + problem.dim_v
    elements = (problem.total_q * problem.heads + problem.total_k * problem.kv_heads) * dims
    return problem.batch * problem.heads * rows * keys * dims <= _HOST_PRODUCTS and elements <= _HOST_ELEMENTS


def flushed_sums(problem: Problem, name: OutputName) -> float:
    """Return what an output's sum loses where the device flushes sums below the smallest normal float32, by their order.

    A sum of n terms has at most n - 1 sums of some of them, and each of these loses less than tiny: atomic additions of float32
    in global memory flush (PTX ISA, `atom`). dQ and dK may be scaled after that.
    """
    terms = max(problem.seqlens_k) if name in BY_QUERY else max(problem.seqlens_q) * problem.groups
    return terms * TINY * (max(1.0, abs(problem.scale)) if name in ("dq", "dk") else 1.0)


def _on_host(inputs: Inputs) -> Inputs:
    names = ("q", "k", "v", "d_o", "cu_seqlens_q", "cu_seqlens_k", *(("d_lse",) if inputs.d_lse is not None else ()))
    copies = on_host([*(getattr(inputs, name) for name in names), *inputs.captured])
    return dataclasses.replace(inputs, **dict(zip(names, copies, strict=False)), captured=tuple(copies[len(names) :]))


def _reference(inputs: Inputs) -> tuple[dict[OutputName, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the oracle's outputs over the whole batch, heads first, and the gradients of captured tensors by name."""
    problem = inputs.problem
    references = []
    for data in attention.sequences(inputs):
        scores = data.q.shape[0] * data.q.shape[1] * data.k.shape[1]
        references.append((attention if scores <= WHOLE else blockwise).reference(problem, data))
    names = problem.needs.outputs
    captured = {name: sum((each.captured[name] for each in references[1:]), x) for name, x in references[0].captured.items()}
    if len(references) == 1:
        return {name: getattr(references[0], name) for name in names}, captured
    return {name: torch.cat([getattr(each, name) for each in references], dim=1) for name in names}, captured
