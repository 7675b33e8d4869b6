"""`attnfuzz mutants`: campaigns on planted bugs. The bank of them is in the repository's tests, which no installation has."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import click

from attnfuzz.harness.cli.mutants_bank import BANK, of_bank, of_checkout, of_operators, whole_bank
from attnfuzz.harness.cli.options import (
    CLEAN,
    FAILURES,
    INTERRUPTED,
    FiniteRange,
    console,
    echo_json,
    json_option,
    writable,
    writing,
)
from attnfuzz.harness.cli.streams import echo
from attnfuzz.harness.core.signals import ending
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.errors import reject

__all__ = ["mutants_command"]

_MOST_JOBS = 4
"""Campaigns at once, as a multiple of the cores."""
_EACH, _DEADLINE = 60.0, 10.0
"""Seconds of a campaign and of a stage on a GPU, where many campaigns share it: one that hangs must not use up their time."""
_TO_END = 10.0
"""Seconds before the end of the time of all in which a campaign that runs again must end: its row would be lost."""
_AGAIN = 3
"""Times that campaigns are run again in new processes, under a time for all of them, where one of the processes was lost."""


@click.command("mutants", hidden=not BANK.is_dir())
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--max-examples", default=500, show_default=True, type=click.IntRange(min=1), metavar="N", help="Cases of each campaign."
)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1), metavar="N", help="Campaigns of each mutant.")
@click.option(
    "--shrink",
    type=FiniteRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Time to shrink a failure, such as 0.01 where only the number of Cases counts [default: that of a run].",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where campaigns run.")
@click.option("--seed", "first", default=0, show_default=True, type=click.IntRange(min=0), metavar="N", help="The first seed.")
@click.option(
    "--each",
    metavar="TIME",
    help="Time of each campaign (60s); it draws from all variants, as without one [default: no limit, with --device cuda 60s].",
)
@click.option(
    "--budget",
    metavar="TIME",
    help="Time of all together, such as 9m; campaigns at work then are dropped. Those that --each has ended run again, longer.",
)
@click.option(
    "--deadline", metavar="TIME", help="A stage of a Case that takes so long hangs [default: 60s, with --device cuda 10s]."
)
@click.option(
    "--rows",
    "rows_file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write each campaign's row at once, one a line; campaigns whose rows are there are not run again, but for those that "
    "--each has ended: last, with twice the time.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Campaigns at once [default: the cores, with --device cuda seven eighths of them].",
)
@click.option(
    "--held-out",
    "held_out",
    is_flag=True,
    help="Instead of the bank: bugs that nothing that is drawn or judged was changed for (tests/mutants/held_out).",
)
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
    first: int,
    shrink: float | None,
    device: Device,
    each: str | None,
    budget: str | None,
    deadline: str | None,
    rows_file: str | None,
    jobs: int | None,
    held_out: bool,
    operators: str | None,
    sample: int | None,
    as_json: bool,
) -> None:
    """Bugs, most of them of released kernels, planted in copies of ours (default: the bank): how many Cases find each.

    Each campaign is that of `attnfuzz run`. Exit 0 only if each finds its bug. Needs a checkout of the repository: the bank is in
    tests/mutants. With --operators KERNEL also libcst.
    """
    detection = of_checkout("detection")
    equivalent: dict[str, str] = {}
    left_out: dict[str, str] = {}
    if held_out and (ids or operators is not None):
        raise reject("held-out", held_out, "it stands for ids, and for the mutants of --operators", "give the one or the other")
    if operators is not None:
        chosen, equivalent = of_operators(operators, ids, sample)
    elif sample is not None:
        raise reject("sample", sample, "the bank is tried as a whole", "give --operators KERNEL, or ids")
    else:
        chosen, left_out = of_bank(whole_bank(), ids, device, held_out=held_out)
    cores = len(os.sched_getaffinity(0))
    at_once = min(jobs or (cores if device == "cpu" else max(1, cores * 7 // 8)), _MOST_JOBS * cores)
    campaign = detection.Attempt("", 0, max_examples, shrink, **_limits(detection, chosen, device, each, deadline, at_once))
    tasks = [replace(campaign, mutant=id_, seed=first + n) for n in range(seeds) for id_ in detection.spread(chosen)]
    seconds = None if budget is None else _seconds(budget, "budget")
    run = _Run(detection, tasks, None if rows_file is None else writable(rows_file, "rows"))
    run.go(at_once, seconds)
    _report(detection, run, max_examples, equivalent, left_out, as_json=as_json)
    survived = any(row.cases is None for row in run.rows) or len(run.rows) < len(tasks)
    click.get_current_context().exit(INTERRUPTED if run.end == "interrupted" else FAILURES if survived else CLEAN)


def _seconds(text: str, name: str) -> float:
    from attnfuzz.harness.campaign.settings import duration

    return duration(text, name)


def _limits(
    detection: ModuleType, chosen: Sequence[str], device: Device, each: str | None, deadline: str | None, jobs: int
) -> dict[str, Any]:
    """Return what the campaigns of a device have in common.

    Raises:
        BadArgument: a kernel of these mutants cannot run on the GPU, or a time is none.
    """
    texts = {"budget": (each, "each"), "deadline": (deadline, "deadline")}
    limits: dict[str, Any] = {name: _seconds(text, of) for name, (text, of) in texts.items() if text is not None}
    if device == "cpu":
        return limits
    kernels = dict.fromkeys(detection.mutant_of(id_).kernel for id_ in chosen)
    for name in kernels:
        if reason := registry.get(name).unavailable(device):
            raise reject("device", device, f"{name} cannot run: {reason}", "give ids of other kernels, or --device cpu")
    # A worker has mutants of all kernels in turn, each of which needs the cores for its own compiles.
    backends = tuple(sorted({registry.get(name).backend for name in kernels}))
    compiles = max(1, len(os.sched_getaffinity(0)) // jobs)
    return {"budget": _EACH, "deadline": _DEADLINE, "device": device, "backends": backends, "compiles": compiles} | limits


class _Run:
    """Campaigns, and the rows that there are of them.

    Args:
        detection: tests/support/detection.py.
        tasks: campaigns.
        file: where rows are kept, and were by an earlier run; None: nowhere.

    Raises:
        BadArgument: it is a file of something else.
    """

    def __init__(self, detection: ModuleType, tasks: Sequence[Any], file: Path | None) -> None:
        self._attempt, self._tasks = detection.attempt, {(each.mutant, each.seed): each for each in tasks}
        try:
            self._file = of_checkout("detection_rows").Rows(file)
        except ValueError as error:
            raise reject("rows", str(file), str(error), "give a file of rows, or a new one") from None
        self._path = file
        known = self._file.known(tasks)
        self._rows: dict[tuple[str, int], Any] = {(each.mutant, each.seed): row for each, row in known.items()}
        self._untried = [each for each in tasks if each not in known]
        self._cut = {(each.mutant, each.seed): row.seconds for each, row in self._file.cut(tasks).items()}
        """Seconds of campaigns that the end of their time has ended in an earlier run."""
        self.end: Literal["interrupted", "time over"] | None = None
        """Why it ended before all campaigns had."""

    @property
    def rows(self) -> list[Any]:
        """The latest row of each campaign."""
        return list(self._rows.values())

    @property
    def left(self) -> list[tuple[str, int]]:
        """Mutants and seeds without a row."""
        return [each for each in self._tasks if each not in self._rows]

    def go(self, jobs: int, seconds: float | None) -> None:
        """Run the campaigns that have no row, with a line for each as it ends; Ctrl-C and the end of the time keep the rows.

        Those that an earlier run cut come last, with more time. In the seconds that are left then, those that were ended by their
        own time run again, with twice that time.

        Raises:
            BadArgument: processes ended in the middle of campaigns, before any other had ended, or a row cannot be written.
        """
        from attnfuzz.harness.report.progress import progress_on

        processes, report = of_checkout("verdict.processes"), of_checkout("detection_report")
        end = None if seconds is None else time.monotonic() + seconds
        limits = {} if seconds is None else {"seconds": seconds, "again": _AGAIN}
        tasks = self._those_cut_last(seconds)
        try:
            with progress_on(console(stderr=True), bar=True, count=True, left=True, width=24) as progress:
                bar = progress.add_task("campaigns", total=len(self._tasks), completed=len(self._rows))
                while tasks:
                    for each in processes.finished(self._attempt, tasks, jobs, **limits):
                        self._rows[each.mutant, each.seed] = each
                        self._keep(each)
                        progress.console.print(report.line(each), highlight=False, soft_wrap=True)
                        progress.update(bar, completed=len(self._rows), description=each.mutant)
                    if end is None:
                        break
                    limits["seconds"] = end - time.monotonic()
                    tasks = self._longer(limits["seconds"])
                ending()
        except KeyboardInterrupt:
            ending()
            self.end = "interrupted"
        except processes.TimeOver:
            # Those that ran again have the row of the time before.
            self.end = "time over" if self.left else None
        except processes.LostProcess as error:
            if not self._rows:
                raise reject("jobs", jobs, str(error), "give fewer") from None
            echo(f"{error}", err=True)
            self.end = "interrupted"

    def _those_cut_last(self, seconds: float | None) -> list[Any]:
        """Return the campaigns to run, those last that an earlier run cut, with twice the time that they had there."""
        first = [each for each in self._untried if (each.mutant, each.seed) not in self._cut]
        again = []
        for key, had in sorted(self._cut.items(), key=lambda each: each[1]):
            task = self._tasks[key]
            if task.budget is not None:
                longer = 2 * had if seconds is None else min(2 * had, seconds - _TO_END)
                task = self._tasks[key] = replace(task, budget=max(task.budget, longer))
            again.append(task)
        return first + again

    def _longer(self, seconds: float) -> list[Any]:
        """Return the campaigns that their time has ended, with up to twice that time; `seconds` are left for them."""
        again = []
        for key, row in self._rows.items():
            task = self._tasks[key]
            longer = min(2 * (task.budget or 0.0), seconds - _TO_END)
            if row.cut and task.budget is not None and longer > task.budget:
                self._tasks[key] = replace(task, budget=longer)
                again.append(self._tasks[key])
        return again

    def _keep(self, row: Any) -> None:
        if self._path is not None:
            with writing(self._path, "rows"):
                self._file.add(self._tasks[row.mutant, row.seed], row)


def _report(
    detection: ModuleType, run: _Run, most: int, equivalent: dict[str, str], other: dict[str, str], *, as_json: bool
) -> None:
    import msgspec

    rows = sorted(run.rows, key=lambda each: (each.mutant, each.seed))
    if as_json:
        changes = {each.mutant: detection.mutant_of(each.mutant).mechanism for each in rows}
        figures = {
            "rates": msgspec.to_builtins(detection.rates(rows)) if rows else None,
            "by_kernel": msgspec.to_builtins(detection.rates_by(rows, "kernel")),
            "by_seed": msgspec.to_builtins(detection.rates_by(rows, "seed")),
            "controls": msgspec.to_builtins(detection.rates_by(rows, "controls")),
        }
        ends = {"interrupted": run.end == "interrupted", "time_over": run.end == "time over", "left": run.left}
        echo_json(
            {
                **figures,
                **ends,
                "attempts": msgspec.to_builtins(rows),
                "changes": changes,
                "equivalent": equivalent,
                "not_here": other,
            }
        )
    elif rows:
        of_checkout("detection_report").show(console(), rows, most, equivalent | other)
    if run.end is not None:
        echo(f"{run.end}; campaigns until then: {len(rows)}, left: {len(run.left)}", err=True)
