"""`attnfuzz selftest memory` on a terminal: a row per planted fault, a line per kernel without one, and the verdict."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnfuzz.harness.audit.selftest.memory import MemoryTried

__all__ = ["show_memory"]


def show_memory(console: Console, done: MemoryTried) -> None:
    """The table of faults, the kernels without one, and one line of verdict."""
    table = Table()
    for column in ("fault", "found", "at", "minimal case", "cases", "right"):
        table.add_column(column, justify="right" if column == "cases" else "left", overflow="fold")
    for row in done.rows:
        right = f"[red]no: {escape('; '.join(row.wrong))}; expected {escape(row.expected)}[/]" if row.wrong else "[green]yes[/]"
        place = row.line.partition(": ")[0] if row.line in row.message else "?"
        table.add_row(*(escape(cell) for cell in (row.title, row.got, place, row.minimal, str(row.cases))), right)
    console.print(table)
    for row in done.rows:
        if row.wrong:
            console.print(
                f"[red]{escape(f'{row.title}: expected {row.line}; {row.message}')}[/]", highlight=False, soft_wrap=True
            )
    for each in done.clean:
        console.print(f"{each.kernel}: {each.cases} cases, {len(each.alarms)} false alarms", highlight=False)
        for alarm in each.alarms:
            console.print(f"[red]{escape(alarm)}[/]", highlight=False, soft_wrap=True)
    if unchecked := done.environment.get("unchecked"):
        console.print(f"[red]{escape(unchecked)}[/]", highlight=False, soft_wrap=True)
    wrong = sum(bool(row.wrong) for row in done.rows)
    told = (
        "[green]every fault is found, and no false alarm[/]"
        if done.right
        else f"[red]{wrong} of {len(done.rows)} rows are wrong[/]"
    )
    if wrong == 0 and not done.right:
        told = "[red]false alarms, or nothing tried[/]"
    console.print(f"{told} ({done.environment.get('device')}, {done.seconds:.0f} s)", highlight=False)
