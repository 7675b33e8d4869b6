"""Tasks of children of either side: describe a kernel, measure its errors, time it.

Each takes a payload of JSON values with "target" (the kernel) and "device", and a function to announce its stage; returns
(result, replace).
A result {"broken": text} means that the kernel's own code raised.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from attnfuzz.harness.core import environment
from attnfuzz.harness.core.clock import Clock
from attnfuzz.harness.gate.subjects import why_absent
from attnfuzz.harness.judge.contract import heads_first
from attnfuzz.harness.judge.truth import Truth, Truths
from attnfuzz.harness.trial.bench import Bench, WentWrong
from attnfuzz.harness.trial.build import build_kernel
from attnfuzz.harness.trial.errors import describe_exception, mark_as_child
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import BuildError, Built, Device, Inputs, Kernel, Outputs
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.kernels.support import memory
from attnfuzz.oracles.formats import Format, half_ulp
from attnfuzz.strategies.case import Case, case_from_json

__all__ = ["describe", "error_figures", "measure", "timed"]

_Done = tuple[dict[str, Any], bool]
_Enter = Callable[[str], None]
_LEAST_SECONDS: dict[Device, float] = {"cpu": 0.02, "cuda": 0.01}
"""Least duration of a measurement: calls are repeated until it is reached."""
_MOST_CALLS = 200
_WARM_UPS = 3

_ready: dict[tuple[str, str], tuple[Built, Inputs, int]] = {}


def describe(payload: dict[str, Any], enter: _Enter) -> _Done:
    """Return what the kernel declares and whether it can run here, or {"absent": why} or {"broken": why}.

    "extensions" are compiled modules of the checkout that are not under version control: both sides would share them.
    """
    enter("compile")
    _begin(payload)
    try:
        kernel = registry.get(payload["target"], tried=True)
        unavailable = kernel.unavailable(payload["device"])
    except BaseException as error:  # a third party's module: its error is the reason
        absent = why_absent(error)
        return ({"absent": absent} if absent else {"broken": describe_exception(error.__cause__ or error)}), True
    can = kernel.capabilities
    finders = [each for each in sys.meta_path if type(each).__name__ == "TreeFinder"]
    return {
        "name": kernel.name,
        "deterministic": list(can.deterministic),
        "unavailable": unavailable,
        "extensions": [name for each in finders for name in each.extensions],  # type: ignore[attr-defined]
    }, False


def measure(payload: dict[str, Any], enter: _Enter) -> _Done:
    """Run a Case ("case") twice and judge the first run: errors over budgets, and a digest of every output of both runs.

    {"unsupported": why} if the kernel does not take the Case.
    """
    _begin(payload)
    memory.check(payload["memory_check"])
    case, device = case_from_json(payload["case"]), payload["device"]
    enter("compile")
    try:
        kernel = registry.get(payload["target"], tried=True)
        if reason := why_not_case(kernel, case, device):
            return {"unsupported": reason}, False
    except Exception as error:  # the kernel's own module
        return {"broken": describe_exception(error)}, True
    bench = Bench(case, kernel, device, Clock(enter))
    try:
        ready, inputs = bench.ready(), bench.inputs()
        outputs = bench.launch(ready, inputs)
        again = bench.launch(ready, inputs)
    except WentWrong as error:
        return {"failures": msgspec.to_builtins([error.failure]), "figures": {}, "digests": []}, False
    truths = bench.truth(inputs)
    verdict = bench.judge(inputs, outputs, truths)
    figures = error_figures(case.problem, outputs, truths) if isinstance(truths, Truths) and not verdict.failures else {}
    return {
        "failures": msgspec.to_builtins(list(verdict.failures)),
        "figures": figures,
        "digests": [] if verdict.failures else [_digests(case.problem, each) for each in (outputs, again)],
    }, False


def error_figures(problem: Problem, outputs: Outputs, truths: dict[OutputName, Truth]) -> dict[OutputName, dict[str, float]]:
    """Return of each output: elements, mean square and maximum of |got - expected| / (budget + half a unit in got's last place).

    Elements whose expected value is not finite, or whose budget is zero or infinite, are left out.
    """
    figures: dict[OutputName, dict[str, float]] = {}
    for name, true in truths.items():
        output: torch.Tensor | None = getattr(outputs, name)
        if output is None:
            continue
        got = heads_first(problem, name, output.to(true.expected.device)).to(torch.float64)
        room = true.allowed if name == "lse" else true.allowed + half_ulp(got.nan_to_num(), Format.of(problem.dtype))
        counted = torch.isfinite(true.expected) & torch.isfinite(got) & torch.isfinite(room) & (room > 0)
        ratio = ((got - true.expected).abs() / room)[counted]
        if ratio.numel():
            square, worst = ratio.square().mean(), ratio.max()
            figures[name] = {"elements": ratio.numel(), "square": float(square), "worst": float(worst)}
    return figures


def timed(payload: dict[str, Any], enter: _Enter) -> _Done:
    """Measure the mean seconds of a call of forward and of backward on a Case ("case").

    The compiled kernel and the inputs stay in this process for the next call.
    """
    _begin(payload)
    memory.check(False)
    case, device = case_from_json(payload["case"]), payload["device"]
    enter("compile")
    try:
        kernel = registry.get(payload["target"], tried=True)
        if reason := why_not_case(kernel, case, device):
            return {"unsupported": reason}, False
        with torch.no_grad():
            return _timed(kernel, case, device, enter), False
    except Exception as error:  # the kernel's own code, which was right a moment ago
        return {"broken": describe_exception(error)}, True


def _timed(kernel: Kernel, case: Case, device: Device, enter: _Enter) -> dict[str, Any]:
    key = (kernel.name, case.canonical())
    if key not in _ready:
        try:
            ready = build_kernel(kernel, case.problem, case.config, device)
        except BuildError as error:
            return {"broken": describe_exception(error)}
        enter("inputs")
        inputs = materialise(case.problem, case.recipe, device).for_kernel()
        enter("kernel")
        one = min(sum(_seconds(ready, inputs, device, 1).values()) for _ in range(_WARM_UPS))
        calls = max(1, min(_MOST_CALLS, math.ceil(_LEAST_SECONDS[device] / max(one, 1e-6))))
        _ready[key] = ready, inputs, calls
    enter("kernel")
    return _seconds(*_ready[key][:2], device, _ready[key][2])


def _seconds(ready: Built, inputs: Inputs, device: Device, calls: int) -> dict[str, float]:
    seconds = {}
    kept = ready.forward(inputs)
    backward = bool({"dq", "dk", "dv"} & set(inputs.problem.needs.outputs))
    for name, call in (
        ("forward", lambda: ready.forward(inputs)),
        *((("backward", lambda: ready.backward(inputs, *kept)),) if backward else ()),
    ):
        environment.synchronise(device)
        start = time.perf_counter()
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            seconds[name] = begin.elapsed_time(end) / 1000 / calls
            continue
        for _ in range(calls):
            call()
        seconds[name] = (time.perf_counter() - start) / calls
    return seconds


def _digests(problem: Problem, outputs: Outputs) -> dict[str, str]:
    """SHA-256 of the bits of each output, slack rows apart."""
    digests: dict[str, str] = {}
    for name in problem.needs.outputs:
        output: torch.Tensor | None = getattr(outputs, name)
        if output is not None:
            values = heads_first(problem, name, output).cpu().contiguous()
            digests[name] = hashlib.sha256(ctypes.string_at(values.data_ptr(), values.nbytes)).hexdigest()
    return digests


def _begin(payload: dict[str, Any]) -> None:
    mark_as_child()
    environment.prepare(payload["device"])
