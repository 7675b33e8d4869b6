"""What a gate finds, as data: parts of a kernel's gate, findings, what it says while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from attnfuzz.harness.campaign.corpus import repro_line
from attnfuzz.harness.judge.failure import Identity, Kind
from attnfuzz.kernels.problem import OutputName

__all__ = [
    "PARTS",
    "Doing",
    "Finding",
    "Gate",
    "KernelGate",
    "Outcome",
    "Part",
    "PartFinished",
    "PartName",
    "Plea",
    "Said",
    "Tell",
]

PartName = Literal["load", "replay", "campaign", "accuracy", "determinism", "compile", "speed"]
PARTS: tuple[PartName, ...] = get_args(PartName)
"""In the order in which they are run."""
Outcome = Literal["pass", "fail", "known", "skipped", "error"]
""" "known": it fails, and the ledger lets all of it through. "error": the gate itself could not tell."""


@dataclass(frozen=True, slots=True)
class Plea:
    """What a ledger's entry asks to let through, as far as reports tell of it: number in the file, issue, last day."""

    number: int
    issue: str
    expires: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: in which part, what, and where it is told from."""

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
    """The Case as one word (harness/campaign/blob.py), for where that file is not."""
    described: tuple[tuple[str, str], ...] = ()
    """The Case in words: (name, value)."""
    plea: Plea | None = None
    """The ledger's entry that lets it through."""

    @property
    def again(self) -> tuple[tuple[str, str], ...]:
        """(name, command line) of each way to run its Case again."""
        ways = (("run it again", self.case), ("without that file", self.blob))
        return tuple((name, repro_line(value, self.kernel)) for name, value in ways if value)

    @staticmethod
    def of(part: PartName, identity: Identity, message: str, detail: str = "", **more: Any) -> Finding:
        """A failure of a Trial."""
        return Finding(
            part=part,
            kernel=identity.kernel,
            message=message,
            kind=identity.kind,
            output=identity.output,
            check=identity.check,
            detail=detail,
            **more,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a kernel's gate: how it ended, in one line why, findings and figures."""

    name: PartName
    outcome: Outcome
    summary: str
    findings: tuple[Finding, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    not_kept: str = ""
    """Why a Case that it found is in no file."""
    complete: bool = True
    """Whether not to find something here again is evidence: the same was tried as whenever it is run."""


@dataclass(frozen=True, slots=True)
class KernelGate:
    """One kernel's gate: why it was gated, its parts in order, and where on its files an annotation belongs."""

    kernel: str
    why: str
    parts: tuple[Part, ...]
    file: str = ""
    """The file that changed, or the first that the kernel declares, relative to the checkout."""
    line: int = 1

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Of all parts."""
        return tuple(each for part in self.parts for each in part.findings)

    @property
    def outcome(self) -> Outcome:
        """The worst of its parts; "skipped" where nothing was run."""
        outcomes = {part.outcome for part in self.parts}
        return next((each for each in _WORST_FIRST if each in outcomes), "skipped")


_WORST_FIRST: tuple[Outcome, ...] = ("error", "fail", "known", "pass")


@dataclass(frozen=True, slots=True)
class Gate:
    """A whole gate: what was compared, one result per kernel, and what is wrong with the ledger."""

    against: str
    """ "3f2a91c4d0 (main)", or the baseline's file."""
    kernels: tuple[KernelGate, ...]
    untouched: int = 0
    """Kernels of the checkout that did not change."""
    notes: tuple[str, ...] = ()
    ledger: str | None = None
    stale: tuple[tuple[str, int], ...] = ()
    """Entries of the ledger that may not stand: why, and the line in its file. Each fails the gate."""
    seconds: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    written: str | None = None

    @property
    def outcome(self) -> Outcome | Literal["interrupted"]:
        """ "fail", "error", "interrupted" where nothing of that was found until then, or "pass"."""
        outcomes = {each.outcome for each in self.kernels}
        if "fail" in outcomes or self.stale:
            return "fail"
        return "error" if "error" in outcomes else "interrupted" if self.interrupted else "pass"

    @property
    def not_kept(self) -> str:
        """Why a Case that was found is in no file; empty where all are."""
        return next((part.not_kept for each in self.kernels for part in each.parts if part.not_kept), "")


@dataclass(frozen=True, slots=True)
class Doing:
    """A part goes on: how far it is."""

    kernel: str
    part: PartName
    note: str = ""


@dataclass(frozen=True, slots=True)
class PartFinished:
    """A part is over; `outcome` before the ledger has had its say."""

    kernel: str
    part: Part


Said = Doing | PartFinished
Tell = Callable[[Said], None]
