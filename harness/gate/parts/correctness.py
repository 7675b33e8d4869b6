"""The parts replay and campaign: the corpus, then a campaign whose Cases are the same for the same seed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from attnfuzz.harness.campaign.blob import blob_of
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.corpus import CaseFile, Corpus, read_case
from attnfuzz.harness.campaign.events import (
    CampaignFinished,
    Event,
    FailureFound,
    KernelStarted,
    KernelSummary,
    Rate,
    TrialFinished,
)
from attnfuzz.harness.campaign.events import Finding as CampaignFinding
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.gate.result import Finding, Outcome, Part, PartName
from attnfuzz.harness.isolation.executors import Executor
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report.describe import describe_case
from attnfuzz.harness.report.progress import seconds_text
from attnfuzz.harness.trial.supports import why_not_case, with_config
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import reject
from attnfuzz.strategies.case import Case

__all__ = ["InterruptedCampaignError", "campaign_part", "findings_of", "fixed_campaign", "replay", "stored_cases"]

Progress = Callable[[str], None]


class InterruptedCampaignError(KeyboardInterrupt):
    """Ctrl-C during the campaign: `part` has the findings so far."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part


def stored_cases(out: str, corpora: Sequence[str]) -> tuple[CaseFile, ...]:
    """Return every case file of `out` and of the folders `corpora` (case files, or a folder `cases` with them), each Case once.

    Raises:
        BadArgument: a folder does not exist, or a file cannot be read.
    """
    files: dict[Case, CaseFile] = {}
    folders = [Corpus(out).folder]
    for each in corpora:
        if not Path(each).is_dir():
            raise reject("corpus", each, "there is no such folder", "give a folder of case files")
        inner = Path(each) / "cases"
        folders.append(inner if inner.is_dir() else Path(each))
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            stored = read_case(path)
            files.setdefault(stored.case, stored)
    return tuple(files.values())


def replay(
    kernel: Kernel, device: Device, stored: Iterable[CaseFile], executor: Executor, progress: Progress = lambda _: None
) -> Part:
    """Run every stored Case of `kernel` again, as often as its failure rate demands, whatever the budget of the campaign."""
    findings: list[Finding] = []
    skipped: list[str] = []
    own = [each for each in stored if each.case.kernel == kernel.name]
    cases = [replace(each, case=with_config(kernel, each.case)) for each in own]
    runner, start = TrialRunner(executor), time.monotonic()
    for number, each in enumerate(cases):
        left = f", about {seconds_text((time.monotonic() - start) / number * (len(cases) - number))} left" if number else ""
        progress(f"replaying {number:,} of {counted(len(cases), 'stored case')}{left}")
        if reason := why_not_case(kernel, each.case, device):
            skipped.append(f"{each.path.name}: {reason}")
            continue
        findings += _replayed(each, runner)
    if not cases:
        return Part("replay", "pass", "no stored case of this kernel")
    wrong = len({each.case for each in findings})
    summary = f"{counted(len(cases), 'stored case')}: {wrong} {'fails' if wrong == 1 else 'fail'}"
    summary += f", {len(skipped)} not taken here ({skipped[0]})" if skipped else ""
    return Part("replay", "fail" if findings else "pass", summary, tuple(findings), {"cases": len(cases), "skipped": skipped})


def _replayed(stored: CaseFile, runner: TrialRunner) -> list[Finding]:
    """Run a stored Case until its failure shows, as often as its rate demands, and keep every failure on the way."""
    findings: list[Finding] = []
    shown: set[Identity] = set()

    def shows(verdict: Verdict) -> bool:
        findings.extend(findings_of("replay", stored.case, verdict, str(stored.path), reported=shown))
        # Where a Case also fails in another way, the failure that shows only sometimes must have its runs.
        return stored.shown_by(shown)

    runner.run(stored.case, "replay", rate=stored.rate, patient=True, shows=shows)
    return findings


def fixed_campaign(kernel: Kernel, settings: Settings, executor: Executor, progress: Progress = lambda _: None) -> Part:
    """Run the campaign of `settings`; every failure of its minimal Cases is a finding.

    Raises:
        InterruptedCampaignError: the user pressed Ctrl-C.
    """
    done = run_campaign([kernel], settings, _CampaignProgress(progress), executor)
    part = campaign_part(done.summaries[0], done, settings)
    if done.interrupted:
        raise InterruptedCampaignError(part)
    return part


def campaign_part(summary: KernelSummary, done: CampaignFinished, settings: Settings) -> Part:
    """Return what a campaign found of one kernel; every failure that its minimal Cases show is a finding."""
    findings = tuple(dict.fromkeys(finding for each in summary.findings for finding in _of_finding(each)))
    text = f"{counted(summary.cases, 'case')} in {summary.seconds:.1f} s, {counted(len(summary.findings), 'failure')}"
    text += f"; stopped early: {done.lost}" if done.lost else ""
    text += f"; not all Cases could be kept on disk: {done.not_kept}" if done.not_kept else ""
    figures = {
        "cases": summary.cases,
        "seconds": summary.seconds,
        "worst": {name: each.worst for name, each in summary.outputs.items()},
        "refused": summary.refused,
    }
    failed = bool(findings or done.lost)
    # The number of Cases is the same on every machine; what ends with the time proves nothing.
    to_the_end = not done.lost and settings.max_examples is not None and summary.cases >= settings.max_examples
    untried = None if failed or done.interrupted or settings.may_be_empty else summary.untried
    text += f"; {untried}" if untried else ""
    outcome: Outcome = "fail" if failed else "error" if untried else "pass"
    return Part("campaign", outcome, text, findings, figures, not_kept=done.not_kept or "", complete=to_the_end)


def _of_finding(finding: CampaignFinding) -> Iterator[Finding]:
    """Yield a finding for each failure that the minimal Case shows."""
    yield from findings_of("campaign", finding.case, finding.verdict, finding.path, finding.rate)


def findings_of(
    part: PartName,
    case: Case,
    verdict: Verdict,
    path: str | None,
    rate: Rate | None = None,
    *,
    reported: set[Identity] | None = None,
) -> Iterator[Finding]:
    """Yield a finding for each identity not in `reported`: a ledger that knows one of them must not hide the others."""
    reported = set() if reported is None else reported
    for failure in verdict.failures:
        if failure.identity in reported:
            continue
        reported.add(failure.identity)
        yield Finding.of(
            part,
            failure.identity,
            failure.message,
            failure.detail,
            case=path,
            blob=blob_of(case, rate),
            described=tuple(describe_case(case)),
        )


class _CampaignProgress:
    """Reports a campaign's progress as text."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._cases, self._failures = progress, 0, 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, KernelStarted) and event.compiles:
            self._progress(f"compiling {counted(event.compiles, 'variant')}")
            return
        if isinstance(event, TrialFinished):
            self._cases += 1
        elif isinstance(event, FailureFound):
            self._failures += 1
        else:
            return
        self._progress(f"{counted(self._cases, 'trial')}, {counted(self._failures, 'failure')}")
