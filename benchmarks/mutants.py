"""Detection power: a campaign on each mutant of the bank: bugs of released kernels, planted in copies of ours (tests/mutants).

    python benchmarks/mutants.py [ID...] [--max-examples N] [--seeds N] [--shrink SECONDS] [--jobs N] [--json]

Exit code 0 if every campaign finds its bug, 1 if not, 2 for wrong use, 130 after Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnfuzz.harness.cli.options import CLEAN, FAILURES, INTERRUPTED, WRONG_USE, console
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.report.progress import progress_on
from attnfuzz.strategies.case import case_from_json

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.detection import Attempt, Found, attempt, rates
from support.mutants import mutants
from support.verdict.processes import LostProcess, finished


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--max-examples", default=500, show_default=True, type=click.IntRange(min=1), metavar="N", help="Cases of each campaign."
)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1), metavar="N", help="Campaigns of each mutant.")
@click.option(
    "--shrink",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Time to shrink a failure, such as 0.01 where only the number of Cases counts [default: that of a run].",
)
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Campaigns at once [default: the cores].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def main(ids: tuple[str, ...], max_examples: int, seeds: int, shrink: float | None, jobs: int | None, as_json: bool) -> None:
    """Tell how many Cases it takes to find each bug, and how small its minimal Case is."""
    try:
        bank = mutants()
    except ValueError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(WRONG_USE)
    if unknown := [each for each in ids if each not in bank]:
        click.echo(f"error: ID={unknown[0]!r}: no mutant has that id; it is one of {', '.join(bank)}", err=True)
        sys.exit(WRONG_USE)
    chosen = [each for each in dict.fromkeys(ids or bank) if bank[each].device == "cpu"]
    if not chosen:
        click.echo(f"error: ID={ids[0]!r}: it shows on a GPU only, and campaigns run on the CPU; give another", err=True)
        sys.exit(WRONG_USE)
    tasks = [Attempt(each, seed, max_examples, shrink) for each in chosen for seed in range(seeds)]
    found: list[Found] = []
    try:
        with progress_on(console(stderr=as_json), bar=True, count=True, left=True, width=24) as progress:
            bar = progress.add_task("campaigns", total=len(tasks))
            for each in finished(attempt, tasks, jobs or len(os.sched_getaffinity(0))):
                found.append(each)
                progress.update(bar, completed=len(found), description=each.mutant)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except LostProcess as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(WRONG_USE)
    found.sort(key=lambda each: (each.mutant, each.seed))
    if as_json:
        summary = dataclasses.asdict(rates(found))
        click.echo(dumps({"rates": summary, "attempts": [dataclasses.asdict(each) for each in found]}))
    else:
        show(console(), found, max_examples)
    sys.exit(FAILURES if any(each.cases is None for each in found) else CLEAN)


def show(terminal: Console, found: list[Found], most: int) -> None:
    """Print a row for each mutant, what survived, and the figures over all."""
    table = Table(title=f"mutants, {most} Cases", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("mutant", "kernel", "found as", "minimal Case"):
        table.add_column(column)
    for column in ("Cases", "shrunk in s"):
        table.add_column(column, justify="right")
    for id_ in dict.fromkeys(each.mutant for each in found):
        rows = [each for each in found if each.mutant == id_]
        killed = [each for each in rows if each.cases is not None]
        kinds = dict.fromkeys(f"{each.kind} {each.output}".strip() for each in killed)
        cases = ", ".join("[red]never[/]" if each.cases is None else str(each.cases) for each in rows)
        smallest = min(killed, key=lambda each: len(each.case), default=None)
        table.add_row(
            escape(id_),
            mutants()[id_].kernel,
            escape(", ".join(kinds)),
            escape(_brief(smallest.case)) if smallest else "",
            cases,
            f"{max((each.shrinking for each in killed), default=0):.1f}",
        )
    terminal.print(table)
    for each in found:
        if each.cases is None:
            if each.otherwise:
                terminal.print(
                    f"[red]{escape(each.mutant)}, seed {each.seed}: not found[/]: {escape(each.otherwise)}", highlight=False
                )
                continue
            worst = ", ".join(f"{name} {ratio:.2f}" for name, ratio in (each.worst or {}).items())
            terminal.print(
                f"[red]{escape(each.mutant)}, seed {each.seed}: not found[/]; worst error / budget: {worst}", highlight=False
            )
    figures = rates(found)
    terminal.print(
        f"{figures.killed} of {figures.attempts} campaigns found their bug; Cases to find it: median "
        f"{_or_never(figures.median)}, 90th percentile {_or_never(figures.ninetieth)}; {figures.simple} minimal Cases have at "
        f"most two sequences and plain values; shrunk in {figures.shrinking:.1f} s (median)",
        highlight=False,
    )


def _brief(case: str) -> str:
    problem = case_from_json(case).problem
    lengths = " ".join(f"{q}x{k}" for q, k in zip(problem.seqlens_q, problem.seqlens_k, strict=True))
    return f"{lengths} heads {problem.heads}/{problem.kv_heads} dims {problem.dim_qk}/{problem.dim_v} {problem.causal or 'full'}"


def _or_never(value: float | None) -> str:
    return "never" if value is None else f"{value:g}"


if __name__ == "__main__":
    main()
