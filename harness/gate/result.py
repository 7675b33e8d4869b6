"""The result of a gate as data: findings, parts, kernels; and the events while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from attnfuzz.harness.campaign.corpus import repro_line
from attnfuzz.harness.judge.failure import Identity, Kind
from attnfuzz.kernels.problem import OutputName

__all__ = [
    "PARTS",
    "Finding",
    "Gate",
    "GateEvent",
    "KernelGate",
    "Listener",
    "Outcome",
    "Part",
    "PartFinished",
    "PartName",
    "PartProgress",
    "Waiver",
    "not_begun",
]

PartName = Literal["load", "replay", "campaign", "accuracy", "determinism", "compile", "speed"]
PARTS: tuple[PartName, ...] = get_args(PartName)
"""In the order in which they run."""
Outcome = Literal["pass", "fail", "known", "skipped", "error"]
""" "known": it fails, and the ledger lets all its findings through. "error": the gate itself failed."""


@dataclass(frozen=True, slots=True)
class Waiver:
    """The ledger's entry that lets a finding through: its number in the file, its issue and its last day."""

    number: int
    issue: str
    expires: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One failure: in which part, what is wrong, and its Case."""

    part: PartName
    kernel: str
    message: str
    kind: Kind | None = None
    output: OutputName | None = None
    check: str = ""
    detail: str = ""
    """A traceback or a compiler's text."""
    case: str | None = None
    """The file of its Case."""
    blob: str | None = None
    """The Case as one word (harness/campaign/blob.py), for machines without that file."""
    described: tuple[tuple[str, str], ...] = ()
    """The Case in words: (name, value)."""
    waiver: Waiver | None = None
    """The ledger's entry that lets it through."""
    id: str | None = None
    """The identity of a Trial's failure as one word (`Identity.key`)."""

    @property
    def again(self) -> tuple[tuple[str, str], ...]:
        """Command lines that run its Case again, as (name, command)."""
        ways = (("run it again", self.case), ("without that file", self.blob))
        return tuple((name, repro_line(value, self.kernel)) for name, value in ways if value)

    @staticmethod
    def of(part: PartName, identity: Identity, message: str, detail: str = "", **more: Any) -> Finding:
        """Make the finding of a Trial's failure."""
        return Finding(
            part=part,
            kernel=identity.kernel,
            message=message,
            id=identity.key,
            kind=identity.kind,
            output=identity.output,
            check=identity.check,
            detail=detail,
            **more,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a kernel's gate: its outcome, the reason in one line, findings and figures."""

    name: PartName
    outcome: Outcome
    summary: str
    findings: tuple[Finding, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    not_kept: str = ""
    """Why a failing Case could not be kept in a file."""
    complete: bool = True
    """Whether a failure that does not show here is gone: every run of the part tries the same."""


@dataclass(frozen=True, slots=True)
class KernelGate:
    """One kernel's gate: why it was gated, its parts in order, and the file and line for annotations."""

    kernel: str
    why: str
    parts: tuple[Part, ...]
    file: str = ""
    """The file that changed, or the first that the kernel declares, relative to the checkout."""
    line: int = 1

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of all parts."""
        return tuple(each for part in self.parts for each in part.findings)

    @property
    def outcome(self) -> Outcome:
        """The worst outcome of its parts; "skipped" if none was run."""
        outcomes = {part.outcome for part in self.parts}
        return next((each for each in _WORST_FIRST if each in outcomes), "skipped")


_WORST_FIRST: tuple[Outcome, ...] = ("error", "fail", "known", "pass")


@dataclass(frozen=True, slots=True)
class Gate:
    """A whole gate: what was compared, one result per kernel, and errors of the ledger."""

    against: str
    """ "3f2a91c4d0 (main)", or the baseline's file."""
    kernels: tuple[KernelGate, ...]
    untouched: int = 0
    """Kernels of the checkout that did not change."""
    notes: tuple[str, ...] = ()
    ledger: str | None = None
    stale: tuple[tuple[str, int], ...] = ()
    """Entries of the ledger that must be removed or renewed, as (reason, line in its file). Each fails the gate."""
    seconds: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    written: str | None = None

    @property
    def outcome(self) -> Outcome | Literal["interrupted"]:
        """ "fail", "error", "interrupted" if neither occurred before, or "pass"."""
        outcomes = {each.outcome for each in self.kernels}
        if "fail" in outcomes or self.stale:
            return "fail"
        return "error" if "error" in outcomes else "interrupted" if self.interrupted else "pass"

    @property
    def not_kept(self) -> str:
        """Why a failing Case could not be kept in a file; empty if all were."""
        return next((part.not_kept for each in self.kernels for part in each.parts if part.not_kept), "")


def not_begun(reason: str) -> Gate:
    """Return the result of a gate that could not begin, for its reports."""
    part = Part("load", "error", reason.splitlines()[0], (Finding("load", "gate", reason),))
    return Gate(against="", kernels=(KernelGate("gate", "it could not begin", (part,)),))


@dataclass(frozen=True, slots=True)
class PartProgress:
    """Progress of a running part."""

    kernel: str
    part: PartName
    note: str = ""


@dataclass(frozen=True, slots=True)
class PartFinished:
    """The end of a part."""

    kernel: str
    part: Part


GateEvent = PartProgress | PartFinished
Listener = Callable[[GateEvent], None]
