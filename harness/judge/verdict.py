"""The result of a Trial, as data: small enough to travel between processes, and no torch needed to read it."""

from __future__ import annotations

from typing import Literal

import msgspec

from attnfuzz.harness.judge.failure import Failure
from attnfuzz.kernels.problem import OutputName

__all__ = ["IN_DOUBT", "Figures", "Verdict"]

IN_DOUBT = "mask_mod compares floats that float32 cannot tell apart"
"""Why elements are left unjudged that count as `Figures.doubted`."""


class Figures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was measured of one output: elements judged, the worst error over its budget (1 is the limit), elements over it.

    `sigmas`: the largest error beyond B in multiples of its root-mean-square size (6 is the limit where that decides). `r`, `z`:
    the aggregate statistics in units of their limits (1 is the limit), None where the values are not generic enough for them.
    """

    elements: int
    worst: float = 0.0
    over: int = 0
    sigmas: float = 0.0
    r: float | None = None
    z: float | None = None
    unjudged: str = ""
    """Why this output was not judged, where it was not."""
    doubted: int = 0
    """Elements not judged since float32 may answer mask_mod's comparisons of floats either way there."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a Trial: figures for every output, failures (first the one that names it), and what it ran on."""

    status: Literal["pass", "fail"]
    figures: dict[OutputName, Figures] = {}
    failures: tuple[Failure, ...] = ()
    seconds: dict[str, float] = {}
    """Wall time of each stage: compile, inputs, kernel, oracle, judge."""
    device: str = ""
    versions: dict[str, str] = {}

    @property
    def failure(self) -> Failure | None:
        """The failure that this verdict is known by."""
        return self.failures[0] if self.failures else None
