"""Cases before a Case's own: what they leave in the process is part of what the Case tries."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from attnfuzz.harness.judge.failure import in_earlier
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.harness.trial.gpu_memory import trim, when_free
from attnfuzz.harness.trial.trial import check_runnable, run_trial
from attnfuzz.kernels.contract import Device
from attnfuzz.strategies.case import Case

__all__ = ["run_earlier", "run_sequence"]


def run_sequence(case: Case, device: Device) -> Verdict:
    """Run the Cases of `case.after`, then the Case.

    Raises:
        BadArgument: one of them cannot run here.
        DeviceLost: the kernel broke the device for this process.
    """
    run_earlier(case, device)
    return run_trial(case, device)


def run_earlier(case: Case, device: Device, enter: Callable[..., None] = lambda *_: None) -> None:
    """Run the Cases of `case.after`, one after the other, whatever their Verdicts.

    `enter` is called with the name of each stage as it begins and the number of the Case; once more for the Case itself.

    Raises:
        BadArgument: one of them, or the Case itself, cannot run here.
        DeviceLost: one of them broke the device for this process; its failure is of check "earlier".
    """
    if not case.after:
        return
    check_runnable(case, device)
    for number, each in enumerate(case.after):
        # An error of the harness in a Case whose Verdict nobody asks for is no reason to end.
        with contextlib.suppress(Exception):
            try:
                _run(each, device, functools.partial(_enter, enter, number))
            except DeviceLost as lost:
                raise DeviceLost(case, in_earlier(lost.failure, number, len(case.after))) from lost
            trim(device)
    enter("inputs", len(case.after))


def _run(case: Case, device: Device, enter: Callable[[str], None]) -> None:
    when_free(lambda: run_trial(case, device, enter), device)


def _enter(enter: Callable[..., None], number: int, stage: str) -> None:
    enter(stage, number)
