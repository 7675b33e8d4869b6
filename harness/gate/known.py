"""The known failures of a run: which of its failures a ledger covers, and which entries do not show any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from attnfuzz.harness.campaign.corpus import CaseFile
from attnfuzz.harness.campaign.events import CampaignFinished, Finding
from attnfuzz.harness.campaign.executor import executor_for
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.core.signals import ending
from attnfuzz.harness.gate.ledger import (
    Entry,
    Ledger,
    case_of,
    check_kernels,
    knows,
    let_through,
    part_through,
    read_ledger,
    spent,
)
from attnfuzz.harness.gate.parts.correctness import campaign_part, findings_of, replay
from attnfuzz.harness.gate.result import KernelGate, Part, Waiver
from attnfuzz.harness.isolation.child import ChildError
from attnfuzz.harness.isolation.outcomes import ExecutionError
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import BadArgument

__all__ = ["Known", "LedgerResult", "read_known"]


@dataclass(frozen=True, slots=True)
class LedgerResult:
    """What a ledger says of a run: `waivers` of each failure in order, none where it is not known."""

    waivers: tuple[tuple[Waiver, ...], ...] = ()
    entries: tuple[str, ...] = ()
    """Entries whose failure showed, and where."""
    wrong: tuple[tuple[str, int], ...] = ()
    """What fails the run, and the line in the ledger's file: entries that may not stay, and Cases that fail in another way."""
    notes: tuple[str, ...] = ()
    broken: bool = False
    """Whether a Case of the ledger could not be tried."""
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """A ledger for a run of `kernels`; read before anything runs."""

    ledger: Ledger
    in_force: tuple[Entry, ...]
    cases: dict[Entry, CaseFile]
    kernels: dict[str, Kernel]
    today: date

    def covers(self, failure: Failure) -> bool:
        """Return whether a Trial's failure is known."""
        return knows(self.in_force, failure)

    def judge(self, done: CampaignFinished, settings: Settings) -> LedgerResult:
        """Return what the ledger says of a run; the Cases of entries that the campaign did not show are tried again."""
        broken = {each.kernel for each in done.broken}
        rows = [row for row in done.summaries if row.kernel not in broken]
        gated = [self._marked(KernelGate(row.kernel, "", (campaign_part(row, done, settings),))) for row in rows]
        interrupted = False
        # After a run that ended early, what did not show proves nothing.
        if not done.interrupted and not done.lost:
            try:
                gated = [self._replayed(each, settings) for each in gated]
            except KeyboardInterrupt:
                ending()
                interrupted = True
        wrong, notes = spent(self.ledger, gated, self.today)
        errors = [part.summary for each in gated for part in each.parts if part.outcome == "error"]
        return LedgerResult(
            waivers=tuple(self._waivers(each) for each in done.findings),
            entries=tuple(self._entries(gated)),
            wrong=(*wrong, *self._otherwise(gated)),
            notes=(*notes, *errors),
            broken=bool(errors),
            interrupted=interrupted,
        )

    def _marked(self, gated: KernelGate) -> KernelGate:
        return let_through(gated, self.ledger, self.today)

    def _replayed(self, gated: KernelGate, settings: Settings) -> KernelGate:
        """Add the part `replay`: the Cases of entries that have not shown."""
        stored = [
            case
            for entry, case in self.cases.items()
            if entry.kernel == gated.kernel and not any(map(entry.covers, gated.findings))
        ]
        kernel = self.kernels[gated.kernel]
        part = Part("replay", "pass", "")
        if stored:
            try:
                with closing(executor_for([kernel], settings)) as executor:
                    part = replay(kernel, settings.device, stored, executor)
            except (BadArgument, ExecutionError, ChildError, DeviceLost) as error:
                part = Part("replay", "error", f"{gated.kernel}: the cases of the ledger could not be tried: {error}")
        return self._marked(replace(gated, parts=(part, *gated.parts)))

    def _waivers(self, failure: Finding) -> tuple[Waiver, ...]:
        findings = tuple(findings_of("campaign", failure.case, failure.verdict, failure.path, failure.rate))
        part = part_through(Part("campaign", "fail", "", findings), self.in_force)
        return tuple(dict.fromkeys(each.waiver for each in part.findings if each.waiver)) if part.outcome == "known" else ()

    def _entries(self, gated: Sequence[KernelGate]) -> Iterator[str]:
        for entry in self.in_force:
            parts = [finding.part for each in gated for finding in each.findings if entry.covers(finding)]
            if parts:
                where = "" if "campaign" in parts or entry.case is None else f"; only its case {entry.case.name} showed it"
                yield f"{entry}: known until {entry.expires}{where}"

    def _otherwise(self, gated: Sequence[KernelGate]) -> Iterator[tuple[str, int]]:
        """Yield failures of the ledger's Cases that no entry covers."""
        for finding in (each for kernel in gated for each in kernel.findings):
            if finding.part == "replay" and finding.waiver is None:
                entry = next(each for each, stored in self.cases.items() if str(stored.path) == finding.case)
                yield f"{entry}: its case {finding.case} fails in another way: {finding.kind}: {finding.message}", entry.line


def read_known(path: Path, kernels: Sequence[Kernel], device: Device, today: date) -> Known:
    """Read a ledger for a run of `kernels` on `device`.

    Raises:
        BadArgument: the ledger is broken, or has an entry of an unknown kernel or with a Case of another one.
    """
    ledger = read_ledger(path, today)
    by_name = {each.name: each for each in kernels}
    check_kernels(ledger, by_name)
    cases = {each: stored for each in ledger.entries if (stored := case_of(each)) is not None}
    ledger = ledger.on(device, today)
    in_force = ledger.in_force(today)
    return Known(ledger, in_force, {each: cases[each] for each in in_force if each in cases}, by_name, today)
