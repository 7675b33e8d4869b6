"""One Case of the verdict's self-test: correct outputs and faulty ones, each judged by the verdict and by its rivals.

The oracle, the budgets and the rivals' references are made once for a Case and serve all its faults.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from attnfuzz.harness.audit.selftest.rivals import References, Rival, alarms, compared, references
from attnfuzz.harness.audit.selftest.verdict_cases import Drawn, Table, drawn
from attnfuzz.harness.judge.judge import Truth, Truths, judge, truth
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Inputs, Outputs
from attnfuzz.kernels.problem import OUTPUT_NAMES, OutputName
from attnfuzz.strategies.case import Case

__all__ = ["Alarm", "Judged", "Shown", "Work", "work"]

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
class Shown:
    """A fault on one Case. `element`: some element (or its shape or dtype) fails; `every`: that, or R or z."""

    changed: bool
    element: bool = False
    every: bool = False
    rivals: frozenset[Rival] = frozenset()
    """Rules that it breaks."""
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judged:
    """A Case of the correct kernel, with its faults. `worst`, `sigmas`, `r`, `z` are the largest of any output."""

    table: Table
    index: int
    family: str
    rivalled: bool
    """Whether the rivals are made for it: float16 or bfloat16, q not prescaled."""
    elements: int
    worst: float
    sigmas: float
    r: float | None
    z: float | None
    unjudged: bool
    rivals: frozenset[Rival]
    alarm: Alarm | None
    faults: dict[str, Shown] = field(default_factory=dict)


def work(task: Work) -> list[Judged]:
    """Judge the Cases of a task, with one thread, so that sums do not depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return [_judged(task.table, i, drawn(task.table, task.seed, i), faults) for i, faults in task.indices.items()]
    finally:
        torch.set_num_threads(threads)


def _judged(table: Table, index: int, one: Drawn, faults: tuple[str, ...]) -> Judged:
    case = one.case
    kernel = registry.get(case.kernel)
    inputs = materialise(case.problem, case.recipe, "cpu")
    with torch.enable_grad():
        expected = truth(inputs, kernel.capabilities.deviations, "cpu")
    against = references(inputs, {name: each.expected for name, each in expected.items()})
    made = _outputs(case, case.kernel, inputs)
    fresh = _copies(expected)
    told = judge(case.kernel, inputs, made, fresh())
    shown = {slug: _shown(case, f"fault.numeric.{slug}", inputs, fresh(), against, made) for slug in faults}
    figures = told.figures.values()
    return Judged(
        table=table,
        index=index,
        family=one.family,
        rivalled=case.problem.dtype != "float32" and not kernel.capabilities.deviations.prescaled_q,
        elements=sum(each.elements for each in figures),
        worst=max((each.worst for each in figures), default=0.0),
        sigmas=max((each.sigmas for each in figures), default=0.0),
        r=max((each.r for each in figures if each.r is not None), default=None),
        z=max((each.z for each in figures if each.z is not None), default=None),
        unjudged=any(each.unjudged for each in figures),
        rivals=alarms(compared(made, against)),
        alarm=_alarm(table, index, one, told),
        faults=shown,
    )


def _outputs(case: Case, name: str, inputs: Inputs) -> Outputs:
    built = registry.get(name).build(case.problem, case.config, "cpu")
    o, lse = built.forward(inputs)
    return Outputs(o, lse, *built.backward(inputs, o, lse))


class _Copy(Truths):
    """A Truths as it was made, whatever was judged with it before; ties are counted once for all copies."""

    def __init__(self, made: Truths, tied: Callable[[], Truths]) -> None:
        dict.__init__(self, made)
        self.__dict__.update(vars(made))
        self._tied = tied

    def count_ties(self) -> None:
        """Take over what the shared one has counted."""
        tied = self._tied()
        self.update(tied)
        self.ties, self.budgets = tied.ties, tied.budgets


def _copies(made: dict[OutputName, Truth]) -> Callable[[], dict[OutputName, Truth]]:
    """A judge may count ties and keep them, which the next kernel on the same Case must not see: each gets a copy."""
    if not isinstance(made, Truths):
        return lambda: made
    plain = made
    tied = copy.copy(plain)

    def counted() -> Truths:
        if not tied.ties:
            tied.count_ties()
        return tied

    return lambda: _Copy(plain, counted)


def _shown(case: Case, name: str, inputs: Inputs, expected: Any, against: References, correct: Outputs) -> Shown:
    made = _outputs(case, name, inputs)
    if all(_same_bits(getattr(made, each), getattr(correct, each)) for each in OUTPUT_NAMES):
        return Shown(changed=False)
    told: Verdict = judge(name, inputs, made, expected)
    return Shown(
        changed=True,
        element=any(each.kind != "aggregate" for each in told.failures),
        every=told.status != "pass",
        rivals=alarms(compared(made, against)),
        outputs=tuple(sorted({each.output for each in told.failures if each.output})),
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = _BITS[a.element_size()]
    return bool(torch.equal(a.view(bits), b.view(bits)))


def _alarm(table: Table, index: int, one: Drawn, told: Verdict) -> Alarm | None:
    if told.status == "pass":
        return None
    message = told.failure.message if told.failure else "failed without a reason"
    return Alarm(table, index, one.family, one.case.to_object(), message)
