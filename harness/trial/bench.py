"""The steps of a Trial: inputs, compiled code, launches, truth and verdict of one Case, each timed as its stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnfuzz.harness.core.clock import Clock
from attnfuzz.harness.core.text import printable
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.judge import HeadTruths, Truth, Truths, judge, judge_by_oracle, truth
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.build import build_kernel
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.launch import launch
from attnfuzz.harness.trial.poison import Bands
from attnfuzz.kernels.contract import BuildError, Built, Device, Inputs, Kernel, Outputs
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.strategies.case import Case, Recipe

__all__ = ["Bench", "WentWrong"]


class WentWrong(Exception):
    """The kernel failed before there was anything to judge."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Bench:
    """One Case's kernel on one device. A check (harness/trial/trial.py) uses it for one or more launches."""

    case: Case
    kernel: Kernel
    device: Device
    clock: Clock

    def ready(self, problem: Problem | None = None) -> Built:
        """Return the kernel compiled for `problem` (default: the Case's).

        Raises:
            WentWrong: it could not be compiled.
        """
        try:
            with self.clock.stage("compile"):
                return build_kernel(self.kernel, problem or self.case.problem, self.case.config, self.device)
        except BuildError as error:
            message = printable(str(error)[:2000])
            raise WentWrong(Failure(kernel=self.case.kernel, kind="compile-error", check="build", message=message)) from error

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
        with self.clock.stage("kernel"):
            outcome = launch(self.case, ready, inputs, self.device, fill=fill, bands=bands)
        if isinstance(outcome, Failure):
            raise WentWrong(outcome)
        return outcome

    def verdict(self, inputs: Inputs, outputs: Outputs) -> Verdict:
        """Compute the truth and judge outputs against it."""
        can = self.kernel.capabilities
        return judge_by_oracle(self.case.kernel, inputs, outputs, can.deviations, self.case.config, self.device, self.clock)

    def truth(self, inputs: Inputs) -> Truths | HeadTruths:
        """Compute oracle and budgets."""
        with self.clock.stage("oracle"):
            return truth(inputs, self.kernel.capabilities.deviations, self.device)

    def judge(self, inputs: Inputs, outputs: Outputs, expected: dict[OutputName, Truth]) -> Verdict:
        """Judge outputs against the truth."""
        with self.clock.stage("judge"):
            return judge(self.case.kernel, inputs, outputs, expected, self.case.config)
