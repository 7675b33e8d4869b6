"""The judgement of several launches of one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnfuzz.harness.judge.judge import Truth, judge, truth
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Config, Deviations, Inputs, Outputs
from attnfuzz.kernels.problem import OutputName

__all__ = ["Judged", "Launched", "judge_batch"]


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """Outputs of one launch, not judged yet."""

    kernel: str
    inputs: Inputs
    outputs: Outputs
    config: Config


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A Verdict, and the truths that it was made by."""

    verdict: Verdict
    truths: dict[OutputName, Truth]


def judge_batch(launched: Sequence[Launched], deviations: Deviations, device: str) -> list[Judged | None]:
    """Judge all launches; None: this one is to be judged alone."""
    judged: list[Judged | None] = []
    for each in launched:
        expected = truth(each.inputs, deviations, device)
        judged.append(Judged(judge(each.kernel, each.inputs, each.outputs, expected, each.config), expected))
    return judged
