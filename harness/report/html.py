"""The HTML report: one file with everything in it, readable offline and on paper. Jinja2 is imported when a page is made."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from attnfuzz.harness.campaign.corpus import repro_line
from attnfuzz.harness.campaign.coverage import EDGES
from attnfuzz.harness.core.environment import versions
from attnfuzz.harness.core.files import exists
from attnfuzz.harness.core.text import counted, dumps, printable
from attnfuzz.harness.judge.errormap import read_maps
from attnfuzz.harness.judge.failure import CAPTURED_TITLES, OUTPUT_TITLES, row_of_gradient
from attnfuzz.harness.report import plots
from attnfuzz.harness.report.merge import MergedRuns, value
from attnfuzz.harness.report.runfile import FailureRecord, KernelRecord, OutputRecord
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import OUTPUT_NAMES

__all__ = ["Page", "page"]

_TITLES: Final = dict[str, str]([*OUTPUT_TITLES.items(), *CAPTURED_TITLES.items()])
_TEMPLATES: Final = Path(__file__).parent / "templates"
_OPEN: Final = 10
"""Failures that are shown in full at once; the others unfold."""
_HEIGHT: Final = 64
"""Pixels of a histogram's highest bar, as in the template."""
_PITCH: Final = 8
_GAP: Final = 6
"""Pixels between what is within the budget and what is beyond."""
_LEAST_HEIGHT: Final = 2.0
_LONGEST_LINE: Final = 1 << 15
"""Letters of a command to copy: paths have some thousand at most."""


@dataclass(frozen=True, slots=True)
class Page:
    """The page's text, how many pictures are in it, and why others are not."""

    text: str
    pictures: int
    without: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Cell:
    """One output of one kernel in the table: text, sort key, CSS class, and tooltip."""

    text: str
    sort: float
    look: str
    title: str


@dataclass(frozen=True, slots=True)
class _FailureView:
    """One failure as the page shows it."""

    record: FailureRecord
    number: int
    output: str
    repro: str
    case: str
    picture: str = ""
    first: str = ""
    """The picture of the Case as it was found."""
    no_picture: str = ""


@dataclass(frozen=True, slots=True)
class _Bar:
    """One bin of a histogram: pixels, whether it is beyond the budget, and its range and Cases in words."""

    x: float
    y: float
    width: float
    height: float
    over: bool
    text: str


@dataclass(frozen=True, slots=True)
class _Histogram:
    """Error over budget of one output; `limit` is the x of the budget, `text` sums it up."""

    bars: tuple[_Bar, ...]
    limit: float
    text: str
    cases: int
    over: int


def page(merged: MergedRuns, folder: Path, *, pictures: int, step: Callable[[], None] = lambda: None) -> Page:
    """Render the runs of a folder.

    Args:
        merged: what to show.
        folder: DIR, where maps and Cases are, wherever it was when they were written.
        pictures: how many are drawn at most; each takes half a second and some ten kilobytes.
        step: called after each failure.

    Raises:
        BadArgument: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise BadArgument("jinja2: it is not installed, and the page needs it; pip install 'attnfuzz[report]'") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=_spelled,
    )  # fmt: skip
    environment.filters.update(seconds=_seconds, count=_count, plural=lambda number: "" if number == 1 else "s")
    views: list[_FailureView] = []
    for number, record in enumerate(merged.failures, 1):
        views.append(_failure(record, number, folder, draw=sum(bool(each.picture) for each in views) < pictures))
        step()
    columns = _columns(merged)
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    text = environment.get_template("report.html.j2").render(
        run=merged,
        failures=views,
        open=_OPEN,
        outputs=[_TITLES[name] for name in columns],
        rows=[_row(each, merged, columns) for each in merged.kernels],
        distributions=[(each.kernel, _histograms(each)) for each in merged.kernels if each.outputs],
        features=_features(merged),
        drawn=_draws(merged),
        headers=_headers(merged),
        version=versions().get("attnfuzz", "unknown"),
        style=(_TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    reasons = tuple(dict.fromkeys(each.no_picture for each in views if each.no_picture))
    return Page(text, sum(bool(each.picture) for each in views), reasons)


def _spelled(value: Any) -> Any:
    """Return a value of the page with its foreign text spelled out: a bidi control turns what stands around it."""
    return type(value)(printable(value)) if isinstance(value, str) else value


def _failure(record: FailureRecord, number: int, folder: Path, *, draw: bool) -> _FailureView:
    repro = _command(record.repro or "")
    if record.path is not None:
        # The folder may have been moved since.
        here = folder / "cases" / Path(record.path).name
        if exists(here) and not exists(record.path):
            repro = repro_line(str(here), record.kernel)
    picture = first = ""
    reason = record.no_maps or ("it was not made" if record.shrunk else "the run ended before it was shrunk")
    if record.maps is not None and not draw:
        reason = f"left out: draw it by {repro} --plot FILE.png" if repro else "left out"
    elif record.maps is not None:
        picture, reason = _picture(record.maps, record.title, folder)
        if record.first_maps is not None:
            first, _ = _picture(record.first_maps, f"{record.title}, as found", folder)
    return _FailureView(
        record=record,
        number=number,
        output=_titled(record.output) or record.check,
        repro=repro,
        case=dumps(record.case) if record.case else "",
        picture=picture,
        first=first,
        no_picture=reason,
    )


def _command(line: str) -> str:
    """Return the line that runs a Case again, to be copied; empty where it is another command: a run file may say anything."""
    words: list[str] = []
    with contextlib.suppress(ValueError):
        words = shlex.split(line) if len(line) <= _LONGEST_LINE else []
    match words:
        case ["attnfuzz", "repro", first] | ["attnfuzz", "repro", first, "--kernel", _] | ["pytest", first, "--attnfuzz-case", _]:
            # Nothing in it is an option of another kind, or read by a shell.
            return line if not first.startswith("-") and shlex.join(words) == line else ""
    return ""


def _picture(name: str, title: str, folder: Path) -> tuple[str, str]:
    """Return (the error maps as a data URI, why there is no picture); one of them is empty."""
    path = folder / "maps" / Path(name).name
    try:
        maps = read_maps(path)
        content = plots.render(maps, title, plots.subtitle(maps))
    except BadArgument as error:
        return "", str(error)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}", ""


def _titled(name: str | None) -> str:
    return _TITLES.get(name or "", "")


def _columns(merged: MergedRuns) -> list[str]:
    """Return the outputs, and the gradients of captured tensors that some kernel has or fails in."""
    rows = {name for each in merged.kernels for name in each.captured} | {_place(each) for each in merged.failures}
    return [*OUTPUT_NAMES, *(name for name in CAPTURED_TITLES if name in rows)]


def _place(failure: FailureRecord) -> str:
    """Return the output, or the row of captured tensors' gradients, that a failure is of; empty: neither."""
    return failure.output or row_of_gradient(failure.output, failure.check) or ""


def _row(kernel: KernelRecord, merged: MergedRuns, columns: Sequence[str]) -> dict[str, Any]:
    """Return one kernel's line of the table."""
    own = [each for each in merged.failures if each.kernel == kernel.kernel]
    return {
        "kernel": kernel.kernel,
        "cases": kernel.cases,
        "rate": kernel.cases / kernel.seconds if kernel.seconds else 0.0,
        "ended": kernel.ended,
        "cells": [_cell(kernel, name, own) for name in columns],
        "failures": len(own),
        "others": [each for each in own if _place(each) not in columns],
        "first": next((number for number, each in enumerate(merged.failures, 1) if each.kernel == kernel.kernel), 0),
    }


def _cell(kernel: KernelRecord, name: str, failures: list[FailureRecord]) -> _Cell:
    output = (kernel.captured if name in CAPTURED_TITLES else kernel.outputs).get(name)
    wrong = [each for each in failures if _place(each) == name]
    title = _titled(name)
    if output is None or not (output.cases or output.failures):
        unjudged = f", {output.unjudged} not judged" if output else ""
        return _Cell("–", -1.0, "none" if not wrong else "wrong", f"{title} of {kernel.kernel}: no Case judged{unjudged}")
    worst = value(output.worst)
    text = f"{title} of {kernel.kernel}: worst error {_ratio(worst)} x its budget"
    text += f", wrong in {output.failures} of {counted(output.cases, 'Case')}"
    text += f", {output.doubted} judged in part" if output.doubted else ""
    if output.failures or wrong:
        return _Cell(f"✗ {_ratio(worst)}", worst, "wrong", text)
    return _Cell(_ratio(worst), worst, "close" if worst > 0.9 else "right", text)


def _histograms(kernel: KernelRecord) -> list[tuple[str, _Histogram | None]]:
    return [(OUTPUT_TITLES[name], _histogram(kernel.outputs[name]) if name in kernel.outputs else None) for name in OUTPUT_NAMES]


def _histogram(output: OutputRecord) -> _Histogram | None:
    """Return the bars of each Case's worst error over budget, None where none was judged; the highest bar fills the height."""
    counts = output.histogram
    most, cases = max(counts), sum(counts)
    if not cases:
        return None
    within = sum(1 for edge in EDGES if edge <= 1)
    bars = []
    for index, count in enumerate(counts):
        height = max(_LEAST_HEIGHT, _HEIGHT * count / most) if count else 0.0
        x = index * (_PITCH - 0.5) + (_GAP if index >= within else 0)
        text = f"{_range(index)}: {counted(count, 'Case')}"
        bars.append(_Bar(x, _HEIGHT - height, _PITCH - 1.5, height, index >= within, text))
    over = sum(counts[within:])
    text = f"{counted(cases, 'Case')}, {over} beyond the budget; worst {float(output.worst):.3g}"
    return _Histogram(tuple(bars), within * (_PITCH - 0.5) + _GAP / 2 - 0.75, text, cases, over)


def _range(index: int) -> str:
    if index > len(EDGES):
        return "infinite or NaN"
    if index == len(EDGES):
        return f"over {EDGES[-1]:g}"
    return f"{EDGES[index - 1] if index else 0:g} to {EDGES[index]:g}"


def _features(merged: MergedRuns) -> list[tuple[str, list[int]]]:
    """Return each feature with its count for every kernel, by name."""
    names = dict.fromkeys(name for kernel in merged.kernels for name in kernel.features)
    rows = [(name, [kernel.features.get(name, 0) for kernel in merged.kernels]) for name in names]
    return sorted(rows, key=lambda row: row[0])


def _draws(merged: MergedRuns) -> list[tuple[str, list[tuple[str, int, float]]]]:
    """Return what was drawn for all kernels: (what, (value, Cases, share of the most frequent))."""
    totals: dict[str, dict[str, int]] = {}
    for kernel in merged.kernels:
        for what, counts in kernel.drawn.items():
            for name, count in counts.items():
                into = totals.setdefault(what, {})
                into[name] = into.get(name, 0) + count
    return [
        (what, _shares(counts)) for what, counts in totals.items() if len(counts) > 1 or what in ("dtype", "packing", "check")
    ]


def _shares(counts: dict[str, int]) -> list[tuple[str, int, float]]:
    """Return each value with its Cases and its share of the most frequent one's."""
    most = max((1, *counts.values()))
    return [(name, count, count / most) for name, count in sorted(counts.items(), key=lambda each: -each[1])]


def _headers(merged: MergedRuns) -> list[dict[str, Any]]:
    """Return settings and environment of the runs, equal ones once."""
    headers: list[dict[str, Any]] = []
    for run in merged.runs:
        settings = {name: each for name, each in run.settings.items() if name not in ("shard", "out", "seconds")}
        environment = dict(run.environment)
        if not isinstance(environment.get("versions"), dict):
            environment["versions"] = {}
        header = {"settings": settings, "environment": environment, "runs": 1}
        same = next((each for each in headers if (each["settings"], each["environment"]) == (settings, environment)), None)
        if same is None:
            headers.append(header)
        else:
            same["runs"] += 1
    return headers


def _ratio(worst: float) -> str:
    if not math.isfinite(worst):
        return "∞"
    return f"{worst:.2f}" if worst < 100 else f"{worst:.1e}"


def _seconds(number: float) -> str:
    if number < 120:
        return f"{number:.1f} s"
    return f"{number / 60:.1f} min" if number < 7200 else f"{number / 3600:.1f} h"


def _count(number: int) -> str:
    return f"{number:,}"
