"""The result of a Trial, as data: small enough to send between processes, readable without torch."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from attnfuzz.harness.judge.failure import Failure
from attnfuzz.kernels.problem import OutputName

__all__ = ["IN_DOUBT", "Figures", "Verdict", "four_digits"]

IN_DOUBT = "mask_mod compares floats that float32 cannot distinguish"
"""Why the elements of `Figures.doubted` are not judged."""


_ABOVE = 1.001
"""The number of four digits next to 1."""
_DECIMALS = 4


def four_digits(x: float) -> float:
    """Return a figure rounded to four significant digits and to four decimals, on the same side of the limit 1.

    The sums behind it differ in their last bits with the order of additions, which depends on the frames that a Case shares with
    others. Without those bits a Case has the same Verdict alone and in every batch. Decimals are limited too, since a small
    figure is a difference of large numbers: how far a value is beyond the last rounding.
    """
    if not math.isfinite(x):
        return x
    rounded = round(float(f"{x:.4g}"), _DECIMALS)
    return _ABOVE if rounded <= 1 < x else rounded


class Figures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Measurements of one output: elements judged, the worst error over its budget (1 is the limit), elements over it.

    `sigmas`: the largest error beyond B in multiples of its root-mean-square size (6 is the limit where that decides). `r`, `z`:
    the aggregate statistics in units of their limits (1 is the limit), None where the values are not generic. All
    four have four digits (`four_digits`).
    """

    elements: int
    worst: float = 0.0
    over: int = 0
    sigmas: float = 0.0
    r: float | None = None
    z: float | None = None
    unjudged: str = ""
    """Why this output was not judged; "" if it was."""
    doubted: int = 0
    """Elements not judged because float32 may decide mask_mod's comparisons of floats either way."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a Trial: figures for every output, failures (the main one first), and what it ran on."""

    status: Literal["pass", "fail"]
    figures: dict[OutputName, Figures] = {}
    captured: dict[str, Figures] = {}
    """Measurements of the gradients of captured tensors, sinks among them, by the tensors' names."""
    failures: tuple[Failure, ...] = ()
    seconds: dict[str, float] = {}
    """Wall time of each stage: compile, inputs, kernel, oracle, judge."""
    device: str = ""
    versions: dict[str, str] = {}

    @property
    def failure(self) -> Failure | None:
        """The main failure, by which the verdict is reported; None if it passed."""
        return self.failures[0] if self.failures else None
