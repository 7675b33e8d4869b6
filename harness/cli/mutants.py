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
@click.option(
    "--operators",
    metavar="KERNEL",
    help="Instead of the bank: small changes of this kernel's device source, made by operators, without the equivalent ones.",
)
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of the mutants of --operators, N only, spread over operators and functions: the same ones each time.",
)
@json_option
def mutants_command(
    ids: tuple[str, ...],
    max_examples: int,
    seeds: int,
    shrink: float | None,
    jobs: int | None,
    operators: str | None,
    sample: int | None,
    as_json: bool,
) -> None:
    """Bugs, most of them of released kernels, planted in copies of ours (default: all): how many Cases it takes to find each.

    Each campaign is that of `attnfuzz run`. Exit 0 only if each finds its bug. Needs a checkout of the repository: the bank is in
    tests/mutants. With --operators KERNEL also libcst.
    """
    detection = _of_checkout("detection")
    equivalent: dict[str, str] = {}
    if operators is not None:
        chosen, equivalent = _by_operators(operators, ids, sample)
    elif sample is not None:
        raise reject("sample", sample, "the bank is tried as a whole", "give --operators KERNEL, or ids")
    else:
        chosen = _chosen(_bank(), ids)
    tasks = [detection.Attempt(each, seed, max_examples, shrink) for each in chosen for seed in range(seeds)]
    cores = len(os.sched_getaffinity(0))
    rows, interrupted = _finished(detection, tasks, min(jobs or cores, _MOST_JOBS * cores), as_json=as_json)
    _report(detection, rows, max_examples, equivalent, interrupted=interrupted, as_json=as_json)
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


def _by_operators(kernel: str, ids: Sequence[str], size: int | None) -> tuple[list[str], dict[str, str]]:
    """Return the ids of the mutants that operators make of a kernel, and those that are equivalent with the reasons.

    Raises:
        BadArgument: libcst is missing, the kernel's source has no such mutants, or the list of equivalents does not fit it.
    """
    try:
        bank = _of_checkout("operators.bank")
    except ModuleNotFoundError as error:
        if error.name != "libcst":
            raise
        raise reject("operators", kernel, "they change a syntax tree of libcst, which is not installed",
                     "pip install libcst, or the extra `mutants`") from None  # fmt: skip
    try:
        everything, reasons = bank.operator_mutants(kernel), bank.equivalents(kernel)
    except ValueError as error:
        raise BadArgument(f"operators={kernel!r}: {error}") from None
    for each in ids:
        if each not in everything:
            near = ", ".join(difflib.get_close_matches(each, everything)) or f"those of `--operators {kernel} --sample 10`"
            raise reject("ID", each, f"none of the {len(everything)} mutants of {kernel} has that id", f"did you mean {near}?")
    chosen = list(dict.fromkeys(ids or everything))
    if size is not None:
        chosen = bank.sample(chosen, size)
    return [each for each in chosen if each not in reasons], {each: reasons[each] for each in chosen if each in reasons}


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


def _report(
    detection: ModuleType, rows: list[Any], most: int, equivalent: dict[str, str], *, interrupted: bool, as_json: bool
) -> None:
    import msgspec

    rows.sort(key=lambda each: (each.mutant, each.seed))
    if as_json:
        figures = msgspec.to_builtins(detection.rates(rows)) if rows else None
        changes = {each.mutant: detection.mutant_of(each.mutant).mechanism for each in rows}
        echo_json({"rates": figures, "attempts": msgspec.to_builtins(rows), "interrupted": interrupted, "changes": changes,
                   "equivalent": equivalent})  # fmt: skip
    elif rows:
        _of_checkout("detection_report").show(console(), rows, most, len(equivalent))
    if interrupted:
        echo(f"interrupted; campaigns until then: {len(rows)}", err=True)
