"""The command line of benchmarks/detection.py."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from support.mutants import Mutant, mutants
from support.verdict.processes import LostProcess, finished

from attnfuzz.harness.cli.options import CLEAN, INTERRUPTED, WRONG_USE, FiniteRange, console, writable
from attnfuzz.harness.core.files import write_whole
from attnfuzz.harness.report.progress import progress_on
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.problem import OUTPUT_NAMES
from detection.contest import METHODS, Result, Turn, played
from detection.tables import show

__all__ = ["main"]

_WIDE = 200
"""Columns of a table in Markdown, which is not cut."""


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--method", "methods", multiple=True, type=click.Choice(list(METHODS)), help="One of them; repeatable.")
@click.option("--seconds", default=10.0, show_default=True, type=FiniteRange(min=0, min_open=True), metavar="S",
              help="Time of each method for each mutant.")  # fmt: skip
@click.option("--control", default=30.0, show_default=True, type=FiniteRange(min=0), metavar="S",
              help="Time of each method for each kernel without bugs; 0: none.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), metavar="N")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Turns at once [default: the cores].")
@click.option("--markdown", is_flag=True, help="Print tables in Markdown.")
@click.option("--json", "kept", metavar="FILE", help="Write every turn to FILE.")
@click.option("--read", metavar="FILE", help="Show the turns of an earlier --json.")
def main(
    ids: tuple[str, ...], methods: tuple[str, ...], seconds: float, control: float, seed: int, jobs: int | None,
    markdown: bool, kept: str | None, read: str | None,
) -> None:  # fmt: skip
    """Try six ways of testing on each mutant for the same time."""
    rows: list[Result] = []
    try:
        interrupted = False
        if read is None:
            target = None if kept is None else writable(kept, "json")
            turns = turns_of(chosen(mutants(), ids), methods or tuple(METHODS), seconds, control, seed)
            try:
                interrupted = _finish(turns, jobs or len(os.sched_getaffinity(0)), rows)
            finally:
                # Whatever ends it: an hour of turns may be in there.
                if target is not None and rows:
                    write_whole(target, msgspec.json.format(msgspec.json.encode(rows)).decode() + "\n")
        else:
            rows = _read(read)
    except (ValueError, LostProcess) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(WRONG_USE)
    terminal = console()
    if markdown:
        terminal.width = _WIDE
    show(terminal, rows, markdown=markdown)
    if interrupted:
        click.echo(f"interrupted; turns until then: {len(rows)}", err=True)
    sys.exit(INTERRUPTED if interrupted else CLEAN)


def chosen(bank: dict[str, Mutant], ids: Sequence[str]) -> list[Mutant]:
    """Return the mutants of the ids; by default those of the bank that show on the CPU and that the other ways have Cases for.

    Raises:
        BadArgument: there is no such mutant, it shows on a GPU only, or the other ways have no Cases for its kernel.
    """
    for each in ids:
        if each not in bank:
            raise reject("ID", each, "no mutant has that id", f"give one of {', '.join(bank)}")
        if bank[each].device != "cpu":
            raise reject("ID", each, "it shows on a GPU only, and this runs on the CPU", "give another")
        if not _has_other_cases(bank[each].kernel):
            why = f"{bank[each].kernel} lacks outputs that the other ways compare, or takes pages alone"
            raise reject("ID", each, why, "give another")
    cpu = (each for each in dict.fromkeys(ids or bank) if bank[each].device == "cpu" and (ids or not bank[each].held_out))
    return [bank[each] for each in cpu if _has_other_cases(bank[each].kernel)]


def _has_other_cases(kernel: str) -> bool:
    """Whether the other ways have Cases for a kernel: they compare all outputs, and have no pages."""
    can = registry.get(kernel).capabilities
    return set(can.outputs) == set(OUTPUT_NAMES) and 0 in can.page_sizes


def turns_of(wanted: Sequence[Mutant], methods: Sequence[str], seconds: float, control: float, seed: int) -> list[Turn]:
    """Return all turns in random order, so that a machine that slows down slows all methods alike."""
    turns = [Turn(method, each.id, seconds, seed) for each in wanted for method in dict.fromkeys(methods)]
    if control:
        kernels = dict.fromkeys(each.kernel for each in wanted)
        turns += [Turn(method, kernel, control, seed) for kernel in kernels for method in dict.fromkeys(methods)]
    random.Random(seed).shuffle(turns)
    return turns


def _finish(turns: Sequence[Turn], jobs: int, rows: list[Result]) -> bool:
    """Add the result of each turn to `rows` as it ends; return whether Ctrl-C ended it before."""
    try:
        with progress_on(console(stderr=True), bar=True, count=True, left=True, width=32) as progress:
            bar = progress.add_task("turns", total=len(turns))
            for row in finished(played, turns, jobs):
                rows.append(row)
                progress.update(bar, completed=len(rows), description=f"{row.subject}, {row.method}")
    except KeyboardInterrupt:
        return True
    return False


def _read(path: str) -> list[Result]:
    """Return the turns of a file.

    Raises:
        BadArgument: it cannot be read.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[Result])
    except (OSError, msgspec.MsgspecError) as error:
        raise reject("read", path, f"it cannot be read ({error})", "give a file that --json has written") from None
