"""Trials of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels.contract import Device
from attnfuzz.strategies.case import Case

__all__ = ["run_batch"]


def run_batch(
    cases: Sequence[Case],
    device: Device,
    enter: Callable[[str], None] | None = None,
    at: Callable[[int], None] = lambda _: None,
) -> list[Verdict]:
    """Run the Trials of a batch."""
    verdicts = []
    for number, each in enumerate(cases):
        at(number)
        verdicts.append(run_trial(each, device, enter))
    return verdicts
