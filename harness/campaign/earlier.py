"""Cases that earlier runs left: in flight when a run died, then those of the corpus."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.corpus import CaseFile
from attnfuzz.harness.campaign.events import CaseResumed, CaseSkipped, Finding, Rate
from attnfuzz.harness.campaign.findings import Findings
from attnfuzz.harness.campaign.journal import LeftBehind
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.supports import why_not_case, with_config
from attnfuzz.kernels.contract import Kernel
from attnfuzz.strategies.case import Case

__all__ = ["ENDED_RUNS", "EarlierCase", "earlier_cases"]

ENDED_RUNS = "run"
"""The check of a Case that ended whole runs; no campaign tries it again."""
_MOST_DEATHS = 2
"""Runs that a Case may end before it counts as deadly."""


@dataclass(frozen=True, slots=True)
class EarlierCase:
    """A Case to run first, and what holds it: `left` in a journal or `stored` in the corpus."""

    case: Case
    rate: Rate | None = None
    left: LeftBehind | None = None
    stored: CaseFile | None = None

    def remove_if_replaced(self, findings: Sequence[Finding]) -> None:
        """Remove the case file of a Case that is not minimal, if its failure is among `findings` and has another file now."""
        if self.stored and self.stored.finding.minimal is False:
            path, identity = str(self.stored.path), self.stored.finding.identity
            if any(each.path not in (None, path) and identity in (None, each.identity) for each in findings):
                with contextlib.suppress(OSError):
                    self.stored.path.unlink(missing_ok=True)

    def shows(self, verdict: Verdict) -> bool:
        """Whether a Verdict has the failure of the case file; any failure where there is no file."""
        identities = {each.identity for each in verdict.failures}
        return self.stored.shown_by(identities) if self.stored else bool(identities)


def earlier_cases(
    kernel: Kernel, context: CampaignContext, findings: Findings, left_behind: Sequence[LeftBehind], stored: Sequence[CaseFile]
) -> Iterator[EarlierCase]:
    """The Cases to run first. What cannot run here is announced and left out, what has ended several runs as well."""
    device, listener = context.settings.device, context.listener
    for each_left in left_behind:
        left = dataclasses.replace(each_left, case=with_config(kernel, each_left.case))
        listener(CaseResumed(left.case, left.deaths))
        if reason := why_not_case(kernel, left.case, device):
            listener(CaseSkipped(str(left.path), reason))
        elif left.deaths >= _MOST_DEATHS and context.corpus:
            message = f"{left.deaths} runs died while this Case was in flight"
            failure = Failure(kernel=kernel.name, kind="crash", check=ENDED_RUNS, message=message)
            path = findings.write(Finding(failure.identity, left.case, Verdict(status="fail", failures=(failure,))))
            if path is None:
                continue
            listener(CaseSkipped(path, message))
        else:
            yield EarlierCase(left.case, left=left)
            continue
        if left.alone:
            left.path.unlink(missing_ok=True)
    for file in stored:
        each = dataclasses.replace(file, case=with_config(kernel, file.case))
        identity = each.finding.identity
        if identity is not None and identity.check == ENDED_RUNS:
            listener(CaseSkipped(str(each.path), f"{each.finding.message}; only `attnfuzz repro` tries it again"))
        elif reason := why_not_case(kernel, each.case, device):
            listener(CaseSkipped(str(each.path), reason))
        else:
            yield EarlierCase(each.case, each.rate, stored=each)
