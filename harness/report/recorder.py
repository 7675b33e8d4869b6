"""Listens to a campaign and keeps what a report needs, so that a run that is killed is reported as far as it had come."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from attnfuzz.harness.campaign import events
from attnfuzz.harness.campaign.corpus import repro_line
from attnfuzz.harness.campaign.coverage import Tally
from attnfuzz.harness.campaign.events import Event, Finding
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.report.describe import describe_case
from attnfuzz.harness.report.explained import explanation_rows
from attnfuzz.harness.report.runfile import (
    FORMAT,
    FailureRecord,
    KernelRecord,
    OutputRecord,
    Refused,
    RunRecord,
    number,
    write_run,
)

__all__ = ["Recorder"]

_EVERY: Final = 5.0
"""Seconds between two writings while nothing but Trials happens."""
_MOST_FAILURES: Final = 500
_MOST_TOLD: Final = 200
_MOST_TEXT: Final = 2000
_MOST_DETAIL: Final = 4000
_MOST_CASE: Final = 1 << 14
_SESSION: Final = secrets.token_hex(8)


class Recorder:
    """Keeps one run in `DIR/runs`; as a context manager it notes an error that ends the run.

    What cannot be written costs the record only: `lost` hears why, once, and the run goes on.

    Args:
        folder: DIR.
        lost: hears why the record cannot be kept.
        again: of a case file's path and its kernel, the line that runs it again.
    """

    def __init__(
        self, folder: Path | str, lost: Callable[[str], None] = lambda _: None, again: Callable[[str, str], str] = repro_line
    ) -> None:
        self._folder, self._lost, self._again = Path(folder), lost, again
        now = datetime.now(UTC)
        self._run = RunRecord(
            format=FORMAT,
            stamp=f"{now:%Y%m%dT%H%M%S.%f}Z-{os.getpid()}-{secrets.token_hex(3)}",
            session=os.environ.get("PYTEST_XDIST_TESTRUNUID") or _SESSION,
            started=now.isoformat(timespec="seconds"),
            updated=now.isoformat(timespec="seconds"),
        )
        self._start = self._written = time.monotonic()
        self._begun = self._over = self._warned = False
        self._tallies: dict[str, Tally] = {}
        self._kernels: dict[str, KernelRecord] = {}
        self._failures: dict[Identity, FailureRecord] = {}

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and self._begun and not self._over:
            self._run.state = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
            self._run.error = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
            self._write()

    def __call__(self, event: Event) -> None:
        """Keep the content of an event."""
        if (handler := getattr(self, f"_on_{type(event).__name__}", None)) is not None:
            handler(event)
        frequent = isinstance(event, events.TrialFinished | events.CompileFinished)
        if (handler and not frequent) or (frequent and time.monotonic() - self._written > _EVERY):
            self._write()

    def _on_CampaignStarted(self, event: events.CampaignStarted) -> None:  # noqa: N802
        self._begun = True
        self._run.settings = {
            **_plain(event.settings),
            "seed": event.seed,
            **({} if event.seconds is None else {"seconds": event.seconds}),
        }
        self._run.environment = _plain(event.environment)

    def _on_KernelSkipped(self, event: events.KernelSkipped) -> None:  # noqa: N802
        self._run.skipped.append(Refused(what=event.kernel, reason=event.reason[:_MOST_TEXT]))

    def _on_CaseSkipped(self, event: events.CaseSkipped) -> None:  # noqa: N802
        if len(self._run.not_tried) < _MOST_TOLD:
            self._run.not_tried.append(Refused(what=event.path, reason=event.reason[:_MOST_TEXT]))

    def _on_KernelStarted(self, event: events.KernelStarted) -> None:  # noqa: N802
        self._kernel(event.kernel).variants = event.variants
        self._tallies[event.kernel] = event.tally

    def _on_CompileFinished(self, event: events.CompileFinished) -> None:  # noqa: N802
        kernel = self._kernel(event.kernel)
        kernel.compiles += 1
        kernel.compile_seconds += event.seconds

    def _on_FailureFound(self, event: events.FailureFound) -> None:  # noqa: N802
        self._keep(event.finding)

    def _on_Shrunk(self, event: events.Shrunk) -> None:  # noqa: N802
        self._failures.pop(event.before, None)
        self._keep(event.finding)

    def _on_FailureMapped(self, event: events.FailureMapped) -> None:  # noqa: N802
        if (record := self._failures.get(event.identity)) is not None:
            record.maps, record.no_maps, record.first_maps = event.path, event.reason[:_MOST_TEXT], event.first

    def _on_KernelBroke(self, event: events.KernelBroke) -> None:  # noqa: N802
        self._run.broken.append(Refused(what=event.kernel, reason=event.error[:_MOST_TEXT]))

    def _on_KernelFinished(self, event: events.KernelFinished) -> None:  # noqa: N802
        row, kernel = event.summary, self._kernel(event.summary.kernel)
        kernel.ended, kernel.seconds, kernel.refused, kernel.replaced = True, row.seconds, row.refused, row.replaced
        kernel.compiles, kernel.compile_seconds, kernel.unreached = row.compiles, row.compile_seconds, row.unreached
        kernel.replayed, kernel.not_replayed = row.replayed, row.not_replayed
        kernel.failed_unjudged = row.failed_unjudged
        kernel.never_drawn = {name: list(values) for name, values in row.never_drawn.items()}
        for finding in row.findings:
            # What failing Cases have in common is known at the end.
            if (record := self._failures.get(finding.identity)) is not None:
                record.explanation = self._record(finding).explanation

    def _on_CampaignFinished(self, event: events.CampaignFinished) -> None:  # noqa: N802
        self._over = True
        self._run.state = "interrupted" if event.interrupted else "finished"
        self._run.lost = (event.lost or "")[:_MOST_TEXT]

    def _kernel(self, name: str) -> KernelRecord:
        if name not in self._kernels:
            self._kernels[name] = KernelRecord(kernel=name)
        return self._kernels[name]

    def _keep(self, finding: Finding) -> None:
        if finding.identity in self._failures or len(self._failures) < _MOST_FAILURES:
            self._failures[finding.identity] = self._record(finding)
        else:
            self._run.more_failures += not finding.shrunk

    def _record(self, finding: Finding) -> FailureRecord:
        identity, case, failure = finding.identity, finding.case, finding.failure
        small = len(case.canonical()) <= _MOST_CASE
        return FailureRecord(
            kernel=identity.kernel,
            title=str(identity),
            fingerprint=identity.fingerprint,
            kind=identity.kind,
            output=identity.output,
            check=identity.check,
            case_id=case.id,
            case=case.to_object() if small else {},
            told=[(name, value[:_MOST_TEXT]) for name, value in describe_case(case)],
            messages=[f"{each.kind}: {each.message}"[:_MOST_TEXT] for each in finding.verdict.failures[:10]],
            pattern=failure.pattern.text[:_MOST_TEXT] if failure and failure.pattern else "",
            detail=failure.detail[-_MOST_DETAIL:] if failure else "",
            path=finding.path,
            repro=self._again(finding.path, identity.kernel) if finding.path else None,
            shrunk=finding.shrunk,
            partly=finding.partly,
            rate=finding.rate,
            cases_to_find=finding.cases_to_find,
            seconds_to_find=finding.seconds_to_find,
            shrink_trials=finding.shrink_trials,
            explanation=[(title, text[:_MOST_TEXT]) for title, text in explanation_rows(finding.explanation)],
        )

    def _write(self) -> None:
        """Everything as it stands. A run that could not begin leaves nothing."""
        if not self._begun:
            return
        self._written = time.monotonic()
        self._run.seconds = self._written - self._start
        self._run.updated = datetime.now(UTC).isoformat(timespec="seconds")
        for name, tally in self._tallies.items():
            _count(self._kernel(name), tally)
        self._run.kernels = list(self._kernels.values())
        self._run.failures = list(self._failures.values())
        try:
            write_run(self._folder, self._run)
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._lost(f"{self._folder / 'runs'}: the record for reports cannot be written ({error.strerror or error})")


def _count(kernel: KernelRecord, tally: Tally) -> None:
    kernel.cases, kernel.shrink_cases, kernel.reruns = tally.cases, tally.shrink_cases, tally.reruns
    kernel.features, kernel.drawn, kernel.stages = tally.features, tally.drawn, tally.stages
    for row, worst in tally.captured.items():
        record = kernel.captured.setdefault(row, OutputRecord())
        record.cases, record.failures, record.worst = worst.cases, worst.failures, number(worst.worst)
    for name, worst in tally.outputs.items():
        output = kernel.outputs.setdefault(name, OutputRecord())
        output.histogram = tally.histograms.get(name, output.histogram)
        output.cases, output.unjudged, output.failures = worst.cases, worst.unjudged, worst.failures
        output.doubted = worst.doubted
        output.worst, output.sigmas, output.r, output.z = map(number, (worst.worst, worst.sigmas, worst.r, worst.z))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, str | int | float | bool | dict) else str(value) for name, value in values.items()}
