"""Error maps as data: how far off each output is, row by row and column by column, small enough for a file and a page.

Made in harness/trial/errormaps.py, drawn in harness/report/plots.py. No torch is needed to read one, and numpy only to draw it.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from attnfuzz.harness.core.files import write_whole
from attnfuzz.kernels.problem import BadArgument, OutputName, reject

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
    "packed",
    "read_maps",
    "unpacked",
    "write_maps",
]

FORMAT: Final = 1
MOST_CELLS: Final = 384
"""Cells along one side of a map: what is larger is reduced by its worst element."""
MOST_SEGMENTS: Final = 48
"""Sequences or heads that are told apart along one side."""
_LARGEST: Final = 8 << 20
"""Bytes of a file of maps: what is larger was not written here."""

# Levels of a cell, one byte, worse is more, so that the worst of many is their maximum.
NOT_JUDGED, EXACT = 0, 1
STEPS, DECADES = 120, 3
"""EXACT + 1 ... EXACT + STEPS: error / budget from 1e-3 to 1, by its logarithm; then as many from 1 to 1000."""
ENDLESS, BROKEN, UNWRITTEN = 2 + 2 * STEPS, 250, 251
"""Beyond every multiple of the budget; NaN or infinity; NaN that is memory never written, or was made from it."""
OUTSIDE: Final = 3
"""Of a mask: query and key of different sequences; 0: hidden, 1: seen in part of the cell, 2: seen."""


class Axis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One side of a map: segments one after the other (sequences, or heads), each cut into cells of `step` elements."""

    segments: tuple[int, ...]
    """Elements of each: tokens of a sequence, columns of a head."""
    step: int = 1
    merged: int = 0
    """So many segments are too many to tell apart: they are shown as one."""

    def __post_init__(self) -> None:
        if self.step < 1 or any(each < 0 for each in self.segments):
            raise ValueError("an axis has steps of 1 or more, and segments of 0 or more elements")

    @property
    def cells(self) -> int:
        """Cells along the side."""
        return sum(-(-each // self.step) for each in self.segments)

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """(first cell, cells, elements) of each segment."""
        at = 0
        for each in self.segments:
            cells = -(-each // self.step)
            yield at, cells, each
            at += cells


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Levels by rows and columns: one byte each, row by row, deflated, as base64."""

    rows: Axis
    columns: Axis
    cells: str


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
    """The mask is not the same for all heads: a cell counts as seen in part where heads differ."""

    @property
    def over(self) -> int:
        """Wrong elements of all outputs."""
        return sum(each.over for each in self.outputs)


def axis(segments: tuple[int, ...]) -> Axis:
    """Segments told apart where there are few enough of them, in cells so large that the side has at most MOST_CELLS."""
    merged = 0
    if len(segments) > MOST_SEGMENTS:
        merged, segments = len(segments), (sum(segments),)
    step = max(1, math.ceil(sum(segments) / MOST_CELLS))
    while sum(-(-each // step) for each in segments) > MOST_CELLS:
        step += 1
    return Axis(segments=segments, step=step, merged=merged)


def packed(levels: bytes) -> str:
    """Levels as text."""
    return base64.b64encode(zlib.compress(levels, 6)).decode()


def unpacked(grid: Grid) -> bytes:
    """The levels of a grid, row by row.

    Raises:
        ValueError: they are not as many as its sides say, or no text of ours.
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
    remedy = "find the case again, or draw it by `attnfuzz repro CASE --plot FILE.png`"
    try:
        if path.stat().st_size > _LARGEST:
            raise reject("maps", str(path), "it is too large to be maps of ours", remedy)
        data = msgspec.json.decode(path.read_bytes())
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            version = data.get("format") if isinstance(data, dict) else None
            raise reject("maps", str(path), f"its format is {version!r}, this attnfuzz reads {FORMAT}", remedy)
        maps = msgspec.convert(data, ErrorMaps)
        for each in (*(output.grid for output in maps.outputs), *([maps.mask] if maps.mask else [])):
            unpacked(each)
    except OSError as error:
        raise reject("maps", str(path), f"it cannot be read ({error.strerror})", remedy) from None
    except BadArgument:
        raise
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise reject("maps", str(path), f"it is broken ({error})", remedy) from None
    return maps
