"""Results of running a case file again, repeating it or shrinking it, for people and for machines."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from attnfuzz.harness.campaign.corpus import CaseFile, StoredFinding, repro_line
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.report.describe import describe_case, describe_verdict
from attnfuzz.harness.report.machine import explanation_object, verdict_object
from attnfuzz.harness.report.terminal import show_explanation
from attnfuzz.harness.repro.explain import Explained
from attnfuzz.harness.repro.reproduce import Repetition, Reproduction
from attnfuzz.harness.repro.reshrink import Reshrunk

__all__ = [
    "explained_object",
    "repetition_object",
    "reshrunk_object",
    "show_explained",
    "show_repetition",
    "show_reproduction",
    "show_reshrunk",
]


def repetition_object(stored: CaseFile, done: Repetition) -> dict[str, Any]:
    """The result as plain values."""
    return {
        "device": done.device,
        "asked": done.count,
        "runs": done.runs,
        "failed": done.failed,
        "rate": done.failed / done.runs if done.runs else None,
        "interval": list(done.interval),
        "interrupted": done.interrupted,
        "failures": [
            {
                "id": each.failure.identity.key,
                "identity": msgspec.to_builtins(each.failure.identity),
                "runs": each.runs,
                "first": each.first,
                "message": each.failure.message,
            }
            for each in done.failures
        ],
        "case": stored.case.to_object(),
    }


def show_repetition(console: Console, stored: CaseFile, done: Repetition) -> None:
    """The rate with its interval, the Case, and each distinct failure with how often it showed."""
    low, high = done.interval
    style, word = ("bold red", "FAILED") if done.failed else ("bold green", "PASSED")
    percent = f"{100 * done.failed / max(1, done.runs):.3g} %, 95 % confidence: {100 * low:.0f} to {100 * high:.0f} %"
    _say(console, f"[{style}]{word}[/] {escape(str(stored.path))} on {done.device}")
    _say(console, f"   failed in {done.failed} of {counted(done.runs, 'run')} ({percent})")
    if done.interrupted:
        _say(console, f"   [yellow]interrupted: {done.runs} of {counted(done.count, 'run')}[/]")
    _case(console, stored)
    for each in done.failures:
        failure = each.failure
        _say(
            console,
            f"   in {each.runs} of {counted(done.runs, 'run')}, first in run {each.first}: {failure.kind}: {failure.message}",
            markup=False,
        )


def reshrunk_object(done: Reshrunk) -> dict[str, Any]:
    """The result as plain values."""
    return {
        "outcome": done.outcome,
        "device": done.device,
        "case": done.case.to_object(),
        "id": done.identity.key if done.identity else None,
        "identity": msgspec.to_builtins(done.identity) if done.identity else None,
        "verdict": verdict_object(done.verdict),
        "path": done.path,
        "repro": repro_line(done.path, done.case.kernel) if done.path else None,
        "trials": done.trials,
        "seconds": done.seconds,
        "partly": done.partly,
        "rate": list(done.rate) if done.rate else None,
        "explanation": explanation_object(done.explanation),
    }


def explained_object(stored: CaseFile, done: Explained) -> dict[str, Any]:
    """The result as plain values."""
    return {
        "outcome": done.outcome,
        "device": done.device,
        "case": stored.case.to_object(),
        "explanation": explanation_object(done.explanation) if done.outcome == "EXPLAINED" else None,
        "trials": done.trials,
        "seconds": done.seconds,
        "written": done.written,
    }


def show_explained(console: Console, stored: CaseFile, done: Explained) -> None:
    """Print the Case, what fails, and which parts matter."""
    word = "[bold red]EXPLAINED[/]" if done.outcome == "EXPLAINED" else "[bold green]FIXED[/] it does not fail any more"
    _say(console, f"{word}: {escape(str(stored.path))} on {done.device}, {done.trials} trials in {done.seconds:.1f} s")
    _case(console, stored)
    for line in describe_verdict(done.verdict):
        _say(console, f"   {line}", markup=False)
    if done.outcome == "EXPLAINED":
        show_explanation(console, done.explanation)
        _say(console, f"   {done.why_not or 'the case file holds this explanation now'}", markup=False)


def show_reshrunk(console: Console, stored: CaseFile, done: Reshrunk) -> None:
    """Print the outcome, the smaller Case, and the line that runs it."""
    outcome = {
        "SMALLER": "[bold red]SMALLER[/] a simpler Case fails alike",
        "MINIMAL": "[bold red]MINIMAL[/] no simpler Case fails alike",
        "STOPPED": "[bold yellow]STOPPED[/] before a simpler Case was found that fails alike",
        "FIXED": "[bold green]FIXED[/] it does not fail any more",
    }[done.outcome]
    _say(
        console,
        f"{outcome}: {escape(str(stored.path))} on {done.device}, {counted(done.trials, 'trial')} in {done.seconds:.1f} s",
    )
    if done.partly:
        _say(console, "   [yellow]not to the end: a longer --budget may find a simpler one[/]")
    if done.identity:
        _say(console, f"   {done.identity}", markup=False)
    _case(console, CaseFile(done.case, StoredFinding(), stored.path))
    for line in describe_verdict(done.verdict):
        _say(console, f"   {line}", markup=False)
    if done.rate:
        _say(console, f"   shows in {done.rate[0]} of {done.rate[1]} runs")
    show_explanation(console, done.explanation)
    if done.path:
        _say(console, f"   run it again:        {repro_line(done.path, done.case.kernel)}", markup=False)


def _case(console: Console, stored: CaseFile) -> None:
    for name, value in describe_case(stored.case):
        _say(console, f"   {name:<20} {value}", markup=False)


def _say(console: Console, text: str, *, markup: bool = True) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=markup)


def show_reproduction(console: Console, stored: CaseFile, done: Reproduction) -> None:
    """FIXED, FAILED or UNJUDGED, the Case, and what was seen this time."""
    style = "bold green" if done.outcome == "FIXED" else "bold red"
    runs = f", run {done.runs} times" if done.runs > 1 else ""
    console.print(
        f"[{style}]{done.outcome}[/] {escape(str(stored.path))} on {done.device}{runs}", highlight=False, soft_wrap=True
    )
    for name, value in describe_case(stored.case):
        console.print(f"   {name:<20} {value}", highlight=False, soft_wrap=True, markup=False)
    for line in describe_verdict(done.verdict):
        console.print(f"   {line}", highlight=False, soft_wrap=True, markup=False)
    if done.outcome == "FAILED":
        show_explanation(console, stored.finding.explanation)
    if done.verdict.failure is not None and done.verdict.failure.detail:
        console.print(done.verdict.failure.detail, highlight=False, soft_wrap=True, markup=False)
