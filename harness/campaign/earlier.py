"""Cases that earlier runs left: in flight when a run died, then those of the corpus."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.corpus import CaseFile
from attnfuzz.harness.campaign.events import CaseResumed, CaseSkipped, Finding, Rate, ReplayStarted
from attnfuzz.harness.campaign.findings import Findings
from attnfuzz.harness.campaign.journal import LeftBehind
from attnfuzz.harness.campaign.replays import in_turn, most_replays
from attnfuzz.harness.campaign.rounds import Rounds
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.supports import why_not_case, with_config
from attnfuzz.kernels.contract import Kernel
from attnfuzz.strategies.case import Case

__all__ = ["ENDED_RUNS", "EarlierCase", "EarlierCases"]

ENDED_RUNS = "run"
"""The check of a Case that ended whole runs; no campaign tries it again."""
_MOST_DEATHS = 2
"""Runs that a Case may end before it counts as deadly."""
_AT_ONCE = 64
"""Cases of earlier runs of one turn: ten thousand would take a worker seconds to receive, while the others have none."""


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


class EarlierCases:
    """Gives out one kernel's Cases of earlier runs: all that were in flight, and stored ones within their part of the run.

    Args:
        kernel: what is tried.
        context: of the campaign.
        findings: of the kernel.
        rounds: of the kernel: what is tried here is not to be drawn again.
        stored: its case files.
        left_behind: its Cases that were in flight when a run died.
    """

    def __init__(
        self,
        kernel: Kernel,
        context: CampaignContext,
        findings: Findings,
        rounds: Rounds,
        stored: Sequence[CaseFile],
        left_behind: Sequence[LeftBehind],
    ) -> None:
        self._kernel, self._context, self._findings, self._rounds = kernel, context, findings, rounds
        self.stored, self._left_behind = tuple(stored), left_behind
        self._queue: list[EarlierCase] | None = None
        self._missing = {each.case: each for each in stored}
        """Stored Cases that have not been replayed."""
        self.replayed: list[str] = []
        """Names of the case files that were replayed, the latest last."""
        self._given: dict[int, tuple[tuple[EarlierCase, ...], float]] = {}
        """What each worker has to try, and the seconds for it."""
        self._resumed: set[Case] = set()
        """Cases that were in flight, given out, and not tried yet."""
        self._spent = 0.0

    def __bool__(self) -> bool:
        """Whether Cases are to be given out."""
        return bool(self.stored or self._left_behind) if self._queue is None else bool(self._queue)

    @property
    def not_replayed(self) -> int:
        """Return the number of stored Cases that can run here, and that have not been replayed."""
        return len(self._missing)

    def take(self, worker: int, workers: int, seconds: float | None) -> tuple[tuple[EarlierCase, ...], float | None]:
        """Return what a worker is to try first, and the seconds that it may spend on stored Cases.

        Args:
            worker: its number.
            workers: of the campaign.
            seconds: of all workers together for this kernel's stored Cases; None: no limit.
        """
        if self._queue is None:
            self._queue = self._begun(None if seconds is None else seconds / workers)
        part = None
        if seconds is not None:
            left = seconds - self._spent - sum(given for _, given in self._given.values())
            part = min(left, seconds / workers)
            if left <= 0:
                self._drop_stored()
        # The Cases of one journal file stay together: it goes with the last of them.
        count = max(_AT_ONCE, sum(each.left is not None for each in self._queue))
        cases, self._queue = tuple(self._queue[:count]), self._queue[count:]
        self._given[worker] = cases, (part or 0.0) if any(each.stored for each in cases) else 0.0
        self._resumed |= {each.case for each in cases if each.left}
        return cases, part

    def _begun(self, seconds: float | None) -> list[EarlierCase]:
        """Return all that is to be tried; the stored Cases beyond their part of a limit on Cases are left out."""
        record = self._context.replays
        ordered = in_turn(self.stored, record.of(self._kernel.name) if record else ())
        all_ = list(_earlier_cases(self._kernel, self._context, self._findings, self._left_behind, ordered))
        left, stored = [each for each in all_ if each.left], [each for each in all_ if each.stored]
        self._missing = {each.case: each.stored for each in stored if each.stored}
        self._rounds.know(each.case.id for each in left)
        chosen = stored[: most_replays(self._rounds.most)]
        self._rounds.know(each.case.id for each in chosen)
        if stored:
            self._context.listener(ReplayStarted(self._kernel.name, len(chosen), len(stored), seconds))
        return [*left, *chosen]

    def _drop_stored(self) -> None:
        """Try no more of the stored Cases: others may be drawn in their place."""
        queue = self._queue or []
        self._queue = [each for each in queue if not each.stored]
        kept = {each.case for each in self._queue}
        self._rounds.forget(each.case.id for each in queue if each.case not in kept)

    def tried(self, case: Case) -> None:
        """Note that a Case has been tried, which may be a stored one, or one that was in flight."""
        if self._resumed:
            # A Case is hashed whole.
            self._resumed.discard(case)
        if self._missing and (stored := self._missing.pop(case, None)) is not None:
            self.replayed.append(stored.path.name)

    def give_back(self, worker: int, not_tried: Sequence[EarlierCase], seconds: float) -> None:
        """Take back what a turn had no time for; `seconds`: what it has spent on stored Cases."""
        self._given.pop(worker, None)
        self._spent += seconds
        self._queue = [*not_tried, *(self._queue or ())]

    def leave(self, worker: int) -> None:
        """Take back the Cases that a worker which has died did not come to."""
        given, _ = self._given.pop(worker, ((), 0.0))
        not_tried = [each for each in given if each.case in (self._missing if each.stored else self._resumed)]
        self._queue = [*not_tried, *(self._queue or ())]

    def resume(self, left: LeftBehind) -> None:
        """Try a Case first that was in flight when a worker died."""
        cases = list(_earlier_cases(self._kernel, self._context, self._findings, [left], ()))
        # Its round, given out again, must not have it tried once more, which would end the next worker.
        self._rounds.know([left.case.id])
        here = with_config(self._kernel, left.case)
        self._queue = [*cases, *(each for each in self._queue or () if each.case != here)]


def _earlier_cases(
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
            message = f"{counted(left.deaths, 'run')} died while this Case was in flight"
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
