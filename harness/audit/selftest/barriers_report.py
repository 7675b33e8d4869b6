"""`attnfuzz selftest barriers` on a terminal: progress, the table of faults, and one of the functions without a fault."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnfuzz.harness.audit.selftest.barriers import BarriersTried
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.report.progress import Heartbeat, ProgressView, progress_on

__all__ = ["RolesProgress", "show_barriers"]


class RolesProgress(ProgressView):
    """Shows which function is being tried; a context, so that the terminal is left as it was."""

    def __init__(self, console: Console) -> None:
        super().__init__(progress_on(console, note=True, width=40))
        self._task = self.bars.add_task("starting", note="")
        self._console = console
        self._name, self._count = "", 0
        self._heartbeat = Heartbeat(self._beat)

    def __enter__(self) -> RolesProgress:
        super().__enter__()
        if not self._console.is_terminal:
            self._heartbeat.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._heartbeat.stop()
        super().__exit__(*error)

    def advance(self, name: str, schedules: int) -> None:
        """Note that so many schedules more of `name` have been run."""
        self._count = self._count + schedules if name == self._name else schedules
        self._name = name
        self.bars.update(self._task, description=escape(name), note=counted(self._count, "schedule"))

    def _beat(self) -> None:
        self._console.print(f"{self._name}: {counted(self._count, 'schedule')}", highlight=False, markup=False)


def show_barriers(console: Console, done: BarriersTried) -> None:
    """Print both tables, every false alarm, and one line of verdict."""
    if done.rows:
        console.print(_faults(done))
    for row in done.rows:
        if row.wrong:
            console.print(f"[red]{escape(f'{row.title}: expected {row.expected}; got {row.got}')}[/]", soft_wrap=True)
    console.print(_functions(done))
    for each in done.clean:
        for alarm in each.alarms:
            console.print(f"[red]{escape(f'{each.kernel} {each.function}: {alarm}')}[/]", highlight=False, soft_wrap=True)
    wrong = sum(bool(row.wrong) for row in done.rows)
    verdict = "[green]every fault is found, and no false alarm[/]"
    if not done.right:
        verdict = "[red]false alarms, or not all was covered[/]"
    if wrong:
        verdict = f"[red]{wrong} of {counted(len(done.rows), 'row')} {'is' if wrong == 1 else 'are'} wrong[/]"
    console.print(f"{verdict} ({done.seconds:.0f} s)", highlight=False)


def _faults(done: BarriersTried) -> Table:
    table = Table()
    for column in ("fault", "found", "schedules", "right"):
        table.add_column(column, justify="right" if column == "schedules" else "left")
    for row in done.rows:
        right = f"[red]no: {escape('; '.join(row.wrong))}[/]" if row.wrong else "[green]yes[/]"
        table.add_row(escape(row.title), escape(row.got), str(row.tried), right)
    return table


def _functions(done: BarriersTried) -> Table:
    table = Table()
    for column in ("function", "roles", "schedules", "states", "interleavings", "by executions", "false alarms"):
        table.add_column(column, justify="left" if column == "function" else "right")
    for each in done.clean:
        covered = each.interleavings if each.complete else "not all counted"
        cells = (f"{each.kernel} {each.function}", str(len(each.roles)), f"{each.schedules:,}", f"{each.states:,}")
        table.add_row(*map(escape, (*cells, covered, str(each.executions), str(len(each.alarms)))))
    return table
