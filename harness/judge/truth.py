"""What is true of a Case's outputs, and how far off they may be: oracle and budgets over the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnfuzz.kernels.contract import Deviations, Inputs
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles import attention, blockwise
from attnfuzz.oracles.budgets.bounds import Budget, Budgets, budgets
from attnfuzz.oracles.budgets.independence import Independence
from attnfuzz.oracles.budgets.repeats import Repeats
from attnfuzz.oracles.formats import Format, half_ulp

__all__ = ["HeadTruths", "Truth", "Truths", "is_tiny", "truth"]

_LOG_2 = 0.6931471805599453
_SINGLE = Format.of("float32")
_WHOLE = 1 << 24
"""Scores of one sequence, all heads, above which the oracle goes by blocks."""
_HOST_PRODUCTS, _HOST_ELEMENTS = 1 << 18, 1 << 15
"""Up to these a Case is judged on the host: the launches alone, some 800, take a GPU longer than all of it takes a CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """Expected value and allowed error of one output over the whole batch, float64, heads first: (heads, tokens[, dim]).

    Where `allowed` is infinite, nothing is judged: dS may exceed the dtype's range there, or mask_mod is in doubt.
    """

    expected: torch.Tensor
    allowed: torch.Tensor
    budget: Budget | None = None
    form: Format = _SINGLE
    doubted: int = 0
    """Elements not judged since mask_mod compares floats that float32 may tell apart either way."""

    def reorder(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """How far apart two runs' outputs may be that add in different orders: two sums' errors and two last roundings."""
        error = self.allowed if self.budget is None or self.budget.reorder is None else self.budget.reorder
        largest = torch.maximum(one.abs(), other.abs()).nan_to_num(nan=0.0, posinf=self.form.largest)
        return (2 * (error + half_ulp(largest, self.form))).masked_fill_(self.allowed == torch.inf, torch.inf)


class Truths(dict[OutputName, Truth]):
    """The Truth of every output; can count ties, should a budget without them be exceeded. `captured`: that of gradients by name.

    Of a tiny Problem it is looked only on demand (`look_for_repeats`) whether its values are generic.
    """

    def __init__(self, inputs: Inputs, deviations: Deviations, device: str, *, lean: bool = False) -> None:
        super().__init__()
        self.captured: dict[str, Truth] = {}
        self._inputs, self._deviations, self._device, self._lean = inputs, deviations, device, lean
        self.ties = False
        self.generic_known = lean or not is_tiny(inputs.problem)
        self.budgets: Budgets
        # In this order: what budgets take of memory for a while is the most.
        all_budgets = self._budgets()
        expected, captured = _reference(inputs)
        if "lse" in expected and deviations.lse_base2:
            expected["lse"] = expected["lse"] / _LOG_2
        self._fill(expected, all_budgets)
        for name, x in captured.items():
            # What no score reads has no gradient, and no error either.
            self.captured[name] = Truth(x, all_budgets.captured.get(name, torch.zeros_like(x)))

    def count_ties(self) -> None:
        """The budget with tau: what repeated values add."""
        self.ties = True
        expected = {name: true.expected for name, true in self.items()}
        self.clear()
        self._fill(expected, self._budgets())

    def look_for_repeats(self) -> Repeats | None:
        """Whether the values are generic, which the statistics over a whole output need to know."""
        if not self.generic_known:
            self.generic_known = True
            self.budgets = dataclasses.replace(self.budgets, repeats=self._budgets().repeats)
        return self.budgets.repeats

    def look_for_dependence(self) -> Independence | None:
        """Whether the errors of all of an output are independent: asked where together they look wrong."""
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
                allowed = all_budgets.lse / (_LOG_2 if self._deviations.lse_base2 else 1.0)
                self[name] = Truth(expected[name], allowed, doubted=_left_out(allowed, all_budgets))
            else:
                allowed = all_budgets.outputs[name].allowed
                self[name] = Truth(expected[name], allowed, all_budgets.outputs[name], form, _left_out(allowed, all_budgets))


def _left_out(allowed: torch.Tensor, all_budgets: Budgets) -> int:
    """Elements that are not judged where a mask is in doubt, whether by the doubt itself or by what follows of it."""
    return int(torch.isinf(allowed).sum()) if any(all_budgets.doubted.values()) else 0


class HeadTruths(dict[OutputName, Truth]):
    """Of a batch so large that the truth of all heads at once would not fit: it is made head by head, while it is judged."""

    def __init__(self, inputs: Inputs, deviations: Deviations, device: str) -> None:
        super().__init__()
        self._inputs, self._deviations, self._device = inputs, deviations, device

    def parts(self) -> Iterator[tuple[int, Inputs, Truths]]:
        """(number, inputs, truth) of each key/value head with its query heads."""
        for head, inputs in blockwise.by_head(self._inputs):
            yield head, inputs, Truths(inputs, self._deviations, self._device, lean=True)


def truth(inputs: Inputs, deviations: Deviations, device: str) -> Truths | HeadTruths:
    """Oracle and budgets of every output the Problem needs; tokens of all sequences one after the other.

    On the inputs' device, but for a tiny Problem (`is_tiny`): on the host.
    """
    if blockwise.is_large(inputs.problem):
        return HeadTruths(inputs, deviations, device)
    return Truths(_on_host(inputs) if inputs.q.is_cuda and is_tiny(inputs.problem) else inputs, deviations, device)


def is_tiny(problem: Problem) -> bool:
    """Whether the truth is worked out on the host, whatever device the kernel runs on."""
    rows, keys, dims = max(problem.seqlens_q), max(problem.seqlens_k), problem.dim_qk + problem.dim_v
    elements = (problem.total_q * problem.heads + problem.total_k * problem.kv_heads) * dims
    return problem.batch * problem.heads * rows * keys * dims <= _HOST_PRODUCTS and elements <= _HOST_ELEMENTS


def _on_host(inputs: Inputs) -> Inputs:
    tensors = {name: getattr(inputs, name).cpu() for name in ("q", "k", "v", "d_o", "cu_seqlens_q", "cu_seqlens_k")}
    d_lse = None if inputs.d_lse is None else inputs.d_lse.cpu()
    return dataclasses.replace(inputs, **tensors, d_lse=d_lse, captured=tuple(each.cpu() for each in inputs.captured))


def _reference(inputs: Inputs) -> tuple[dict[OutputName, torch.Tensor], dict[str, torch.Tensor]]:
    """The oracle's outputs over the whole batch, heads first, and the gradients of captured tensors by name."""
    problem = inputs.problem
    references = []
    for data in attention.sequences(inputs):
        scores = data.q.shape[0] * data.q.shape[1] * data.k.shape[1]
        references.append((attention if scores <= _WHOLE else blockwise).reference(problem, data))
    names = problem.needs.outputs
    captured = {name: sum((each.captured[name] for each in references[1:]), x) for name, x in references[0].captured.items()}
    if len(references) == 1:
        return {name: getattr(references[0], name) for name in names}, captured
    return {name: torch.cat([getattr(each, name) for each in references], dim=1) for name in names}, captured
