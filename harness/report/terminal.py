"""The campaign on a terminal: a header, live progress, failures as they come, a table at the end."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID
from rich.table import Table
from rich.text import Text

from attnfuzz.harness.campaign import events
from attnfuzz.harness.campaign.blob import blob_of
from attnfuzz.harness.campaign.corpus import CaseFile, quoted, repro_line
from attnfuzz.harness.campaign.events import Event, Finding, KernelSummary, Worst
from attnfuzz.harness.judge.failure import OUTPUT_TITLES
from attnfuzz.harness.report.describe import describe_case, describe_verdict
from attnfuzz.harness.report.progress import progress_on
from attnfuzz.kernels.problem import OUTPUT_NAMES

__all__ = ["Terminal", "show_finding", "show_stored", "summary_table"]

_MOST_PASTED = 1 << 15
"""Letters of a Case that is printed as a blob too: a command line takes about 128,000."""
_SHOW_EVERY = 0.2
"""Seconds between two updates of the progress display."""


class Terminal:
    """Listens to a campaign and shows it on `console`."""

    def __init__(self, console: Console, *, live: bool | None = None) -> None:
        self.console = console
        self.progress = progress_on(console, bar=True, note=True, left=True, live=live)
        self.task: TaskID | None = None
        self.cases = self.failures = self.compiled = self.to_compile = self.trying = 0
        self._seconds: float | None = None
        self._started = self._shown = 0.0

    def __call__(self, event: Event) -> None:
        """Show one event."""
        handler = getattr(self, f"_on_{type(event).__name__}", None)
        if handler is not None:
            handler(event)

    def _on_CampaignStarted(self, event: events.CampaignStarted) -> None:  # noqa: N802
        described: dict[str, Any] = event.environment
        versions = ", ".join(f"{name} {version}" for name, version in described["versions"].items())
        if "unchecked" in described:
            self.console.print(f"[yellow]{escape(described['unchecked'])}[/]", highlight=False, soft_wrap=True)
        changed = " ".join(f"{name}={value}" for name, value in event.settings.items()) or "all default"
        self.console.print(f"[bold]attnfuzz[/] on {described['device']}, {described['cores']} cores; {versions}", highlight=False)
        budget = "no time limit" if event.seconds is None else f"{event.seconds:g} s for {len(event.kernels)} kernels"
        self.console.print(f"settings: {changed}; budget: {budget}", highlight=False, soft_wrap=True, markup=False)
        self._seconds, self._started = event.seconds, time.monotonic()
        self.task = self.progress.add_task("attnfuzz", total=event.seconds, note="")
        self.progress.start()

    def _on_KernelSkipped(self, event: events.KernelSkipped) -> None:  # noqa: N802
        self._say(f"[yellow]{escape(event.kernel)}: not run here: {escape(event.reason)}[/]")

    def _on_CaseSkipped(self, event: events.CaseSkipped) -> None:  # noqa: N802
        self._say(f"[yellow]{escape(event.path)}: not tried again here: {escape(event.reason)}[/]")

    def _on_CaseNotKept(self, event: events.CaseNotKept) -> None:  # noqa: N802
        if event.failing:
            self._say(f"[red]a failing case could not be written: {escape(event.reason)}; it is this:[/]")
            self.progress.console.print(event.case.canonical(), highlight=False, soft_wrap=True, markup=False)
        else:
            self._say(f"[red]the case in flight cannot be noted on disk any more: {escape(event.reason)}[/]")

    def _on_CaseResumed(self, event: events.CaseResumed) -> None:  # noqa: N802
        self._say(f"[yellow]case {event.case.id} was in flight when a run died: it comes first[/]")

    def _on_KernelStarted(self, event: events.KernelStarted) -> None:  # noqa: N802
        self.trying += 1
        self.to_compile += event.compiles
        self._show("trying", now=True)

    def _on_CompileFinished(self, _: events.CompileFinished) -> None:  # noqa: N802
        self.compiled += 1
        self._show("compiling")

    def _on_TrialFinished(self, event: events.TrialFinished) -> None:  # noqa: N802
        self.cases += event.phase in ("replay", "generate")
        self._show({"shrink": "shrinking", "replay": "running earlier cases"}.get(event.phase, "trying"))

    def _show(self, step: str, *, now: bool = False) -> None:
        """Show how far the run is, a few times a second at most: a GPU ends a thousand trials in that time."""
        elapsed = time.monotonic() - self._started
        if self.task is None or not (now or elapsed - self._shown >= _SHOW_EVERY):
            return
        self._shown = elapsed
        compiled = f", {self.compiled} of {max(self.compiled, self.to_compile)} compiled" if self.to_compile else ""
        kernels = f"{self.trying} kernel{'s' * (self.trying != 1)}"
        note = f"{step} {kernels}: {self.cases} cases, {self.failures} failures{compiled}"
        done = min(elapsed, self._seconds) if self._seconds is not None else None
        self.progress.update(self.task, completed=done, note=note)

    def _on_FailureFound(self, event: events.FailureFound) -> None:  # noqa: N802
        self.failures += 1
        shrinking = "shrinking" if event.seconds is None else f"shrinking for at most {event.seconds:.0f} s"
        self._say(
            f"[red]found[/] {escape(str(event.finding.identity))} after {event.finding.cases_to_find} cases; {shrinking} ..."
        )

    def _on_KernelBroke(self, event: events.KernelBroke) -> None:  # noqa: N802
        self._say(f"[red]{escape(event.kernel)}: not tried to the end, by an error: {escape(event.error)}[/]")

    def _on_KernelFinished(self, event: events.KernelFinished) -> None:  # noqa: N802
        row = event.summary
        self.trying -= 1
        compiles = f", {row.compiles} variants compiled in {row.compile_seconds:.1f} s" if row.compiles else ""
        compiles += f" ([red]{row.refused} refused by the compiler[/], and not tried)" if row.refused else ""
        compiles += f", [yellow]{row.unreached} not reached by the compiler in this time[/]" if row.unreached else ""
        replaced = f", {row.replaced} {'process' if row.replaced == 1 else 'processes'} replaced" if row.replaced else ""
        self._say(f"{escape(row.kernel)}: {row.cases} cases in {row.seconds:.1f} s ({row.rate:.1f} cases/s){compiles}{replaced}")

    def _on_CampaignFinished(self, event: events.CampaignFinished) -> None:  # noqa: N802
        self.progress.stop()
        self.console.print(summary_table(event.summaries))
        for number, each in enumerate(event.findings, 1):
            show_finding(self.console, number, each)
        if event.interrupted:
            self.console.print("[yellow]interrupted: the findings until then are above[/]")
        for broken in event.broken:
            self.console.print(
                f"[red]{escape(broken.kernel)} was not tried to the end: {escape(broken.error.splitlines()[0])}[/]"
            )
        if event.not_kept:
            text = f"not all cases could be written to disk: {event.not_kept}; save a case that is printed above as a case file"
            self.console.print(f"[red]{escape(text)}[/]", highlight=False, soft_wrap=True)
        if event.lost:
            self.console.print(f"[red]stopped early: {escape(event.lost)}[/]", highlight=False, soft_wrap=True)
        cases, count = sum(row.cases for row in event.summaries), len(event.findings)
        verdict = f"[red]{count} failure{'s' * (count > 1)}[/]" if count else "[green]no failures[/]"
        self.console.print(f"{verdict} in {cases} cases, {event.seconds:.1f} s", highlight=False)

    def _say(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, soft_wrap=True)


def summary_table(summaries: tuple[KernelSummary, ...]) -> Table:
    """Kernels x outputs: Cases judged, worst error over budget, Cases in which the output was wrong."""
    table = Table()
    table.add_column("kernel", no_wrap=True)
    for column in ("output", "cases", "worst error / budget", "wrong in"):
        table.add_column(column, justify="left" if column == "output" else "right")
    for row in summaries:
        for number, name in enumerate(OUTPUT_NAMES):
            figures = row.outputs.get(name, Worst())
            unjudged = f" (+{figures.unjudged} not judged)" if figures.unjudged else ""
            unjudged += f" ({figures.doubted} in part)" if figures.doubted else ""
            unjudged += f" ({row.unreached} variants not reached)" if row.unreached and number == 0 else ""
            wrong = Text(str(figures.failures), style="red" if figures.failures else "green")
            title = escape(row.kernel) if number == 0 else ""
            table.add_row(title, OUTPUT_TITLES[name], f"{figures.cases}{unjudged}", _ratio(figures.worst), wrong)
        table.add_section()
    return table


def show_finding(console: Console, number: int, finding: Finding, again: str | None = None) -> None:
    """One failure: identity, minimal Case, message, and how to run it again (`again` and the path, or `attnfuzz repro`)."""
    partly = ", partly shrunk" if finding.partly else ""
    if finding.rate:
        partly += f"; shows in {finding.rate[0]} of {finding.rate[1]} runs"
    console.print(
        f"\n[bold red]{number}. {escape(str(finding.identity))}[/] (found after {finding.cases_to_find} cases, "
        f"shrunk in {finding.shrink_trials} trials{partly})",
        highlight=False,
        soft_wrap=True,
    )
    for name, value in describe_case(finding.case)[1:]:
        console.print(f"   {name:<20} {value}", highlight=False, soft_wrap=True, markup=False)
    for line in describe_verdict(finding.verdict):
        console.print(f"   {line}", highlight=False, soft_wrap=True, markup=False)
    if finding.path:
        line = f"{again} {quoted(finding.path)}" if again else repro_line(finding.path, finding.case.kernel)
        console.print(f"   run it again:        {line}", highlight=False, soft_wrap=True, markup=False)
    else:
        text = finding.case.canonical()
        console.print(f"   its case, in no file: {text}", highlight=False, soft_wrap=True, markup=False)
        if len(text) <= _MOST_PASTED:
            blob = blob_of(finding.case, finding.rate)
            line = f"{again} {blob}" if again else repro_line(blob, finding.case.kernel)
            console.print(f"   run it again:        {line}", highlight=False, soft_wrap=True, markup=False)


def show_stored(console: Console, stored: CaseFile) -> None:
    """A case file: the Case, what was found, and its canonical JSON."""
    console.print(f"[bold]{escape(str(stored.path))}[/] (case {stored.case.id})", highlight=False, soft_wrap=True)
    for name, value in describe_case(stored.case):
        console.print(f"   {name:<20} {value}", highlight=False, soft_wrap=True, markup=False)
    finding = stored.finding
    if finding.message:
        console.print(f"   {'found':<20} {finding.message}", highlight=False, soft_wrap=True, markup=False)
    if finding.device:
        versions = ", ".join(f"{name} {version}" for name, version in finding.versions.items()) or "?"
        console.print(f"   {'on':<20} {finding.device}; {versions}", highlight=False, soft_wrap=True, markup=False)
    line = repro_line(str(stored.path), stored.case.kernel, finding.target)
    console.print(f"   {'run it again':<20} {line}", highlight=False, soft_wrap=True, markup=False)
    console.print(stored.case.canonical(), highlight=False, soft_wrap=True, markup=False)


def _ratio(value: float) -> str:
    if math.isinf(value):
        return "inf"
    return f"{value:.2f}" if value < 100 else f"{value:.1e}"
