"""One Case for the verdict's rates: correct outputs and faulty ones, each judged by the verdict and by the other rules.

The oracle, the budgets and the other rules' references are made once for a Case and serve all its faults.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from support.emulated.kernel import fault_kernel, kernel_named
from support.verdict.cases import FamilyCase, Table, drawn_case
from support.verdict.other_rules import References, Rule, alarms, compared, references

from attnfuzz.harness.judge.judge import judge
from attnfuzz.harness.judge.truth import Truth, Truths, truth
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.contract import Inputs, Kernel, Outputs
from attnfuzz.kernels.problem import OUTPUT_NAMES, OutputName
from attnfuzz.strategies.case import Case

_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Work:
    """Numbers of Cases in a table, with the faults that each is tried with."""

    table: Table
    seed: int
    indices: dict[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Alarm:
    """The verdict failed a correct kernel: a false alarm, with its Case."""

    table: Table
    index: int
    family: str
    case: dict[str, Any]
    message: str


@dataclass(frozen=True, slots=True)
class FaultJudged:
    """A fault on one Case. `element`: some element (or its shape or dtype) fails; `every`: that, or R or z."""

    changed: bool
    element: bool = False
    every: bool = False
    broken_rules: frozenset[Rule] = frozenset()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judged:
    """A Case of the correct kernel, with its faults. `worst`, `sigmas`, `r`, `z` are the largest of any output."""

    table: Table
    index: int
    family: str
    comparable: bool
    """Whether the other rules are made for it: float16 or bfloat16, q not prescaled."""
    elements: int
    worst: float
    sigmas: float
    r: float | None
    z: float | None
    unjudged: bool
    broken_rules: frozenset[Rule]
    alarm: Alarm | None
    faults: dict[str, FaultJudged] = field(default_factory=dict)


def work(task: Work) -> list[Judged]:
    """Judge the Cases of a task, with one thread, so that sums do not depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return [_judged(task.table, i, drawn_case(task.table, task.seed, i), faults) for i, faults in task.indices.items()]
    finally:
        torch.set_num_threads(threads)


def _judged(table: Table, index: int, one: FamilyCase, faults: tuple[str, ...]) -> Judged:
    case = one.case
    kernel = kernel_named(case.kernel)
    inputs = materialise(case.problem, case.recipe, "cpu")
    with torch.enable_grad():
        expected = truth(inputs, kernel.capabilities.deviations, "cpu")
    against = references(inputs, {name: each.expected for name, each in expected.items()})
    outputs = _outputs(case, kernel, inputs)
    fresh = _copies(expected)
    verdict = judge(case.kernel, inputs, outputs, fresh())
    judged = {slug: _fault_judged(case, slug, inputs, fresh(), against, outputs) for slug in faults}
    figures = verdict.figures.values()
    return Judged(
        table=table,
        index=index,
        family=one.family,
        comparable=case.problem.dtype != "float32" and not kernel.capabilities.deviations.prescaled_q,
        elements=sum(each.elements for each in figures),
        worst=max((each.worst for each in figures), default=0.0),
        sigmas=max((each.sigmas for each in figures), default=0.0),
        r=max((each.r for each in figures if each.r is not None), default=None),
        z=max((each.z for each in figures if each.z is not None), default=None),
        unjudged=any(each.unjudged for each in figures),
        broken_rules=alarms(compared(outputs, against)),
        alarm=_alarm(table, index, one, verdict),
        faults=judged,
    )


def _outputs(case: Case, kernel: Kernel, inputs: Inputs) -> Outputs:
    built = kernel.build(case.problem, case.config, "cpu")
    o, lse = built.forward(inputs)
    return Outputs(o, lse, *built.backward(inputs, o, lse))


class _Copy(Truths):
    """A copy of a fresh Truths; ties are counted once for all copies."""

    def __init__(self, fresh: Truths, tied: Callable[[], Truths]) -> None:
        dict.__init__(self, fresh)
        self.__dict__.update(vars(fresh))
        self._tied = tied

    def count_ties(self) -> None:
        """Take over what the shared one has counted."""
        tied = self._tied()
        self.update(tied)
        self.ties, self.budgets = tied.ties, tied.budgets


def _copies(fresh: dict[OutputName, Truth]) -> Callable[[], dict[OutputName, Truth]]:
    """A judge may count ties and keep them, which the next kernel on the same Case must not see: each gets a copy."""
    if not isinstance(fresh, Truths):
        return lambda: fresh
    plain = fresh
    tied = copy.copy(plain)

    def counted() -> Truths:
        if not tied.ties:
            tied.count_ties()
        return tied

    return lambda: _Copy(plain, counted)


def _fault_judged(case: Case, slug: str, inputs: Inputs, expected: Any, against: References, correct: Outputs) -> FaultJudged:
    kernel = fault_kernel(slug)
    outputs = _outputs(case, kernel, inputs)
    if all(_same_bits(getattr(outputs, each), getattr(correct, each)) for each in OUTPUT_NAMES):
        return FaultJudged(changed=False)
    verdict = judge(kernel.name, inputs, outputs, expected)
    return FaultJudged(
        changed=True,
        element=any(each.kind != "aggregate" for each in verdict.failures),
        every=verdict.status != "pass",
        broken_rules=alarms(compared(outputs, against)),
        outputs=tuple(sorted({each.output for each in verdict.failures if each.output})),
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = _BITS[a.element_size()]
    return bool(torch.equal(a.view(bits), b.view(bits)))


def _alarm(table: Table, index: int, one: FamilyCase, verdict: Verdict) -> Alarm | None:
    if verdict.status == "pass":
        return None
    message = verdict.failure.message if verdict.failure else "failed without a reason"
    return Alarm(table, index, one.family, one.case.to_object(), message)
