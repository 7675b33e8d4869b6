"""One Case again: FIXED (it passes now), FAILED (it still fails), or an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attnfuzz.harness import environment
from attnfuzz.harness.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.strategies.case import Case

__all__ = ["Reproduction", "reproduce"]


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What came of running a Case again on `device`."""

    outcome: Literal["FIXED", "FAILED"]
    device: Device
    verdict: Verdict


def reproduce(case: Case, asked: str) -> Reproduction:
    """Run `case` again on `asked` ("auto": CUDA if this machine and the kernel have it, else the CPU).

    Raises:
        BadArgument: the kernel is absent, cannot run here, or does not support the Problem.
    """
    from attnfuzz.harness.trial import run_trial

    device = environment.resolve_device(asked)
    if asked == "auto" and device == "cuda" and "cuda" not in registry.get(case.kernel).capabilities.devices:
        device = "cpu"
    environment.prepare(device)
    verdict = run_trial(case, device)
    return Reproduction("FIXED" if verdict.failure is None else "FAILED", device, verdict)
