"""Judgement of several Cases at once: reference, budgets and comparison cost about the launches of one Case.

Only a Case that passes clearly is judged here. Every other one, and those whose judgement needs more than this (modifiers, sizes
that fill the device alone, repeated values), is left to `judge`, which thereby remains the only source of Failures.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from msgspec.structs import replace

from attnfuzz.harness.judge.failure import BY_QUERY
from attnfuzz.harness.judge.intervals import Side, compared, figures_of, place_of_lse
from attnfuzz.harness.judge.together import FRAME, Launched, alike, parts, takes_gradient
from attnfuzz.harness.judge.truth import LOG_2, Truth, is_tiny
from attnfuzz.harness.judge.verdict import Figures, Verdict, four_digits
from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.problem import SINKS, OutputName, Problem
from attnfuzz.oracles.budgets.aggregate import SUMS, of_limits, sums_of_rows
from attnfuzz.oracles.budgets.batch import BatchTruth, truth_of_batches
from attnfuzz.oracles.budgets.bounds import Budget
from attnfuzz.oracles.budgets.repeats import Generic, Repeats
from attnfuzz.oracles.formats import Format, half_ulp
from attnfuzz.oracles.fused import whole_of

__all__ = ["Judged", "judge_batch"]

_CLEAR, _CLEAR_RATIO = 0.99, 0.999
"""Largest statistic, and largest error over its budget, of a Case that passes clearly."""
_OVER = 1.001
"""Smallest error over its budget of a Case that is clearly beyond it: as in `judge`, equal values are counted then."""
_COUNTS, _OF_SINKS = 5, 2
_SINGLE = Format.of("float32")


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A Case's Verdict, and the truth of its outputs."""

    verdict: Verdict
    truths: Mapping[OutputName, Truth]


class _OfCase(Mapping[OutputName, Truth]):
    """The truth of a Case's outputs: views of the batch's, made when they are asked for, since few Cases need them."""

    def __init__(self, batch: BatchTruth, truths: dict[OutputName, Truth], at: int) -> None:
        self._batch, self._truths, self._at = batch, truths, at

    @functools.cached_property
    def _views(self) -> dict[OutputName, Truth]:
        return _of_case(self._batch, self._truths, self._at)

    def __getitem__(self, name: OutputName) -> Truth:
        return self._views[name]

    def __iter__(self) -> Iterator[OutputName]:
        return iter(self._truths)

    def __len__(self) -> int:
        return len(self._truths)


def judge_batch(launched: Sequence[Launched], deviations: Deviations, device: str) -> list[Judged | None]:
    """Judge Cases of one kernel by the rules of `judge`; None for each that it must judge alone.

    Args:
        launched: inputs and outputs of the Cases, on one device.
        deviations: what the kernel declares.
        device: "cpu" or "cuda", for deviations declared for one of them.

    Returns:
        For each Case its passing Verdict, equal to that of `judge`, or None.
    """
    results: list[Judged | None] = [None] * len(launched)
    for group in alike(launched, deviations):
        # Cases beyond their budgets without ties are judged with them, those of all parts together.
        numbers, beyond = group, list[int]()
        for ties in (False, True):
            for part in parts(launched, numbers):
                judged, over = _judged([launched[number] for number in part], deviations, device, ties=ties)
                beyond += [part[at] for at in over]
                for number, each in zip(part, judged, strict=True):
                    results[number] = each
            numbers, beyond = beyond, []
    return results


def _judged(
    launched: Sequence[Launched], deviations: Deviations, device: str, *, ties: bool = False
) -> tuple[list[Judged | None], list[int]]:
    """Judge Cases of equal dtype, dims and outputs; `ties`: equal values count.

    Returns also the numbers of Cases that are clearly beyond their budgets without ties, and have to be judged with them.
    """
    problems = [each.inputs.problem for each in launched]
    p, where = problems[0], launched[0].inputs.q.device
    form = Format.of(p.dtype)
    searched = [at for at, each in enumerate(problems) if _is_searched(each)]
    every = [each.inputs for each in launched]
    batch = truth_of_batches(every, deviations, device, FRAME[where.type], searched, ties=ties)
    names = list(p.needs.outputs)
    with torch.inference_mode():
        truths = _truths(batch, names, deviations, form)
        got = {name: _values([getattr(each.outputs, name) for each in launched], name, batch) for name in names}
        counts = _counts(batch, got, truths, form)
        judged: list[OutputName] = [name for name in names if name != "lse"] if p.dtype != "float32" else []
        sums = _sums(batch, [(got[name], truths[name]) for name in judged], judged, form)
        repeats = batch.repeats.figures()
        # One copy from the device for all Cases and outputs.
        columns = [x.flatten() for x in (counts, sums, repeats, _of_sinks(batch, launched))]
        numbers = torch.cat([x.to(where) for x in columns]).tolist()
        ends = accumulate(x.numel() for x in columns)
        of_counts, of_sums, of_repeats, of_sinks = (numbers[end - len(x) : end] for end, x in zip(ends, columns, strict=True))
        generic = batch.repeats.generic(of_repeats)
        results: list[Judged | None] = []
        beyond: list[int] = []
        for at, each in enumerate(launched):
            rows = {name: _part(of_counts, len(launched), place, at, _COUNTS) for place, name in enumerate(names)}
            statistics: dict[OutputName, list[float]] = {
                name: _part(of_sums, len(launched), place, at, SUMS) for place, name in enumerate(judged)
            }
            sizes_of = _elements_of(each.inputs.problem)
            figures = _figures(sizes_of, rows)
            if figures is None and not ties and p.dtype != "float32" and _clearly_beyond(rows):
                beyond.append(at)
            if figures is not None:
                figures = _with_statistics(each.inputs.problem, figures, sizes_of, statistics, generic.get(at))
            captured = _captured(each.inputs.problem, _part(of_sinks, 0, 0, at, _OF_SINKS))
            judgement = None
            if figures and captured is not None:
                judgement = Judged(Verdict(status="pass", figures=figures, captured=captured), _OfCase(batch, truths, at))
            results.append(judgement)
        return results, beyond


def _is_searched(problem: Problem) -> bool:
    """Whether `judge` looks for repeated values before it knows the statistics."""
    return problem.dtype != "float32" and not is_tiny(problem) and problem.total_q * problem.heads >= Repeats.FEWEST


def _truths(batch: BatchTruth, names: list[OutputName], deviations: Deviations, form: Format) -> dict[OutputName, Truth]:
    """Return the Truth of each output over the rows or keys of all Cases."""
    truths: dict[OutputName, Truth] = {}
    for name in names:
        budget = batch.budgets[name]
        if name == "lse":
            unit = LOG_2 if deviations.lse_base2 else 1.0
            truths[name] = Truth(batch.expected[name] / unit, budget.allowed / unit)
        else:
            truths[name] = Truth(batch.expected[name], budget.allowed, budget, form)
    return truths


def _values(outputs: list[torch.Tensor], name: OutputName, batch: BatchTruth) -> torch.Tensor:
    """Return the kernel's values of one output, in the order of the truth, float64."""
    slots = batch.slots
    index = slots.lse if name == "lse" else slots.rows if name in BY_QUERY else slots.keys
    values = torch.cat([x.reshape(-1, 1 if name == "lse" else x.shape[-1]) for x in outputs])
    return values.index_select(0, index).to(torch.float64)


def _batches_of(batch: BatchTruth, name: OutputName) -> torch.Tensor:
    return batch.slots.batch_of_row if name in BY_QUERY else batch.slots.batch_of_key


def _places(batch: BatchTruth, names: list[OutputName]) -> torch.Tensor:
    """Return for each row of all outputs, one after the other, the number of its output and Case."""
    cases = len(batch.slots.problems)
    return torch.cat([_batches_of(batch, name) + place * cases for place, name in enumerate(names)])


def _counts(
    batch: BatchTruth, got: dict[OutputName, torch.Tensor], truths: dict[OutputName, Truth], form: Format
) -> torch.Tensor:
    """Return what `figures_of` takes, of each output and Case, `(outputs x Cases, 5)`."""
    names = list(got)
    sizes = [got[name].numel() for name in names]
    columns = compared([Side(got[name].flatten(), truths[name]) for name in names], form, place_of_lse(names, sizes))
    outside, broken, ratio, judged, multiples = columns
    shapes = [got[name].shape for name in names]

    def by_output(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        each = _side_by_side(parts).split(sizes, 1)
        return [x.unflatten(1, shape) for x, shape in zip(each, shapes, strict=True)]

    numbers = [x.sum(2) for x in by_output((outside, broken, judged))]
    largest = [x.amax(2) for x in by_output((ratio, multiples))]
    places = _places(batch, names)
    lines = len(names) * len(batch.slots.problems)
    counts = torch.zeros((3, lines), dtype=torch.float64, device=places.device)
    counts.index_add_(1, places, torch.cat(numbers, 1).to(torch.float64))
    most = torch.zeros((2, lines), dtype=torch.float64, device=places.device)
    most.scatter_reduce_(1, places.expand(2, -1), torch.cat(largest, 1), "amax")
    return torch.cat([counts, most]).T


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return them as one tensor, which is a copy where they do not lie together."""
    whole = whole_of(parts)
    return torch.stack(list(parts)) if whole is None else whole


def _sums(batch: BatchTruth, pairs: list[tuple[torch.Tensor, Truth]], names: list[OutputName], form: Format) -> torch.Tensor:
    """Return the sums behind the statistics, of each output and Case, `(outputs x Cases, SUMS)`."""
    if not names:
        return torch.zeros((0, SUMS), dtype=torch.float64)
    outputs = [(x, true.expected, true.budget) for x, true in pairs if true.budget is not None]
    places = _places(batch, names)
    sums = torch.zeros((len(names) * len(batch.slots.problems), SUMS), dtype=torch.float64, device=places.device)
    return sums.index_add_(0, places, torch.cat([each.T for each in sums_of_rows(outputs, form)]))


def _of_sinks(batch: BatchTruth, launched: Sequence[Launched]) -> torch.Tensor:
    """Return of each Case how many gradients of sinks are beyond their budgets, and the largest error over it, `(Cases, 2)`."""
    of, starts = batch.slots.batch_of_head, batch.slots.head_starts
    taken = [takes_gradient(each.inputs.problem) for each in launched]
    if batch.sinks is None or not any(taken):
        return torch.zeros((0, _OF_SINKS), dtype=torch.float64)
    expected, m = batch.sinks
    # Heads without sinks have no error.
    parts = [each.outputs.d_captured[0] if of_sinks else None for each, of_sinks in zip(launched, taken, strict=True)]
    got = torch.cat([expected[starts[at] : starts[at + 1]] if x is None else x for at, x in enumerate(parts)]).double()
    size = expected.abs() + m.nan_to_num(posinf=0.0)
    unit = half_ulp(size, _SINGLE)
    in_half = [x is not None and x.dtype != torch.float32 for x in parts]
    if any(in_half):
        own = half_ulp(size, Format.of(launched[0].inputs.problem.dtype))
        unit = torch.where(torch.tensor(in_half).to(of.device, non_blocking=True)[of], own, unit)
    error, allowed = (got - expected).abs(), m + unit
    ratio = (error / allowed).nan_to_num(nan=0.0, posinf=torch.inf)
    counts = torch.zeros((2, len(launched)), dtype=torch.float64, device=of.device)
    counts[0].index_add_(0, of, (~(error <= allowed)).double())
    counts[1].scatter_reduce_(0, of, ratio, "amax")
    return counts.T


def _captured(problem: Problem, numbers: Sequence[float]) -> dict[str, Figures] | None:
    """Return the figures of the sinks' gradient, from `_of_sinks`, or None unless all are clearly within their budgets."""
    if not takes_gradient(problem):
        return {}
    over, worst = numbers
    return None if over or not worst <= _CLEAR_RATIO else {SINKS: Figures(elements=problem.heads, worst=four_digits(worst))}


def _part(numbers: list[float], cases: int, output: int, case: int, width: int) -> list[float]:
    start = (output * cases + case) * width
    return numbers[start : start + width]


def _of_case(batch: BatchTruth, truths: dict[OutputName, Truth], at: int) -> dict[OutputName, Truth]:
    """Return the Truth of one Case's outputs, heads first."""
    slots = batch.slots
    heads = (slots.problems[at].heads, slots.problems[at].kv_heads)

    def view(x: torch.Tensor, name: OutputName) -> torch.Tensor:
        starts = slots.row_starts if name in BY_QUERY else slots.key_starts
        part = x[starts[at] : starts[at + 1]]
        if name == "lse":
            return part[:, 0].unflatten(0, (heads[0], part.shape[0] // heads[0]))
        own = heads[0] if name in BY_QUERY else heads[1]
        return part.unflatten(0, (own, part.shape[0] // own))

    of = {}
    for name, true in truths.items():
        parts = {each: getattr(true.budget, each) for each in _PARTS} if true.budget else {}
        budget = Budget(**{each: view(x, name) for each, x in parts.items() if x is not None}) if parts else None
        of[name] = Truth(view(true.expected, name), view(true.allowed, name), budget, true.form)
    return of


_PARTS = ("allowed", "random", "b", "flush", "noise", "reorder")


def _elements_of(problem: Problem) -> dict[OutputName, int]:
    """Return the number of elements of each output."""
    rows, keys = problem.total_q * problem.heads, problem.total_k * problem.kv_heads
    dim_qk, dim_v = problem.dim_qk, problem.dim_v
    return {"o": rows * dim_v, "lse": rows, "dq": rows * dim_qk, "dk": keys * dim_qk, "dv": keys * dim_v}


def _figures(sizes: dict[OutputName, int], counts: dict[OutputName, list[float]]) -> dict[OutputName, Figures] | None:
    """Return the figures of every output, or None unless all elements are clearly within their intervals."""
    figures = {}
    for name, (over, nonfinite, judged, worst, sigmas) in counts.items():
        if over or nonfinite or not worst <= _CLEAR_RATIO:
            return None
        elements = sizes[name]
        values = (over, nonfinite, judged, worst, sigmas)
        figures[name] = figures_of(elements, values) if elements else Figures(elements=0)
    return figures


def _clearly_beyond(counts: dict[OutputName, list[float]]) -> bool:
    """Whether some element is clearly beyond its budget, and all are finite."""
    finite = not any(nonfinite for _, nonfinite, *_ in counts.values())
    return finite and any(over and worst > _OVER for over, _, _, worst, _ in counts.values())


def _with_statistics(
    problem: Problem,
    figures: dict[OutputName, Figures],
    sizes: dict[OutputName, int],
    sums: dict[OutputName, list[float]],
    generic: Generic | None,
) -> dict[OutputName, Figures] | None:
    """Return the figures with R and z where `judge` has them, or None unless all are clearly below their limits."""
    tiny = is_tiny(problem)
    if generic is None and not tiny:
        return figures
    for name, row in sums.items():
        pair = of_limits(name, generic or Generic(), row) if sizes[name] else None
        if pair is None:
            continue
        if not max(pair) <= _CLEAR:
            return None
        # A tiny Case's values are searched for repeats only on suspicion.
        if not tiny:
            figures[name] = replace(figures[name], r=four_digits(pair[0]), z=four_digits(pair[1]))
    return figures
