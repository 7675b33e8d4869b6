"""Outputs + reference + budgets -> Verdict: pass iff rd(ref - M) <= out <= rd(ref + M) for every element of every output."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from attnfuzz.harness.failure import OUTPUT_TITLES, Failure, Place
from attnfuzz.harness.verdict import Figures, Verdict
from attnfuzz.kernels.contract import Deviations, Inputs, Outputs
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles import attention, bounds

__all__ = ["Truth", "judge", "truth", "why_unfit"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_BY_QUERY = ("o", "lse", "dq")
_LOG_2 = 0.6931471805599453


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """Expected value and allowed error of one output over the whole batch, float64, heads first: (heads, tokens[, dim])."""

    expected: torch.Tensor
    allowed: torch.Tensor
    unjudged: str = ""


def truth(inputs: Inputs, deviations: Deviations, device: str) -> dict[OutputName, Truth]:
    """Oracle and budgets of every output the Problem needs; tokens of all sequences one after the other."""
    problem = inputs.problem
    references, allowed = [], []
    for data in attention.sequences(inputs):
        references.append(attention.reference(problem, data))
        allowed.append(bounds.budgets(problem, data, deviations, device))
    overflow = torch.stack([budget.ds_overflows for budget in allowed]).any().item()
    found: dict[OutputName, Truth] = {}
    for name in problem.needs.outputs:
        found[name] = Truth(
            expected=torch.cat([getattr(each, name) for each in references], dim=1),
            allowed=torch.cat([getattr(each, name) for each in allowed], dim=1),
            unjudged="dS overflows the dtype" if overflow and name in ("dq", "dk") else "",
        )
    if deviations.lse_base2 and "lse" in found:
        found["lse"] = Truth(expected=found["lse"].expected / _LOG_2, allowed=found["lse"].allowed / _LOG_2)
    return found


def judge(kernel: str, inputs: Inputs, outputs: Outputs, expected: dict[OutputName, Truth]) -> Verdict:
    """Shape, dtype and device first, then NaN patterns, then every element against its budget."""
    problem = inputs.problem
    failures: list[Failure] = []
    figures: dict[OutputName, Figures] = {}
    for name, true in expected.items():
        got: torch.Tensor | None = getattr(outputs, name)
        broken = _contract(kernel, problem, name, got, inputs.q.device)
        if broken is not None:
            failures.append(broken)
            continue
        assert got is not None
        if true.unjudged:
            figures[name] = Figures(elements=0, unjudged=true.unjudged)
            continue
        figures[name], failure = _elements(kernel, problem, name, _heads_first(problem, name, got), true)
        if failure is not None:
            failures.append(failure)
    return Verdict(status="fail" if failures else "pass", figures=figures, failures=tuple(failures))


def _shape(problem: Problem, name: OutputName) -> tuple[int, ...]:
    """The shape that the contract asks of an output, slack rows included."""
    heads = problem.heads if name in _BY_QUERY else problem.kv_heads
    dim = problem.dim_v if name in ("o", "dv") else problem.dim_qk
    lengths, slack = (problem.seqlens_q, problem.slack_q) if name in _BY_QUERY else (problem.seqlens_k, problem.slack_k)
    if problem.packing == "dense":
        rows = lengths[0] + slack
        return (problem.batch, heads, rows) if name == "lse" else (problem.batch, rows, heads, dim)
    rows = sum(lengths) + slack
    return (heads, rows) if name == "lse" else (rows, heads, dim)


def why_unfit(kernel: str, inputs: Inputs, outputs: Outputs) -> tuple[Failure, ...]:
    """Outputs that are not what the contract says: shape, dtype, device, storage. Their values are not looked at."""
    problem = inputs.problem
    found = (_contract(kernel, problem, name, getattr(outputs, name), inputs.q.device) for name in problem.needs.outputs)
    return tuple(failure for failure in found if failure is not None)


def _contract(kernel: str, problem: Problem, name: OutputName, got: torch.Tensor | None, device: torch.device) -> Failure | None:
    title, dtype = OUTPUT_TITLES[name], torch.float32 if name == "lse" else _DTYPES[problem.dtype]

    def broken(check: str, expected: object, found: object) -> Failure:
        message = f"{title} has {check} {found} where {expected} is expected"
        return Failure(kernel=kernel, kind="contract", output=name, check=check, message=message)

    if not isinstance(got, torch.Tensor):
        return broken("type", "a tensor", "None" if got is None else type(got).__name__)
    if type(got) not in (torch.Tensor, torch.nn.Parameter):
        return broken("type", "a plain tensor", type(got).__name__)
    if got.layout is not torch.strided:
        return broken("layout", torch.strided, got.layout)
    if tuple(got.shape) != _shape(problem, name):
        return broken("shape", _shape(problem, name), tuple(got.shape))
    if got.dtype != dtype:
        return broken("dtype", dtype, got.dtype)
    if got.device != device:
        return broken("device", device, got.device)
    if (held := got.untyped_storage().nbytes()) < (needed := _bytes_needed(got)):
        return broken("storage", f"{needed} bytes", f"{held} bytes")
    return None


def _bytes_needed(x: torch.Tensor) -> int:
    """Bytes of storage that the tensor's shape and strides reach."""
    if not x.numel():
        return 0
    last = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return int((last + 1) * x.element_size())


def _heads_first(problem: Problem, name: OutputName, got: torch.Tensor) -> torch.Tensor:
    """A kernel's output as float64 (heads, tokens[, dim]), slack rows left out."""
    lengths = problem.seqlens_q if name in _BY_QUERY else problem.seqlens_k
    got = got.detach()
    if problem.packing == "dense":
        got = got if name == "lse" else got.transpose(1, 2)
        return got[:, :, : lengths[0]].transpose(0, 1).flatten(1, 2).double()
    got = got if name == "lse" else got.transpose(0, 1)
    return got[:, : sum(lengths)].double()


def _elements(kernel: str, problem: Problem, name: OutputName, got: torch.Tensor, true: Truth) -> tuple[Figures, Failure | None]:
    """Figures of one output, and its Failure where an element is outside its interval."""
    form = bounds.Format.of("float32" if name == "lse" else problem.dtype)
    expected, allowed = true.expected, true.allowed
    if not got.numel():
        return Figures(elements=0), None
    # LSE is compared as it is; what the budget of -inf would be is no number, and -inf must be met exactly.
    endless = torch.isinf(expected)
    centre = torch.where(endless, 0.0, expected)
    low = bounds.rounded(centre - allowed, form)
    high = bounds.rounded(centre + allowed, form)
    if name == "lse":
        low, high = torch.minimum(low, centre - allowed), torch.maximum(high, centre + allowed)
    inside = torch.where(endless, got == expected, (low <= got) & (got <= high))
    excess = _excess(got, centre, allowed, form, exact=name == "lse")
    ratio = torch.where(inside & (allowed == 0), 0.0, excess / allowed)
    ratio = torch.where(endless | torch.isnan(got), torch.where(inside, 0.0, torch.inf), ratio)
    # Judged by the interval; the ratio only measures. It may touch 1 by its own rounding on either side.
    ratio = torch.where(inside, ratio.clamp(max=1.0), ratio.clamp(min=1.0 + 1e-6))
    broken = torch.isnan(got) | torch.isinf(got) & ~inside
    over = ~inside
    counts = torch.stack([over.sum().double(), broken.sum().double(), _without_nan(ratio).max()]).tolist()
    figures = Figures(elements=got.numel(), worst=counts[2], over=int(counts[0]))
    if not figures.over:
        return figures, None
    nonfinite = counts[1] > 0
    flat = int((broken if nonfinite else _without_nan(ratio)).flatten().double().argmax())
    place = _place(problem, name, flat, got, true)
    return figures, _failure(kernel, name, place, figures, "nonfinite" if nonfinite else "mismatch")


def _without_nan(ratio: torch.Tensor) -> torch.Tensor:
    return ratio.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _excess(got: torch.Tensor, centre: torch.Tensor, allowed: torch.Tensor, form: bounds.Format, exact: bool) -> torch.Tensor:
    """Error beyond the one final rounding: distance of `centre` from the cell of values that round to `got`."""
    error = (got - centre).abs()
    if exact:
        return error
    finite = torch.where(torch.isfinite(got), got, torch.sign(got) * form.largest)
    return torch.where(torch.isfinite(got), (error - bounds.half_ulp(finite, form)).clamp(min=0.0), torch.inf).where(
        error > 0, torch.zeros_like(allowed)
    )


def _place(problem: Problem, name: OutputName, flat: int, got: torch.Tensor, true: Truth) -> Place:
    """Where the element number `flat` of a heads-first output lies."""
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape)]
    head, token, dim = index[0], index[1], index[2] if len(index) > 2 else None
    lengths = problem.seqlens_q if name in _BY_QUERY else problem.seqlens_k
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


def _failure(kernel: str, name: OutputName, place: Place, figures: Figures, kind: Literal["mismatch", "nonfinite"]) -> Failure:
    title = OUTPUT_TITLES[name]
    dim = "" if place.dim is None else f", dim {place.dim}"
    rows = "query" if name in _BY_QUERY else "key"
    where = f"sequence {place.sequence}, {rows} {place.position}, head {place.head}{dim}"
    times = f", {figures.worst:.3g} x its budget" if kind == "mismatch" and figures.worst < float("inf") else ""
    message = (
        f"{title}: {figures.over} of {figures.elements} elements are wrong; worst at {where}: got {place.got:.9g}, "
        f"expected {place.expected:.9g}, allowed error {place.allowed:.3g}{times}"
    )
    return Failure(kernel=kernel, kind=kind, output=name, check="element", message=message, place=place)
