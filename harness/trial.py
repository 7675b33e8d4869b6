"""One Trial: a Case from start to Verdict, in this process."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from attnfuzz.harness import environment
from attnfuzz.harness.builds import built
from attnfuzz.harness.failure import Failure, printable
from attnfuzz.harness.inputs import materialise
from attnfuzz.harness.judge import judge, truth
from attnfuzz.harness.poison import PoisonEmpty
from attnfuzz.harness.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import BuildError, Built, Device, Inputs, Kernel, Outputs
from attnfuzz.kernels.problem import BadArgument, reject
from attnfuzz.strategies.case import Case

_INPUTS = ("q", "k", "v", "d_o", "d_lse", "cu_seqlens_q", "cu_seqlens_k")

__all__ = ["DeviceLost", "check_runnable", "run_trial"]


class DeviceLost(BaseException):
    """The device answers no more after this Case: the process must end. `failure` says what happened, `case` is on record.

    No Exception, so that nothing on the way up takes it for the kernel's own and tries again.
    """

    def __init__(self, case: Case, failure: Failure) -> None:
        super().__init__(f"{failure.message}; the device context is lost, so this process can run no further Case")
        self.case, self.failure = case, failure


@dataclass(slots=True)
class _Clock:
    """Seconds spent in each stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def check_runnable(case: Case, device: Device) -> Kernel:
    """The Case's kernel, if it is installed, can run on `device` and supports the Problem.

    Raises:
        BadArgument: it is not, cannot or does not; the text says why and what to do.
    """
    kernel = registry.get(case.kernel)
    if reason := kernel.unavailable(device):
        raise BadArgument(f"kernel={kernel.name!r}: it cannot run on {device} here: {reason}")
    if reason := kernel.supports(case.problem, case.config, device):
        raise reject(
            "case", case.canonical(), f"{kernel.name} does not support it: {reason}", "give a Case within its capabilities"
        )
    return kernel


def run_trial(case: Case, device: Device) -> Verdict:
    """Make inputs, run the kernel forward and backward, run the oracle, judge.

    Whatever the kernel raises is a Failure. An error of the oracle, the inputs or the judge is the harness's own and is raised.

    Raises:
        BadArgument: the Case cannot run here.
        DeviceLost: the kernel broke the device for this process.
    """
    environment.prepare(device)
    kernel, clock = check_runnable(case, device), _Clock()
    device_name, versions = environment.device_name(device), environment.versions()
    try:
        with clock.stage("compile"):
            ready = built(kernel, case.problem, case.config, device)
    except BuildError as error:
        failure = Failure(kernel=case.kernel, kind="compile-error", check="build", message=printable(str(error)[:2000]))
        return Verdict(status="fail", failures=(failure,), seconds=clock.seconds, device=device_name, versions=versions)
    with clock.stage("inputs"):
        inputs = materialise(case.problem, case.recipe, device)
        given = _copied(inputs)
    with clock.stage("kernel"):
        outcome = _run(case, ready, given, device)
    if not isinstance(outcome, Failure):
        outcome = _changed_input(case, inputs, given) or outcome
    if isinstance(outcome, Failure):
        return Verdict(status="fail", failures=(outcome,), seconds=clock.seconds, device=device_name, versions=versions)
    with clock.stage("oracle"):
        expected = truth(inputs, kernel.capabilities.deviations, device)
    with clock.stage("judge"):
        verdict = judge(case.kernel, inputs, outcome, expected)
    return replace(verdict, seconds=clock.seconds, device=device_name, versions=versions)


def _run(case: Case, ready: Built, inputs: Inputs, device: Device) -> Outputs | Failure:
    needs, step = case.problem.needs.outputs, "forward"
    d_q = d_k = d_v = None
    try:
        with torch.no_grad(), PoisonEmpty():
            o, lse = ready.forward(inputs)
            if {"dq", "dk", "dv"} & set(needs):
                step = "backward"
                d_q, d_k, d_v = ready.backward(inputs, o, lse)
            environment.synchronise(device)
    except (Exception, SystemExit, GeneratorExit) as error:  # a kernel may raise anything: that is the finding
        failure = Failure(
            kernel=case.kernel,
            kind="exception",
            check=step,
            message=printable(f"{step} raised {type(error).__name__}: {error}"[:2000]),
            detail=printable("".join(traceback.format_exception(error))[-6000:]),
        )
        if not environment.alive(device):
            raise DeviceLost(case, replace(failure, kind="illegal-access")) from error
        return failure
    return Outputs(o=o, lse=lse, dq=d_q, dk=d_k, dv=d_v)


def _copied(inputs: Inputs) -> Inputs:
    """What the kernel gets: tensors of its own, so that nothing it writes can reach the oracle."""
    tensors = {name: getattr(inputs, name).clone() for name in _INPUTS if getattr(inputs, name) is not None}
    return dataclasses.replace(inputs, **tensors)


def _changed_input(case: Case, inputs: Inputs, given: Inputs) -> Failure | None:
    """A kernel must leave its inputs alone, to the bit (their slack rows are NaN, which equals nothing)."""
    for name in _INPUTS:
        before, after = getattr(inputs, name), getattr(given, name)
        if before is not None and not torch.equal(before.view(torch.uint8), after.view(torch.uint8)):
            message = f"the kernel wrote to its input {name}"
            return Failure(kernel=case.kernel, kind="guard", check=f"input {name}", message=message)
    return None
