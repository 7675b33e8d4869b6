"""Outputs + reference + budgets -> Verdict: pass iff rd(ref - M) <= out <= rd(ref + M) for every element of every output.

The budget without ties is tried first, since it is never larger; only where that is exceeded, equal values are counted. On top of
it two statistics over a whole output say what stays inside every element's budget (oracles/aggregate.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from msgspec.structs import replace

from attnfuzz.harness.failure import OUTPUT_TITLES, Failure, Place
from attnfuzz.harness.verdict import Figures, Verdict
from attnfuzz.kernels.contract import Deviations, Inputs, Outputs
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles import aggregate, attention, blockwise
from attnfuzz.oracles.bounds import Budget, Budgets, budgets
from attnfuzz.oracles.formats import Format, half_ulp, rounded

__all__ = ["Truth", "Truths", "judge", "truth"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_BY_QUERY = ("o", "lse", "dq")
_LOG_2 = 0.6931471805599453
_WHOLE = 1 << 24
"""Scores of one sequence, all heads, above which the oracle goes by blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """Expected value and allowed error of one output over the whole batch, float64, heads first: (heads, tokens[, dim]).

    Where `allowed` is infinite, nothing is judged: dS may exceed the dtype's range there.
    """

    expected: torch.Tensor
    allowed: torch.Tensor
    budget: Budget | None = None
    form: Format | None = None

    @property
    def reorder(self) -> torch.Tensor:
        """How far apart two runs may be that add in different orders: two sums' errors and two last roundings."""
        if self.budget is None or self.budget.reorder is None or self.form is None:
            return 2 * self.allowed
        return 2 * (self.budget.reorder + half_ulp(self.expected.abs() + self.budget.reorder, self.form))


class Truths(dict[OutputName, Truth]):
    """The Truth of every output; can count ties, should a budget without them be exceeded."""

    def __init__(self, inputs: Inputs, deviations: Deviations, device: str, expected: dict[OutputName, torch.Tensor]) -> None:
        super().__init__()
        self._inputs, self._deviations, self._device = inputs, deviations, device
        self.ties = False
        self.large = blockwise.is_large(inputs.problem)
        self._fill(expected)

    def count_ties(self) -> None:
        """The budget with tau: what repeated values add."""
        self.ties = True
        self._fill({name: true.expected for name, true in self.items()}, scaled=True)

    def _fill(self, expected: dict[OutputName, torch.Tensor], *, scaled: bool = False) -> None:
        found = budgets(self._inputs, self._deviations, self._device, ties=self.ties, lean=self.large)
        self.budgets: Budgets = found
        form = Format.of(self._inputs.problem.dtype)
        for name in self._inputs.problem.needs.outputs:
            if name == "lse":
                unit = _LOG_2 if self._deviations.lse_base2 else 1.0
                self[name] = Truth(expected[name] / (1.0 if scaled else unit), found.lse / unit)
            else:
                self[name] = Truth(expected[name], found.outputs[name].allowed, found.outputs[name], form)


def truth(inputs: Inputs, deviations: Deviations, device: str) -> Truths:
    """Oracle and budgets of every output the Problem needs; tokens of all sequences one after the other."""
    problem = inputs.problem
    references = []
    for data in attention.sequences(inputs):
        scores = data.q.shape[0] * data.q.shape[1] * data.k.shape[1]
        references.append((attention if scores <= _WHOLE else blockwise).reference(problem, data))
    expected = {name: torch.cat([getattr(each, name) for each in references], dim=1) for name in problem.needs.outputs}
    return Truths(inputs, deviations, device, expected)


def judge(kernel: str, inputs: Inputs, outputs: Outputs, expected: dict[OutputName, Truth]) -> Verdict:
    """Shape, dtype and device first, then NaN patterns, then every element against its budget, then the whole of each output."""
    problem = inputs.problem
    failures: list[Failure] = []
    got: dict[OutputName, torch.Tensor] = {}
    for name in expected:
        found: torch.Tensor | None = getattr(outputs, name)
        broken = _contract(kernel, problem, name, found, inputs.q.device)
        if broken is not None:
            failures.append(broken)
        elif found is not None:
            got[name] = _heads_first(problem, name, found)
    measured = _measured(problem, got, expected)
    if isinstance(expected, Truths) and not expected.ties and any(each.over for each in measured.values()):
        expected.count_ties()
        measured = _measured(problem, got, expected)
    figures: dict[OutputName, Figures] = {}
    for name, each in measured.items():
        figures[name] = each.figures
        if each.over:
            failures.append(_wrong(kernel, problem, name, got[name], expected[name], each))
    if isinstance(expected, Truths) and not any(each.over for each in measured.values()):
        failures += _as_a_whole(kernel, problem, got, expected, figures)
    ordered = sorted(failures, key=lambda each: list(expected).index(each.output) if each.output else -1)
    return Verdict(status="fail" if ordered else "pass", figures=figures, failures=tuple(ordered))


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


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    """One output against its Truth: which elements are outside, how far off each is, and the counts."""

    outside: torch.Tensor
    broken: torch.Tensor
    ratio: torch.Tensor
    figures: Figures
    nonfinite: bool

    @property
    def over(self) -> int:
        """Wrong elements."""
        return self.figures.over


def _measured(
    problem: Problem, got: dict[OutputName, torch.Tensor], expected: dict[OutputName, Truth]
) -> dict[OutputName, _Measured]:
    """Every output; all of them at once, since a launch costs more than their elements, and the device is waited for once."""
    names = [name for name, x in got.items() if x.numel()]
    found = {name: _Measured(x, x, x, Figures(elements=0), nonfinite=False) for name, x in got.items() if not x.numel()}
    if not names:
        return found
    sizes = [got[name].numel() for name in names]
    compared = _compared(problem, names, sizes, got, expected)
    # Outside, not finite, worst ratio, judged, largest sigma multiple.
    sums = torch.stack([x.to(torch.float64) for x in (compared[0], compared[1], compared[3])]).split(sizes, 1)
    largest = torch.stack([compared[2], compared[4]]).split(sizes, 1)
    counts = torch.stack([torch.cat([each.sum(1), most.amax(1)]) for each, most in zip(sums, largest, strict=True)]).tolist()
    for index, name in enumerate(names):
        over, nonfinite, judged, worst, sigmas = counts[index]
        shape = got[name].shape
        outside, broken, ratio = (x.split(sizes)[index].reshape(shape) for x in compared[:3])
        unjudged = "" if judged else "dS overflows the dtype"
        figures = Figures(elements=int(judged), worst=worst, over=int(over), sigmas=sigmas, unjudged=unjudged)
        found[name] = _Measured(outside, broken, ratio, figures, nonfinite > 0)
    return {name: found[name] for name in got}


def _compared(
    problem: Problem,
    names: list[OutputName],
    sizes: list[int],
    outputs: dict[OutputName, torch.Tensor],
    expected: dict[OutputName, Truth],
) -> tuple[torch.Tensor, ...]:
    """(outside, broken, ratio, judged, sigma multiple) of each element of all outputs, one after the other."""
    form = Format.of(problem.dtype)
    got = torch.cat([outputs[name].flatten() for name in names])
    truth_ = torch.cat([expected[name].expected.flatten() for name in names])
    allowed = torch.cat([expected[name].allowed.flatten() for name in names])
    # What the budget of -inf would be is no number, and -inf must be met exactly.
    endless = torch.isinf(truth_)
    centre = truth_.masked_fill(endless, 0.0)
    judged, finite = allowed < torch.inf, torch.isfinite(got)
    ends = torch.stack([centre - allowed, centre + allowed])
    low, high = rounded(ends, form)
    cell = half_ulp(got.nan_to_num(nan=0.0, posinf=form.largest, neginf=-form.largest), form)
    if "lse" in names:
        # LSE is float32 whatever the dtype, and compared as it is.
        begin = sum(sizes[: names.index("lse")])
        lse = slice(begin, begin + sizes[names.index("lse")])
        low[lse], high[lse] = ends[0, lse], ends[1, lse]
        cell[lse] = 0.0
    error = (got - centre).abs_()
    excess = (error - cell).clamp_(min=0.0)
    inside = torch.where(endless, got == truth_, (low <= got) & (got <= high)) | ~judged
    # Judged by the interval; the ratio only measures. It may touch 1 by its own rounding on either side.
    ratio = (excess / allowed).nan_to_num_(nan=0.0, posinf=torch.inf)
    ratio = torch.where(inside, ratio.clamp(max=1.0), ratio.clamp(min=1.0 + 1e-6))
    ratio = torch.where(inside | finite & ~endless, ratio, torch.inf).masked_fill_(inside & (endless | ~finite), 0.0)
    broken = (torch.isnan(got) & judged) | (~finite & ~inside)
    return ~inside, broken, ratio, judged, _multiples(excess, names, expected)


def _multiples(excess: torch.Tensor, names: list[OutputName], expected: dict[OutputName, Truth]) -> torch.Tensor:
    """Each error beyond B in multiples of its root mean square, where that is what limits; else 0."""
    zero = torch.zeros_like(excess)
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, size in zip(names, [expected[name].expected.numel() for name in names], strict=True):
        budget = expected[name].budget
        if budget is None or budget.random is None or budget.b is None:
            parts.append((zero[:size], zero[:size]))
        else:
            parts.append((budget.random.flatten(), budget.b.flatten()))
    random, b = (torch.cat(each) for each in zip(*parts, strict=True))
    multiples = (excess - b).clamp_(min=0.0).mul_(6).div_(random)
    return multiples.masked_fill_(random == 0, 0.0).nan_to_num_(nan=0.0)


def _as_a_whole(
    kernel: str,
    problem: Problem,
    got: dict[OutputName, torch.Tensor],
    expected: Truths,
    figures: dict[OutputName, Figures],
) -> list[Failure]:
    """Failures of the aggregate tests; their statistics go into `figures`."""
    form, found = Format.of(problem.dtype), []
    pairs = {
        name: (x, expected[name].expected, budget)
        for name, x in got.items()
        if (budget := expected[name].budget) is not None and x.numel()
    }
    for name, (r, z) in aggregate.statistics(pairs, expected.budgets.repeats, form).items():
        figures[name] = replace(figures[name], r=r, z=z)
        for check, value, what in (("R", r, "more noise than roundings make"), ("z", z, "a scale or a bias in all of it")):
            if value > 1:
                message = f"{OUTPUT_TITLES[name]}: no element is beyond its budget, but together they show {what}: "
                message += f"{check} is {value:.3g} x its limit"
                found.append(Failure(kernel=kernel, kind="aggregate", output=name, check=check, message=message))
    return found


def _wrong(kernel: str, problem: Problem, name: OutputName, got: torch.Tensor, true: Truth, measured: _Measured) -> Failure:
    """The Failure of an output with elements outside their intervals: at its worst element."""
    worst = measured.broken if measured.nonfinite else measured.ratio
    flat = int(worst.flatten().double().argmax())
    place = _place(problem, name, flat, got, true)
    return _failure(kernel, name, place, measured.figures, "nonfinite" if measured.nonfinite else "mismatch")


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
