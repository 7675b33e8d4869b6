"""What a Failure of numbers says to people: what is wrong where, what would have been accepted, what to look for."""

from __future__ import annotations

import math

import torch

from attnfuzz.harness.core.text import counted
from attnfuzz.harness.judge.failure import OUTPUT_TITLES, Place, where
from attnfuzz.kernels.problem import Dtype, OutputName
from attnfuzz.oracles.formats import Format, half_ulp, rounded

__all__ = ["of_statistic", "wrong_elements", "wrong_output"]

_FOLLOWS = 0.01
"""Relative difference up to which a factor is seen to follow from the numbers beside it, which have few digits."""
_STATISTICS = {
    "R": (
        "each element is within its budget, but together their errors are larger than roundings make them: their mean square is "
        "{:.3g} x the most that roundings explain (R)",
        "look for precision lost on the way to all elements, such as P, dS or a sum kept in fewer bits than declared",
    ),
    "z": (
        "each element is within its budget, but together their errors lean one way, as by a scale or a bias in all of it: "
        "{:.3g} x the most that chance explains (z)",
        "look for a factor that is slightly off, such as softmax_scale, log2(e) or the sum that rows are divided by, and for "
        "truncation in place of rounding",
    ),
}


def wrong_elements(title: str, over: int, elements: int) -> str:
    """Return how many of an output's elements are wrong: "dK: 3 of 64 elements are wrong"."""
    return f"{title}: {over} of {counted(elements, 'element')} {'is' if over == 1 else 'are'} wrong"


def wrong_output(name: OutputName, place: Place, over: int, elements: int, ratio: float | None, dtype: Dtype) -> str:
    """Return the message of an output with wrong elements: how many, the worst one's place, and what it may be.

    Args:
        name: the output.
        place: the worst element.
        over: number of wrong elements.
        elements: number of elements that were judged.
        ratio: the worst element's error beyond the last rounding over its budget; None where it is not a number.
        dtype: of the Problem. LSE is not rounded to it.
    """
    finite = ratio is not None and math.isfinite(ratio)
    allowed = _allowed(place, ratio if finite else None, None if name == "lse" or math.isinf(place.expected) else dtype)
    worst = f"worst at {where(name, place)}: got {place.got:.9g}, expected {place.expected:.9g}, {allowed}"
    return f"{wrong_elements(OUTPUT_TITLES[name], over, elements)}; {worst}"


def _allowed(place: Place, ratio: float | None, dtype: Dtype | None) -> str:
    """Return the allowed error, or the accepted values where the steps of `dtype` are larger than it; and the error over it."""
    error, budget = abs(place.got - place.expected), place.allowed
    factor = "" if ratio is None else f", {ratio:.3g} x its budget"
    if dtype is None:
        return f"allowed error {budget:.3g}{factor}"
    form = Format.of(dtype)
    low, high = (float(rounded(_number(place.expected + sign * budget), form)) for sign in (-1, 1))
    follows = ratio is None or (budget > 0 and abs(error / budget - ratio) <= _FOLLOWS * ratio)
    if budget >= 2 * float(half_ulp(_number(place.expected), form)) or low == high == place.expected:
        return f"allowed error {budget:.3g}{factor}" + ("" if follows else f" beyond half a step of {dtype}")
    accepted = f"accepted {low:.9g}" + (" alone" if low == high else f" to {high:.9g}")
    if follows:
        return accepted + (f"{factor} of {budget:.3g}" if factor else "")
    step = 2 * float(half_ulp(_number(place.got), form))
    beyond = f"the error beyond half a step is {ratio:.3g} x its budget of {budget:.3g}"
    return f"{accepted}: {dtype} has steps of {step:.3g} there, and {beyond}"


def _number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def of_statistic(name: OutputName, check: str, value: float) -> str:
    """Return the message of an output whose statistic `check`, "R" or "z", is `value` times its limit."""
    what, remedy = _STATISTICS[check]
    return f"{OUTPUT_TITLES[name]}: {what.format(value)}; {remedy}"
