"""`attnfuzz gate` on a terminal, in Markdown and for machines."""

from __future__ import annotations

import time
from typing import Any, Self

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID
from rich.table import Table

from attnfuzz.harness.core.text import counted, one_line, printable
from attnfuzz.harness.gate.result import Finding, Gate, GateEvent, KernelGate, Outcome, Part, PartFinished
from attnfuzz.harness.judge.failure import OUTPUT_TITLES
from attnfuzz.harness.report.progress import Heartbeat, ProgressView, Verbosity, progress_on, seconds_text

__all__ = ["GateProgress", "gate_object", "markdown", "show_gate"]

_STYLES: dict[Outcome, str] = {"pass": "green", "fail": "red", "known": "yellow", "skipped": "dim", "error": "bold red"}
_SIGNS: dict[Outcome, str] = {"pass": "pass", "fail": "**FAIL**", "known": "known", "skipped": "skipped", "error": "**ERROR**"}
_MOST_DETAIL = 3000


class GateProgress(ProgressView):
    """Shows the running part, and a line for each part that has ended; a context that restores the terminal.

    Where there is no terminal, a line each 30 s says what is running.

    Args:
        console: where it is shown.
        verbosity: quiet: only parts that could not be run; verbose: also a line for each part that begins.
    """

    def __init__(self, console: Console, verbosity: Verbosity = "normal") -> None:
        self._console, self._verbosity = console, verbosity
        super().__init__(progress_on(console, note=True, live=False if verbosity == "quiet" else None))
        self._task: TaskID | None = None
        self._doing: tuple[str, str] | None = None
        self._note, self._start = "", time.monotonic()
        self._heartbeat = Heartbeat(self.beat)

    def __enter__(self) -> Self:
        if not self._console.is_terminal and self._verbosity != "quiet":
            self._heartbeat.start()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        self._heartbeat.stop()
        super().__exit__()

    def beat(self) -> None:
        """Print what is running."""
        doing = f"{' '.join(self._doing)} {self._note}".strip() if self._doing else "loading"
        text = f"after {seconds_text(time.monotonic() - self._start)}: {doing}"
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def __call__(self, event: GateEvent) -> None:
        """Show one event."""
        if self._verbosity == "quiet" and not (isinstance(event, PartFinished) and event.part.outcome == "error"):
            return
        if isinstance(event, PartFinished):
            part = event.part
            style, seconds = _STYLES[part.outcome], f" ({part.seconds:.1f} s)" if part.seconds >= 0.05 else ""
            said = escape(one_line(part.summary))
            text = f"{escape(one_line(event.kernel))} {part.name}: [{style}]{part.outcome}[/] {said}{seconds}"
            self.bars.console.print(text, highlight=False, soft_wrap=True)
            return
        if self._doing != (event.kernel, event.part):
            self._doing = (event.kernel, event.part)
            if self._verbosity == "verbose":
                text = escape(f"{event.kernel} {event.part}: begins")
                self.bars.console.print(text, highlight=False, soft_wrap=True)
            if self._task is not None:
                self.bars.remove_task(self._task)
            self._task = self.bars.add_task(escape(f"{event.kernel} {event.part}"), total=None, note="")
        self._note = event.note
        if self._task is not None:
            self.bars.update(self._task, note=escape(event.note))


def show_gate(console: Console, done: Gate, verbosity: Verbosity = "normal") -> None:
    """Print the table of kernels and parts, every finding with its Case, the ledger's errors, and one line of verdict.

    quiet: neither the table nor notes.
    """
    if done.kernels and verbosity != "quiet":
        table = Table()
        for column in ("kernel", "part", "verdict", "why"):
            table.add_column(column, no_wrap=column != "why")
        for gated in done.kernels:
            for number, part in enumerate(gated.parts):
                name = escape(one_line(gated.kernel)) if number == 0 else ""
                style = _STYLES[part.outcome]
                table.add_row(name, part.name, f"[{style}]{part.outcome}[/]", escape(one_line(part.summary)))
            table.add_section()
        console.print(table)
    number = 0
    for gated in done.kernels:
        for finding in gated.findings:
            number += 1
            _show_finding(console, number, gated, finding)
    for text, line in done.stale:
        where = f"{done.ledger}:{line}: " if line else f"{done.ledger}: "
        console.print(f"[red]{escape(where + text)}[/]", highlight=False, soft_wrap=True)
    for note in done.notes if verbosity != "quiet" else ():
        console.print(f"[yellow]{escape(note)}[/]", highlight=False, soft_wrap=True)
    if done.interrupted:
        console.print("[yellow]interrupted: the findings so far are above[/]")
    style = "yellow" if done.outcome == "interrupted" else _STYLES[done.outcome]
    console.print(f"[{style}]{escape(_verdict(done))}[/]", highlight=False, soft_wrap=True)


def _show_finding(console: Console, number: int, gated: KernelGate, finding: Finding) -> None:
    style = "yellow" if finding.waiver else "bold red"
    console.print(f"\n[{style}]{number}. {escape(one_line(_title(finding)))}[/]", highlight=False, soft_wrap=True)
    rows = [("why gated", gated.why), *finding.described, ("found", finding.message)]
    if gated.file:
        rows.append(("file", f"{gated.file}:{gated.line}"))
    if finding.waiver:
        rows.append(("known", f"{finding.waiver.issue}, until {finding.waiver.expires}"))
    rows += finding.again
    for name, value in rows:
        lines = value.replace("\n", f"\n{'':<24}")
        console.print(f"   {name:<20} {lines}", highlight=False, soft_wrap=True, markup=False)
    if finding.detail and finding.part in ("load", "compile"):
        console.print(finding.detail[-_MOST_DETAIL:].rstrip(), highlight=False, markup=False, soft_wrap=True)


def _title(finding: Finding) -> str:
    what = finding.kind or finding.part
    where = f" in {OUTPUT_TITLES[finding.output]}" if finding.output else f" in {finding.check}" if finding.check else ""
    return f"{finding.kernel}: {what}{where}"


def _verdict(done: Gate) -> str:
    seconds = f"{done.seconds:.1f} s"
    if done.written:
        return f"{done.written}: {counted(len(done.kernels), 'kernel')} written in {seconds}"
    against = f" against {done.against}" if done.against else ""
    counts = {
        name: sum(1 for each in done.kernels if each.outcome == name) for name in ("pass", "fail", "known", "error", "skipped")
    }
    text = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no kernel changed"
    text += f", {done.untouched} unchanged" if done.untouched else ""
    text += f", {counted(len(done.stale), 'ledger error')}" if done.stale else ""
    text += ", interrupted" if done.interrupted and done.outcome != "interrupted" else ""
    return f"gate {done.outcome.upper()}{against}: {text}; {seconds}"


def gate_object(done: Gate) -> dict[str, Any]:
    """Return the gate's result as plain values."""
    return {
        "outcome": done.outcome,
        "against": done.against,
        "kernels": [_kernel_object(each) for each in done.kernels],
        "untouched": done.untouched,
        "ledger": done.ledger,
        "ledger_errors": [{"error": text, "line": line} for text, line in done.stale],
        "notes": list(done.notes),
        "seconds": done.seconds,
        "environment": done.environment,
        "interrupted": done.interrupted,
        "written": done.written,
    }


def _kernel_object(gated: KernelGate) -> dict[str, Any]:
    return {
        "kernel": gated.kernel,
        "outcome": gated.outcome,
        "why": gated.why,
        "file": gated.file,
        "line": gated.line,
        "parts": [_part_object(part) for part in gated.parts],
    }


def _part_object(part: Part) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(part)
    for finding, each in zip(part.findings, plain["findings"], strict=True):
        each["described"] = dict(finding.described)
        each["repro"] = next((line for _, line in finding.again), None)
    return plain


def markdown(done: Gate) -> str:
    """Return a summary for a job's page: one row per kernel and part, and the findings below."""
    lines = [f"## attnfuzz gate: {done.outcome.upper() if done.outcome != 'pass' else 'pass'}", "", _cell(_verdict(done)), ""]
    if done.kernels:
        lines += ["| kernel | part | verdict | why |", "|---|---|---|---|"]
        for gated in done.kernels:
            for number, part in enumerate(gated.parts):
                name = f"`{_code(gated.kernel)}`" if number == 0 else ""
                lines.append(f"| {name} | {part.name} | {_SIGNS[part.outcome]} | {_cell(part.summary)} |")
        lines.append("")
    for gated in done.kernels:
        for finding in gated.findings:
            lines += _finding_markdown(gated, finding)
    if done.stale or done.notes:
        lines += [
            "### Ledger",
            "",
            *(f"- {_cell(text)}" for text, _ in done.stale),
            *(f"- note: {_cell(each)}" for each in done.notes),
        ]
        lines.append("")
    return "\n".join(lines)


def _finding_markdown(gated: KernelGate, finding: Finding) -> list[str]:
    known = f" (known: {finding.waiver.issue}, until {finding.waiver.expires})" if finding.waiver else ""
    rows = [*finding.described, ("found", finding.message)]
    if gated.file:
        rows.append(("file", f"{gated.file}:{gated.line}"))
    rows += finding.again
    text = printable("\n".join(f"{name:<20} {value}" for name, value in rows))
    # A fence longer than any run of backticks that a kernel's own text may hold.
    fence = "`" * max(3, 1 + max((len(each) for each in _ticks(text)), default=0))
    return [f"### {_cell(_title(finding) + known)}", "", fence, text, fence, ""]


def _ticks(text: str) -> list[str]:
    return "".join(each if each == "`" else " " for each in text).split()


def _cell(text: str) -> str:
    """Return `text` as one line of Markdown that cannot open a tag, a cell or a link."""
    flat = " ".join(printable(text).split())
    for sign in "\\`|[]*_":
        flat = flat.replace(sign, f"\\{sign}")
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _code(text: str) -> str:
    return one_line(text).replace("`", "'").replace("|", "\\|")
