"""The table of `attnfuzz mutants`: a row for each mutant, what came nearest in those that survived, and figures over all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from support.detection import Found, Rates, mutant_of, rates, rates_by

from attnfuzz.strategies.case import case_from_json

__all__ = ["brief", "line", "show"]


def line(row: Found) -> str:
    """Return one campaign in a line, for a console: what it came to, after how many Cases and seconds."""
    if row.error:
        said = f"[red]broke[/]: {escape(row.error)}"
    elif row.cases is None:
        said = f"[red]not found[/] in {row.tried} Cases{', time over' if row.cut else ''} {escape(row.otherwise)}".rstrip()
    elif row.runs:
        said = f"{escape(f'{row.kind} {row.output}'.strip())} after {row.cases} Cases"
    else:
        said = "does not run"
    return f"{escape(row.mutant)}, seed {row.seed}, {mutant_of(row.mutant).kernel}: {said}, {row.seconds:.1f} s"


def show(terminal: Console, rows: Sequence[Found], most: int, left_out: Mapping[str, str]) -> None:
    """Print a row for each mutant, what survived, and the figures over all; `left_out`: mutants that are not tried, and why."""
    table = Table(title=f"mutants, {most} Cases", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("mutant", overflow="fold")
    for column in ("kernel", "found as", "minimal Case"):
        table.add_column(column)
    for column in ("tokens", "Cases", "seconds", "shrunk in s"):
        table.add_column(column, justify="right")
    for id_ in dict.fromkeys(each.mutant for each in rows):
        table.add_row(*_row(id_, [each for each in rows if each.mutant == id_]))
    terminal.print(table)
    for each in rows:
        if each.cases is not None and not each.simple:
            terminal.print(f"{escape(each.mutant)}, seed {each.seed}: minimal but for {', '.join(each.beyond)}", highlight=False)
        if each.cases is None:
            change = f"{mutant_of(each.mutant).mechanism}: {_why(each)}"
            terminal.print(f"[red]{escape(each.mutant)}, seed {each.seed}: not found[/]: {escape(change)}", highlight=False)
    _show_parts(terminal, rows)
    figures = rates(rows)
    terminal.print(
        f"{figures.killed} of {figures.attempts} campaigns found their bug; Cases to find it: median "
        f"{_or_never(figures.median)}, 90th percentile {_or_never(figures.ninetieth)}; {figures.simple} minimal Cases have at "
        f"most two sequences, two tiles of tokens, plain values and one key/value head, or what the bug needs; shrunk in "
        f"{figures.shrinking:.1f} s (median)",
        highlight=False,
    )
    if figures.not_run:
        terminal.print(f"not counted, as they do not run: {figures.not_run}", highlight=False)
    if cut := sum(each.cut for each in rows):
        terminal.print(f"not found, and ended by their time before all of their Cases were tried: {cut}", highlight=False)
    if broken := sum(bool(each.error) for each in rows):
        terminal.print(f"not found, and ended by an error: {broken}", highlight=False)
    if left_out:
        terminal.print(f"left out, as they are equivalent or cannot show here: {len(left_out)}", highlight=False)


def _show_parts(terminal: Console, rows: Sequence[Found]) -> None:
    """Print the figures of each kernel, of the controls and of each seed."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("campaigns of")
    for column in ("found", "of", "median", "90th", "most Cases"):
        table.add_column(column, justify="right")

    def add(name: str, part: Rates) -> None:
        cells = (str(part.killed), str(part.attempts), _or_never(part.median), _or_never(part.ninetieth), _or_never(part.most))
        table.add_row(name, *cells)

    for name, part in (rates_by(rows, "kernel") | rates_by(rows, "controls")).items():
        add(name, part)
    for seed, part in rates_by(rows, "seed").items():
        add(f"seed {seed}", part)
    terminal.print(table)


def _row(id_: str, rows: Sequence[Found]) -> tuple[str, ...]:
    """Return the cells of a mutant: kinds, smallest minimal Case, and Cases and seconds to the first failure by seed."""
    killed = [each for each in rows if each.cases is not None]
    kinds = dict.fromkeys(f"{each.kind} {each.output}".strip() for each in killed)
    smallest = min(killed, key=lambda each: (each.tokens, len(each.case)), default=None)
    return (
        escape(id_),
        mutant_of(id_).kernel,
        escape(", ".join(kinds)),
        escape(brief(smallest.case)) if smallest else "",
        str(smallest.tokens) if smallest else "",
        ", ".join(_cases(each) for each in rows),
        ", ".join(f"{each.seconds:.1f}" for each in rows),
        f"{max((each.shrinking for each in killed), default=0):.1f}",
    )


def _cases(row: Found) -> str:
    if not row.runs:
        return "does not run"
    return "[red]never[/]" if row.cases is None else str(row.cases)


def _why(row: Found) -> str:
    """Say what a campaign saw instead of the bug: another failure, or the Cases whose errors came nearest to their budgets."""
    if row.error:
        return f"the campaign broke: {row.error}"
    if row.otherwise:
        return row.otherwise
    nearest = sorted(row.nearest.items(), key=lambda each: each[1].ratio, reverse=True)
    cases = "; ".join(f"{name} {each.ratio:.2f} in {brief(each.case)}" for name, each in nearest)
    tried = f"{row.tried} Cases{', then its time was over' if row.cut else ''}"
    return f"{tried}; nearest to the budget (error / budget): {cases or 'no Case was judged'}"


def brief(case: str) -> str:
    """Return the shape of a Case in JSON, in a few words."""
    problem = case_from_json(case).problem
    lengths = " ".join(f"{q}x{k}" for q, k in zip(problem.seqlens_q, problem.seqlens_k, strict=True))
    return f"{lengths} heads {problem.heads}/{problem.kv_heads} dims {problem.dim_qk}/{problem.dim_v} {problem.causal or 'full'}"


def _or_never(value: float | None) -> str:
    return "never" if value is None else f"{value:g}"
