"""Case files of a folder, and what became of them, for people and for machines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from attnfuzz.harness.judge.failure import OUTPUT_TITLES
from attnfuzz.harness.report.describe import lengths
from attnfuzz.harness.repro.stored import Entry, Listing, Removal, size_of

__all__ = ["entry_object", "listing_object", "removal_object", "show_left", "show_listing", "show_removals"]

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def _age(seconds: float) -> str:
    """The age in its largest unit: "3 d"."""
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _words(entry: Entry) -> tuple[str, str, str]:
    """Output, kind and size."""
    identity, case = entry.identity, entry.stored.case
    p = case.problem
    output = "" if identity is None else OUTPUT_TITLES[identity.output] if identity.output else "-"
    shape = lengths(case)
    if len(shape) > 24:
        shape = f"{p.batch} sequences, {p.total_q}x{p.total_k}"
    return output or "?", identity.kind if identity else "?", f"{shape}, heads {p.heads}/{p.kv_heads}, dims {p.dim_qk}/{p.dim_v}"


def entry_object(entry: Entry) -> dict[str, Any]:
    """A case file as plain values."""
    identity, case = entry.identity, entry.stored.case
    return {
        "kernel": case.kernel,
        "output": identity.output if identity else None,
        "kind": identity.kind if identity else None,
        "check": case.check,
        "elements": size_of(entry),
        "lengths": lengths(case),
        "age_seconds": round(max(0.0, time.time() - entry.written)),
        "last_seen": entry.last_seen,
        "minimal": entry.stored.finding.minimal,
        "id": identity.key if identity else None,
        "case_id": case.id,
        "file": str(entry.stored.path),
    }


def _left_objects(left: Sequence[tuple[Path, str]]) -> list[dict[str, str]]:
    return [{"file": str(path), "reason": reason} for path, reason in left]


def listing_object(listing: Listing) -> dict[str, Any]:
    """The folder as plain values."""
    cases = [entry_object(each) for each in listing.entries]
    return {"folder": str(listing.folder), "cases": cases, "unreadable": _left_objects(listing.unreadable)}


def removal_object(
    removed: Sequence[Removal], left: Sequence[tuple[Path, str]], kept: int, *, dry_run: bool, interrupted: bool
) -> dict[str, Any]:
    """What was removed and what is left, as plain values."""
    return {
        "dry_run": dry_run,
        "removed": [{**entry_object(each.entry), "reason": each.reason} for each in removed],
        "left": _left_objects(left),
        "kept": kept,
        "interrupted": interrupted,
    }


def show_listing(console: Console, listing: Listing) -> None:
    """A table with a line for each case file, then what cannot be read."""
    from rich.table import Table

    if listing.entries:
        table = Table("kernel", "output", "kind", "size", "age", "last seen (UTC)")
        table.add_column("file", overflow="fold")
        for each in listing.entries:
            date = each.last_seen[:16].replace("T", " ")
            row = (each.stored.case.kernel, *_words(each), _age(time.time() - each.written), date, each.stored.path.name)
            table.add_row(*map(escape, row))
        console.print(table)
    count = len(listing.entries)
    _say(console, f"{count} {'case' if count == 1 else 'cases'} in {listing.folder}")
    show_left(console, listing.unreadable)


def show_removals(console: Console, removals: Sequence[Removal], verb: str) -> None:
    """A line for each file with the reason."""
    for each in removals:
        _say(console, f"{verb} {each.entry.stored.path}: {each.reason}")


def show_left(console: Console, left: Sequence[tuple[Path, str]]) -> None:
    """A line for each file that is left alone, with the reason."""
    for path, reason in left:
        _say(console, f"left {path}: {reason}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
