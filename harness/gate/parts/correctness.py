"""The corpus first, then a campaign whose Cases are the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from attnfuzz.harness.campaign.blob import blob_of
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.corpus import CaseFile, Corpus, read_case
from attnfuzz.harness.campaign.events import CampaignFinished, Event, FailureFound, Found, KernelStarted, TrialFinished
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.campaign.shrink import Rate, tries
from attnfuzz.harness.gate.result import Finding, Part, PartName
from attnfuzz.harness.isolation.executors import Executor
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report.describe import describe_case
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.problem import reject
from attnfuzz.strategies.case import Case

__all__ = ["InterruptedCampaignError", "findings_of", "fixed_campaign", "replay", "stored_cases"]

Progress = Callable[[str], None]


class InterruptedCampaignError(KeyboardInterrupt):
    """Ctrl-C during the campaign: `part` is what was found until then."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part


def stored_cases(out: str, corpora: Sequence[str]) -> tuple[CaseFile, ...]:
    """Every case file of `out` and of the folders `corpora` (case files, or a folder `cases` with them), each Case once.

    Raises:
        BadArgument: a folder of `corpora` is none; a file cannot be read.
    """
    found: dict[Case, CaseFile] = {}
    folders = [Corpus(out).folder]
    for each in corpora:
        if not Path(each).is_dir():
            raise reject("corpus", each, "there is no such folder", "give a folder of case files")
        inner = Path(each) / "cases"
        folders.append(inner if inner.is_dir() else Path(each))
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            stored = read_case(path)
            found.setdefault(stored.case, stored)
    return tuple(found.values())


def replay(
    kernel: Kernel, device: Device, stored: Iterable[CaseFile], executor: Executor, progress: Progress = lambda _: None
) -> Part:
    """Every stored Case of `kernel` again, as often as the rate at which it failed demands."""
    findings: list[Finding] = []
    skipped: list[str] = []
    cases = [each for each in stored if each.case.kernel == kernel.name]
    for number, each in enumerate(cases):
        progress(f"{number} of {len(cases)} cases")
        if reason := why_not_case(kernel, each.case, device):
            skipped.append(f"{each.path.name}: {reason}")
            continue
        for _ in range(tries(each.rate)):
            executor.begin(each.case, patient=True)
            verdict = executor.finish()
            if verdict.failures:
                findings += findings_of("replay", each.case, verdict, str(each.path))
                break
    if not cases:
        return Part("replay", "pass", "no stored case of this kernel")
    wrong = len({each.case for each in findings})
    summary = f"{len(cases)} stored case{'s' * (len(cases) > 1)}: {wrong} fail"
    summary += f", {len(skipped)} not taken here ({skipped[0]})" if skipped else ""
    return Part("replay", "fail" if findings else "pass", summary, tuple(findings), {"cases": len(cases), "skipped": skipped})


def fixed_campaign(kernel: Kernel, settings: Settings, executor: Executor, progress: Progress = lambda _: None) -> Part:
    """The campaign of `settings`; every failure that its minimal Cases show is a finding.

    Raises:
        InterruptedCampaignError: by the user.
    """
    done = run_campaign([kernel], settings, _Told(progress), executor)
    findings = tuple(dict.fromkeys(finding for each in done.found for finding in _of_found(each)))
    summary = done.summaries[0]
    text = f"{summary.cases} cases in {summary.seconds:.1f} s, {len(done.found)} failure{'s' * (len(done.found) != 1)}"
    text += f"; stopped early: {done.lost}" if done.lost else ""
    text += f"; not all Cases could be kept on disk: {done.not_kept}" if done.not_kept else ""
    figures = {
        "cases": summary.cases,
        "seconds": summary.seconds,
        "worst": {name: each.worst for name, each in summary.outputs.items()},
        "refused": summary.refused,
    }
    failed = bool(findings or done.lost)
    part = Part("campaign", "fail" if failed else "pass", text, findings, figures, complete=_to_the_end(done, settings))
    part = replace(part, not_kept=done.not_kept or "")
    if done.interrupted:
        raise InterruptedCampaignError(part)
    return part


def _to_the_end(done: CampaignFinished, settings: Settings) -> bool:
    """Whether the number of Cases ended it, which is the same on every machine, and not the time."""
    return not done.lost and settings.max_examples is not None and done.summaries[0].cases >= settings.max_examples


def _of_found(found: Found) -> Iterator[Finding]:
    yield from findings_of("campaign", found.case, found.verdict, found.path, found.rate)


def findings_of(
    part: PartName,
    case: Case,
    verdict: Verdict,
    path: str | None,
    rate: Rate | None = None,
    *,
    seen: set[Identity] | None = None,
) -> Iterator[Finding]:
    """One for each identity not yet in `seen`: a ledger that knows one of them must not hide the others."""
    seen = set() if seen is None else seen
    for failure in verdict.failures:
        if failure.identity in seen:
            continue
        seen.add(failure.identity)
        yield Finding.of(
            part,
            failure.identity,
            failure.message,
            failure.detail,
            case=path,
            blob=blob_of(case, rate),
            described=tuple(describe_case(case)),
        )


class _Told:
    """How far the campaign is."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._cases, self._failures = progress, 0, 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, KernelStarted) and event.compiles:
            self._progress(f"compiling {event.compiles} variants")
            return
        if isinstance(event, TrialFinished):
            self._cases += 1
        elif isinstance(event, FailureFound):
            self._failures += 1
        else:
            return
        self._progress(f"{self._cases} trials, {self._failures} failures")
