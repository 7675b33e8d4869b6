"""A Case run in this process so that a debugger can look at it: where the kernel raised, or the tensors that were compared."""

from __future__ import annotations

import pdb
import sys
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from attnfuzz.harness.core.clock import Clock
from attnfuzz.harness.judge.contract import heads_first, why_unfit
from attnfuzz.harness.judge.truth import Truths
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.bench import Bench, WentWrong
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels.contract import Built, Device, Gradients, Inputs, Kernel, Outputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support import memory
from attnfuzz.strategies.case import Case, Recipe

if TYPE_CHECKING:
    import torch

__all__ = ["Recorded", "enter", "recorded"]


@dataclass(slots=True)
class Recorded:
    """What a Trial left behind for a debugger: its Verdict, and the last of each thing that it made.

    `raised`: what the kernel raised, in a compile or a call, with its traceback. `reference`, `budget` and `error` hold a tensor
    for each output, float64, heads first `(heads, tokens[, dim])`; empty where nothing was compared.
    """

    verdict: Verdict
    kernel: Kernel | None = None
    inputs: Inputs | None = None
    outputs: Outputs | None = None
    raised: BaseException | None = None
    reference: dict[str, torch.Tensor] = field(default_factory=dict)
    budget: dict[str, torch.Tensor] = field(default_factory=dict)
    error: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """Frames from where the kernel raised up to attnfuzz's call of it, in which its inputs are."""
        frames = [] if self.raised is None else _frames(self.raised.__traceback__)
        own = [at for at, each in enumerate(frames) if each.tb_frame.f_code.co_filename == __file__]
        return len(frames) - 1 - own[-1] if own else 0


def recorded(case: Case, device: Device, *, memory_check: bool = True) -> Recorded:
    """Run `case` in this process.

    Raises:
        BadArgument: the Case cannot run here.
    """
    found = Recorded(Verdict(status="pass"))

    def bench(case: Case, kernel: Kernel, device: Device, clock: Clock) -> Bench:
        found.kernel = kernel
        return _Recording(case, kernel, device, clock, found)

    before = memory.checking()
    memory.check(memory_check)
    try:
        found.verdict = run_trial(case, device, bench=bench)
    except DeviceLost as lost:
        found.verdict = Verdict(status="fail", failures=(lost.failure,))
    finally:
        memory.check(before)
    return found


@dataclass(frozen=True)
class _Recording(Bench):
    found: Recorded

    def ready(self, problem: Problem | None = None) -> Built:
        try:
            return _Watched(super().ready(problem), self.found, self.case)
        except WentWrong as error:
            cause = error.__cause__
            self.found.raised = (cause.__cause__ or cause) if cause is not None else error
            raise

    def inputs(self, problem: Problem | None = None, recipe: Recipe | None = None) -> Inputs:
        self.found.inputs = super().inputs(problem, recipe)
        return self.found.inputs

    def launch(self, ready: Built, inputs: Inputs, **more: Any) -> Outputs:
        made = super().launch(ready, inputs, **more)
        if not more:
            # The launch that tells unwritten memory apart is not the one to look at.
            self.found.inputs, self.found.outputs = inputs, made
        return made

    def verdict(self, inputs: Inputs, outputs: Outputs) -> Verdict:
        return self.judge(inputs, outputs, self.truth(inputs))

    def judge(self, inputs: Inputs, outputs: Outputs, expected: Any) -> Verdict:
        verdict = super().judge(inputs, outputs, expected)
        if isinstance(expected, Truths) and not why_unfit(self.case.kernel, inputs, outputs):
            for name, true in expected.items():
                got = heads_first(inputs.problem, name, getattr(outputs, name)).to(true.expected.device).double()
                self.found.reference[name], self.found.budget[name] = true.expected, true.allowed
                self.found.error[name] = (got - true.expected).abs()
        return verdict


class _Watched:
    """A built kernel whose errors are kept with their tracebacks."""

    def __init__(self, built: Built, found: Recorded, case: Case) -> None:
        self.built, self.found, self.case = built, found, case

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        kernel, case, problem = self.found.kernel, self.case, inputs.problem  # noqa: F841 - to be seen in the debugger
        try:
            return self.built.forward(inputs)
        except BaseException as error:
            self.found.raised = error
            raise

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:
        kernel, case, problem = self.found.kernel, self.case, inputs.problem  # noqa: F841
        try:
            return self.built.backward(inputs, o, lse)
        except BaseException as error:
            self.found.raised = error
            raise


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def enter(found: Recorded, case: Case) -> None:
    """Stop in pdb: where the kernel raised, or in a frame that holds what was compared. Returns when the user leaves it."""
    # On a terminal pdb's own input, which has a history; else what is piped in, whoever holds the streams.
    debugger = pdb.Pdb() if sys.stdin.isatty() else pdb.Pdb(stdin=sys.stdin, stdout=sys.stdout)
    debugger.reset()
    if found.raised is not None:
        debugger.interaction(None, found.raised.__traceback__)
    else:
        _with_tensors(
            debugger, case, found.kernel, found.verdict, found.inputs, found.outputs, found.reference, found.budget, found.error
        )


def _with_tensors(
    debugger: pdb.Pdb,
    case: Case,  # noqa: ARG001 - the arguments are what can be seen in the debugger
    kernel: Kernel | None,  # noqa: ARG001
    verdict: Verdict,  # noqa: ARG001
    inputs: Inputs | None,  # noqa: ARG001
    outputs: Outputs | None,  # noqa: ARG001
    reference: dict[str, torch.Tensor],  # noqa: ARG001
    budget: dict[str, torch.Tensor],  # noqa: ARG001
    error: dict[str, torch.Tensor],  # noqa: ARG001
) -> None:
    debugger.interaction(sys._getframe(), None)
