"""Error maps as data: how far off each output is by row and column, small enough for a file and a page.

harness/trial/errormaps.py computes them, harness/report/plots.py draws them. Reading needs no torch, drawing only numpy.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from attnfuzz.harness.core.files import Unreadable, decoded, read_file, write_whole
from attnfuzz.kernels.errors import reject, shown
from attnfuzz.kernels.problem import OUTPUT_NAMES, OutputName

__all__ = [
    "BROKEN",
    "DECADES",
    "ENDLESS",
    "EXACT",
    "FORMAT",
    "MOST_CELLS",
    "NOT_JUDGED",
    "OUTSIDE",
    "STEPS",
    "UNWRITTEN",
    "Axis",
    "ErrorMaps",
    "Grid",
    "OutputMap",
    "axis",
    "copy_maps",
    "packed",
    "read_maps",
    "unpacked",
    "write_maps",
]

FORMAT: Final = 1
MOST_CELLS: Final = 384
"""Limit on cells along one side of a map: larger sides are reduced, each cell to its worst element."""
MOST_SEGMENTS: Final = 48
"""Limit on sequences or heads shown separately along one side."""
_LARGEST: Final = 8 << 20
"""Bytes: larger files of maps are refused."""
_REMEDY: Final = "find the case again, or draw it by `attnfuzz repro CASE --plot FILE.png`"
_MOST: Final = 2**53
"""Limit on a number of elements."""

# Levels of a cell, one byte each. Worse is larger, so that the worst of many is their maximum.
NOT_JUDGED, EXACT = 0, 1
STEPS, DECADES = 120, 3
"""EXACT + 1 ... EXACT + STEPS: error / budget from 1e-3 to 1, by its logarithm; then as many from 1 to 1000."""
ENDLESS, BROKEN, UNWRITTEN = 2 + 2 * STEPS, 250, 251
"""Beyond every multiple of the budget; NaN or infinity; NaN that is memory never written, or computed from it."""
OUTSIDE: Final = 3
"""Level in a mask: query and key of different sequences; 0: hidden, 1: seen in part of the cell, 2: seen."""


class Axis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One side of a map: segments one after the other (sequences, or heads), each cut into cells of `step` elements."""

    segments: tuple[int, ...]
    """Elements of each: tokens of a sequence, columns of a head."""
    step: int = 1
    merged: int = 0
    """Number of segments that are shown as one, since they are too many; else 0."""

    def __post_init__(self) -> None:
        if not 1 <= self.step <= _MOST or any(not 0 <= each <= _MOST for each in (*self.segments, self.merged)):
            raise ValueError("an axis has steps of 1 or more, and segments of 0 or more elements")
        if len(self.segments) > MOST_SEGMENTS:
            raise ValueError(f"an axis has at most {MOST_SEGMENTS} segments")

    @property
    def cells(self) -> int:
        """Return the number of cells along the side."""
        return sum(-(-each // self.step) for each in self.segments)

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first cell, cells, elements) of each segment."""
        at = 0
        for each in self.segments:
            cells = -(-each // self.step)
            yield at, cells, each
            at += cells


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Levels by row and column: one byte each, row by row, deflated, as base64."""

    rows: Axis
    columns: Axis
    cells: str


class _BrokenMapsError(ValueError):
    """Error for maps that cannot be drawn."""


class OutputMap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One output: its grid and its figures. `tile`: rows of the kernel's tiles, 0 where it names none."""

    output: OutputName
    grid: Grid
    elements: int
    over: int
    worst: float | Literal["inf"]
    tile: int = 0
    unjudged: str = ""


class ErrorMaps(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All outputs of one Case, and its mask: rows are queries, columns keys. `tiles`: (queries, keys), 0 where unknown."""

    format: int
    case: dict[str, Any]
    id: str
    outputs: tuple[OutputMap, ...]
    mask: Grid | None = None
    tiles: tuple[int, int] = (0, 0)
    mask_heads: bool = False
    """Whether the mask differs by head: a cell counts as seen in part where heads differ."""

    @property
    def over(self) -> int:
        """Return the number of wrong elements of all outputs."""
        return sum(each.over for each in self.outputs)


def axis(segments: tuple[int, ...]) -> Axis:
    """Return the Axis of `segments`: separate unless too many, in cells so large that there are at most MOST_CELLS."""
    merged = 0
    if len(segments) > MOST_SEGMENTS:
        merged, segments = len(segments), (sum(segments),)
    step = max(1, math.ceil(sum(segments) / MOST_CELLS))
    while sum(-(-each // step) for each in segments) > MOST_CELLS:
        step += 1
    return Axis(segments=segments, step=step, merged=merged)


def packed(levels: bytes) -> str:
    """Encode levels as text."""
    return base64.b64encode(zlib.compress(levels, 6)).decode()


def unpacked(grid: Grid) -> bytes:
    """Return the levels of a grid, row by row.

    Raises:
        ValueError: the text cannot be decoded, or its length does not match the sides.
    """
    size = grid.rows.cells * grid.columns.cells
    if grid.rows.cells > MOST_CELLS or grid.columns.cells > MOST_CELLS:
        raise ValueError("a map is larger than any that is written")
    try:
        reader = zlib.decompressobj()
        levels = reader.decompress(base64.b64decode(grid.cells, validate=True), size + 1)
    except zlib.error as error:
        raise ValueError(f"its levels cannot be read: {error}") from None
    if len(levels) != size:
        raise ValueError(f"it has {len(levels)} levels, not {size}")
    return levels


def write_maps(path: Path, maps: ErrorMaps) -> None:
    """Write maps whole or not at all.

    Raises:
        OSError: they cannot be written.
    """
    write_whole(path, msgspec.json.encode(maps).decode() + "\n")


def read_maps(path: Path) -> ErrorMaps:
    """Read what `write_maps` wrote.

    Raises:
        BadArgument: the file is missing, broken or of another version.
    """
    return _maps_of(read_file(path, _LARGEST, argument="maps", remedy=_REMEDY), path)


def copy_maps(path: Path, target: Path) -> None:
    """Copy a file of maps whole or not at all.

    Raises:
        BadArgument: it is missing, broken or of another version.
        OSError: the copy cannot be written.
    """
    content = read_file(path, _LARGEST, argument="maps", remedy=_REMEDY)
    _maps_of(content, path)
    write_whole(target, content)


def _maps_of(content: bytes, path: Path) -> ErrorMaps:
    try:
        data = decoded(content)
        version = data.get("format") if isinstance(data, dict) else None
        if type(version) is not int or version != FORMAT:
            raise reject("maps", str(path), f"its format is {shown(version)}, this attnfuzz reads {FORMAT}", _REMEDY)
        maps = msgspec.convert(data, ErrorMaps)
        _check(maps)
    except (Unreadable, msgspec.ValidationError, _BrokenMapsError) as error:
        raise reject("maps", str(path), f"it is broken ({error})", _REMEDY) from None
    return maps


def _check(maps: ErrorMaps) -> None:
    """Check what drawing relies on.

    Raises:
        _BrokenMapsError: an output is there twice, a grid cannot be read, or a number is out of range.
    """
    names = [each.output for each in maps.outputs]
    if len(set(names)) < len(names) or not set(names) <= set(OUTPUT_NAMES):
        raise _BrokenMapsError("it has an output twice")
    numbers = [*maps.tiles, *(number for each in maps.outputs for number in (each.elements, each.over, each.tile))]
    if not all(0 <= each <= _MOST for each in numbers):
        raise _BrokenMapsError("it has a number of elements that is negative or too large")
    try:
        for each in (*(output.grid for output in maps.outputs), *([maps.mask] if maps.mask else [])):
            unpacked(each)
    except ValueError as error:
        raise _BrokenMapsError(str(error)) from None
