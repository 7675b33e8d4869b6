"""Progress on a terminal; nothing where there is none."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["ProgressView", "progress_on"]


def progress_on(
    console: Console,
    *,
    bar: bool = False,
    count: bool = False,
    note: bool = False,
    left: bool = False,
    width: int = 0,
    live: bool | None = None,
) -> Progress:
    """Return rich's progress display with the time elapsed; it vanishes when it ends.

    Args:
        console: where it is shown.
        bar: show a bar; else a spinner.
        count: show how many of how many are done.
        note: show the field `note` of each task, which `add_task` and `update` then take.
        left: show an estimate of the time left.
        width: columns that the description takes at least.
        live: whether it is shown; by default where `console` is a terminal.
    """
    columns: list[ProgressColumn] = [] if bar else [SpinnerColumn()]
    columns.append(TextColumn(f"{{task.description:<{width}}}" if width else "{task.description}"))
    columns += [BarColumn(bar_width=24)] * bar + [MofNCompleteColumn()] * count
    columns += [TextColumn("{task.fields[note]}")] * note + [TimeElapsedColumn()] + [TimeRemainingColumn()] * left
    live = console.is_terminal if live is None else live
    return Progress(*columns, console=console, disable=not live, transient=True)


class ProgressView:
    """Base of classes that show progress in `bars`: a context, so that the terminal is left as it was."""

    def __init__(self, bars: Progress) -> None:
        self.bars = bars

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()
