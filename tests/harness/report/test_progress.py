"""One progress display for all commands: on a terminal alone, with the columns that are wanted."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from attnfuzz.harness.report.progress import ProgressView, progress_on


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, "doing 0:00:00"),
        ({"bar": True, "count": True}, "doing ━━━━━━━━━━━━╺━━━━━━━━━━━ 1/2 0:00:00"),
        ({"note": True, "width": 7}, "doing half 0:00:00"),
        ({"bar": True, "left": True}, "doing ━━━━━━━━━━━━╺━━━━━━━━━━━ 0:00:00 -:--:--"),
    ],
)
def test_it_shows_what_is_wanted(columns: dict[str, Any], expected: str) -> None:
    text = StringIO()
    with progress_on(Console(file=text, force_terminal=True, width=100), **columns) as progress:
        progress.add_task("doing", total=2, completed=1, note="half")
    lines = [" ".join(Text.from_ansi(line).plain.split()) for line in text.getvalue().splitlines()]
    assert any(line.endswith(expected) for line in lines), lines


@pytest.mark.parametrize(("terminal", "live"), [(False, None), (True, False)])
def test_it_is_silent_where_there_is_no_terminal(terminal: bool, live: bool | None) -> None:
    text = StringIO()
    with ProgressView(progress_on(Console(file=text, force_terminal=terminal), live=live)) as view:
        view.bars.add_task("doing", total=2)
    assert text.getvalue().strip() == ""
