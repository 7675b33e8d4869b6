"""One Trial: a Case from start to Verdict, in this process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from attnfuzz.harness import environment
from attnfuzz.harness.builds import built
from attnfuzz.harness.failure import Failure, Kind, printable
from attnfuzz.harness.inputs import materialise
from attnfuzz.harness.judge import judge, truth
from attnfuzz.harness.lost import DeviceLost
from attnfuzz.harness.poison import Bands, PoisonEmpty
from attnfuzz.harness.raised import may_catch, told, trace
from attnfuzz.harness.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import BuildError, Built, Deviations, Device, Inputs, Kernel, Outputs
from attnfuzz.kernels.problem import BadArgument, Problem, reject
from attnfuzz.strategies.case import Case, Recipe

_DEVICE_ERRORS: tuple[tuple[Kind, str, tuple[str, ...]], ...] = (
    ("illegal-access", "an illegal memory access", ("illegal memory access", "ILLEGAL_ADDRESS")),
    ("illegal-access", "a misaligned address", ("misaligned address", "MISALIGNED_ADDRESS")),
    # Torch adds advice on device-side assertions to every error, so that less than this would not do.
    ("crash", "a device-side assertion failed", ("device-side assert triggered", "CUDA_ERROR_ASSERT")),
    ("crash", "an unspecified launch failure", ("unspecified launch failure", "LAUNCH_FAILED")),
)
_INPUTS = ("q", "k", "v", "d_o", "d_lse", "cu_seqlens_q", "cu_seqlens_k")

__all__ = ["check_runnable", "is_out_of_memory", "rehearse", "run_trial"]


@dataclass(slots=True)
class _Clock:
    """Seconds spent in each stage; `enter` hears of each as it begins."""

    enter: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.enter(name)
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


def run_trial(case: Case, device: Device, enter: Callable[[str], None] = lambda _: None) -> Verdict:
    """Make inputs, run the kernel forward and backward, run the oracle, judge.

    Whatever the kernel raises is a Failure. An error of the oracle, the inputs or the judge is the harness's own and is raised.
    `enter` is told each stage as it begins: compile, inputs, kernel, oracle, judge.

    Raises:
        BadArgument: the Case cannot run here.
        DeviceLost: the kernel broke the device for this process.
    """
    environment.prepare(device)
    kernel, clock = check_runnable(case, device), _Clock(enter)
    device_name, versions = environment.device_name(device), environment.versions()
    try:
        with clock.stage("compile"):
            ready = built(kernel, case.problem, case.config, device)
    except BuildError as error:
        failure = Failure(kernel=case.kernel, kind="compile-error", check="build", message=printable(str(error)[:2000]))
        return Verdict(status="fail", failures=(failure,), seconds=clock.seconds, device=device_name, versions=versions)
    with clock.stage("inputs"):
        inputs, bands = materialise(case.problem, case.recipe, device), Bands()
        given = _copied(inputs, bands)
    with clock.stage("kernel"):
        outcome = _run(case, ready, given, device, bands)
        if not isinstance(outcome, Failure):
            outcome = _overstepped(case, bands) or _changed_input(case, inputs, given) or outcome
    if isinstance(outcome, Failure):
        return Verdict(status="fail", failures=(outcome,), seconds=clock.seconds, device=device_name, versions=versions)
    with clock.stage("oracle"):
        expected = truth(inputs, kernel.capabilities.deviations, device)
    with clock.stage("judge"):
        verdict = judge(case.kernel, inputs, outcome, expected)
    return replace(verdict, seconds=clock.seconds, device=device_name, versions=versions)


def rehearse(device: Device) -> None:
    """All that a Trial does but the kernel, once: what torch imports and loads for it takes seconds the first time."""
    problem = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=16, dim_v=16)
    inputs, bands = materialise(problem, Recipe(), device), Bands()
    given = _copied(inputs, bands)
    with torch.no_grad(), PoisonEmpty(bands):
        made = Outputs(o=torch.zeros_like(given.q), lse=torch.empty((1, 1), device=device))
    judge("rehearsal", inputs, made, truth(inputs, Deviations(), device))
    bands.broken()
    environment.synchronise(device)


def _run(case: Case, ready: Built, inputs: Inputs, device: Device, bands: Bands) -> Outputs | Failure:
    needs, step = case.problem.needs.outputs, "forward"
    d_q = d_k = d_v = None
    try:
        with torch.no_grad(), PoisonEmpty(bands):
            o, lse = ready.forward(inputs)
            # So that an error of the device shows in the step that made it.
            environment.synchronise(device)
            if {"dq", "dk", "dv"} & set(needs):
                step = "backward"
                d_q, d_k, d_v = ready.backward(inputs, o, lse)
                environment.synchronise(device)
    except BaseException as error:  # a kernel may raise anything: that is the finding
        if not may_catch(error):
            raise
        failure = _raised(case.kernel, step, error)
        if not environment.alive(device):
            raise DeviceLost(case, _device_error(failure)) from error
        return failure
    return Outputs(o=o, lse=lse, dq=d_q, dk=d_k, dv=d_v)


def _raised(kernel: str, step: str, error: BaseException) -> Failure:
    message, detail = f"{step} raised {told(error)}", trace(error)
    if is_out_of_memory(error):
        return Failure(kernel=kernel, kind="out-of-memory", check="memory", message=message, detail=detail)
    return Failure(kernel=kernel, kind="exception", check=step, message=message, detail=detail)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation was refused, by Python, torch's CPU allocator or the device's."""
    refusals = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(each in told(error) for each in refusals)
    )


def _device_error(failure: Failure) -> Failure:
    """An error after which the device is lost, by its name alone: each library words it in its own way."""
    for kind, name, words in _DEVICE_ERRORS:
        if any(word in failure.message for word in words):
            return replace(failure, kind=kind, message=f"{failure.check}: {name}", detail=f"{failure.message}\n{failure.detail}")
    return replace(failure, kind="illegal-access")


def _copied(inputs: Inputs, bands: Bands) -> Inputs:
    """What the kernel gets: tensors of its own, so that nothing it writes can reach the oracle."""
    tensors = {name: bands.copy(value, f"its input {name}") for name in _INPUTS if (value := getattr(inputs, name)) is not None}
    return dataclasses.replace(inputs, **tensors)


def _overstepped(case: Case, bands: Bands) -> Failure | None:
    """A kernel must write within its tensors."""
    message = bands.broken()
    return Failure(kernel=case.kernel, kind="guard", check="bounds", message=message) if message else None


def _changed_input(case: Case, inputs: Inputs, given: Inputs) -> Failure | None:
    """A kernel must leave its inputs alone, to the bit (their slack rows are NaN, which equals nothing)."""
    for name in _INPUTS:
        before, after = getattr(inputs, name), getattr(given, name)
        if before is None:
            continue
        if after.untyped_storage().nbytes() < before.untyped_storage().nbytes():
            message = f"the kernel took away the memory of its input {name}"
            return Failure(kernel=case.kernel, kind="guard", check=f"input {name}", message=message)
        if not torch.equal(before.view(torch.uint8), after.view(torch.uint8)):
            message = f"the kernel wrote to its input {name}"
            return Failure(kernel=case.kernel, kind="guard", check=f"input {name}", message=message)
    return None
