"""The steps of a Trial: inputs, compiled code, launches, truth and verdict of one Case, each timed as its stage.

A check (harness/trial/checks/) is a generator over them, so that the outputs of many Cases can be judged together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch

from attnfuzz.harness.core.clock import Clock
from attnfuzz.harness.core.text import encodable
from attnfuzz.harness.judge.batch import Judged
from attnfuzz.harness.judge.failure import Failure, Identity
from attnfuzz.harness.judge.judge import judge, judge_by_oracle
from attnfuzz.harness.judge.together import Launched
from attnfuzz.harness.judge.truth import HeadTruths, Truth, Truths, truth
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.bands import Bands
from attnfuzz.harness.trial.build import build_by_roles, build_kernel
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.launch import launch
from attnfuzz.kernels.contract import BuildError, Built, Device, Inputs, Kernel, Outputs
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.relations.transfer import Move, moved
from attnfuzz.strategies.case import Case, Recipe
from attnfuzz.strategies.earlier_calls import earlier_problems

__all__ = ["Bench", "Steps", "WentWrong", "completed"]

Steps: TypeAlias = Generator[Launched | Move, Any, Verdict]
"""A check of a Case: it yields what may be done for many Cases at once, and returns the Verdict.

Outputs that the oracle must judge: it is resumed with a Judged. A Move: it is resumed with the list of copies.
"""


class WentWrong(Exception):
    """The kernel failed before there was anything to judge."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@contextlib.contextmanager
def _as_failure(kernel: str) -> Iterator[None]:
    """Turn a BuildError into the Failure of a kernel."""
    try:
        yield
    except BuildError as error:
        message = encodable(str(error)[:2000])
        raise WentWrong(Failure(kernel=kernel, kind="compile-error", check="build", message=message)) from error


@dataclass(frozen=True, slots=True)
class Bench:
    """One Case's kernel on one device. A check (harness/trial/checks/) uses it for one or more launches."""

    case: Case
    kernel: Kernel
    device: Device
    clock: Clock
    slack: list[Failure] = field(default_factory=list, kw_only=True)
    """Failures of slack rows so far."""
    known: Collection[Identity] = field(default=(), kw_only=True)
    """Failures whose pattern is not looked for, as in `judge`."""
    waits: ClassVar[bool] = True
    """Whether each launch is waited for, so that an error of the device is attributed to it."""

    def earlier(self) -> tuple[Problem, ...]:
        """Return the Problems of the calls before the Case's own."""
        return earlier_problems(self.kernel, self.case, self.device)

    def ready(self, problem: Problem | None = None) -> Built:
        """Return the kernel compiled for `problem` (default: the Case's).

        Raises:
            WentWrong: it could not be compiled.
        """
        with self.clock.stage("compile"), _as_failure(self.case.kernel):
            return build_kernel(self.kernel, problem or self.case.problem, self.case.config, self.device)

    def by_roles(self) -> Built:
        """Return the kernel as warp roles under the Case's schedule.

        Raises:
            WentWrong: it could not be built.
        """
        with self.clock.stage("compile"), _as_failure(self.case.kernel):
            return build_by_roles(self.kernel, self.case.problem, self.case.config, self.case.schedule)

    def inputs(self, problem: Problem | None = None, recipe: Recipe | None = None) -> Inputs:
        """Return the tensors for `problem` and `recipe` (default: the Case's)."""
        with self.clock.stage("inputs"):
            return materialise(problem or self.case.problem, recipe or self.case.recipe, self.device)

    def launch(self, ready: Built, inputs: Inputs, *, fill: float = math.nan, bands: Bands | None = None) -> Outputs:
        """Run forward and backward on copies of `inputs`; `fill` and `bands` as in harness/trial/launch.py.

        Raises:
            WentWrong: it raised, or wrote outside its tensors.
            DeviceLost: it broke the device for this process.
        """
        return self.checked_launch(ready, inputs, fill=fill, bands=bands)

    def checked_launch(self, ready: Built, inputs: Inputs, *, fill: float = math.nan, bands: Bands | None = None) -> Outputs:
        """Launch, wait, and check where it wrote, which `launch` leaves for later in a batch; raises as it does."""
        with self.clock.stage("kernel"):
            rows = self.kernel.capabilities.slack_rows
            how: dict[str, Any] = {"fill": fill, "bands": bands, "wait": self.waits, "slack_rows": rows, "slack": self.slack}
            outcome = launch(self.case, ready, inputs, self.device, **how)
        if isinstance(outcome, Failure):
            raise WentWrong(outcome)
        return outcome

    def watch(self, bands: Sequence[Bands]) -> Callable[[], Iterator[str]]:
        """Begin to check bands of earlier launches again; return a function that yields what is wrong with each."""
        return lambda: (message for each in bands if (message := each.broken()))

    def judged(self, launched: Launched) -> Judged:
        """Compute the truth and judge outputs against it."""
        case, deviations = self.case, self.kernel.capabilities.deviations
        of = (case.kernel, launched.inputs, launched.outputs, deviations, case.config, self.device, self.clock)
        return Judged(*judge_by_oracle(*of, self.known))

    def truth(self, inputs: Inputs) -> Truths | HeadTruths:
        """Compute oracle and budgets."""
        with self.clock.stage("oracle"):
            return truth(inputs, self.kernel.capabilities.deviations, self.device)

    def judge(self, inputs: Inputs, outputs: Outputs, expected: dict[OutputName, Truth]) -> Verdict:
        """Judge outputs against the truth."""
        with self.clock.stage("judge"):
            return judge(self.case.kernel, inputs, outputs, expected, self.case.config, self.known)


def completed(bench: Bench, steps: Steps) -> Verdict:
    """Run a check to its end, with everything done when it is asked for.

    Raises:
        WentWrong: the kernel failed before there was anything to judge.
        DeviceLost: the kernel broke the device for this process.
    """
    answer: Judged | list[torch.Tensor] | None = None
    try:
        while True:
            request = steps.send(answer)
            if isinstance(request, Move):
                with bench.clock.stage(request.stage):
                    (answer,) = moved([request])
            else:
                answer = bench.judged(request)
    except StopIteration as end:
        verdict: Verdict = end.value
        return verdict
