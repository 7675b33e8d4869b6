"""Pictures of growth's curves, one SVG each; equal figures are equal files. Matplotlib is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from attnfuzz.harness.core.files import write_whole
from attnfuzz.harness.report.plots import needs_matplotlib
from throughput.growth import CURVES
from throughput.tables import medians

__all__ = ["draw", "points_of"]

_BLUE, _PALE, _GREY = "#1f4e79", "#a3c0dc", "#333333"
_LOGARITHMIC, _CHOSEN = ("corpus",), ("workers", "budget", "corpus")
"""Curves whose x spans several powers of ten; curves whose x were chosen, so that they are the marks of the axis."""
_Point = tuple[float, float, float, float]


def points_of(rows: Sequence[Mapping[str, Any]], curve: str) -> list[_Point]:
    """Return (x, median y, lowest y, highest y) of each point of a curve that was measured, by x."""
    own = [row for row in rows if row["curve"] == curve and row["x"] is not None and row["y"] is not None]
    points = []
    for row in medians(own, ("kernel", "curve", "point")):
        of_point = [each["y"] for each in own if each["point"] == row["point"]]
        points.append((row["x"], row["y"], min(of_point), max(of_point)))
    return sorted(points)


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write a picture of each curve into `folder`, and return their paths.

    Raises:
        BadArgument: matplotlib is not installed.
    """
    needs_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for curve, (x, y) in CURVES.items():
        points = points_of(rows, curve)
        if len(points) > 1:
            kernel = next(row["kernel"] for row in rows if row["curve"] == curve)
            paths.append(folder / f"throughput-{curve}.svg")
            write_whole(paths[-1], _picture(points, f"{y}, {kernel}", x, y, curve))
    return paths


def _picture(points: Sequence[_Point], title: str, x: str, y: str, curve: str) -> bytes:
    """Return a line through the medians, with a band from the lowest round to the highest."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    xs, medians_, lows, highs = zip(*points, strict=True)
    with mpl.rc_context({"svg.hashsalt": "attnfuzz", "font.size": 9}):
        figure = Figure(figsize=(6.0, 3.4), facecolor="white", layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.fill_between(xs, lows, highs, color=_PALE, linewidth=0)
        axes.plot(xs, medians_, color=_BLUE, linewidth=1.6, marker="o", markersize=4)
        if curve in _LOGARITHMIC:
            # Zero stored Cases have a place too.
            axes.set_xscale("symlog", linthresh=10)
        if curve in _CHOSEN:
            axes.set_xticks(xs, [f"{each:g}" for each in xs])
            axes.minorticks_off()
        axes.set_ylim(0, 1.1 * max(highs) or 1.0)
        axes.set_title(title, fontsize=11, fontweight="bold", loc="left", color=_GREY)
        axes.set_xlabel(x, color=_GREY)
        axes.set_ylabel(y, color=_GREY)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        content = BytesIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()
