"""The campaign on a terminal: a header, live progress, failures as they come, a table at the end."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, get_args

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID
from rich.table import Table
from rich.text import Text

from attnfuzz.harness.campaign import events
from attnfuzz.harness.campaign.blob import blob_of
from attnfuzz.harness.campaign.corpus import CaseFile, quoted, repro_line
from attnfuzz.harness.campaign.coverage import Worst
from attnfuzz.harness.campaign.events import Event, Finding, KernelSummary
from attnfuzz.harness.campaign.explain import Explanation
from attnfuzz.harness.campaign.undrawn import never_drawn_line
from attnfuzz.harness.core.text import counted, json_line, one_line
from attnfuzz.harness.isolation.disturbances import Disturbances
from attnfuzz.harness.judge.failure import CAPTURED_TITLES, OUTPUT_TITLES, Identity
from attnfuzz.harness.report import groups
from attnfuzz.harness.report.describe import describe_case, describe_verdict
from attnfuzz.harness.report.explained import explanation_rows
from attnfuzz.harness.report.progress import Heartbeat, Pace, Verbosity, progress_on, seconds_text
from attnfuzz.kernels.problem import OUTPUT_NAMES
from attnfuzz.kernels.support.memory import MemoryKind

__all__ = ["Terminal", "never_drawn_lines", "show_explanation", "show_finding", "show_stored", "summary_table"]

_MOST_PASTED = 1 << 15
"""Letters of a Case that is printed as a blob too: a command line takes about 128,000."""
_SHOW_EVERY = 0.2
"""Seconds between two updates of the progress display."""
_STEPS = {"shrink": "shrinking", "explain": "explaining"}
"""What the progress display says of the phase of a trial."""
_REPLACED = "that is fine: where a child process dies or holds too much memory, a new one takes its place"


class Terminal:
    """Listens to a campaign and shows it on `console`.

    Args:
        console: where it is shown.
        live: show progress that is renewed in place; by default where `console` is a terminal. Elsewhere it is a line each 30 s.
        verbosity: how much is shown.
        tried: show at the end what the kernels declare and no Case had.
    """

    def __init__(
        self, console: Console, *, live: bool | None = None, verbosity: Verbosity = "normal", tried: bool = True
    ) -> None:
        self.console, self._verbosity, self._tried = console, verbosity, tried
        self._live = (console.is_terminal if live is None else live) and verbosity != "quiet"
        self.progress = progress_on(console, bar=True, note=True, live=self._live)
        self.task: TaskID | None = None
        self.failures = self.compiled = self.to_compile = self.trying = self.kernels = self.kernels_done = 0
        self._pace, self._shown = Pace(), 0.0
        self._replays: dict[str, Pace] = {}
        self._announced: set[Identity] = set()
        self._replayed: dict[str, Counter[str]] = {}
        self._workers, self._shard = 1, ""
        self._heartbeat = Heartbeat(self.beat)

    def close(self) -> None:
        """End the progress display, whether or not the campaign has come to its end."""
        self._heartbeat.stop()
        self.progress.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        handler = getattr(self, f"_on_{type(event).__name__}", None)
        if handler is not None:
            handler(event)

    def _on_CampaignStarted(self, event: events.CampaignStarted) -> None:  # noqa: N802
        self._pace = Pace(event.seconds, None if event.examples is None else event.examples * len(event.kernels))
        self.kernels = len(event.kernels)
        self._workers = event.settings.get("workers", 1)
        if (shards := event.settings.get("shards", 1)) > 1:
            self._shard = f" --shard {event.settings.get('shard', 0) + 1}/{shards}"
        if self._verbosity == "quiet":
            return
        described: dict[str, Any] = event.environment
        versions = ", ".join(f"{name} {version}" for name, version in described["versions"].items())
        if "unchecked" in described:
            self.console.print(f"[yellow]{escape(described['unchecked'])}[/]", highlight=False, soft_wrap=True)
        changed = " ".join(f"{name}={value}" for name, value in event.settings.items() if name != "seed") or "all default"
        self.console.print(f"[bold]attnfuzz[/] on {described['device']}, {described['cores']} cores; {versions}", highlight=False)
        budget = "no time limit" if event.seconds is None else f"{event.seconds:g} s for {counted(len(event.kernels), 'kernel')}"
        text = f"settings: {changed}; budget: {budget}; seed: {event.seed}"
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)
        self.task = self.progress.add_task("attnfuzz", total=event.seconds or self._pace.wanted, note="")
        self.progress.start()
        if not self._live:
            self._heartbeat.start()

    def beat(self) -> None:
        """Print how far the run is, where there is no terminal."""
        done = f"{self.kernels_done} of {self.kernels} kernels done, " if self.kernels > 1 else ""
        counts = f"{counted(self._pace.cases, 'case')}, {done}{counted(self.failures, 'failure')}"
        text = f"after {seconds_text(self._pace.elapsed)}: {counts}{self._pace.text()}"
        self._say(text)

    def _on_KernelSkipped(self, event: events.KernelSkipped) -> None:  # noqa: N802
        self._say(f"[yellow]{escape(one_line(event.kernel))}: not run here: {escape(event.reason)}[/]")

    def _on_CaseSkipped(self, event: events.CaseSkipped) -> None:  # noqa: N802
        self._say(f"[yellow]{escape(one_line(event.path))}: not tried again here: {escape(event.reason)}[/]")

    def _on_CaseNotKept(self, event: events.CaseNotKept) -> None:  # noqa: N802
        if event.failing:
            self._say(f"[red]a failing case could not be written: {escape(event.reason)}; it is this:[/]", always=True)
            self.progress.console.print(json_line(event.case.canonical()), highlight=False, soft_wrap=True, markup=False)
        else:
            self._say(f"[red]the case in flight cannot be noted on disk any more: {escape(event.reason)}[/]", always=True)

    def _on_CaseResumed(self, event: events.CaseResumed) -> None:  # noqa: N802
        self._say(f"[yellow]case {event.case.id} was in flight when a run died: it comes first[/]")

    def _on_WorkerDied(self, event: events.WorkerDied) -> None:  # noqa: N802
        at = "" if event.kernel is None else f" while it tried {one_line(event.kernel)}"
        then = "another takes its place" if event.replaced else "none takes its place"
        self._say(f"[yellow]worker {event.worker} ended by {escape(event.ending + at)}: {then}[/]")

    def _on_KernelStarted(self, event: events.KernelStarted) -> None:  # noqa: N802
        self.trying += 1
        self.to_compile += event.compiles
        if self._verbosity == "verbose":
            self._say(f"{escape(one_line(event.kernel))}: begins, with {event.variants} variants and {event.compiles} compiles")
        self._show("trying", now=True)

    def _on_ReplayStarted(self, event: events.ReplayStarted) -> None:  # noqa: N802
        self._replays[event.kernel] = Pace(event.seconds, event.cases)
        of = f" of {event.stored:,}" if event.stored > event.cases else ""
        cases = f"{event.cases:,}{of} stored case{'s' * (event.stored != 1)}"
        most = "" if event.seconds is None else f", for at most {seconds_text(event.seconds)}"
        self._say(f"{escape(one_line(event.kernel))}: replaying {cases}{most}")

    def _replay_step(self, event: events.TrialFinished) -> str:
        """Count a replayed Case; returns what the progress display says of it."""
        if (pace := self._replays.get(event.kernel)) is None:
            return "running earlier cases"
        pace.count()
        return f"replaying {pace.cases:,} of {pace.wanted:,} stored cases{pace.text()};"

    def _on_CompileFinished(self, event: events.CompileFinished) -> None:  # noqa: N802
        self.compiled += 1
        if self._verbosity == "verbose":
            ending = f"refused: {escape(event.error)}" if event.error else f"{event.seconds:.1f} s"
            self._say(f"{escape(one_line(event.kernel))}: compiled {escape(event.config)}: {ending}")
        self._show("compiling")

    def _on_TrialFinished(self, event: events.TrialFinished) -> None:  # noqa: N802
        if event.phase in ("replay", "generate"):
            self._pace.count()
        step = self._replay_step(event) if event.phase == "replay" else _STEPS.get(event.phase, "trying")
        if event.phase == "replay":
            self._replayed.setdefault(event.kernel, Counter())[event.verdict.status] += 1
        if event.phase == "replay" and self._verbosity == "verbose":
            self._say(f"{escape(one_line(event.kernel))}: replayed {event.case.id}: {event.verdict.status}")
        self._show(step)

    def _show(self, step: str, *, now: bool = False) -> None:
        """Show how far the run is, a few times a second at most: a GPU ends a thousand trials in that time."""
        elapsed = self._pace.elapsed
        if self.task is None or not (now or elapsed - self._shown >= _SHOW_EVERY):
            return
        self._shown = elapsed
        compiled = f", {self.compiled} of {max(self.compiled, self.to_compile)} compiled" if self.to_compile else ""
        counts = f"{counted(self._pace.cases, 'case')}, {counted(self.failures, 'failure')}"
        note = f"{step} {counted(self.trying, 'kernel')}: {counts}{compiled}{self._pace.text()}"
        done = float(self._pace.cases) if self._pace.seconds is None else min(elapsed, self._pace.seconds)
        self.progress.update(self.task, completed=done, note=note)

    def _on_FailureFound(self, event: events.FailureFound) -> None:  # noqa: N802
        identity = event.finding.identity
        if identity in self._announced:  # by a worker, whose Case comes again from the one that the run was interrupted in
            return
        self._announced.add(identity)
        self.failures += 1
        shrinking = "shrinking" if event.seconds is None else f"shrinking for at most {event.seconds:.0f} s"
        self._say(f"[red]found[/] {escape(str(identity))} after {counted(event.finding.cases_to_find, 'case')}; {shrinking} ...")

    def _on_KernelBroke(self, event: events.KernelBroke) -> None:  # noqa: N802
        self._say(f"[red]{escape(one_line(event.kernel))}: not tried to the end, by an error: {escape(event.error)}[/]")

    def _on_KernelFinished(self, event: events.KernelFinished) -> None:  # noqa: N802
        row = event.summary
        self.trying -= 1
        self.kernels_done += 1
        compiles = f", {counted(row.compiles, 'variant')} compiled in {row.compile_seconds:.1f} s" if row.compiles else ""
        compiles += f" ([red]{row.refused} refused by the compiler[/], and not tried)" if row.refused else ""
        compiles += f", [yellow]{row.unreached} not reached by the compiler in this time[/]" if row.unreached else ""
        compiles += f", [yellow]{_not_replayed(row)}[/]" if row.not_replayed else ""
        replaced = f", {counted(row.replaced, 'process', 'processes')} replaced ({_REPLACED})" if row.replaced else ""
        of_all = (" of all workers", " each") if self._workers > 1 else ("", "")
        cases = f"{counted(row.cases, 'case')} in {row.seconds:.1f} s{of_all[0]} ({row.rate:.1f} cases/s{of_all[1]})"
        earlier = ""
        if statuses := self._replayed.get(row.kernel):
            passed = statuses["pass"]
            earlier = f", {passed:,} of {counted(statuses.total(), 'earlier case')} pass{'es' if passed == 1 else ''} now"
        self._say(f"{escape(one_line(row.kernel))}: {cases}{earlier}{compiles}{replaced}")

    def _on_CampaignFinished(self, event: events.CampaignFinished) -> None:  # noqa: N802
        self.close()
        if self._verbosity != "quiet":
            self.console.print(summary_table(event.summaries))
            for line in failed_unjudged_lines(event):
                self.console.print(f"[yellow]{escape(line)}[/]", highlight=False, soft_wrap=True)
        for number, each in enumerate(event.findings, 1):
            show_finding(self.console, number, each)
        for number, line in enumerate(groups.described(event.findings)):
            self.console.print("\n" * (number == 0) + line, highlight=False, soft_wrap=True, markup=False)
        if event.interrupted:
            self.console.print("[yellow]interrupted: the findings until then are above[/]")
        disturbances = sum((row.disturbances for row in event.summaries), Disturbances()).describe()
        if disturbances:
            self.console.print(f"[yellow]{disturbances}[/]", highlight=False, soft_wrap=True)
        for broken in event.broken:
            self.console.print(
                f"[red]{escape(one_line(broken.kernel))} was not tried to the end: {escape(broken.error.splitlines()[0])}[/]"
            )
        if event.not_kept:
            text = f"not all cases could be written to disk: {event.not_kept}; save a case that is printed above as a case file"
            self.console.print(f"[red]{escape(text)}[/]", highlight=False, soft_wrap=True)
        if event.shared_gpu and event.shared_gpu.seconds is not None and self._verbosity != "quiet":
            self.console.print(event.shared_gpu.describe(), highlight=False, soft_wrap=True, markup=False)
        if event.lost:
            self.console.print(f"[red]stopped early: {escape(event.lost)}[/]", highlight=False, soft_wrap=True)
        for line in never_drawn_lines(event) if self._tried and self._verbosity != "quiet" else ():
            self.console.print(line, highlight=False, soft_wrap=True, markup=False)
        cases, count = sum(row.cases for row in event.summaries), len(event.findings)
        whole = not event.untried and not event.broken
        verdict = f"[red]{counted(count, 'failure')}[/]" if count else f"[{'green' if whole else 'yellow'}]no failures[/]"
        causes = len(set(groups.groups_of(event.findings)))
        verdict += f", likely of {counted(causes, 'cause')}," if causes < count else ""
        left = "" if whole else "; [yellow]not every kernel was tried[/]"
        seed = "" if event.seed is None else f"; the same cases again: --seed {event.seed}{self._shard}"
        self.console.print(f"{verdict} in {counted(cases, 'case')}, {event.seconds:.1f} s{left}{seed}", highlight=False)

    def _say(self, text: str, *, always: bool = False) -> None:
        if self._verbosity == "quiet" and not always:
            return
        self.progress.console.print(text, highlight=False, soft_wrap=True)


def _not_replayed(row: KernelSummary) -> str:
    cases = f"{row.not_replayed:,} stored case{'s' * (row.not_replayed != 1)}"
    return f"{cases} not replayed: their part of the run was over"


def failed_unjudged_lines(event: events.CampaignFinished) -> list[str]:
    """Return a line for each kernel with Cases whose outputs were not judged, since something else failed before."""
    lines = []
    for row in event.summaries:
        if not row.failed_unjudged:
            continue
        by_access = any(each.identity.kind in get_args(MemoryKind) for each in row.findings)
        more = "; --no-memory-check judges outputs despite accesses outside of tensors" if by_access else ""
        lines.append(
            f"{one_line(row.kernel)}: {row.failed_unjudged} of {counted(row.cases, 'case')} failed before an output was judged, "
            f"so that wrong outputs may not show{more}"
        )
    return lines


def never_drawn_lines(event: events.CampaignFinished) -> list[str]:
    """Return a line for each kernel of which Cases had not all that it declares."""
    texts = {row.kernel: never_drawn_line(row.never_drawn) for row in event.summaries}
    return [f"{kernel}: {text}" for kernel, text in texts.items() if text]


def summary_table(summaries: tuple[KernelSummary, ...]) -> Table:
    """Kernels x outputs and gradients of captured tensors: Cases judged, worst error over budget, Cases in which it was wrong."""
    table = Table()
    table.add_column("kernel", no_wrap=True)
    for column in ("output", "cases", "worst error / budget", "wrong in"):
        table.add_column(column, justify="left" if column == "output" else "right")
    for row in summaries:
        for number, name in enumerate(OUTPUT_NAMES):
            figures = row.outputs.get(name, Worst())
            unjudged = f" (+{figures.unjudged} not judged)" if figures.unjudged else ""
            unjudged += f" ({figures.doubted} in part)" if figures.doubted else ""
            unjudged += f" (+{row.failed_unjudged} failed before)" if row.failed_unjudged and number == 0 else ""
            unjudged += f" (not replayed: {row.not_replayed})" if row.not_replayed and number == 0 else ""
            unjudged += f" ({counted(row.unreached, 'variant')} not reached)" if row.unreached and number == 0 else ""
            wrong = Text(str(figures.failures), style="red" if figures.failures else "green")
            title = escape(one_line(row.kernel)) if number == 0 else ""
            table.add_row(title, OUTPUT_TITLES[name], f"{figures.cases}{unjudged}", _ratio(figures.worst), wrong)
        for place, title in CAPTURED_TITLES.items():
            if (of_tensor := row.captured.get(place)) is not None:
                wrong = Text(str(of_tensor.failures), style="red" if of_tensor.failures else "green")
                table.add_row("", title, str(of_tensor.cases), _ratio(of_tensor.worst), wrong)
        table.add_section()
    return table


def show_finding(console: Console, number: int, finding: Finding, again: str | None = None) -> None:
    """One failure: identity, minimal Case, message, and how to run it again (`again` and the path, or `attnfuzz repro`)."""
    how = f"found after {counted(finding.cases_to_find, 'case')}, {_shrunk(finding)}"
    if finding.rate:
        how += f"; shows in {finding.rate[0]} of {counted(finding.rate[1], 'run')}"
    console.print(f"\n[bold red]{number}. {escape(str(finding.identity))}[/] ({how})", highlight=False, soft_wrap=True)
    for name, value in describe_case(finding.case)[1:]:
        console.print(f"   {name:<20} {value}", highlight=False, soft_wrap=True, markup=False)
    for line in describe_verdict(finding.verdict):
        console.print(f"   {line}", highlight=False, soft_wrap=True, markup=False)
    show_explanation(console, finding.explanation)
    if finding.path:
        line = f"{again} {quoted(finding.path)}" if again else repro_line(finding.path, finding.case.kernel)
        console.print(f"   run it again:        {line}", highlight=False, soft_wrap=True, markup=False)
    else:
        line = json_line(finding.case.canonical())
        console.print(f"   its case, in no file: {line}", highlight=False, soft_wrap=True, markup=False)
        if len(line) <= _MOST_PASTED:
            blob = blob_of(finding.case, finding.rate)
            line = f"{again} {blob}" if again else repro_line(blob, finding.case.kernel)
            console.print(f"   run it again:        {line}", highlight=False, soft_wrap=True, markup=False)


def _shrunk(finding: Finding) -> str:
    if not finding.shrink_trials:
        return "already minimal" if finding.minimal else "not shrunk"
    return f"shrunk in {counted(finding.shrink_trials, 'trial')}{', partly shrunk' * finding.partly}"


def show_explanation(console: Console, explanation: Explanation | None) -> None:
    """Print which parts of a minimal Case matter, and what failing Cases have in common."""
    for title, text in explanation_rows(explanation):
        console.print(f"   {title:<20} {text}", highlight=False, soft_wrap=True, markup=False)


def show_stored(console: Console, stored: CaseFile) -> None:
    """A case file: the Case, what was found, and its canonical JSON."""
    console.print(f"[bold]{escape(one_line(str(stored.path)))}[/] (case {stored.case.id})", highlight=False, soft_wrap=True)
    for name, value in describe_case(stored.case):
        console.print(f"   {name:<20} {value}", highlight=False, soft_wrap=True, markup=False)
    finding = stored.finding
    if finding.message:
        message = finding.message.replace("\n", f"\n{'':<24}")
        console.print(f"   {'found':<20} {message}", highlight=False, soft_wrap=True, markup=False)
    if finding.device:
        versions = ", ".join(f"{name} {version}" for name, version in finding.versions.items()) or "?"
        console.print(f"   {'on':<20} {one_line(f'{finding.device}; {versions}')}", highlight=False, soft_wrap=True, markup=False)
    show_explanation(console, finding.explanation)
    line = repro_line(str(stored.path), stored.case.kernel, finding.target)
    console.print(f"   {'run it again':<20} {line}", highlight=False, soft_wrap=True, markup=False)
    console.print(json_line(stored.case.canonical()), highlight=False, soft_wrap=True, markup=False)


def _ratio(value: float) -> str:
    if math.isinf(value):
        return "inf"
    return f"{value:.2f}" if value < 100 else f"{value:.1e}"
