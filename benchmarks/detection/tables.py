"""The results as tables: found by each way of testing, by kernel and by kind of bug, and what it fails of right kernels."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from support.mutants import mutants

from detection.contest import METHODS, OURS, Result

__all__ = ["show"]


def show(terminal: Console, rows: Sequence[Result], *, markdown: bool) -> None:
    """Print the tables of finished turns."""
    style = box.MARKDOWN if markdown else box.SIMPLE_HEAD
    for table in (_methods(rows), _kinds(rows), _words()):
        table.box = style
        terminal.print(table, highlight=False)
        terminal.print()
    for line in _apart(rows):
        terminal.print(line, highlight=False, soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _present(rows: Sequence[Result]) -> list[str]:
    return [each for each in METHODS if any(row.method == each for row in rows)]


def _methods(rows: Sequence[Result]) -> Table:
    """Return a row for each method: what it found, in how many Cases, and its false alarms."""
    bank = mutants()
    kernels = list(dict.fromkeys(bank[row.subject].kernel for row in rows if row.subject in bank))
    table = _table("", "found", *kernels, "by it alone", "Cases tried", "in all", "seconds to find", "false alarms")
    for method in _present(rows):
        own = [row for row in rows if row.method == method and row.subject in bank]
        of_kernels = [[row for row in own if bank[row.subject].kernel == kernel] for kernel in kernels]
        alone = sum(_alone(row, rows) for row in own)
        seconds = [row.seconds for row in own if row.found]
        tried = statistics.median([row.cases for row in own if not row.found] or [row.cases for row in own] or [0])
        table.add_row(
            method, _share(own), *map(_share, of_kernels), str(alone), f"{tried:g}", str(sum(row.cases for row in own)),
            f"{statistics.median(seconds):.1f}" if seconds else "-", _alarms(method, rows),
        )  # fmt: skip
    return table


def _share(rows: Sequence[Result]) -> str:
    return f"{sum(bool(row.found) for row in rows)} of {len(rows)}"


def _alone(row: Result, rows: Sequence[Result]) -> bool:
    """Whether all other methods had their turn on the bug, and none found it."""
    others = [each for each in rows if each.subject == row.subject and each.method != row.method]
    return bool(row.found) and len(others) == len(_present(rows)) - 1 and not any(each.found for each in others)


def _alarms(method: str, rows: Sequence[Result]) -> str:
    """Return failures of the kernels without bugs, of how many Cases."""
    right = [row for row in rows if row.method == method and row.subject not in mutants()]
    return f"{sum(row.alarms for row in right)} of {sum(row.cases for row in right)}" if right else "-"


def _kinds(rows: Sequence[Result]) -> Table:
    """Return a row for each kind of bug, the first part of its id."""
    present = _present(rows)
    table = _table("kind of bug", "mutants", *present)
    of_mutants = [row for row in rows if row.subject in mutants()]
    for kind in dict.fromkeys(row.subject.partition("-")[0] for row in sorted(of_mutants, key=lambda row: row.subject)):
        own = [row for row in of_mutants if row.subject.partition("-")[0] == kind]
        counts = (str(sum(bool(row.found) for row in own if row.method == method)) for method in present)
        table.add_row(kind, str(len({row.subject for row in own})), *counts)
    return table


def _apart(rows: Sequence[Result]) -> Iterator[str]:
    """Yield what attnfuzz alone found, what it missed and others found, and what none found, by id."""
    bank = mutants()
    turns = Counter(row.subject for row in rows)
    # After Ctrl-C some methods may not have had their turn.
    whole = [each for each in sorted(turns) if each in bank and turns[each] == len(_present(rows))]
    finders: dict[str, list[str]] = {each: [] for each in whole}
    for row in rows:
        if row.found and row.subject in finders:
            finders[row.subject].append(row.method)
    alone = [each for each, by in finders.items() if by == [OURS]]
    others = [f"{each} ({', '.join(sorted(by))})" for each, by in finders.items() if by and OURS not in by]
    none = [each for each, by in finders.items() if not by]
    for title, ids in ((f"found by {OURS} alone", alone), ("found by others only", others), ("found by none", none)):
        yield f"{title} ({len(ids)}): {', '.join(ids) or '-'}"
    for method in (each for each in _present(rows) if each != OURS):
        first = sum(OURS in by and method not in by for by in finders.values())
        second = sum(method in by and OURS not in by for by in finders.values())
        yield f"of {OURS} and {method}, the first alone found {first}, the second alone {second}"


def _words() -> Table:
    """Return what each method tries and accepts."""
    table = _table("", "", "Cases", "accepts")
    for name, method in METHODS.items():
        table.add_row(name, method.title, method.shapes, method.accepts)
    return table
