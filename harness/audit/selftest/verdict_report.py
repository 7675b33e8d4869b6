"""`attnfuzz selftest verdict` on a terminal: progress, correct kernels by family, faults beside their floors and the rivals."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnfuzz.harness.audit.selftest.rivals import RIVALS, TITLES
from attnfuzz.harness.audit.selftest.verdict import FamilyRow, FaultRow, Rate, VerdictTried
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.report.progress import ProgressView, progress_on

__all__ = ["CaseProgress", "show_verdict"]

_ALARMS_SHOWN = 5


class CaseProgress(ProgressView):
    """A bar over all Cases; a context, so that the terminal is left as it was."""

    def __init__(self, console: Console) -> None:
        super().__init__(progress_on(console, bar=True, count=True, left=True, width=24))
        self._task = self.bars.add_task("starting", total=None)

    def __call__(self, doing: str, done: int, total: int) -> None:
        """Show how many Cases are done."""
        self.bars.update(self._task, description=escape(doing), completed=done, total=total)


def show_verdict(console: Console, done: VerdictTried) -> None:
    """Both tables, the false alarms with their Cases, what is below its floor, and one line of verdict."""
    console.print(_family_table(done.families))
    console.print(_fault_table(done.faults))
    console.print(
        "A: normal values, B: all families. n: cases in which the fault changed a bit; found in per cent of them / the floor.\n"
        "E: every element against its budget; all: R and z too. The three rules after them look at O, dQ, dK and dV, and count\n"
        "only where they pass the correct kernel on the same case. Yellow: under the floor, not below its confidence limit.",
        highlight=False,
    )
    for alarm in done.alarms[:_ALARMS_SHOWN]:
        console.print(f"[red]false alarm[/] ({escape(alarm.family)}): {escape(alarm.message)}", highlight=False)
        console.print(dumps(alarm.case), highlight=False, markup=False, soft_wrap=True)
    if len(done.alarms) > _ALARMS_SHOWN:
        console.print(f"and {len(done.alarms) - _ALARMS_SHOWN} more false alarms: see --json", highlight=False)
    for row in done.below:
        for name, rate in (("E", row.element), ("all", row.every)):
            if rate.below:
                console.print(f"[red]{escape(row.fault)}, {row.table} cases, {name}: {_told(rate)}[/]", highlight=False)
    console.print(_last_line(done), highlight=False)


def _last_line(done: VerdictTried) -> str:
    short = sum(rate.short for row in done.faults for rate in (row.element, row.every))
    verdict = (
        "[green]the verdict is as sharp as it must be, without a false alarm[/]" if done.right else "[red]the verdict is wrong[/]"
    )
    return (
        f"{verdict}: {len(done.alarms)} false alarms in {done.cases} correct cases ({done.elements:,} elements), "
        f"{len(done.below)} of {len(done.faults)} rows below their floors"
        + (f", {short} rates between limit and floor" if short else "")
        + f" (seed {done.seed}, {done.jobs} processes, {done.seconds:.0f} s)"
    )


def _told(rate: Rate) -> str:
    return f"found in {rate.hits} of {rate.cases}, {rate.rate:.0f} %; the floor is {rate.floor} %, its limit {rate.limit:.1f} %"


def _family_table(rows: Iterable[FamilyRow]) -> Table:
    """Correct kernels."""
    table = Table(title="correct kernels", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("family")
    for column in ("cases", "worst ratio", "sigmas", "R", "z", "not judged", "alarms", *(TITLES[each] for each in RIVALS)):
        table.add_column(column, justify="right")
    total = [0] * (3 + len(RIVALS))
    for row in rows:
        rivals = [row.rivals[each] for each in RIVALS]
        total = [a + b for a, b in zip(total, (row.cases, row.alarms, row.rival_cases, *rivals), strict=True)]
        alarms = f"[red]{row.alarms}[/]" if row.alarms else "0"
        table.add_row(
            row.family,
            str(row.cases),
            f"{row.worst:.3f}",
            f"{row.sigmas:.2f}",
            _statistic(row.r),
            _statistic(row.z),
            str(row.unjudged or ""),
            alarms,
            *(_percent(each, row.rival_cases) for each in rivals),
        )
    rates = (_percent(each, total[2]) for each in total[3:])
    table.add_section()
    table.add_row("all", str(total[0]), "", "", "", "", "", str(total[1]), *rates)
    return table


def _fault_table(rows: Iterable[FaultRow]) -> Table:
    table = Table(title="planted faults", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("fault", no_wrap=True)
    rivals = tuple(TITLES[each] for each in RIVALS)
    for kind in ("A", "B"):
        for column in ("n", "E", "all", *rivals):
            table.add_column(f"{kind} {column}" if column in ("n", "E") else column, justify="right")
    cells: dict[str, list[str]] = {}
    for row in rows:
        name = f"{row.fault} (gray)" if row.gray else row.fault
        rates = [_percent(row.rivals[each], row.cases) for each in RIVALS]
        cells.setdefault(name, []).extend((str(row.cases), _cell(row.element), _cell(row.every), *rates))
    for name, values in cells.items():
        table.add_row(escape(name), *values)
    return table


def _cell(rate: Rate) -> str:
    text = f"{rate.rate:.0f}/{rate.floor}"
    return f"[red]{text}[/]" if rate.below else f"[yellow]{text}[/]" if rate.short else text


def _statistic(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(hits: int, cases: int) -> str:
    return f"{100 * hits / cases:.0f}" if cases else ""
