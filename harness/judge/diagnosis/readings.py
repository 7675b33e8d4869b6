"""Weaker readings of wrong values, each with its own test: rounding, one value, a factor per row, part of a sum, noise."""

from __future__ import annotations

import math

import torch

from attnfuzz.harness.judge.diagnosis.sample import Fit, Sample, fitted
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.formats import Format, half_ulp

__all__ = ["constant", "noise", "part", "per_row", "rounded", "truncated", "unrelated"]

_ENOUGH = 16
_MANY = 64
_ROWS = 256
_PER_ROW = 0.95
_COARSER = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def truncated(problem: Problem, name: OutputName, sample: Sample) -> Fit | None:
    """Rounded toward zero: always nearer to 0 than expected, by less than one unit in the last place."""
    form = Format.of("float32" if name == "lse" else problem.dtype)
    error = (sample.got - sample.expected) * torch.sign(sample.expected)
    unit = 2 * half_ulp(sample.expected, form)
    if len(sample) < _ENOUGH or not (
        (error < 0).double().mean() >= 0.98 and (-error <= unit + sample.allowed).double().mean() >= 0.95
    ):
        return None
    x, y = unit * sample.weight, error * sample.weight
    explained = fitted(sample, error - unit * (x @ y) / (x @ x))
    mean = float((-error / unit).mean())
    return Fit("truncated", explained, f"always nearer to zero, by {mean:.2g} units in the last place: truncated", value=-mean)


def constant(sample: Sample) -> Fit | None:
    """One value nearly everywhere, where those expected differ."""
    value = sample.got[0]
    if (sample.got == value).double().mean() < 0.95 or float(sample.expected.std()) == 0:
        return None
    return Fit("foreign", 1.0, f"{float(value):.6g} everywhere", value=float(value))


def per_row(sample: Sample) -> Fit | None:
    """got = c_i * expected for each row i: told from chance by 16 elements of each row or more, all of its columns counted."""
    rows = torch.stack([sample.head, sample.token]).unique(dim=1)
    rows = rows[:, :: max(1, rows.shape[1] // _ROWS)]
    got, expected, allowed = (x[rows[0], rows[1]] for x in (sample.of_got, sample.of_expected, sample.of_allowed))
    usable = torch.isfinite(got).all(1) & torch.isfinite(expected).all(1) & (expected != 0).any(1)
    if got.shape[1] < _ENOUGH or int(usable.sum()) < 2 or float(usable.double().mean()) < 0.5:
        return None
    got, expected, allowed = got[usable], expected[usable], allowed[usable]
    factor = (got * expected).sum(1) / expected.square().sum(1)
    rest, before = (got - factor[:, None] * expected).square(), (got - expected).square()
    weight = 1 / allowed.square().mean(1).clamp(min=1e-60)
    explained = float(1 - (rest.sum(1) * weight).sum() / (before.sum(1) * weight).sum())
    if not explained >= _PER_ROW:
        return None
    text = f"the values expected, each row times a factor of its own ({float(factor.min()):.4g} to {float(factor.max()):.4g})"
    return Fit("scaled", explained, text)


def unrelated(sample: Sample) -> Fit | None:
    """Values of the right size that have nothing to do with those expected."""
    if len(sample) < _MANY:
        return None
    got, expected = ((x - x.mean()) for x in (sample.got, sample.expected))
    sizes = float(got.norm()), float(expected.norm())
    if not 0 < sizes[1] / 3 <= sizes[0] <= 3 * sizes[1]:
        return None
    related = abs(float(got @ expected)) / (sizes[0] * sizes[1])
    if related > max(0.1, 4 / math.sqrt(len(sample))):
        return None
    text = f"values of the right size that have nothing to do with those expected (correlation {related:.2f}), as of another call"
    return Fit("foreign", 1 - related, text, value=related)


def noise(sample: Sample) -> Fit:
    """None of the others: how large the errors are against the budget."""
    error = sample.got - sample.expected
    size = float((error * sample.weight).square().mean().sqrt())
    known = float(sample.allowed.square().sum())
    against = f", {size:.3g} x the budget (RMS)" if known and math.isfinite(size) else ""
    return Fit("noise", 0.0, f"errors without a pattern{against}", value=size if math.isfinite(size) else None)


def rounded(problem: Problem, name: OutputName, sample: Sample) -> Fit | None:
    """All values fit a coarser dtype than the output's own: rounded to it on the way. One does by chance once in 8 at most."""
    own = "float32" if name == "lse" else problem.dtype
    coarser = [dtype for dtype in ("bfloat16", "float16") if own == "float32" or (own, dtype) == ("float16", "bfloat16")]
    distinct = sample.got.unique()
    if len(distinct) < _ENOUGH:
        return None
    for dtype in coarser:
        if torch.equal(distinct.to(_COARSER[dtype]).double(), distinct):
            return Fit("rounded", 1.0, f"values that were rounded to {dtype} on the way", name=dtype)
    return None


def part(problem: Problem, sample: Sample) -> Fit | None:
    """expected = got + rest with a rest unrelated to got: terms of a sum are missing.

    The slope of expected on got must be 1. Its error counts columns of a head, not elements: neighbouring rows are much alike.
    """
    # Without weights: those follow expected, and would bend the slope.
    x, y = sample.got, sample.expected
    got, both, whole = float(x @ x), float(x @ y), float(y @ y)
    if len(sample) < _MANY or not 0 < 0.02 * whole <= got <= 0.95 * whole:
        return None
    slope, share = both / got, got / whole
    columns, cluster = torch.stack([sample.head, sample.dim]).unique(dim=1, return_inverse=True)
    sums = torch.zeros(columns.shape[1], dtype=torch.float64, device=x.device).index_add_(0, cluster, x * (y - slope * x))
    error = float(sums.norm()) / got
    if columns.shape[1] < _ENOUGH or error > 0.1 or abs(slope - 1) > 0.05 + 2 * error:
        return None
    groups = problem.groups
    named = {f"{n} of {groups} heads of the group": n / groups for n in (1, groups - 1) if groups > 1}
    known = next((text for text, each in named.items() if abs(share / each - 1) <= 0.1 + 2 * error), "")
    text = f"about {100 * share:.0f} % of the sum expected{f' (perhaps {known})' if known else ''}, the rest of its terms missing"
    return Fit("partial", share, text, value=share, name=known)
