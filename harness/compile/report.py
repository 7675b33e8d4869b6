"""Tables of compiled functions: for a terminal, and as Markdown for docs/."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnfuzz.harness.campaign.corpus import again_line
from attnfuzz.harness.compile.baseline import Compared
from attnfuzz.harness.compile.compile import Job, Left, Row
from attnfuzz.harness.compile.tensor_memory import COLUMNS
from attnfuzz.harness.core.text import counted, printable
from attnfuzz.harness.report.progress import ProgressView, progress_on

__all__ = ["Progressing", "markdown", "placed", "show", "show_compared"]

_EVERY = 20.0
"""Seconds between two lines of progress without a terminal."""
_ALL = "attnfuzz compile"
"""The command whose marks any table may take, in a page without its own."""
_MOST_FAILURES = 20
"""Failures that are printed in full."""
_SPILLING = 12
"""Functions that spill, listed in a page of docs."""
_FEW_DIMS = 2
"""Pairs of dims that a line of the table names."""


class Progressing(ProgressView):
    """Shows how far it has come: a bar on a terminal, a line now and then elsewhere; each failure at once."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self._total, self._failed, self._done = console, total, 0, 0
        self._last = time.monotonic()
        super().__init__(progress_on(console, bar=True, count=True, left=True))
        self._task = self.bars.add_task("compiling", total=total)

    def __call__(self, job: Job, rows: Sequence[Row]) -> None:
        """Count one compiled variant, and print its failures."""
        self._done += 1
        self._failed += sum(not each.ok for each in rows)
        self.bars.update(self._task, advance=1)
        for row in rows:
            if not row.ok:
                first = (row.error or "").splitlines()[0]
                self.console.print(
                    f"[red]failed[/] {escape(row.kernel)} {escape(row.function)} for {escape(row.arch)}: {escape(first)}",
                    highlight=False,
                    soft_wrap=True,
                )
        if not self.console.is_terminal and time.monotonic() - self._last > _EVERY:
            self._last = time.monotonic()
            self.console.print(
                f"{self._done} of {counted(self._total, 'variant')}, {counted(self._failed, 'function')} failed; "
                f"last {escape(job.case.kernel)} for {job.arch}",
                highlight=False,
                soft_wrap=True,
            )


@dataclass(frozen=True, slots=True)
class _Worst:
    """The worst of several functions, for one line of a table."""

    of: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def failed(self) -> int:
        return sum(not each.ok for each in self.rows)

    def most(self, name: str) -> int | None:
        return max((value for each in self.rows if (value := getattr(each, name)) is not None), default=None)

    @property
    def spilling(self) -> int:
        return sum(bool(each.spills) for each in self.rows)

    @property
    def paths(self) -> str:
        names = sorted({each.tensor_core or "none" for each in self.rows if each.registers is not None})
        return ", ".join(names) or "-"

    @property
    def races(self) -> str:
        races = [each.races for each in self.rows if each.races is not None]
        return str(sum(map(len, races))) if races else "-"

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.rows)


def _grouped(rows: Iterable[Row], of: Callable[[Row], tuple[str, ...]]) -> list[_Worst]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(of(row), []).append(row)
    return [_Worst(key, tuple(group)) for key, group in sorted(groups.items())]


def _bytes(value: int | None, limit: int) -> str:
    return "-" if value is None else f"{value / 1024:.0f} of {limit / 1024:.0f}"


def _cells(each: _Worst) -> list[str]:
    registers, spills = each.most("registers"), each.most("spills")
    spilled = "-" if spills is None else f"{spills} (in {each.spilling})" if spills else "0"
    ok = len(each.rows) - each.failed
    shared, columns = _bytes(each.most("shared"), each.rows[0].shared_limit), each.most("tensor_columns")
    memory = (spilled, shared, f"{columns} of {COLUMNS}" if columns else "-")
    size = each.most("instructions")
    code = ("-" if size is None else str(size), each.paths, each.races)
    return [str(ok), str(each.failed), "-" if registers is None else str(registers), *memory, *code]


_FIGURES = ("ok", "failed", "regs", "spills, B", "shared, KiB", "tensor memory", "instr", "tensor", "races")


def show(console: Console, rows: Sequence[Row], left: Sequence[Left]) -> None:
    """Print the table by kernel, architecture and function, the worst of each; then failures, and kernels left out."""
    if rows:
        table = Table()
        for title in ("kernel", "arch", "function", *_FIGURES, "s"):
            table.add_column(title, no_wrap=title == "kernel")
        for each in _grouped(rows, lambda row: (row.kernel, row.arch, row.function or "all")):
            style = "red" if each.failed else "yellow" if each.spilling else ""
            table.add_row(*map(escape, each.of), *_cells(each), f"{each.seconds:.0f}", style=style)
        console.print(table)
    for row in [each for each in rows if not each.ok][:_MOST_FAILURES]:
        _show_failure(console, row)
    failed, cached = sum(not each.ok for each in rows), sum(each.cached for each in rows)
    if failed > _MOST_FAILURES:
        console.print(f"... and {failed - _MOST_FAILURES} more, each in its case file", highlight=False)
    for race in dict.fromkeys((each.kernel, race) for each in rows for race in each.races or ()):
        console.print(f"[yellow]race[/] {escape(race[0])}: {escape(race[1])}", highlight=False, soft_wrap=True)
    for kernel in left:
        colour = "red" if kernel.missing else "dim"
        console.print(f"{escape(kernel.kernel)}: {escape(kernel.reason)}", highlight=False, soft_wrap=True, style=colour)
    console.print(f"{counted(len(rows), 'function')} compiled, {failed} failed, {cached} known from the cache", highlight=False)


def _show_failure(console: Console, row: Row) -> None:
    title = f"{escape(row.kernel)} {escape(row.function) or 'all functions'} for {escape(row.arch)}"
    console.print(f"\n[red]{title}[/]: {escape(row.kind or '')}", highlight=False)
    console.print(f"   {row.key}\n   config {_config(row)}", highlight=False, soft_wrap=True, markup=False)
    for line in (row.error or "").splitlines():
        console.print(f"   {line}", highlight=False, soft_wrap=True, markup=False)
    if row.case:
        console.print(
            f"   compile it again:    {again_line(row.case, row.kernel, 'attnfuzz compile --case')}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )


def show_compared(console: Console, compared: Compared) -> None:
    """Print what is worse than the baseline, and what is fixed."""
    lists: tuple[tuple[str, list[Any], str], ...] = (
        ("new failure", compared.new_failures, "red"),
        ("new spills", compared.new_spills, "red"),
        ("lost tensor-core path", compared.lost_tensor_core, "red"),
        ("new race", compared.new_races, "yellow"),
        ("fixed", compared.fixed, "green"),
    )
    for title, changes, colour in lists:
        for each in changes:
            what = f"{each.kernel} {each.function} for {each.arch}: {each.before} -> {each.now}"
            console.print(f"[{colour}]{title}[/] {escape(what)}\n   {escape(each.key)}", highlight=False, soft_wrap=True)
    for name, (was, now) in compared.versions.items():
        console.print(f"[yellow]{name} {now}, the baseline has {was}[/]: registers and spills depend on it")
    verdict = "[red]worse than[/]" if compared.worse else "no worse than"
    more = f"{counted(compared.added, 'function')} added, {compared.missing} missing"
    console.print(f"{verdict} {escape(compared.baseline)}; {more}", highlight=False, soft_wrap=True)


def markdown(
    rows: Sequence[Row], left: Sequence[Left], versions: dict[str, str], command: str, *, by_config: bool = False
) -> str:
    """Return the table by kernel, architecture and dtype, the worst of each; the largest spills; the failures.

    `by_config`: by kernel, architecture, function and Config.
    """
    lines = [f"`{command}`, with {', '.join(f'{name} {version}' for name, version in versions.items())}:", ""]
    lines += _by_config(rows) if by_config else _by_dtype(rows)
    spilling = sorted((each for each in rows if each.spills), key=lambda row: -(row.spills or 0))
    if spilling:
        lines += [
            "",
            f"Of {counted(len(spilling), 'function')} that {'spills' if len(spilling) == 1 else 'spill'}, the worst:",
            "",
        ]
        lines += [_line("kernel", "arch", "function", "dtype", "dims", "spills, B", "Config"), _line(*["---"] * 7)]
    for row in spilling[:_SPILLING]:
        pair = f"{row.dims[0]}, {row.dims[1]}"
        lines.append(_line(row.kernel, row.arch, row.function, row.dtype, pair, str(row.spills), _config(row)))
    failed = [each for each in rows if not each.ok]
    lines += ["", f"{counted(len(rows), 'function')}, {len(failed)} failed."]
    for error, group in _by_error(failed).items():
        of = sorted({f"{each.kernel} {each.function or 'all functions'} for {each.arch}" for each in group})
        lines += ["", f"{len(group)} x {', '.join(of)}:", "", "```", error, "```"]
    races = dict.fromkeys((each.kernel, race) for each in rows for race in each.races or ())
    if races:
        lines += ["", "Races, by TileLang's own check and in what Triton makes for Hopper:", ""]
        lines += [f"- {kernel}: {race}" for kernel, race in races]
    if left:
        lines += ["", "Not compiled:", "", *(f"- {each.kernel}: {each.reason}" for each in left)]
    return printable("\n".join(lines)) + "\n"


def _by_dtype(rows: Sequence[Row]) -> list[str]:
    lines = [_line("kernel", "arch", "dtype", "dims", "Configs", *_FIGURES), _line(*["---"] * (5 + len(_FIGURES)))]
    for each in _grouped(rows, lambda row: (row.kernel, row.arch, row.dtype)):
        configs = {tuple(row.config.items()) for row in each.rows}
        lines.append(_line(*each.of, _dims(each), str(len(configs)), *_cells(each)))
    return lines


def _by_config(rows: Sequence[Row]) -> list[str]:
    lines = [_line("kernel", "arch", "function", "Config", "dims", *_FIGURES), _line(*["---"] * (5 + len(_FIGURES)))]
    for each in _grouped(rows, lambda row: (row.kernel, row.arch, row.function or "all", _config(row))):
        lines.append(_line(*each.of, _dims(each), *_cells(each)))
    return lines


def _dims(each: _Worst) -> str:
    dims = list(dict.fromkeys(row.dims for row in each.rows))
    return "; ".join(f"{qk}, {v}" for qk, v in dims) if len(dims) <= _FEW_DIMS else f"{len(dims)} pairs"


def _config(row: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in row.config.items())


def placed(text: str, table: str, command: str) -> str:
    """Return `text`, a page of docs, with `table` between the marks of its command, or else of all; alone if it has neither."""
    for marked in (command, _ALL):
        begin, end = f"<!-- {marked} -->", f"<!-- end of {marked} -->"
        before, begun, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if begun and ended:
            return f"{before}{begin}\n\n{table}\n{end}{after}"
    return table


def _by_error(failed: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for each in failed:
        groups.setdefault(each.error or "", []).append(each)
    return groups


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
