"""A Case run in this process so that a debugger can look at it: where the kernel raised, or the tensors that were compared."""

from __future__ import annotations

import pdb
import sys
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from attnfuzz.harness.core.clock import Clock
from attnfuzz.harness.isolation.executors import InProcess
from attnfuzz.harness.judge.batch import Judged
from attnfuzz.harness.judge.contract import heads_first, why_unfit
from attnfuzz.harness.judge.together import Launched
from attnfuzz.harness.judge.truth import Truths
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.bench import Bench, WentWrong
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.harness.trial.sequence import run_earlier
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels.contract import Built, Device, Gradients, Inputs, Kernel, Outputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case, Recipe

if TYPE_CHECKING:
    import torch

__all__ = ["Record", "RecordingExecutor", "enter"]


@dataclass(slots=True)
class Record:
    """A Trial for a debugger: its Verdict, and the last of its inputs, outputs and references.

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


class RecordingExecutor(InProcess):
    """Runs Cases in this process and keeps the `record` of the last."""

    record: Record

    def finish(self) -> Verdict:
        """Run the Trial.

        Raises:
            BadArgument: the Case cannot run here.
        """
        self.record = record = Record(Verdict(status="pass"))

        def bench(case: Case, kernel: Kernel, device: Device, clock: Clock) -> Bench:
            record.kernel = kernel
            return _RecordingBench(case, kernel, device, clock, record)

        assert self.case is not None
        try:
            with self.memory_checked():
                run_earlier(self.case, self.device)
                record.verdict = run_trial(self.case, self.device, bench=bench)
        except DeviceLost as lost:
            record.verdict = Verdict(status="fail", failures=(lost.failure,))
        return record.verdict


@dataclass(frozen=True)
class _RecordingBench(Bench):
    record: Record

    def ready(self, problem: Problem | None = None) -> Built:
        try:
            return _Watched(super().ready(problem), self.record, self.case)
        except WentWrong as error:
            cause = error.__cause__
            self.record.raised = (cause.__cause__ or cause) if cause is not None else error
            raise

    def inputs(self, problem: Problem | None = None, recipe: Recipe | None = None) -> Inputs:
        self.record.inputs = super().inputs(problem, recipe)
        return self.record.inputs

    def launch(self, ready: Built, inputs: Inputs, **more: Any) -> Outputs:
        outputs = super().launch(ready, inputs, **more)
        if not more:
            # The launch that distinguishes unwritten memory is not the one to look at.
            self.record.inputs, self.record.outputs = inputs, outputs
        return outputs

    def judged(self, launched: Launched) -> Judged:
        expected = self.truth(launched.inputs)
        return Judged(self.judge(launched.inputs, launched.outputs, expected), expected)

    def judge(self, inputs: Inputs, outputs: Outputs, expected: Any) -> Verdict:
        verdict = super().judge(inputs, outputs, expected)
        if isinstance(expected, Truths) and not why_unfit(self.case.kernel, inputs, outputs):
            for name, true in expected.items():
                got = heads_first(inputs.problem, name, getattr(outputs, name)).to(true.expected.device).double()
                self.record.reference[name], self.record.budget[name] = true.expected, true.allowed
                self.record.error[name] = (got - true.expected).abs()
        return verdict


class _Watched:
    """A built kernel whose errors are kept with their tracebacks."""

    def __init__(self, built: Built, record: Record, case: Case) -> None:
        self.built, self.record, self.case = built, record, case

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        kernel, case, problem = self.record.kernel, self.case, inputs.problem  # noqa: F841 - to be seen in the debugger
        try:
            return self.built.forward(inputs)
        except BaseException as error:
            self.record.raised = error
            raise

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:
        kernel, case, problem = self.record.kernel, self.case, inputs.problem  # noqa: F841
        try:
            return self.built.backward(inputs, o, lse)
        except BaseException as error:
            self.record.raised = error
            raise


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def enter(record: Record, case: Case) -> None:
    """Stop in pdb: where the kernel raised, or in a frame that holds what was compared. Returns when the user leaves it."""
    # On a terminal pdb's own input, which has a history; else what is piped in, whoever holds the streams.
    debugger = pdb.Pdb() if sys.stdin.isatty() else pdb.Pdb(stdin=sys.stdin, stdout=sys.stdout)
    debugger.reset()
    if record.raised is not None:
        debugger.interaction(None, record.raised.__traceback__)
    else:
        _with_tensors(
            debugger,
            case,
            record.kernel,
            record.verdict,
            record.inputs,
            record.outputs,
            record.reference,
            record.budget,
            record.error,
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
