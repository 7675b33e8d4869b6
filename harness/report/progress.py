"""Progress on a terminal; nothing where there is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self

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

__all__ = ["HEARTBEAT", "Heartbeat", "Pace", "ProgressView", "Verbosity", "progress_on", "seconds_text"]

Verbosity = Literal["quiet", "normal", "verbose"]
"""quiet: failures and the last line; verbose: also each replay and compile, and each kernel's start."""
HEARTBEAT = 30.0
"""Seconds between two lines of progress where there is no terminal."""


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


class Heartbeat:
    """Calls `beat` every 30 s, from another thread, until it is stopped.

    Args:
        beat: what to call.
    """

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat, self._over = beat, threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End it; what is being printed is printed to its end."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(HEARTBEAT):
            self._beat()


@dataclass(slots=True)
class Pace:
    """How far a run has come, and an estimate of the time that is left.

    Args:
        seconds: of the run; None: no limit.
        wanted: Cases of all kernels; None: no limit.
    """

    seconds: float | None = None
    wanted: int | None = None
    cases: int = 0
    _started: float = field(default_factory=lambda: time.monotonic())
    _first: float | None = None

    @property
    def elapsed(self) -> float:
        """Return the seconds since its begin."""
        return time.monotonic() - self._started

    def count(self) -> None:
        """Count a Case."""
        self.cases += 1
        if self._first is None:
            self._first = time.monotonic()

    @property
    def left(self) -> float | None:
        """Return the seconds that are left, by the limit on time and by the rate of Cases; None: not known."""
        by_time = None if self.seconds is None else max(0.0, self.seconds - self.elapsed)
        spent = 0.0 if self._first is None else time.monotonic() - self._first
        by_cases = None
        if self.wanted is not None and self.cases > 1 and spent > 0:
            by_cases = max(0, self.wanted - self.cases) * spent / (self.cases - 1)
        return min((each for each in (by_time, by_cases) if each is not None), default=None)

    def text(self) -> str:
        """Return the estimate in words; empty where nothing is known."""
        return "" if self.left is None else f", about {seconds_text(self.left)} left"


def seconds_text(seconds: float) -> str:
    """Return seconds as "40 s", "3 min" or "1 h 10 min"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
