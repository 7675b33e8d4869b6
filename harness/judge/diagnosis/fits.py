"""Fits of wrong values to the values expected: one factor, one offset, and the names by which they are known."""

from __future__ import annotations

import math

from attnfuzz.harness.judge.diagnosis.sample import Fit, Sample, accepted, fitted, followed
from attnfuzz.kernels.problem import OutputName, Problem

__all__ = ["factor", "known_factor", "offset"]

_BARELY = 9.0
"""Mean squared error in budgets below which the choice of the wrong elements is part of what is seen in them."""
_CHANCE = 0.01
"""Odds that a value known by name is met by accident, at most."""


def _unselected(sample: Sample, around: Sample) -> Sample:
    """The elements to fit: the wrong ones, or all of their rows where errors hardly exceed the budget.

    There the wrong elements are those in which error and effect happened to add up, and would tell of too large an effect.
    """
    size = ((sample.got - sample.expected) * sample.weight).square().mean()
    return around if len(around) and float(size) < _BARELY else sample


def factor(problem: Problem, sample: Sample, around: Sample) -> Fit | None:
    """got = c * expected."""
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
    """got = expected + b."""
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
    """A factor or offset known by name that meets every one of too few elements, where chance would not."""
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
    """The names whose value this is to within its error; "" where the error is too large to tell."""
    if error > 0.02 * abs(value):
        return ""
    return ", ".join(text for text, each in named if abs(value - each) <= max(4 * error, 5e-4 * abs(each)))
