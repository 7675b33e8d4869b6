"""Outputs + reference + budgets -> Verdict: every element of every output is within its interval (intervals.py).

The budget without ties is tried first, since it is never larger; equal values are counted only where it is exceeded. In addition,
two statistics over a whole output find errors within every element's budget (oracles/budgets/aggregate.py). Gradients of captured
tensors are judged by the same rule (`judge_captured`).
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import Literal

import torch
from msgspec.structs import replace

from attnfuzz.harness.core.clock import Clock
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.judge.contract import broken_contract, heads_first, why_unfit
from attnfuzz.harness.judge.diagnosis.diagnose import diagnose
from attnfuzz.harness.judge.diagnosis.model import Pattern
from attnfuzz.harness.judge.failure import BY_QUERY, Failure, Identity, Place
from attnfuzz.harness.judge.host import on_host
from attnfuzz.harness.judge.intervals import Measurement, measure
from attnfuzz.harness.judge.truth import HeadTruths, Truth, Truths, truth
from attnfuzz.harness.judge.verdict import Figures, Verdict, four_digits
from attnfuzz.harness.judge.wording import of_statistic, wrong_elements, wrong_output
from attnfuzz.kernels.contract import Config, Deviations, Inputs, Outputs
from attnfuzz.kernels.modified import shape_of, tensors_of
from attnfuzz.kernels.problem import SINKS, Dtype, OutputName, Problem
from attnfuzz.oracles.budgets import aggregate
from attnfuzz.oracles.formats import Format, half_ulp

__all__ = ["compare", "judge", "judge_by_oracle", "judge_captured", "outputs_of_head", "place_of"]

_NO_CONFIG = Config()


def judge(
    kernel: str,
    inputs: Inputs,
    outputs: Outputs,
    expected: dict[OutputName, Truth],
    config: Config = _NO_CONFIG,
    known: Collection[Identity] = (),
) -> Verdict:
    """Judge shape, dtype and device, then every element against its budget, then each output as a whole.

    `config` gives the tiles for a failure's pattern. `known`: failures whose pattern is not looked for, since that takes much
    longer than the Case itself.
    """
    if isinstance(expected, HeadTruths):
        return _head_by_head(kernel, inputs, outputs, expected, config, known)
    with torch.inference_mode():
        return _judged(kernel, inputs, outputs, expected, config, known)


def judge_by_oracle(
    kernel: str,
    inputs: Inputs,
    outputs: Outputs,
    deviations: Deviations,
    config: Config,
    device: str,
    clock: Clock,
    known: Collection[Identity] = (),
) -> tuple[Verdict, Truths | HeadTruths]:
    """Compute oracle and budgets for `inputs`, then judge as `judge` does; stages "oracle" and "judge" of `clock`."""
    with clock.stage("oracle"):
        expected = truth(inputs, deviations, device)
    with clock.stage("judge"):
        return judge(kernel, inputs, outputs, expected, config, known), expected


def compare(
    kernel: str, inputs: Inputs, outputs: Outputs, expected: dict[OutputName, Truth]
) -> tuple[dict[OutputName, torch.Tensor], dict[OutputName, Measurement], list[Failure]]:
    """Return outputs, heads first, their measurements against the budgets, and Failures of those that break the contract."""
    problem = inputs.problem
    failures: list[Failure] = []
    got: dict[OutputName, torch.Tensor] = {}
    for name in expected:
        output: torch.Tensor | None = getattr(outputs, name)
        broken = broken_contract(kernel, problem, name, output, inputs.q.device)
        if broken is not None:
            failures.append(broken)
        elif output is not None:
            got[name] = output
    if any(each.expected.device.type == "cpu" for each in expected.values()):
        # A tiny Case's truth is on the host.
        got = dict(zip(got, on_host(list(got.values())), strict=True))
    got = {name: heads_first(problem, name, each) for name, each in got.items()}
    measurements = measure(problem, got, expected)
    if isinstance(expected, Truths) and not expected.ties and any(each.over for each in measurements.values()):
        expected.count_ties()
        measurements = measure(problem, got, expected)
    return got, measurements, failures


def _judged(
    kernel: str,
    inputs: Inputs,
    outputs: Outputs,
    expected: dict[OutputName, Truth],
    config: Config,
    known: Collection[Identity],
) -> Verdict:
    problem = inputs.problem
    got, measurements, failures = compare(kernel, inputs, outputs, expected)
    figures = {name: each.figures for name, each in measurements.items()}
    wrong = [name for name, each in measurements.items() if each.over]
    failures += [_wrong(kernel, problem, name, got[name], expected, measurements[name], config, known) for name in wrong]
    if isinstance(expected, Truths) and not wrong:
        failures += _as_a_whole(kernel, problem, got, expected, figures)
    captured: dict[str, Figures] = {}
    if isinstance(expected, Truths):
        captured, of_captured = judge_captured(kernel, inputs, outputs, expected)
        failures += of_captured
    ordered = sorted(failures, key=lambda each: list(expected).index(each.output) if each.output else -1)
    return Verdict(status="fail" if ordered else "pass", figures=figures, captured=captured, failures=tuple(ordered))


def _head_by_head(
    kernel: str, inputs: Inputs, outputs: Outputs, expected: HeadTruths, config: Config, known: Collection[Identity]
) -> Verdict:
    """Judge each key/value head separately; report an output that is wrong in several at its worst place."""
    problem = inputs.problem
    if broken := why_unfit(kernel, inputs, outputs):
        return Verdict(status="fail", failures=broken)
    figures: dict[OutputName, Figures] = {}
    captured: dict[str, Figures] = {}
    worst: dict[OutputName, tuple[Figures, Failure]] = {}
    of_captured: dict[str, Failure] = {}
    for head, part, truths in expected.parts():
        verdict = judge(kernel, part, outputs_of_head(problem, outputs, head), truths, config, known)
        for name, each in verdict.figures.items():
            figures[name] = _added(figures[name], each) if name in figures else each
        for tensor, each in verdict.captured.items():
            captured[tensor] = _added(captured[tensor], each) if tensor in captured else each
        for failure in verdict.failures:
            output, place = failure.output, failure.place
            if output is None:
                # The gradient of a captured tensor: its message says which element of this head's part.
                of_captured.setdefault(
                    failure.check or "", replace(failure, message=f"{failure.message}, of key/value head {head}")
                )
                continue
            assert place is not None
            at = place.head + head * (problem.groups if output in BY_QUERY else 1)
            of_head = verdict.figures[output]
            before = worst.get(output)
            if before is None or (failure.kind, of_head.worst) > (before[1].kind, before[0].worst):
                worst[output] = (of_head, replace(failure, place=replace(place, head=at)))
    failures = tuple(
        _with_pattern(
            _failure(kernel, name, failure.place, figures[name], failure.kind, problem.dtype),
            failure.pattern,
            " in that head alone",
        )
        for name in figures
        if name in worst and (failure := worst[name][1]).place and failure.kind in ("mismatch", "nonfinite")
    )
    failures += tuple(of_captured.values())
    return Verdict(status="fail" if failures else "pass", figures=figures, captured=captured, failures=failures)


def _added(one: Figures, other: Figures) -> Figures:
    return Figures(
        elements=one.elements + other.elements,
        worst=max(one.worst, other.worst),
        over=one.over + other.over,
        sigmas=max(one.sigmas, other.sigmas),
        unjudged=one.unjudged and other.unjudged,
        doubted=one.doubted + other.doubted,
    )


def outputs_of_head(problem: Problem, outputs: Outputs, head: int) -> Outputs:
    """Return the outputs of one key/value head."""
    rows, keys = slice(head * problem.groups, (head + 1) * problem.groups), slice(head, head + 1)

    def of(x: torch.Tensor | None, at: slice) -> torch.Tensor | None:
        return None if x is None else x[..., at, :]

    captured = outputs.d_captured
    if problem.sinks and captured and isinstance(captured[-1], torch.Tensor):
        captured = (*captured[:-1], captured[-1][rows])
    return Outputs(
        d_captured=captured,
        o=of(outputs.o, rows),
        lse=of(outputs.lse, rows),
        dq=of(outputs.dq, rows),
        dk=of(outputs.dk, keys),
        dv=of(outputs.dv, keys),
    )


def _as_a_whole(
    kernel: str,
    problem: Problem,
    got: dict[OutputName, torch.Tensor],
    expected: Truths,
    figures: dict[OutputName, Figures],
) -> list[Failure]:
    """Return the failures of the aggregate tests, and add their statistics to `figures`."""
    form, failures = Format.of(problem.dtype), []
    pairs = {
        name: (x, expected[name].expected, budget)
        for name, x in got.items()
        if (budget := expected[name].budget) is not None and x.numel()
    }
    if not expected.generic_known and not aggregate.suspicious(pairs, form):
        return []
    ratios = aggregate.statistics(pairs, expected.look_for_repeats(), form, expected.look_for_dependence)
    for name, (r, z) in ratios.items():
        figures[name] = replace(figures[name], r=four_digits(r), z=four_digits(z))
        for check, value in (("R", r), ("z", z)):
            if value > 1:
                message = of_statistic(name, check, value)
                failures.append(Failure(kernel=kernel, kind="aggregate", output=name, check=check, message=message))
    return failures


def _wrong(
    kernel: str,
    problem: Problem,
    name: OutputName,
    got: torch.Tensor,
    expected: dict[OutputName, Truth],
    measurement: Measurement,
    config: Config,
    known: Collection[Identity],
) -> Failure:
    """Return the Failure of an output with elements outside their intervals: at the worst one, with the pattern of all."""
    true, got = expected[name], got.double()
    worst = measurement.broken if measurement.nonfinite else measurement.ratio
    flat = int(worst.flatten().double().argmax())
    place = place_of(problem, name, flat, got, true)
    failure = _failure(
        kernel, name, place, measurement.figures, "nonfinite" if measurement.nonfinite else "mismatch", problem.dtype
    )
    if _is_known(failure, known):
        return failure
    others = {other: each.expected for other, each in expected.items()}
    pattern = diagnose(problem, config, name, got, true.expected, true.allowed, measurement.outside, others)
    return _with_pattern(failure, pattern)


def _is_known(failure: Failure, known: Collection[Identity]) -> bool:
    """Whether no pattern is looked for; a nonfinite failure may turn out to be of memory that was never written."""
    kinds = ("nonfinite", "unwritten") if failure.kind == "nonfinite" else (failure.kind,)
    return all(replace(failure, kind=kind).identity in known for kind in kinds)


def _with_pattern(failure: Failure, pattern: Pattern | None, alone: str = "") -> Failure:
    """Return the Failure with its pattern, described in a second sentence of the message."""
    if pattern is None:
        return failure
    return replace(failure, pattern=pattern, message=f"{failure.message}. {pattern.text[:1].upper()}{pattern.text[1:]}{alone}")


def place_of(problem: Problem, name: OutputName, flat: int, got: torch.Tensor, true: Truth) -> Place:
    """Return the Place of element number `flat` of a heads-first output."""
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape)]
    head, token, dim = index[0], index[1], index[2] if len(index) > 2 else None
    lengths = problem.seqlens_q if name in BY_QUERY else problem.seqlens_k
    ends = list(accumulate(lengths))
    sequence = next(i for i, end in enumerate(ends) if token < end)
    element = tuple(index)
    return Place(
        sequence=sequence,
        position=token - (ends[sequence] - lengths[sequence]),
        head=head,
        dim=dim,
        got=float(got[element]),
        expected=float(true.expected[element]),
        allowed=float(true.allowed[element]),
    )


def _failure(
    kernel: str, name: OutputName, place: Place, figures: Figures, kind: Literal["mismatch", "nonfinite"], dtype: Dtype
) -> Failure:
    ratio = figures.worst if kind == "mismatch" else None
    message = wrong_output(name, place, figures.over, figures.elements, ratio, dtype)
    return Failure(kernel=kernel, kind=kind, output=name, check="element", message=message, place=place)


def judge_captured(kernel: str, inputs: Inputs, outputs: Outputs, expected: Truths) -> tuple[dict[str, Figures], list[Failure]]:
    """Return the figures of each captured tensor's gradient, and a Failure where it breaks the contract or its budget."""
    problem = inputs.problem
    tensors = tensors_of(problem)
    if not any(each.gradient for each in tensors) or not {"dq", "dk", "dv"} & set(problem.needs.outputs):
        return {}, []
    if len(outputs.d_captured) != len(tensors):
        message = (
            f"the backward returned {counted(len(outputs.d_captured), 'gradient')} of captured tensors "
            f"where {len(tensors)} {'is' if len(tensors) == 1 else 'are'} expected"
        )
        return {}, [Failure(kernel=kernel, kind="contract", check="d captured", message=message)]
    figures: dict[str, Figures] = {}
    failures = list[Failure]()
    for tensor, got in zip(tensors, outputs.d_captured, strict=True):
        if not tensor.gradient:
            continue
        check, title = f"d {tensor.name}", f"the gradient of {tensor.name}"
        shape = shape_of(problem, tensor)
        # Models keep their sinks in the dtype of q, and then have their gradient so.
        dtypes = {torch.float32, inputs.q.dtype} if problem.sinks and tensor.name == SINKS else {torch.float32}
        if not isinstance(got, torch.Tensor) or tuple(got.shape) != shape or got.dtype not in dtypes:
            actual = f"{tuple(got.shape)} {got.dtype}" if isinstance(got, torch.Tensor) else type(got).__name__
            message = f"{title} is {actual} where {shape} {torch.float32} is expected"
            failures.append(Failure(kernel=kernel, kind="contract", check=check, message=message))
            continue
        figures[tensor.name], failure = _beyond(kernel, check, title, got, tensor.name, expected)
        if failure is not None and not expected.ties:
            # Equal values have equal errors, in D too.
            expected.count_ties()
            figures[tensor.name], failure = _beyond(kernel, check, title, got, tensor.name, expected)
        failures += [] if failure is None else [failure]
    return figures, failures


def _without_bound(expected: Truths, device: torch.device) -> torch.Tensor:
    """Return whether a gradient of a captured tensor may be anything finite under an infinite budget, on the device."""
    overflow = expected.budgets.overflow
    if any(expected.budgets.doubted.values()) or overflow is None:
        return torch.full((), any(expected.budgets.doubted.values()), device=device)
    return overflow.to(device).bool()


def _beyond(
    kernel: str, check: str, title: str, got: torch.Tensor, name: str, expected: Truths
) -> tuple[Figures, Failure | None]:
    """Return a gradient's figures, and its Failure at the worst element where some are outside their intervals."""
    true = expected.captured[name]
    form = Format.of(expected.dtype) if got.dtype != torch.float32 else true.form
    got = got.to(true.expected.device).double()
    allowed = true.allowed + half_ulp(true.expected.abs() + true.allowed.nan_to_num(posinf=0.0), form)
    error = (got - true.expected).abs()
    # Under an infinite budget only NaN is wrong, or nothing if a mask is in doubt or D may overflow: their effects have no bound.
    wrong = ~(error <= allowed) & ~((allowed == torch.inf) & _without_bound(expected, got.device))
    broken = wrong & ~torch.isfinite(got)
    # No error is 0 of its budget, whatever that is: 0, or without a bound.
    ratio = torch.where(broken, torch.inf, (error / allowed).nan_to_num(nan=0.0, posinf=torch.inf))
    # One copy from the device for both.
    worst, over = torch.stack([ratio.amax(), wrong.sum().double()]).tolist() if got.numel() else (0.0, 0.0)
    figures = Figures(elements=got.numel(), worst=four_digits(worst), over=int(over))
    if not figures.over:
        return figures, None
    at = int(torch.where(wrong, ratio, -1.0).flatten().argmax())
    index = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(at), got.shape))
    one, right, most = (float(x.flatten()[at]) for x in (got, true.expected, allowed))
    times = "" if broken.any() else f", {float(ratio.flatten()[at]):.3g} x its budget"
    message = (
        f"{wrong_elements(title, figures.over, got.numel())}; worst at [{index}]: got {one:.9g}, "
        f"expected {right:.9g}, allowed error {most:.3g}{times}"
    )
    return figures, Failure(kernel=kernel, kind="nonfinite" if broken.any() else "mismatch", check=check, message=message)
