"""Figures of a campaign for every kernel and output: how near to its budgets each came, as Markdown and for machines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from attnfuzz.harness.campaign.coverage import Worst
from attnfuzz.harness.campaign.events import CampaignFinished, CampaignStarted, Event, Finding, KernelSummary, TrialFinished
from attnfuzz.harness.core.text import counted, printable
from attnfuzz.harness.judge.failure import CAPTURED_TITLES, OUTPUT_TITLES, Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report.describe import describe_case, describe_verdict
from attnfuzz.kernels.problem import OUTPUT_NAMES

__all__ = ["WHOLE", "Count", "Figures"]

WHOLE: Final = "run"
"""The row of failures of no single output: an exception, a crash, a write out of bounds."""
_MANY: Final = 1e4
_COLUMNS = ("kernel", "output", "judged", "not judged", "wrong", "known", "worst / budget", "sigmas", "R", "z", "R and z in")
_LEGEND = (
    "Judged, not judged: Cases; wrong: Cases wrong in a way that is not known; known: Cases wrong only in known ways; "
    "worst / budget: the largest error over its budget (1 is the limit); sigmas: the largest error beyond the float32 part in "
    "multiples of its root-mean-square size (6 is the limit where that decides); R, z: the aggregate statistics over their "
    "limits, in so many Cases."
)


@dataclass(slots=True)
class Count:
    """Cases in which an output was wrong: in a way that is not known, and only in known ones."""

    wrong: int = 0
    known: int = 0


class Figures:
    """Listens to a campaign and counts wrong Cases of each output; Cases of shrinking are left out.

    Args:
        is_known: whether a failure is a known one.
    """

    def __init__(self, is_known: Callable[[Failure], bool] = lambda _: False) -> None:
        self.counts: dict[str, dict[str, Count]] = {}
        """By kernel and output, a key of CAPTURED_TITLES, or WHOLE."""
        self._is_known = is_known
        self._started: CampaignStarted | None = None

    def __call__(self, event: Event) -> None:
        """Count one event."""
        if isinstance(event, CampaignStarted):
            self._started = event
        elif isinstance(event, TrialFinished) and event.phase in ("replay", "generate"):
            self._count(self.counts.setdefault(event.kernel, {}), event.verdict)

    def _count(self, counts: dict[str, Count], verdict: Verdict) -> None:
        known: dict[str, bool] = {}
        for failure in verdict.failures:
            place: str = failure.output or failure.captured_row or WHOLE
            known[place] = known.get(place, True) and self._is_known(failure)
        for place, only_known in known.items():
            count = counts.setdefault(place, Count())
            count.known += only_known
            count.wrong += not only_known

    def of(self, kernel: str) -> dict[str, dict[str, int]]:
        """Return one kernel's counts as plain values."""
        return {place: {"wrong": each.wrong, "known": each.known} for place, each in self.counts.get(kernel, {}).items()}

    def markdown(self, done: CampaignFinished, command: str, failures: Sequence[Finding], notes: Iterable[str] = ()) -> str:
        """Return the table as a document: the command that makes it, device, versions, `failures` (not known) and `notes`."""
        environment: dict[str, Any] = self._started.environment if self._started else {}
        versions = ", ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items())
        cases, kernels = sum(row.cases for row in done.summaries), len(done.summaries)
        lines = [
            "# How near each kernel came to its budgets",
            "",
            f"Made by `{command}` on {environment.get('device', '?')}: {versions}.",
            "",
            _LEGEND,
            "",
            f"| {' | '.join(_COLUMNS)} |",
            f"|{'|'.join('---' if column in ('kernel', 'output') else '---:' for column in _COLUMNS)}|",
            *(f"| {' | '.join(cells)} |" for row in done.summaries for cells in self._rows(row)),
            "",
            f"{counted(cases, 'Case')} of {counted(kernels, 'kernel')}.",
        ]
        sections = {"Failures": map(_failure, failures), "Notes": [*self._notes(done), *notes]}
        for title, items in sections.items():
            if texts := [f"- {each}" for each in items]:
                lines += ["", f"## {title}", "", *texts]
        return printable("\n".join(lines)) + "\n"

    def _rows(self, row: KernelSummary) -> Iterator[tuple[str, ...]]:
        """Yield one row an output, and one for failures of no single output where there are any."""
        counts = self.counts.get(row.kernel, {})
        for number, name in enumerate(OUTPUT_NAMES):
            figures, count = row.outputs.get(name, Worst()), counts.get(name, Count())
            yield (
                row.kernel if number == 0 else "",
                OUTPUT_TITLES[name],
                *map(str, (figures.cases, figures.unjudged, count.wrong, count.known)),
                _number(figures.worst),
                f"{figures.sigmas:.2f}" if figures.sigmas < _MANY else f"{figures.sigmas:.1e}",
                f"{figures.r:.2f}",
                f"{figures.z:.2f}",
                str(figures.aggregated),
            )
        for place, title in CAPTURED_TITLES.items():
            if place in row.captured or place in counts:
                figures, count = row.captured.get(place, Worst()), counts.get(place, Count())
                cells = map(str, (figures.cases, figures.unjudged, count.wrong, count.known))
                yield ("", title, *cells, _number(figures.worst), *[""] * 4)
        if whole := counts.get(WHOLE):
            yield ("", WHOLE, "", "", str(whole.wrong), str(whole.known), *[""] * 5)

    def _notes(self, done: CampaignFinished) -> Iterator[str]:
        most = self._started.settings.get("max_examples") if self._started else None
        yield from (f"{each.kernel}: not run here: {each.reason}" for each in done.skipped)
        yield from (f"{each.kernel}: not tried to the end: {each.error.partition(chr(10))[0]}" for each in done.broken)
        yield from (
            f"{row.kernel}: {row.cases} of {counted(most, 'Case')}"
            for row in done.summaries
            if most is not None and row.cases < most
        )
        if done.lost:
            yield f"stopped early: {done.lost}"
        if done.interrupted:
            yield "interrupted"
        if done.shared_gpu:
            yield done.shared_gpu.describe()


def _failure(failure: Finding) -> str:
    parts = "; ".join(f"{name} {value}" for name, value in describe_case(failure.case)[1:])
    rate = f" It shows in {failure.rate[0]} of {failure.rate[1]} runs." if failure.rate else ""
    return f"{failure.identity}: {parts}. {' '.join(describe_verdict(failure.verdict))}{rate} `{failure.case.canonical()}`"


def _number(value: float) -> str:
    if math.isinf(value):
        return "inf"
    return f"{value:.3f}" if value < 100 else f"{value:.2e}"
