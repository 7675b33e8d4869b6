"""Distributions as bars, ready to be drawn by the template: no library, and the page's own colours in light and dark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from attnfuzz.harness.report.runfile import EDGES, OutputRecord

__all__ = ["HEIGHT", "WIDTH", "Bar", "Histogram", "histogram"]

WIDTH: Final = 216
HEIGHT: Final = 64
_PITCH: Final = 8
_GAP: Final = 6
"""Pixels between what is within the budget and what is beyond."""
_LEAST: Final = 2.0


@dataclass(frozen=True, slots=True)
class Bar:
    """One bin: pixels, Cases, and its range in words."""

    x: float
    y: float
    width: float
    height: float
    over: bool
    told: str


@dataclass(frozen=True, slots=True)
class Histogram:
    """The bars of one output; `limit` is where the budget ends, `told` says it in words."""

    bars: tuple[Bar, ...]
    limit: float
    told: str
    cases: int
    over: int


def histogram(output: OutputRecord) -> Histogram | None:
    """The worst error over its budget of each Case, None where none was judged. The highest bin is as high as the picture."""
    counts = output.histogram
    most, cases = max(counts), sum(counts)
    if not cases:
        return None
    within = sum(1 for edge in EDGES if edge <= 1)
    bars = []
    for index, count in enumerate(counts):
        height = max(_LEAST, HEIGHT * count / most) if count else 0.0
        x = index * (_PITCH - 0.5) + (_GAP if index >= within else 0)
        told = f"{_range(index)}: {count} Case{'' if count == 1 else 's'}"
        bars.append(Bar(x, HEIGHT - height, _PITCH - 1.5, height, index >= within, told))
    over = sum(counts[within:])
    told = f"{cases} Cases, {over} beyond the budget; worst {float(output.worst):.3g}"
    return Histogram(tuple(bars), within * (_PITCH - 0.5) + _GAP / 2 - 0.75, told, cases, over)


def _range(index: int) -> str:
    if index > len(EDGES):
        return "infinite or NaN"
    if index == len(EDGES):
        return f"over {EDGES[-1]:g}"
    return f"{EDGES[index - 1] if index else 0:g} to {EDGES[index]:g}"
