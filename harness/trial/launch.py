"""One launch of a kernel, forward and backward, on copies of the inputs between guard bands: Outputs, or a Failure."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from attnfuzz.harness.core import environment
from attnfuzz.harness.core.text import encodable
from attnfuzz.harness.judge.failure import Failure, Kind
from attnfuzz.harness.trial import gpu_memory, guard_kernel
from attnfuzz.harness.trial.bands import Bands
from attnfuzz.harness.trial.defaults import of_kernel
from attnfuzz.harness.trial.errors import MEMORY_TAKEN, DeviceLost, describe_exception, format_traceback, may_catch
from attnfuzz.harness.trial.gpu_memory import is_out_of_memory
from attnfuzz.harness.trial.guard_kernel import Pieces
from attnfuzz.harness.trial.poison import PoisonEmpty
from attnfuzz.harness.trial.slack import Slack
from attnfuzz.harness.trial.writes import Writes
from attnfuzz.kernels.contract import Built, CapturedGradients, Device, Gradients, Inputs, Outputs, SlackRows
from attnfuzz.kernels.modified import tensors_of
from attnfuzz.kernels.support.memory import MemoryFault, Watch, watching
from attnfuzz.kernels.support.protocol import ProtocolFault
from attnfuzz.strategies.case import Case

__all__ = ["Started", "copied", "launch", "split", "start", "start_in_place"]

_DEVICE_ERRORS: tuple[tuple[Kind, str, tuple[str, ...]], ...] = (
    ("illegal-access", "an illegal memory access", ("illegal memory access", "ILLEGAL_ADDRESS")),
    ("illegal-access", "a misaligned address", ("misaligned address", "MISALIGNED_ADDRESS")),
    # Torch mentions device-side assertions in the advice of every error, so that a shorter text would match them all.
    ("crash", "a device-side assertion failed", ("device-side assert triggered", "CUDA_ERROR_ASSERT")),
    ("crash", "an unspecified launch failure", ("unspecified launch failure", "LAUNCH_FAILED")),
)
_INPUTS = ("q", "k", "v", "d_o", "d_lse", "cu_seqlens_q", "cu_seqlens_k", "k_pages", "v_pages", "page_table", "seqlens_k")


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """A launch whose outputs were returned: where it wrote is being computed on the device, and not read yet."""

    outputs: Outputs
    writes: Writes


def launch(
    case: Case,
    ready: Built,
    inputs: Inputs,
    device: Device,
    *,
    fill: float = math.nan,
    bands: Bands | None = None,
    wait: bool = True,
    slack_rows: SlackRows = "anything",
    slack: list[Failure] | None = None,
) -> Outputs | Failure:
    """Run the kernel on copies of `inputs`; then check that it wrote only where it may.

    Args:
        case: names the kernel.
        ready: the compiled kernel.
        inputs: not changed.
        device: the inputs' device.
        fill: value of memory that the kernel allocates but does not write.
        bands: new ones, if the caller will check them again; they keep all tensors of this launch alive.
        wait: as in `start`; the checks are waited for anyway.
        slack_rows: what the kernel declares of its outputs; checked where `fill` is NaN.
        slack: gets the Failure of slack rows, which makes no other row doubtful.

    Raises:
        DeviceLost: the kernel broke the device for this process.
    """
    outcome = start(case, ready, inputs, device, fill=fill, bands=bands, wait=wait, slack_rows=slack_rows)
    if isinstance(outcome, Failure):
        return outcome
    if (failure := outcome.writes.failure()) is not None:
        return failure
    if slack is not None and (failure := outcome.writes.slack_failure()) is not None:
        slack.append(failure)
    return outcome.outputs


def start(
    case: Case,
    ready: Built,
    inputs: Inputs,
    device: Device,
    *,
    fill: float,
    bands: Bands | None,
    wait: bool,
    slack_rows: SlackRows = "anything",
) -> Started | Failure:
    """Run the kernel as `launch` does, but only begin to check where it wrote.

    With `wait`, forward and backward each wait for the device, so that its errors are raised in the step that caused them;
    without, they are raised wherever the caller waits.
    """
    bands = Bands() if bands is None else bands
    copies = copied(inputs, bands)
    outcome = _run(case, ready, copies, device, bands, fill, wait=wait)
    if isinstance(outcome, Failure):
        return outcome
    slack, problem, where = None, inputs.problem, inputs.q.device
    checks = Pieces(where) if guard_kernel.takes(where) else None
    if slack_rows != "anything" and math.isnan(fill) and (problem.slack_q or problem.slack_k):
        slack = Slack(case.kernel, problem, outcome, slack_rows, where, checks)
    return Started(outcome, Writes(case.kernel, bands, _tensors(inputs), _tensors(copies), slack, checks))


def start_in_place(case: Case, ready: Built, inputs: Inputs, device: Device, bands: Bands, *, wait: bool) -> Outputs | Failure:
    """Run the kernel on `inputs` themselves, without bands: their rows may be too far apart in memory to be copied.

    `wait` as in `start`. Where it wrote is for the caller to check: `bands` are those of the kernel's own tensors.

    Raises:
        DeviceLost: the kernel broke the device for this process.
    """
    return _run(case, ready, inputs, device, bands, math.nan, wait=wait)


def _run(case: Case, ready: Built, inputs: Inputs, device: Device, bands: Bands, fill: float, *, wait: bool) -> Outputs | Failure:
    needs, step = inputs.problem.needs.outputs, "forward"
    d_q = d_k = d_v = None
    d_captured: CapturedGradients = ()
    watch = Watch()
    if wait:
        # Of others, those of a batch, nothing is counted.
        gpu_memory.start_counting(device)
    try:
        with of_kernel(), torch.no_grad(), watching(watch), PoisonEmpty(bands, fill=fill, watch=watch):
            o, lse = ready.forward(inputs)
            if wait:
                environment.synchronise(device)
            if {"dq", "dk", "dv"} & set(needs):
                step = "backward"
                (d_q, d_k, d_v), d_captured = split(ready.backward(inputs, o, lse))
                if wait:
                    environment.synchronise(device)
    except BaseException as error:  # a kernel may raise anything: that is a finding
        if not may_catch(error):
            raise
        if is_out_of_memory(error) and not gpu_memory.is_own_need(error, device):
            raise MemoryError(f"{MEMORY_TAKEN}: {describe_exception(error)}") from error
        failure = _misused(case.kernel, watch.fault) if watch.fault else _raised(case.kernel, step, error)
        if not environment.alive(device):
            raise DeviceLost(case, _device_error(failure)) from error
        return failure
    if watch.fault:  # the kernel's own code has caught it
        return _misused(case.kernel, watch.fault)
    return Outputs(o=o, lse=lse, dq=d_q, dk=d_k, dv=d_v, d_captured=d_captured)


def split(gradients: Gradients) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], CapturedGradients]:
    """Return (dq, dk, dv), and the gradients of captured tensors, which a kernel without any leaves out."""
    return gradients[:3], gradients[3] if len(gradients) == 4 else ()


def _misused(kernel: str, fault: MemoryFault) -> Failure:
    """Return the Failure that the memory checker of an interpreted kernel reports."""
    return Failure(kernel=kernel, kind=fault.kind, check=fault.check, message=encodable(str(fault)), detail=fault.trail)


def _raised(kernel: str, step: str, error: BaseException) -> Failure:
    if isinstance(error, ProtocolFault):
        message = encodable("; ".join((f"{step}: {error}", *getattr(error, "__notes__", ()))))
        return Failure(kernel=kernel, kind=error.kind, check=error.check, message=message)
    message, detail = f"{step} raised {describe_exception(error)}", format_traceback(error)
    if is_out_of_memory(error):
        return Failure(kernel=kernel, kind="out-of-memory", check="memory", message=message, detail=detail)
    return Failure(kernel=kernel, kind="exception", check=step, message=message, detail=detail)


def _device_error(failure: Failure) -> Failure:
    """Return the Failure of a lost device, with a common message: each library has its own words."""
    for kind, name, words in _DEVICE_ERRORS:
        if any(word in failure.message for word in words):
            return replace(failure, kind=kind, message=f"{failure.check}: {name}", detail=f"{failure.message}\n{failure.detail}")
    return replace(failure, kind="illegal-access")


def copied(inputs: Inputs, bands: Bands) -> Inputs:
    """Copy the inputs for the kernel, so that nothing it writes can reach the oracle."""
    copies = bands.copies(_tensors(inputs), "its input")
    captured = tuple(copies.pop(f"captured {each.name}") for each in tensors_of(inputs.problem))
    return dataclasses.replace(inputs, **copies, captured=captured).for_kernel()


def _tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return all tensors that a kernel gets; captured ones by their names in the modifiers."""
    names = [name for name in _INPUTS if inputs.page_table is None or name not in ("k", "v")]
    tensors = {name: value for name in names if (value := getattr(inputs, name)) is not None}
    return tensors | {
        f"captured {each.name}": value for each, value in zip(tensors_of(inputs.problem), inputs.captured, strict=True)
    }
