"""One Trial: a Case to its Verdict, in this process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from msgspec.structs import replace

from attnfuzz.harness.core import environment
from attnfuzz.harness.core.clock import Clock
from attnfuzz.harness.judge.judge import judge
from attnfuzz.harness.judge.together import Launched
from attnfuzz.harness.judge.truth import truth
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.bands import Bands
from attnfuzz.harness.trial.bench import Bench, Steps, WentWrong, completed
from attnfuzz.harness.trial.checks.calls import CALL_CHECKS
from attnfuzz.harness.trial.checks.on_streams import STREAM_CHECKS
from attnfuzz.harness.trial.checks.protocol import by_roles
from attnfuzz.harness.trial.checks.relations import RELATION_CHECKS
from attnfuzz.harness.trial.defaults import of_torch
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.launch import copied
from attnfuzz.harness.trial.poison import PoisonEmpty
from attnfuzz.harness.trial.supports import why_not_case, with_config
from attnfuzz.harness.trial.unwritten import name_unwritten
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Deviations, Device, Kernel, Outputs
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support import process_setup
from attnfuzz.strategies.case import Case, Check, Recipe

__all__ = ["CHECKS", "check_runnable", "rehearse", "run_trial", "signed"]


def against_oracle(bench: Bench) -> Steps:
    """Run one launch, and compare it with the float64 oracle."""
    ready, inputs = bench.ready(), bench.inputs()
    outputs = bench.launch(ready, inputs)
    judged = yield Launched(bench.case.kernel, inputs, outputs, bench.case.config)
    return name_unwritten(bench, ready, inputs, outputs, judged.verdict)


CHECKS: dict[Check, Callable[[Bench], Steps]] = {
    "oracle": against_oracle,
    **CALL_CHECKS,
    **RELATION_CHECKS,
    "protocol": by_roles,
    **STREAM_CHECKS,
}
"""The function of each check; `completed` of harness/trial/bench.py runs what it returns."""


def check_runnable(case: Case, device: Device) -> Kernel:
    """Return the Case's kernel, if it is installed, can run on `device` and supports the Problem; the process is set up for it.

    Raises:
        BadArgument: it is not installed, cannot run or does not support it.
    """
    kernel = registry.get(case.kernel)
    if reason := kernel.unavailable(device):
        raise BadArgument(f"kernel={kernel.name!r}: it cannot run on {device} here: {reason}")
    if reason := why_not_case(kernel, with_config(kernel, case), device):
        raise reject("case", case.id, f"{kernel.name} does not support it: {reason}", "give a Case within its capabilities")
    process_setup.enter(kernel, device)
    return kernel


def run_trial(
    case: Case,
    device: Device,
    enter: Callable[[str], None] | None = None,
    bench: Callable[[Case, Kernel, Device, Clock], Bench] = Bench,
) -> Verdict:
    """Run the Case's check: compute inputs, run the kernel forward and backward, run the oracle, judge.

    An exception of the kernel is a Failure. An error of the oracle, the inputs or the judge is the harness's own and is raised.
    `enter` is called with the name of each stage as it begins: compile, inputs, kernel, oracle, judge. `bench` makes the Bench.

    Raises:
        BadArgument: the Case cannot run here.
        DeviceLost: the kernel broke the device for this process.
    """
    environment.prepare(device)
    kernel, clock = check_runnable(case, device), Clock(enter)
    case = with_config(kernel, case)
    own = bench(case, kernel, device, clock)
    try:
        with of_torch():
            verdict = completed(own, CHECKS[case.check](own))
    except WentWrong as error:
        verdict = Verdict(status="fail", failures=(error.failure,))
    if own.slack:
        verdict = replace(verdict, status="fail", failures=(*verdict.failures, own.slack[0]))
    return signed(verdict, clock.seconds, device)


def signed(verdict: Verdict, seconds: dict[str, float], device: Device) -> Verdict:
    """Return the Verdict with each stage's time and with what it ran on."""
    return replace(verdict, seconds=seconds, device=environment.device_name(device), versions=environment.versions())


def rehearse(device: Device) -> None:
    """Run all of a Trial except a kernel, once: the first time, torch's imports and loading take seconds."""
    problem = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=16, dim_v=16)
    inputs, bands = materialise(problem, Recipe(), device), Bands()
    copies = copied(inputs, bands)
    with torch.no_grad(), PoisonEmpty(bands):
        outputs = Outputs(o=torch.zeros_like(copies.q), lse=torch.empty((1, 1), device=device))
    judge("rehearsal", inputs, outputs, truth(inputs, Deviations(), device))
    bands.broken()
    environment.synchronise(device)
