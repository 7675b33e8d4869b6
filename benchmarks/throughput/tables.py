"""Tables of results: on a terminal, as Markdown, and as rows of JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["Column", "Sheet", "as_text", "median", "medians"]

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column: the rows' key, its title, and how its numbers are written."""

    key: str
    title: str
    form: str = ""
    """Format specification of numbers; "" for text."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """One table of results with its title, and sentences that belong under it."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def show(self, console: Console) -> None:
        """Print it for people."""
        table = Table(title=escape(self.title), title_justify="left", box=box.SIMPLE_HEAD)
        for column in self.columns:
            table.add_column(column.title, justify="right" if column.form else "left")
        for row in self.rows:
            table.add_row(*(escape(as_text(row.get(column.key), column.form)) for column in self.columns))
        console.print(table)
        for note in self.notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)

    def markdown(self) -> str:
        """Return it as Markdown, ready for a page."""
        lines = [f"**{self.title}**", "", _line(column.title for column in self.columns)]
        lines.append(_line("--:" if column.form else "---" for column in self.columns))
        lines += [_line(as_text(row.get(column.key), column.form) for column in self.columns) for row in self.rows]
        return "\n".join([*lines, *(part for note in self.notes for part in ("", note))]) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(each.replace('|', chr(92) + '|') for each in cells)} |"


def as_text(value: Any, form: str = "") -> str:
    """Return a cell's text; "-" where there is no value."""
    if value is None:
        return "-"
    return format(value, form) if form and isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of what was measured; None where nothing was."""
    known = [each for each in values if each is not None]
    return statistics.median(known) if known else None


def medians(rows: Sequence[Row], same: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row for all rows that agree in the keys `same`: the medians of their numbers, and how many rounds they are.

    What is no number is the first row's.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in same), []).append(row)
    joined = []
    for group in groups.values():
        numeric = {key for row in group for key, value in row.items() if isinstance(value, int | float)} - set(same)
        joined.append({key: median(row.get(key) for row in group) if key in numeric else group[0][key] for key in group[0]}
                      | {"rounds": len(group)})  # fmt: skip
    return joined
