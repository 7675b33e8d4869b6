"""The verdict on an emulated kernel, right in every family of values and then with 36 numeric faults, beside three other rules.

    python benchmarks/verdict.py [--cases N] [--jobs N] [--seed N] [--json]

Exit code 0 if no correct kernel fails and every fault is found as often as its floor says, 1 if not, 130 after Ctrl-C. A
false alarm's Case is printed; in the folder tests, `attnfuzz repro FILE --kernel support.emulated.kernel:KERNEL` (or
`:PRESCALED`) runs it again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnfuzz.harness.cli.options import CLEAN, FAILURES, INTERRUPTED, WRONG_USE, console
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.report.progress import progress_on

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.verdict import rates
from support.verdict.other_rules import RULES, TITLES
from support.verdict.processes import LostProcess
from support.verdict.rates import FamilyRow, FaultRow, Rate, VerdictTried

ALARMS_SHOWN = 5


@click.command()
@click.option(
    "--cases",
    default=rates.CASES,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Correct Cases; faulty ones in proportion.",
)
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Processes [default: the cores].")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), metavar="N", help="Same seed, same Cases.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def main(cases: int, jobs: int | None, seed: int, as_json: bool) -> None:
    """Judge emulated kernels, right ones and 36 that are wrong by little: exit 0 only if all verdicts are as they should be."""
    cores = len(os.sched_getaffinity(0))
    terminal = console(stderr=as_json)
    try:
        with progress_on(terminal, bar=True, count=True, left=True, width=24) as progress:
            bar = progress.add_task("starting", total=None)

            def show(doing: str, done: int, total: int) -> None:
                progress.update(bar, description=doing, completed=done, total=total)

            done = rates.verdict(cases, seed=seed, jobs=min(jobs or cores, cores), progress=show)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except LostProcess as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(WRONG_USE)
    if as_json:
        click.echo(dumps(rates.machine_object(done)))
    else:
        show_verdict(console(), done)
    sys.exit(CLEAN if done.right else FAILURES)


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
    for alarm in done.alarms[:ALARMS_SHOWN]:
        console.print(f"[red]false alarm[/] ({escape(alarm.family)}): {escape(alarm.message)}", highlight=False)
        console.print(dumps(alarm.case), highlight=False, markup=False, soft_wrap=True)
    if len(done.alarms) > ALARMS_SHOWN:
        console.print(f"and {len(done.alarms) - ALARMS_SHOWN} more false alarms: see --json", highlight=False)
    for row in done.below:
        for name, rate in (("E", row.element), ("all", row.every)):
            if rate.below:
                console.print(f"[red]{escape(row.fault)}, {row.table} cases, {name}: {_as_text(rate)}[/]", highlight=False)
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


def _as_text(rate: Rate) -> str:
    return f"found in {rate.hits} of {rate.cases}, {rate.rate:.0f} %; the floor is {rate.floor} %, its limit {rate.limit:.1f} %"


def _family_table(rows: Iterable[FamilyRow]) -> Table:
    """Correct kernels."""
    table = Table(title="correct kernels", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("family")
    for column in ("cases", "worst ratio", "sigmas", "R", "z", "not judged", "alarms", *(TITLES[each] for each in RULES)):
        table.add_column(column, justify="right")
    total = [0] * (3 + len(RULES))
    for row in rows:
        broken = [row.other_rules[each] for each in RULES]
        total = [a + b for a, b in zip(total, (row.cases, row.alarms, row.comparable, *broken), strict=True)]
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
            *(_percent(each, row.comparable) for each in broken),
        )
    percents = (_percent(each, total[2]) for each in total[3:])
    table.add_section()
    table.add_row("all", str(total[0]), "", "", "", "", "", str(total[1]), *percents)
    return table


def _fault_table(rows: Iterable[FaultRow]) -> Table:
    table = Table(title="planted faults", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("fault", no_wrap=True)
    titles = tuple(TITLES[each] for each in RULES)
    for kind in ("A", "B"):
        for column in ("n", "E", "all", *titles):
            table.add_column(f"{kind} {column}" if column in ("n", "E") else column, justify="right")
    cells: dict[str, list[str]] = {}
    for row in rows:
        name = f"{row.fault} (gray)" if row.gray else row.fault
        percents = [_percent(row.other_rules[each], row.cases) for each in RULES]
        cells.setdefault(name, []).extend((str(row.cases), _cell(row.element), _cell(row.every), *percents))
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


if __name__ == "__main__":
    main()
