"""`attnfuzz calibrate` on a terminal, in Markdown and for machines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID
from rich.table import Table

from attnfuzz.harness.audit.calibrate.calibrate import Calibration
from attnfuzz.harness.audit.calibrate.known import Known
from attnfuzz.harness.audit.calibrate.turn import WHOLE, Count, Progress, Turn
from attnfuzz.harness.campaign.events import Worst
from attnfuzz.harness.judge.failure import OUTPUT_TITLES
from attnfuzz.harness.report.describe import describe_case, describe_verdict
from attnfuzz.harness.report.machine import found_object
from attnfuzz.harness.report.progress import ProgressView, progress_on
from attnfuzz.harness.report.terminal import show_found
from attnfuzz.kernels.problem import OUTPUT_NAMES

__all__ = ["CalibrationProgress", "calibration_object", "markdown", "show_calibration"]

_MANY = 1e4
_COLUMNS = ("kernel", "output", "judged", "not judged", "alarms", "known", "worst / budget", "sigmas", "R", "z", "R and z in")
_LEGEND = (
    "judged, not judged: Cases; alarms: Cases wrong in a way that is not known; known: Cases wrong only in known ways; "
    "worst / budget: the largest error over its budget (1 is the limit); sigmas: the largest error beyond the float32 part in "
    "multiples of its root-mean-square size (6 is the limit where that decides); R, z: the aggregate statistics over their "
    "limits, in so many Cases"
)


class CalibrationProgress(ProgressView):
    """Shows how far each kernel is, one line each; a context, so that the terminal is left as it was."""

    def __init__(self, console: Console) -> None:
        super().__init__(progress_on(console, note=True, width=22))
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, progress: Progress) -> None:
        """Show how far a kernel is."""
        if progress.over:
            if (task := self._tasks.pop(progress.kernel, None)) is not None:
                self.bars.remove_task(task)
            return
        note = f"{progress.cases} cases, {progress.failures} failures, {progress.doing}"
        if progress.kernel not in self._tasks:
            self._tasks[progress.kernel] = self.bars.add_task(escape(progress.kernel), total=None, note=note)
        self.bars.update(self._tasks[progress.kernel], note=note)


def show_calibration(console: Console, done: Calibration) -> None:
    """The table, every alarm with its minimal Case, what is known, and one line of verdict."""
    table = Table()
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("kernel", "output") else "right", no_wrap=column == "kernel")
    for turn in done.turns:
        for cells in _rows(turn):
            alarms = f"[red]{cells[4]}[/]" if cells[4] != "0" else cells[4]
            table.add_row(*map(escape, cells[:4]), alarms, *map(escape, cells[5:]))
        table.add_section()
    console.print(table)
    console.print(f"{_LEGEND}.", highlight=False)
    for number, found in enumerate((found for turn in done.turns for found in turn.alarms), 1):
        show_found(console, number, found)
    for note in _notes(done):
        console.print(escape(note), highlight=False, soft_wrap=True)
    count = sum(len(turn.alarms) for turn in done.turns)
    verdict = f"[red]{count} alarm{'s' * (count != 1)}[/]" if done.failed else "[green]no alarms[/]"
    console.print(f"{verdict} in {done.cases} cases of {_kernels(done)} ({_device(done)}, {done.seconds:.0f} s)", highlight=False)


def markdown(done: Calibration, command: str) -> str:
    """The table as a document, with the command that makes it, the device and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in done.environment.get("versions", {}).items())
    lines = [
        "# Peers: how near each kernel came to its budgets",
        "",
        f"Made by `{command}` on {_device(done)}: {versions}.",
        "",
        f"{_LEGEND[0].upper()}{_LEGEND[1:]}.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'|'.join('---' if column in ('kernel', 'output') else '---:' for column in _COLUMNS)}|",
        *(f"| {' | '.join(cells)} |" for turn in done.turns for cells in _rows(turn)),
        "",
        f"{done.cases} Cases of {_kernels(done)}.",
    ]
    alarms = [found for turn in done.turns for found in turn.alarms]
    if alarms:
        lines += ["", "## Alarms", ""]
    for found in alarms:
        parts = "; ".join(f"{name} {value}" for name, value in describe_case(found.case)[1:])
        rate = f" It shows in {found.rate[0]} of {found.rate[1]} runs." if found.rate else ""
        lines.append(f"- {found.identity}: {parts}. {' '.join(describe_verdict(found.verdict))}{rate} `{found.case.canonical()}`")
    if notes := list(_notes(done)):
        lines += ["", "## Notes", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def calibration_object(done: Calibration) -> dict[str, Any]:
    """Plain values for `--json`."""
    return {
        "device": _device(done),
        "versions": done.environment.get("versions", {}),
        "cases": done.cases,
        "max_examples": done.plan.cases,
        "seed": done.plan.seed,
        "jobs": done.plan.jobs,
        "seconds": done.seconds,
        "failed": done.failed,
        "interrupted": done.interrupted,
        "kernels": [_turn_object(turn) for turn in done.turns],
    }


def _turn_object(turn: Turn) -> dict[str, Any]:
    summary = turn.summary
    return {
        "kernel": turn.kernel,
        "cases": summary.cases if summary else 0,
        "seconds": summary.seconds if summary else 0.0,
        "outputs": {name: msgspec.to_builtins(each) for name, each in summary.outputs.items()} if summary else {},
        "wrong": {place: {"alarms": count.alarms, "known": count.known} for place, count in turn.counts.items()},
        "alarms": [found_object(found) for found in turn.alarms],
        "known": [{"path": str(each.stored.path), "identity": str(each.identity), "cases": cases} for each, cases in turn.known],
        "gone": [str(each.stored.path) for each in turn.gone],
        "of_other_versions": [str(each.stored.path) for each in turn.elsewhere],
        "features": summary.features if summary else {},
        "processes_replaced": summary.replaced if summary else 0,
        "skipped": turn.skipped or None,
        "broken": turn.broken or None,
        "lost": turn.lost or None,
    }


def _rows(turn: Turn) -> Iterator[tuple[str, ...]]:
    """One row an output, and one for failures of no single output where there are any."""
    if turn.summary is None:
        return
    for number, name in enumerate(OUTPUT_NAMES):
        figures, count = turn.summary.outputs.get(name, Worst()), turn.counts.get(name, Count())
        yield (
            turn.kernel if number == 0 else "",
            OUTPUT_TITLES[name],
            str(figures.cases),
            str(figures.unjudged),
            str(count.alarms),
            str(count.known),
            _number(figures.worst),
            f"{figures.sigmas:.2f}" if figures.sigmas < _MANY else f"{figures.sigmas:.1e}",
            f"{figures.r:.2f}",
            f"{figures.z:.2f}",
            str(figures.aggregated),
        )
    if WHOLE in turn.counts:
        whole = turn.counts[WHOLE]
        yield ("", "run", "", "", str(whole.alarms), str(whole.known), *[""] * 5)


def _notes(done: Calibration) -> Iterator[str]:
    for turn in done.turns:
        if turn.skipped:
            yield f"{turn.kernel}: not run here: {turn.skipped}"
        for each, cases in turn.known:
            yield (
                f"{turn.kernel}: known: {each.identity} ({_told(each)}), in {cases} Cases"
                if cases
                else f"{turn.kernel}: known: {each.identity} ({_told(each)}), in its own Case"
            )
        for each in turn.gone:
            yield f"{turn.kernel}: known, but gone: {each.identity} ({_told(each)}); take the file away"
        for each in turn.elsewhere:
            yield f"{turn.kernel}: known of other versions and not judged: {each.identity} ({_told(each)})"
        if turn.lost:
            yield f"{turn.kernel}: stopped early: {turn.lost}"
        if turn.broken:
            yield f"{turn.kernel}: not tried to the end: {turn.broken.splitlines()[0]}"
        if turn.interrupted:
            yield f"{turn.kernel}: interrupted"
        elif turn.summary and turn.summary.cases < done.plan.cases:
            yield f"{turn.kernel}: {turn.summary.cases} of {done.plan.cases} Cases: {_why_fewer(turn)}"


def _why_fewer(turn: Turn) -> str:
    assert turn.summary is not None
    return f"{len(turn.summary.found)} failures ended its turn" if turn.summary.found else "there are no more to draw"


def _told(known: Known) -> str:
    return ", ".join([str(known.stored.path), *(f"{package} {version}" for package, version in known.versions)])


def _kernels(done: Calibration) -> str:
    count = sum(turn.summary is not None for turn in done.turns)
    return f"{count} kernel{'s' * (count != 1)}"


def _device(done: Calibration) -> str:
    return str(done.environment.get("device", done.plan.device))


def _number(value: float) -> str:
    if math.isinf(value):
        return "inf"
    return f"{value:.3f}" if value < 100 else f"{value:.2e}"
