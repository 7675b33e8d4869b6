"""Show the result of `attnfuzz check-adapter` on a terminal, or as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from attnfuzz.harness.audit.conformance.check import Conformance
from attnfuzz.harness.audit.conformance.row import Row, Status
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.report.progress import ProgressView, progress_on

__all__ = ["ConformanceProgress", "conformance_object", "show_conformance"]

_STYLES: dict[Status, str] = {"ok": "green", "wrong": "bold red", "hint": "cyan", "absent": "dim", "not run": "yellow"}


class ConformanceProgress(ProgressView):
    """Shows which check was done last; a context, so that the terminal is left as it was."""

    def __init__(self, console: Console) -> None:
        super().__init__(progress_on(console))
        self._task = self.bars.add_task("starting", total=None)
        self._done = 0

    def __call__(self, row: Row) -> None:
        """Show that a check is done."""
        self._done += 1
        self.bars.update(self._task, description=f"{counted(self._done, 'check')} done; last: {escape(row.check)}")


def show_conformance(console: Console, done: Conformance) -> None:
    """Print each check with its remedy, then the verdict."""
    width = max(len(row.check) for row in done.rows)
    for row in done.rows:
        style = _STYLES[row.status]
        head = f"[{style}]{row.status:<8}[/] {escape(row.check):<{width}}  {escape(row.found)}"
        console.print(head, highlight=False, soft_wrap=True)
        if row.remedy:
            console.print(f"{'':<9}{'':<{width}}  -> {row.remedy}", highlight=False, soft_wrap=True, markup=False)
    hints = sum(row.status == "hint" for row in done.rows)
    counts = f"{len(done.wrong)} of {counted(len(done.rows), 'check')} failed" if done.wrong else counted(len(done.rows), "check")
    verdict = "[bold red]breaks the contract[/]" if done.wrong else "[green]fulfils the contract[/]"
    if not done.wrong and not done.complete:
        verdict = "[yellow]not checked to the end[/]" if done.interrupted else "[yellow]could not be checked here[/]"
    more = f", {counted(hints, 'hint')}" if hints else ""
    console.print(f"{escape(done.kernel)} on {done.device}: {verdict} ({counts}{more}, {done.seconds:.1f} s)", highlight=False)


def conformance_object(done: Conformance) -> dict[str, Any]:
    """Return the result as plain values."""
    return {
        "kernel": done.kernel,
        "device": done.device,
        "right": not done.wrong and done.complete,
        "complete": done.complete,
        "interrupted": done.interrupted,
        "checks": msgspec.to_builtins(done.rows),
        "seconds": done.seconds,
    }
