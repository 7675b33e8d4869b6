"""Memory never written, distinguished from NaN that a kernel computed.

A launch fills the kernel's allocations with NaN. If an output has NaN, a second launch uses another filling: an element that is
then not NaN is unwritten memory, or was computed from it.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace

from attnfuzz.harness.core.text import counted
from attnfuzz.harness.judge.contract import heads_first
from attnfuzz.harness.judge.failure import OUTPUT_TITLES, Failure, where
from attnfuzz.harness.judge.judge import place_of
from attnfuzz.harness.judge.truth import Truth
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.bench import Bench, WentWrong
from attnfuzz.kernels.contract import Built, Inputs, Outputs
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.kernels.support.memory import describe_stores

__all__ = ["OTHER_FILL", "name_unwritten"]

OTHER_FILL = 0.34375
"""The filling of the second launch: exact in every dtype, and not a usual result of attention."""


def name_unwritten(bench: Bench, ready: Built, inputs: Inputs, outputs: Outputs, verdict: Verdict) -> Verdict:
    """Return the verdict with kind "unwritten" in place of "nonfinite" where NaN is from memory never written.

    Raises:
        DeviceLost: the second launch broke the device for this process.
    """
    names: list[OutputName] = [each.output for each in verdict.failures if each.kind == "nonfinite" and each.output]
    if not names:
        return verdict
    # Before the second launch: it may return the same memory.
    first = {name: heads_first(inputs.problem, name, getattr(outputs, name)) for name in names}
    try:
        again = bench.launch(ready, inputs, fill=OTHER_FILL)
    except WentWrong:  # the NaN came first, and is reported
        return verdict
    with bench.clock.stage("judge"):
        failures = tuple(_renamed(each, inputs.problem, first, again) for each in verdict.failures)
    return replace(verdict, failures=failures)


def _renamed(failure: Failure, problem: Problem, first: dict[OutputName, torch.Tensor], again: Outputs) -> Failure:
    name = failure.output
    if failure.kind != "nonfinite" or name is None:
        return failure
    was, second = first[name], getattr(again, name)
    if not isinstance(second, torch.Tensor) or second.ndim != was.ndim + (problem.packing == "dense"):
        return failure
    now = heads_first(problem, name, second)
    if now.shape != was.shape:
        return failure
    changed = was.isnan() & ~now.isnan()
    count = int(changed.sum())
    if not count:
        return failure
    zeros = torch.zeros_like(was)
    place = place_of(problem, name, int(changed.flatten().double().argmax()), was, Truth(expected=zeros, allowed=zeros))
    if failure.place is not None:
        place = replace(place, expected=failure.place.expected, allowed=failure.place.allowed)
    never = bool((now[changed] == OTHER_FILL).all())
    said = (
        f"{'was' if count == 1 else 'were'} never written"
        if never
        else f"{'comes' if count == 1 else 'come'} from memory that was never written"
    )
    message = f"{OUTPUT_TITLES[name]}: {count} of {counted(was.numel(), 'element')} {said}; first at {where(name, place)}"
    if stores := describe_stores(second):
        message += f"; {stores}"
    return replace(failure, kind="unwritten", message=message, place=place)
