"""`attnfuzz mutants`: campaigns on planted bugs. The bank of them is in the repository's tests, which no installation has."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from attnfuzz.harness.cli.options import CLEAN, FAILURES, INTERRUPTED, console, echo_json, json_option
from attnfuzz.harness.cli.streams import echo
from attnfuzz.harness.core.signals import ending
from attnfuzz.kernels.problem import BadArgument, reject

__all__ = ["mutants_command"]

_TESTS = Path(__file__).parents[2] / "tests"
"""The repository's tests, where this module is in a checkout."""
_BANK = _TESTS / "mutants" / "bugs"
_MOST_JOBS = 4
"""Campaigns at once, as a multiple of the cores."""


@click.command("mutants", hidden=not _BANK.is_dir())
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--max-examples", default=500, show_default=True, type=click.IntRange(min=1), metavar="N", help="Cases of each campaign."
)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1), metavar="N", help="Campaigns of each mutant.")
@click.option(
    "--shrink",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Time to shrink a failure, such as 0.01 where only the number of Cases counts [default: that of a run].",
)
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Campaigns at once [default: the cores].")
@json_option
def mutants_command(
    ids: tuple[str, ...], max_examples: int, seeds: int, shrink: float | None, jobs: int | None, as_json: bool
) -> None:
    """Bugs, most of them of released kernels, planted in copies of ours (default: all): how many Cases it takes to find each.

    Each campaign is that of `attnfuzz run`. Exit 0 only if each finds its bug. Needs a checkout of the repository: the bank is in
    tests/mutants.
    """
    detection = _of_checkout("detection")
    chosen = _chosen(_bank(), ids)
    tasks = [detection.Attempt(each, seed, max_examples, shrink) for each in chosen for seed in range(seeds)]
    cores = len(os.sched_getaffinity(0))
    rows, interrupted = _finished(detection, tasks, min(jobs or cores, _MOST_JOBS * cores), as_json=as_json)
    _report(detection, rows, max_examples, interrupted=interrupted, as_json=as_json)
    survived = any(each.cases is None for each in rows)
    click.get_current_context().exit(INTERRUPTED if interrupted else FAILURES if survived else CLEAN)


def _of_checkout(name: str) -> ModuleType:
    """Import a module of tests/support.

    Raises:
        BadArgument: this is an installation, without the repository's tests.
    """
    if not _BANK.is_dir():
        raise reject("mutants", str(_BANK), "the bank of mutants is no part of an installation",
                     "run `attnfuzz` from a checkout of the repository (pip install -e .)")  # fmt: skip
    if str(_TESTS) not in sys.path:
        sys.path.insert(0, str(_TESTS))
    return importlib.import_module(f"support.{name}")


def _bank() -> dict[str, Any]:
    """Return the mutants by id.

    Raises:
        BadArgument: a file of the bank is wrong.
    """
    try:
        bank: dict[str, Any] = _of_checkout("mutants").mutants()
    except ValueError as error:
        raise BadArgument(f"{_BANK}: {error}") from None
    return bank


def _chosen(bank: dict[str, Any], ids: Sequence[str]) -> list[str]:
    """Return the ids of the mutants to try, each once.

    Raises:
        BadArgument: the bank has none of an id, or it shows on a GPU only.
    """
    for each in ids:
        if each not in bank:
            near = ", ".join(difflib.get_close_matches(each, bank)) or f"those of {_BANK}"
            raise reject("ID", each, f"none of the {len(bank)} mutants has that id", f"did you mean {near}?")
        if bank[each].device != "cpu":
            raise reject("ID", each, "it shows on a GPU only, and campaigns run on the CPU", "give another")
    return [each for each in dict.fromkeys(ids or bank) if bank[each].device == "cpu"]


def _finished(detection: ModuleType, tasks: Sequence[Any], jobs: int, *, as_json: bool) -> tuple[list[Any], bool]:
    """Return (rows, interrupted): what campaigns made of the mutants; Ctrl-C keeps the rows until then.

    Raises:
        BadArgument: a process ended in the middle of a campaign.
    """
    from attnfuzz.harness.report.progress import progress_on

    processes = _of_checkout("verdict.processes")
    rows: list[Any] = []
    try:
        with progress_on(console(stderr=as_json), bar=True, count=True, left=True, width=24) as progress:
            bar = progress.add_task("campaigns", total=len(tasks))
            for each in processes.finished(detection.attempt, tasks, jobs):
                rows.append(each)
                progress.update(bar, completed=len(rows), description=each.mutant)
            ending()
    except KeyboardInterrupt:
        ending()
        return rows, True
    except processes.LostProcess as error:
        raise reject("jobs", jobs, str(error), "give fewer") from None
    return rows, False


def _report(detection: ModuleType, rows: list[Any], most: int, *, interrupted: bool, as_json: bool) -> None:
    import msgspec

    rows.sort(key=lambda each: (each.mutant, each.seed))
    if as_json:
        figures = msgspec.to_builtins(detection.rates(rows)) if rows else None
        echo_json({"rates": figures, "attempts": msgspec.to_builtins(rows), "interrupted": interrupted})
    elif rows:
        _of_checkout("detection_report").show(console(), rows, most)
    if interrupted:
        echo(f"interrupted; campaigns until then: {len(rows)}", err=True)
