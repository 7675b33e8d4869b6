"""Every element of every output against its interval: rd(ref - M) <= out <= rd(ref + M)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnfuzz.harness.truth import Truth
from attnfuzz.harness.verdict import Figures
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.formats import Format, half_ulp, rounded

__all__ = ["Measured", "measured"]


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
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


def measured(
    problem: Problem, got: dict[OutputName, torch.Tensor], expected: dict[OutputName, Truth]
) -> dict[OutputName, Measured]:
    """Every output; all of them at once, since a launch costs more than their elements, and the device is waited for once."""
    names = [name for name, x in got.items() if x.numel()]
    found = {name: Measured(x, x, x, Figures(elements=0), nonfinite=False) for name, x in got.items() if not x.numel()}
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
        found[name] = Measured(outside, broken, ratio, figures, nonfinite > 0)
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
