"""Explanations of wrong values: a factor or an offset on the expected values, with known names, and weaker ones without a fit.

Weaker ones: a constant, truncated or rounded values, a factor for each row, part of a sum, unrelated values, noise.
"""

from __future__ import annotations

import math

import torch

from attnfuzz.harness.judge.diagnosis.sample import Fit, Sample, accepted, fitted, followed
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.formats import Format, half_ulp

__all__ = ["constant", "factor", "known_factor", "noise", "offset", "part", "per_row", "rounded", "truncated", "unrelated"]

_BARELY = 9.0
"""Mean squared error in budgets below which selecting the wrong elements biases a fit."""
_CHANCE = 0.01
"""Highest odds that a value known by name fits by accident."""
_ENOUGH = 16
_MANY = 64
_ROWS = 256
_PER_ROW = 0.95
_COARSER = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def _unselected(sample: Sample, around: Sample) -> Sample:
    """Return the elements to fit: the wrong ones, or all of their rows where errors hardly exceed the budget.

    There the wrong elements are those where rounding error and effect add up, so that the effect would seem too large.
    """
    size = ((sample.got - sample.expected) * sample.weight).square().mean()
    return around if len(around) and float(size) < _BARELY else sample


def factor(problem: Problem, sample: Sample, around: Sample) -> Fit | None:
    """Fit got = c * expected."""
    basis = _unselected(sample, around)
    x, y = basis.expected * basis.weight, basis.got * basis.weight
    below = float(x @ x)
    if not below:
        return None
    c = float(x @ y) / below
    rest = sample.got - c * sample.expected
    explained = fitted(sample, rest)
    if not (accepted(sample, rest, explained) and followed(sample, rest)):
        return None
    error = math.sqrt(float((rest * sample.weight).square().sum()) / len(sample) / below)
    if abs(c + 1) <= max(0.01, 4 * error):
        return Fit("sign", explained, "the values expected with the other sign", value=c)
    known = _known_as(c, _factors(problem), error)
    text = f"the values expected, times {c:.{5 if error < 1e-5 * abs(c) else 3}g}" + (f" ({known})" if known else "")
    return Fit("scaled", explained, text, value=c, name=known)


def offset(problem: Problem, sample: Sample, around: Sample) -> Fit | None:
    """Fit got = expected + b."""
    error = sample.got - sample.expected
    basis, weights = _unselected(sample, around), sample.weight.square()
    b = float((basis.weight.square() * (basis.got - basis.expected)).sum() / basis.weight.square().sum())
    explained = fitted(sample, error - b)
    if not (accepted(sample, error - b, explained) and followed(sample, error - b)):
        return None
    spread = math.sqrt(float((weights * (error - b).square()).sum()) / len(sample) / float(weights.sum()))
    known = _known_as(b, _offsets(problem), spread)
    return Fit(
        "offset",
        explained,
        f"the values expected, {'plus' if b > 0 else 'minus'} {abs(b):.{5 if spread < 1e-5 * abs(b) else 3}g}"
        + (f" ({known})" if known else ""),
        value=b,
        name=known,
    )


def known_factor(problem: Problem, name: OutputName, sample: Sample) -> Fit | None:
    """Return a factor or offset known by name that fits each of too few elements, and hardly by chance."""
    null = (sample.got - sample.expected).abs()
    odds = float((sample.tolerance / null).clamp(max=1.0).prod())
    candidates = [("scaled", c, text) for text, c in _factors(problem)]
    if name == "lse":
        candidates += [("offset", b, text) for text, b in _offsets(problem)]
    if not len(sample) or odds * len(candidates) > _CHANCE:
        return None
    for kind, value, text in candidates:
        rest = sample.got - (sample.expected * value if kind == "scaled" else sample.expected + value)
        if (rest.abs() <= sample.tolerance).all() and fitted(sample, rest) > 0:
            explained = fitted(sample, rest)
            if kind == "scaled":
                return Fit("scaled", explained, f"the values expected, times {value:.5g} ({text})", value=value, name=text)
            sign = "plus" if value > 0 else "minus"
            return Fit("offset", explained, f"the values expected, {sign} {abs(value):.5g} ({text})", value=value, name=text)
    return None


def _factors(problem: Problem) -> list[tuple[str, float]]:
    groups, scale, dim = problem.groups, problem.scale, problem.dim_qk
    named = [("ln 2", math.log(2)), ("1/ln 2", 1 / math.log(2)), ("2", 2.0), ("1/2", 0.5)]
    named += [("groups", float(groups)), ("1/groups", 1 / groups)]
    named += [("softmax_scale", scale), ("softmax_scale / ln 2", scale / math.log(2))]
    if scale:
        named += [("1/softmax_scale", 1 / scale)]
    if not math.isclose(abs(scale), dim**-0.5):
        named += [("sqrt(dim_qk)", dim**0.5), ("1/sqrt(dim_qk)", dim**-0.5)]
    else:
        named = [(text.replace("1/softmax_scale", "1/softmax_scale, sqrt(dim_qk)"), value) for text, value in named]
    return [(text, value) for text, value in named if value not in (0.0, 1.0)]


def _offsets(problem: Problem) -> list[tuple[str, float]]:
    named = [("ln 2", math.log(2)), ("ln groups", math.log(problem.groups))]
    if len(set(problem.seqlens_k)) == 1 and problem.seqlens_k[0] > 0:
        named.append(("ln seqlen_k", math.log(problem.seqlens_k[0])))
    return [(f"{sign}{text}", factor * value) for text, value in named if value for sign, factor in (("", 1), ("-", -1))]


def _known_as(value: float, named: list[tuple[str, float]], error: float) -> str:
    """Return the names whose values equal `value` within its error; "" if the error is too large."""
    if error > 0.02 * abs(value):
        return ""
    return ", ".join(text for text, each in named if abs(value - each) <= max(4 * error, 5e-4 * abs(each)))


def truncated(problem: Problem, name: OutputName, sample: Sample) -> Fit | None:
    """Recognise rounding toward zero: always nearer to 0 than expected, by less than one unit in the last place."""
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
    """Recognise one value nearly everywhere, where the expected values differ."""
    value = sample.got[0]
    if (sample.got == value).double().mean() < 0.95 or float(sample.expected.std()) == 0:
        return None
    return Fit("foreign", 1.0, f"{float(value):.6g} everywhere", value=float(value))


def per_row(sample: Sample) -> Fit | None:
    """Fit got = c_i * expected for each row i, over all its columns: at least 16, so that it is not by chance."""
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
    """Recognise values of the right size that do not correlate with the expected ones."""
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
    """Return the size of errors without a pattern in units of the budget."""
    error = sample.got - sample.expected
    size = float((error * sample.weight).square().mean().sqrt())
    known = float(sample.allowed.square().sum())
    against = f", {size:.3g} x the budget (RMS)" if known and math.isfinite(size) else ""
    return Fit("noise", 0.0, f"errors without a pattern{against}", value=size if math.isfinite(size) else None)


def rounded(problem: Problem, name: OutputName, sample: Sample) -> Fit | None:
    """Recognise values that all fit a coarser dtype than the output's; one value fits by chance once in 8 at most."""
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
    """Recognise missing terms of a sum: expected = got + rest, with a rest unrelated to got.

    The slope of expected on got must be 1. Its error counts columns of a head, not elements, since neighbouring rows are alike.
    """
    # Without weights, since those depend on expected and would bias the slope.
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
