"""`attnfuzz selftest` on a terminal: progress, and a table with a verdict for every row."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnfuzz.harness.audit.selftest.faults import FaultRow, Faults, row_of
from attnfuzz.harness.audit.selftest.memory import MemoryTried
from attnfuzz.harness.campaign.events import CampaignStarted, Event, KernelFinished, KernelStarted
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.report.progress import ProgressView, progress_on
from attnfuzz.kernels.contract import Device

__all__ = ["FaultProgress", "show_faults", "show_memory"]


class FaultProgress(ProgressView):
    """Listens to the campaigns of a selftest; a context, so that the terminal is left as it was.

    Args:
        console: where it is shown.
        device: of faults, of which a line is printed each as it ends: a run that is cut off says something; None: no lines.
    """

    def __init__(self, console: Console, device: Device | None = None) -> None:
        super().__init__(progress_on(console, bar=True, count=True, width=24))
        self._task = self.bars.add_task("starting", total=0)
        self._total, self._device = 0, device

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, CampaignStarted):
            self._total += len(event.kernels)
            self.bars.update(self._task, total=self._total)
        elif isinstance(event, KernelStarted):
            self.bars.update(self._task, description=escape(event.kernel))
        elif isinstance(event, KernelFinished):
            self.bars.advance(self._task)
            if self._device is not None:
                self.bars.console.print(_line(row_of(self._device, event.summary)), highlight=False, soft_wrap=True)


def _line(row: FaultRow) -> str:
    said = f"[red]{escape('; '.join(row.wrong))}[/]" if row.wrong else "right"
    return f"{escape(row.kernel)}: {escape(row.got)} in {counted(row.cases, 'case')}: {said}"


def show_faults(console: Console, done: Faults) -> None:
    """Print the table of faults, the restarts, and one line of verdict."""
    table = Table()
    for column in ("fault", "found", "minimal case", "shows in", "cases", "shrunk in", "next verdict", "right"):
        numeric = column in ("cases", "shrunk in", "next verdict")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=column not in ("fault", "right"))
    for row in done.rows:
        table.add_row(*_cells(row))
    console.print(table)
    leaks = done.leaks
    left = counted(len(leaks.left), "process", "processes")
    console.print(
        f"{counted(leaks.restarts, 'restart')} in {leaks.seconds:.1f} s: "
        f"file descriptors {leaks.descriptors[0]} -> {leaks.descriptors[1]}, "
        f"memory {leaks.memory[0] >> 20} -> {leaks.memory[1] >> 20} MiB, {left} left",
        highlight=False,
    )
    console.print(f"next verdict after a death, with a spare child ready: {leaks.ready * 1000:.0f} ms", highlight=False)
    wrong = sum(1 for row in done.rows if row.wrong)
    for each in leaks.wrong:
        console.print(f"[red]{escape(each)}[/]", highlight=False)
    verdict = (
        "[green]every row is right[/]"
        if done.right
        else f"[red]{wrong} of {counted(len(done.rows), 'row')} {'is' if wrong == 1 else 'are'} wrong[/]"
    )
    console.print(f"{verdict} ({done.environment.get('device')}, {done.seconds:.0f} s)", highlight=False)


def _cells(row: FaultRow) -> tuple[str, ...]:
    recovery = "" if row.recovery is None else f"{row.recovery * 1000:.0f} ms"
    right = f"[red]no: {escape('; '.join(row.wrong))}; expected {row.expected}[/]" if row.wrong else "[green]yes[/]"
    cells = (
        row.title,
        row.got,
        row.minimal,
        row.rate or ("" if row.got == "nothing" else "every run"),
        str(row.cases),
        counted(row.trials, "trial"),
        recovery,
    )
    return (*(escape(cell) for cell in cells), right)


def show_memory(console: Console, done: MemoryTried) -> None:
    """Print the table of faults, the kernels without one, and one line of verdict."""
    table = Table()
    for column in ("fault", "found", "at", "minimal case", "cases", "right"):
        table.add_column(column, justify="right" if column == "cases" else "left", no_wrap=column not in ("fault", "right"))
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
        console.print(
            f"{each.kernel}: {counted(each.cases, 'case')}, {counted(len(each.alarms), 'false alarm')}", highlight=False
        )
        for alarm in each.alarms:
            console.print(f"[red]{escape(alarm)}[/]", highlight=False, soft_wrap=True)
    if unchecked := done.environment.get("unchecked"):
        console.print(f"[red]{escape(unchecked)}[/]", highlight=False, soft_wrap=True)
    wrong = sum(bool(row.wrong) for row in done.rows)
    verdict = (
        "[green]every fault is found, and no false alarm[/]"
        if done.right
        else f"[red]{wrong} of {counted(len(done.rows), 'row')} {'is' if wrong == 1 else 'are'} wrong[/]"
    )
    if wrong == 0 and not done.right:
        verdict = "[red]false alarms, or nothing tried[/]"
    console.print(f"{verdict} ({done.environment.get('device')}, {done.seconds:.0f} s)", highlight=False)
