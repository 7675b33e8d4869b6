"""Pictures of error maps: error over budget by row and column of each output, with tiles, sequences, heads and the mask.

One colour scale for all maps: blues are within the budget, orange to dark red beyond it, with a step at 1 that shows in grey too.
Matplotlib is imported when something is drawn; it needs no display.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from attnfuzz.harness.core.files import write_whole
from attnfuzz.harness.judge.errormap import (
    BROKEN,
    DECADES,
    ENDLESS,
    EXACT,
    NOT_JUDGED,
    OUTSIDE,
    STEPS,
    UNWRITTEN,
    Axis,
    ErrorMaps,
    Grid,
    OutputMap,
    unpacked,
)
from attnfuzz.harness.judge.failure import OUTPUT_TITLES
from attnfuzz.harness.report.describe import describe_case
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.strategies.case import case_from_object

__all__ = ["SUFFIXES", "needs_matplotlib", "render", "save", "subtitle"]

SUFFIXES: Final = (".png", ".svg", ".pdf")
_WITHIN: Final = ("#fbfdff", "#f1f6fb", "#dde9f4", "#c3d7ea", "#a3c0dc")
_BEYOND: Final = ("#fdae4b", "#f0701a", "#cb2f0d", "#8c0d10", "#4d0013")
_COLOURS: Final = {NOT_JUDGED: "#d9d9d9", ENDLESS: "#4d0013", BROKEN: "#000000", UNWRITTEN: "#00c2a0"}
_MASK: Final = ("#ffffff", "#a8a8a8", "#4a4a4a", "#efe9dc")
_BANDS: Final = 12
"""Colours on each side of the budget: enough to distinguish factors of two, few enough for small files."""
_QUERY_ROWS: Final = ("o", "lse", "dq")
_MOST_LINES: Final = 40
_MOST_LABELS: Final = 12
_WRONG: Final = "#a50f15"


def needs_matplotlib() -> None:
    """Check that drawing is possible, before anything takes time.

    Raises:
        BadArgument: matplotlib or numpy is not installed.
    """
    try:
        import matplotlib
        import numpy
    except ImportError as error:
        name = error.name or "matplotlib"
        raise BadArgument(f"{name}: it is not installed, and drawing needs it; pip install 'attnfuzz[report]'") from None
    del matplotlib, numpy


def subtitle(maps: ErrorMaps) -> str:
    """Return the Case of `maps` in one line."""
    try:
        rows = describe_case(case_from_object(maps.case))
    except BadArgument:
        return f"case {maps.id}"
    return "; ".join(f"{name} {value}" for name, value in rows[1:])


def save(maps: ErrorMaps, path: Path, title: str, subtitle: str = "") -> None:
    """Draw `maps` into a file: its suffix, one of SUFFIXES, is the format.

    Raises:
        BadArgument: another suffix, or the file cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise reject("plot", str(path), "no such format", f"give a file that ends with {', '.join(SUFFIXES)}, or a folder")
    content = render(maps, title, subtitle, path.suffix[1:])
    try:
        write_whole(path, content)
    except OSError as error:
        raise reject("plot", str(path), f"it cannot be written ({error.strerror})", "give a file that can be written") from None


def render(maps: ErrorMaps, title: str, subtitle: str = "", form: str = "png", dpi: int = 100) -> bytes:
    """Return the picture: outputs by query above, by key below, each with the mask; about 1200 x 800 pixels as PNG."""
    needs_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bands = [band for names in (_QUERY_ROWS, ("dk", "dv")) if (band := [each for each in maps.outputs if each.output in names])]
    figure = Figure(figsize=(12.0, 1.75 + 3.3 * max(1, len(bands))), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    top = _headed(figure, title, subtitle)
    height = figure.get_figheight()
    frame = figure.add_gridspec(
        max(1, len(bands)), 1, left=0.055, right=0.985, top=top, bottom=1.0 / height, hspace=0.85 / (3.3 - 0.85) * 1.05
    )
    for index, band in enumerate(bands):
        _band(figure, frame[index], maps, band)
    _legend(figure, maps, height)
    content = BytesIO()
    # Without a date, equal maps are equal files.
    figure.savefig(
        content, format=form, metadata={"Date": None} if form == "svg" else {"CreationDate": None} if form == "pdf" else None
    )
    return content.getvalue()


def _headed(figure: Any, title: str, subtitle: str) -> float:
    """Draw title and subtitle; return where they end, as a share of the height."""
    height, y = figure.get_figheight(), figure.get_figheight() - 0.12
    for text, size, width, weight, most in ((title, 13, 118, "bold", 2), (subtitle, 9.5, 175, "normal", 2)):
        lines = textwrap.wrap(_plain(text), width, max_lines=most, placeholder=" ...") if text else []
        for line in lines:
            figure.text(0.012, y / height, line, fontsize=size, fontweight=weight, va="top", parse_math=False)
            y -= size / 72 * 1.45
    return float((y - 0.42) / height)


def _plain(text: str) -> str:
    """Return one line that any font can draw."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.split()))


def _band(figure: Any, place: Any, maps: ErrorMaps, band: Sequence[OutputMap]) -> None:
    """Draw outputs with the same rows side by side, and the mask by the same rows."""
    queries = band[0].output in _QUERY_ROWS
    widths = [0.45 if each.output == "lse" else 2.0 for each in band] + ([1.6] if maps.mask else [])
    cells = place.subgridspec(1, len(widths), width_ratios=widths, wspace=0.16)
    for index, each in enumerate(band):
        axes = figure.add_subplot(cells[index])
        _output(axes, each, labelled=index == 0, noun="query" if queries else "key")
    if maps.mask is not None:
        _mask(figure.add_subplot(cells[len(band)]), maps, by_query=queries)


def _output(axes: Any, output_map: OutputMap, *, labelled: bool, noun: str) -> None:
    import numpy as np

    rows, columns = output_map.grid.rows, output_map.grid.columns
    lookup = np.full((256, 3), 1.0)
    lookup[: len(_lookup())] = _lookup()
    levels = _array(output_map.grid)
    title = OUTPUT_TITLES[output_map.output]
    if output_map.unjudged and not output_map.elements:
        text, colour = f"{title}: not judged", "#555555"
    elif output_map.over:
        worst = "" if output_map.worst == "inf" else f", {output_map.worst:.3g} x"
        text, colour = f"{title}: {output_map.over:,} of {output_map.elements:,} wrong{worst}", _WRONG
    else:
        text, colour = f"{title}: within budget ({output_map.worst:.2g})", "#1f4e79"
    if output_map.output == "lse":
        text = f"{title}: wrong" if output_map.over else f"{title}: ok"
    axes.set_title(text, fontsize=9.5, color=colour, fontweight="bold" if output_map.over else "normal", pad=17, loc="left")
    _blank_or_image(axes, lookup[levels] if levels.size else None)
    _row_marks(axes, rows, output_map.tile, noun if labelled else None)
    _head_marks(axes, columns, "dim" if output_map.output != "lse" else "")


def _blank_or_image(axes: Any, picture: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    if picture is None:
        axes.text(0.5, 0.5, "no elements", ha="center", va="center", transform=axes.transAxes, color="#777777", fontsize=9)
        return
    height, width = picture.shape[:2]
    axes.imshow(picture, aspect="auto", interpolation="nearest", extent=(0, width, height, 0))


def _row_marks(axes: Any, rows: Axis, tile: int, noun: str | None) -> None:
    """Draw tiles dashed, ends of sequences solid, positions within each sequence at the left."""
    if not rows.cells:
        return
    parts = list(rows.parts())
    lines = sum(each // tile for each in rows.segments) if tile else 0
    for first, _, length in parts:
        if first:
            _line(axes.axhline, first, 1.3)
        if tile and lines <= _MOST_LINES and not rows.merged:
            for at in range(tile, length, tile):
                _line(axes.axhline, first + at / rows.step, 0.8, dashed=True)
    axes.set_ylim(rows.cells, 0)
    if noun is not None:
        _row_names(axes, rows, noun)


def _line(draw: Any, at: float, width: float, *, dashed: bool = False) -> None:
    """Draw a black line with a pale edge, visible on every colour of the scale."""
    draw(at, color="white", linewidth=width + 1.1, alpha=0.75)
    draw(at, color="black", linewidth=width, linestyle=(0, (4, 3)) if dashed else "-")


def _row_names(axes: Any, rows: Axis, noun: str) -> None:
    """Write the first and last position of each sequence, and its number, as far as there is room."""

    def write(text: str, at: float, where: str, points: int, *, turned: bool = False) -> None:
        axes.annotate(text, (0, at), xytext=(points, 0), textcoords="offset points", ha="right", va=where, color="#333333",
                      fontsize=7.5 if turned else 7, rotation=90 if turned else 0, annotation_clip=False)  # fmt: skip

    parts = list(rows.parts())
    several = 1 < len(parts) <= _MOST_LABELS
    for index, (first, cells, length) in enumerate(parts if len(parts) <= _MOST_LABELS else ()):
        roomy = cells > rows.cells / 12
        if length and (roomy or index == 0):
            write("0", first, "top" if roomy else "center", -2)
        if length > 1 and roomy:
            write(str(length - 1), first + cells, "bottom", -2)
        if several and cells > rows.cells / 8:
            write(f"seq {index}", first + cells / 2, "center", -14, turned=True)
    named = f"{noun} (of all {rows.merged} sequences)" if rows.merged else noun
    axes.annotate(named, (0, 0.5), xycoords="axes fraction", xytext=(-28 if several else -17, 0), textcoords="offset points",
                  ha="right", va="center", rotation=90, fontsize=8.5, annotation_clip=False)  # fmt: skip


def _head_marks(axes: Any, columns: Axis, unit: str) -> None:
    """Separate heads by lines; name them above, their columns below."""
    if not columns.cells:
        return
    parts = list(columns.parts())
    every = -(-len(parts) // (_MOST_LABELS if unit else 4))
    for index, (first, cells, _) in enumerate(parts):
        if first:
            _line(axes.axvline, first, 0.8 if len(parts) <= 16 else 0.35)
        if index % every == 0 and not columns.merged:
            name = f"head {index}" if len(parts) <= 4 and unit else f"{index}" if index or not unit else "head 0"
            axes.annotate(name, (first + cells / 2, 0), xytext=(0, 3), textcoords="offset points", ha="center", va="bottom",
                          fontsize=7, color="#333333", annotation_clip=False)  # fmt: skip
    axes.set_xlim(0, columns.cells)
    if unit:
        length = columns.segments[0]
        text = f"{unit} 0 to {length - 1} of each head" if not columns.merged else f"{columns.merged} heads x {unit}"
        axes.set_xlabel(text if len(parts) > 1 else f"{unit} 0 to {length - 1}", fontsize=7.5, labelpad=2, color="#333333")


def _mask(axes: Any, maps: ErrorMaps, *, by_query: bool) -> None:
    import numpy as np

    assert maps.mask is not None
    levels = _array(maps.mask)
    grid = maps.mask
    rows, columns = (grid.rows, grid.columns) if by_query else (grid.columns, grid.rows)
    picture = np.array([_rgb(each) for each in _MASK])[np.minimum(levels if by_query else levels.T, OUTSIDE)]
    _blank_or_image(axes, picture if picture.size else None)
    heads = ", heads differ where grey" if maps.mask_heads else ""
    text = "mask: keys that a query sees" if by_query else "mask: queries that see a key"
    axes.set_title(f"{text}{heads}", fontsize=9.5, color="#333333", pad=17, loc="left")
    _row_marks(axes, rows, maps.tiles[0 if by_query else 1], None)
    tile = maps.tiles[1 if by_query else 0]
    many = bool(tile) and sum(each // tile for each in columns.segments) > _MOST_LINES
    for first, _, length in columns.parts():
        if first:
            axes.axvline(first, color="black", linewidth=1.3)
        for at in range(tile, length, tile) if tile and not many else ():
            axes.axvline(first + at / columns.step, color="#888888", linewidth=0.6, linestyle=(0, (4, 3)))
    if columns.cells:
        axes.set_xlim(0, columns.cells)
    axes.set_xlabel("key" if by_query else "query", fontsize=7.5, labelpad=2, color="#333333")


def _legend(figure: Any, maps: ErrorMaps, height: float) -> None:
    """Draw the scale, the same for every map, and explain the special colours and lines."""
    import numpy as np

    axes = figure.add_axes((0.055, 0.43 / height, 0.36, 0.15 / height))
    bar = _lookup()[EXACT : EXACT + 2 * STEPS + 1][None]
    axes.imshow(bar, aspect="auto", extent=(-DECADES, DECADES, 0, 1))
    axes.axvline(0, color="black", linewidth=1.4)
    axes.set_yticks([])
    axes.set_xticks(
        np.arange(-DECADES, DECADES + 1), ["≤ 0.001", "0.01", "0.1", "1 = budget", "10", "100", "≥ 1000"], fontsize=7.5
    )
    axes.tick_params(axis="x", length=2, pad=1)
    axes.set_title("|error| / budget", fontsize=8, loc="left", pad=2)
    levels = {level for each in maps.outputs for level in set(unpacked(each.grid))}
    named = [
        (_COLOURS[BROKEN], "NaN or infinity", BROKEN in levels),
        (_COLOURS[UNWRITTEN], "never written", UNWRITTEN in levels),
        (_COLOURS[NOT_JUDGED], "not judged", NOT_JUDGED in levels),
        (_MASK[2], "seen", maps.mask is not None),
        (_MASK[3], "other sequence", maps.mask is not None and OUTSIDE in set(unpacked(maps.mask))),
    ]
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Any] = [
        Patch(facecolor=colour, edgecolor="#666666", linewidth=0.5, label=label) for colour, label, present in named if present
    ]
    if any(maps.tiles):
        entries.append(Line2D([], [], color="black", linewidth=0.9, linestyle=(0, (4, 3)), label=_tile_words(maps.tiles)))
    step = max((max(each.grid.rows.step, each.grid.columns.step) for each in maps.outputs), default=1)
    if step > 1:
        entries.append(Line2D([], [], linestyle="", label="a cell shows the worst of its elements"))
    if entries:
        place = {"loc": "lower right", "bbox_to_anchor": (0.988, 0.05 / height)}
        figure.legend(handles=entries, ncols=4, fontsize=8, frameon=False, handlelength=1.6, columnspacing=1.4, **place)


def _tile_words(tiles: tuple[int, int]) -> str:
    """Return text such as "tile of 32 queries, 64 keys"."""
    return "tile of " + ", ".join(f"{size} {noun}" for size, noun in zip(tiles, ("queries", "keys"), strict=True) if size)


def _lookup() -> Any:
    """Return the colour of each level: `(252, 3)` between 0 and 1."""
    import numpy as np

    table = np.ones((UNWRITTEN + 1, 3))
    for colours, begin in ((_WITHIN, EXACT + 1), (_BEYOND, EXACT + 1 + STEPS)):
        stops = np.linspace(0, 1, len(colours))
        for channel in range(3):
            table[begin : begin + STEPS, channel] = np.interp(
                np.floor(np.linspace(0, 1, STEPS, endpoint=False) * _BANDS) / (_BANDS - 1),
                stops,
                [_rgb(each)[channel] for each in colours],
            )
    for level, colour in _COLOURS.items():
        table[level] = _rgb(colour)
    return table


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))


def _array(grid: Grid) -> Any:
    import numpy as np

    return np.frombuffer(unpacked(grid), dtype=np.uint8).reshape(grid.rows.cells, grid.columns.cells)
