"""Results of compute-sanitizer, for people and for machines."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnfuzz.harness.campaign.corpus import CaseFile
from attnfuzz.harness.report.describe import describe_case
from attnfuzz.harness.repro.sanitize.log import Finding
from attnfuzz.harness.repro.sanitize.sanitize import Sanitized

__all__ = ["sanitized_object", "show_sanitized"]


def sanitized_object(stored: CaseFile, done: Sanitized) -> dict[str, Any]:
    """The result as plain values."""
    return {
        "tool": done.tool,
        "device": done.device,
        "clean": done.clean,
        "findings": [msgspec.to_builtins(each) for each in done.findings],
        "raised": done.raised,
        "late": done.late,
        "notes": list(done.notes),
        "seconds": done.seconds,
        "command": shlex.join(done.command),
        "case": stored.case.to_object(),
    }


def show_sanitized(console: Console, stored: CaseFile, done: Sanitized) -> None:
    """Print CLEAN or FOUND, the Case, and a table of findings."""
    style, outcome = ("bold green", "CLEAN") if done.clean else ("bold red", "FOUND")
    console.print(
        f"[{style}]{outcome}[/] {escape(str(stored.path))} under {done.tool} on {done.device}, {done.seconds:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    for name, value in describe_case(stored.case):
        console.print(f"   {name:<20} {value}", highlight=False, soft_wrap=True, markup=False)
    if done.findings:
        console.print(_table(done.findings))
    for line in (done.raised, *done.notes):
        if line:
            console.print(f"   {line}", highlight=False, soft_wrap=True, markup=False)
    if done.late:
        console.print("   the deadline passed: there may be more to find", highlight=False)


def _table(findings: tuple[Finding, ...]) -> Table:
    table = Table()
    for column in ("what", "kernel", "where", "first seen", "times"):
        table.add_column(column, no_wrap=column in ("kernel", "times"), justify="right" if column == "times" else "left")
    for each in findings:
        what = each.kind + (f" of {each.size} bytes" if each.size is not None else "")
        mild = "" if each.severity == "error" else f" ({each.severity})"
        details = (
            f"thread {each.thread}" if each.thread else "",
            f"block {each.block}" if each.block else "",
            each.address,
            each.nearest,
            each.other,
        )
        cells = (what + mild, each.kernel, each.code, ", ".join(filter(None, details)), str(each.count))
        table.add_row(*map(escape, cells))
    return table
