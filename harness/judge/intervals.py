"""Comparison of every element of every output with its interval: rd(ref - M) <= out <= rd(ref + M)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnfuzz.harness.judge.truth import Truth
from attnfuzz.harness.judge.verdict import IN_DOUBT, Figures, four_digits
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.budgets.bounds import Budget
from attnfuzz.oracles.formats import Format, half_ulp, rounded
from attnfuzz.oracles.fused import stacked

__all__ = ["Measurement", "Side", "compared", "figures_of", "measure", "place_of_lse"]

_AT_ONCE = 1 << 22
"""Elements compared at once: 32 MiB in float64."""


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """One output compared with its Truth: which elements are outside, how far off each is, and the counts."""

    outside: torch.Tensor
    broken: torch.Tensor
    ratio: torch.Tensor
    figures: Figures
    nonfinite: bool

    @property
    def over(self) -> int:
        """Number of wrong elements."""
        return self.figures.over


def measure(
    problem: Problem, got: dict[OutputName, torch.Tensor], expected: dict[OutputName, Truth]
) -> dict[OutputName, Measurement]:
    """Measure every output; small ones at once, since launches cost more than their elements, with one wait for the device."""
    names = [name for name, x in got.items() if x.numel()]
    results = {name: Measurement(x, x, x, Figures(elements=0), nonfinite=False) for name, x in got.items() if not x.numel()}
    if not names:
        return results
    if sum(got[name].numel() for name in names) <= _AT_ONCE:
        sizes = [got[name].numel() for name in names]
        form = Format.of(problem.dtype)
        exact = place_of_lse(names, sizes)
        columns = [x.split(sizes) for x in compared([Side(got[name].flatten(), expected[name]) for name in names], form, exact)]
        parts = {name: tuple(each[index] for each in columns) for index, name in enumerate(names)}
        counts = torch.stack([_counted(*part) for part in parts.values()]).tolist()
    else:
        pieces = {name: _in_pieces(problem, name, got[name], expected[name]) for name in names}
        parts = {name: each[0] for name, each in pieces.items()}
        counts = [each[1] for each in pieces.values()]
    for name, (over, nonfinite, judged, worst, sigmas) in zip(names, counts, strict=True):
        shape = got[name].shape
        outside, broken, ratio = (x.reshape(shape) for x in parts[name][:3])
        figures = figures_of(got[name].numel(), (over, nonfinite, judged, worst, sigmas), expected[name].doubted)
        results[name] = Measurement(outside, broken, ratio, figures, nonfinite > 0)
    return {name: results[name] for name in got}


def figures_of(elements: int, counts: Sequence[float], doubted: int = 0) -> Figures:
    """Return the figures of an output with elements, from the numbers outside, not finite and judged, and the largest ratios."""
    over, _, judged, worst, sigmas = counts
    return Figures(
        elements=int(judged),
        worst=four_digits(worst),
        over=int(over),
        sigmas=four_digits(sigmas),
        unjudged="" if judged else _why_none(doubted, elements),
        doubted=doubted,
    )


def _why_none(doubted: int, elements: int) -> str:
    """Return why no element is judged, where `doubted` of them are in doubt."""
    others = "" if doubted >= elements else "scores or dS beyond what the dtype can hold"
    return ", or ".join(each for each in (IN_DOUBT if doubted else "", others) if each)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """A flattened output, or a piece of one, and its Truth."""

    got: torch.Tensor
    true: Truth


def place_of_lse(names: list[OutputName], sizes: list[int]) -> slice:
    """Return where LSE's elements are among those of all outputs, one after the other; empty without LSE."""
    begin = sum(sizes[: names.index("lse")]) if "lse" in names else 0
    return slice(begin, begin + (sizes[names.index("lse")] if "lse" in names else 0))


def _counted(
    outside: torch.Tensor, broken: torch.Tensor, ratio: torch.Tensor, judged: torch.Tensor, sigmas: torch.Tensor
) -> torch.Tensor:
    """Return the numbers outside, not finite and judged, the worst ratio and the largest sigma multiple."""
    sums = torch.stack([outside, broken, judged]).sum(1).to(torch.float64)
    return torch.cat([sums, torch.stack([ratio, sigmas]).amax(1)])


def _in_pieces(
    problem: Problem, name: OutputName, got: torch.Tensor, true: Truth
) -> tuple[tuple[torch.Tensor, ...], list[float]]:
    """Compare one large output in pieces, so that temporaries do not fill the memory."""
    form, flat = Format.of(problem.dtype), got.flatten()
    whole = [torch.empty(flat.shape, dtype=dtype, device=got.device) for dtype in (torch.bool, torch.bool, torch.float32)]
    counts = []
    for begin in range(0, flat.numel(), _AT_ONCE):
        piece = slice(begin, begin + _AT_ONCE)
        part = Truth(true.expected.flatten()[piece], true.allowed.flatten()[piece], true.budget and _piece(true.budget, piece))
        exact = slice(0, _AT_ONCE if name == "lse" else 0)
        columns = compared([Side(flat[piece].to(torch.float64), part)], form, exact)
        for kept, values in zip(whole, columns, strict=False):
            kept[piece] = values
        counts.append(_counted(*columns))
    rows = torch.stack(counts)
    return tuple(whole), torch.cat([rows[:, :3].sum(0), rows[:, 3:].amax(0)]).tolist()


def _piece(budget: Budget, piece: slice) -> Budget:
    values = {name: getattr(budget, name) for name in ("allowed", "random", "b")}
    return Budget(**{name: None if x is None else x.flatten()[piece] for name, x in values.items()})


def compared(sides: list[Side], form: Format, exact: slice) -> tuple[torch.Tensor, ...]:
    """Return (outside, broken, ratio, judged, sigma multiple) of each element of all outputs, one after the other.

    `exact`: the elements of LSE, which is float32 under every dtype, and compared without rounding.
    """
    got = torch.cat([each.got for each in sides]).to(torch.float64)
    truth = torch.cat([each.true.expected.flatten() for each in sides])
    allowed = torch.cat([each.true.allowed.flatten() for each in sides])
    random, b = _limits(sides, truth)
    if exact.stop - exact.start in (0, len(got)):
        return _compared(got, truth, allowed, random, b, None, form, exact.stop == exact.start)
    lse = torch.zeros(got.shape, dtype=torch.bool, device=got.device)
    lse[exact] = True
    return _compared(got, truth, allowed, random, b, lse, form, True)


@stacked
def _compared(
    got: torch.Tensor,
    truth: torch.Tensor,
    allowed: torch.Tensor,
    random: torch.Tensor,
    b: torch.Tensor,
    lse: torch.Tensor | None,
    form: Format,
    rounds: bool,
) -> tuple[torch.Tensor, ...]:
    """Return `compared` of each element; not rounded are those of `lse`, and all unless `rounds`."""
    # -inf has no budget and must be met exactly.
    endless = truth.abs() == torch.inf
    centre = truth.masked_fill(endless, 0.0)
    judged, finite = allowed != torch.inf, got.abs() < torch.inf
    low, high, cell = centre - allowed, centre + allowed, torch.zeros_like(got)
    if rounds:
        ends = (rounded(low, form), rounded(high, form))
        own = half_ulp(got.nan_to_num(nan=0.0, posinf=form.largest, neginf=-form.largest), form)
        if lse is None:
            (low, high), cell = ends, own
        else:
            low, high = torch.where(lse, low, ends[0]), torch.where(lse, high, ends[1])
            cell = torch.where(lse, 0.0, own)
    excess = (got - centre).abs().sub_(cell).clamp_(min=0.0)
    inside = (endless & (got == truth)) | (~endless & (low <= got) & (got <= high)) | ~judged
    # The interval decides; the ratio only measures, and its own rounding may put it on the wrong side of 1.
    ratio = (excess / allowed).nan_to_num_(nan=0.0, posinf=torch.inf)
    ratio = torch.where(inside, ratio.clamp(max=1.0), ratio.clamp(min=1.0 + 1e-6))
    ratio = torch.where(inside | (finite & ~endless), ratio, torch.inf).masked_fill(inside & (endless | ~finite), 0.0)
    broken = ((got != got) & judged) | (~finite & ~inside)
    # At the edge of two binades a value may round correctly and be inside, while its distance is in units of the finer one.
    multiples = (excess - b).clamp_(min=0.0).mul_(6).div_(random).masked_fill(random == 0, 0.0).nan_to_num_(nan=0.0)
    multiples = torch.where(inside, multiples.clamp(max=6.0), multiples).masked_fill(~judged, 0.0)
    return ~inside, broken, ratio, judged, multiples


def _limits(sides: list[Side], truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what errors beyond B are measured by, their limit by random roundings, else 0, and B."""
    zero = torch.zeros_like(truth)
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for each in sides:
        budget = each.true.budget
        if budget is None or budget.random is None or budget.b is None:
            parts.append((zero[: each.got.numel()],) * 2)
        else:
            parts.append((budget.random.flatten(), budget.b.flatten()))
    random, b = (torch.cat(each) for each in zip(*parts, strict=True))
    return random, b
