"""What a campaign says. Every output (terminal, JSON, files) listens to these; the run itself never prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.problem import OutputName
from attnfuzz.strategies.case import Case

__all__ = [
    "CampaignFinished",
    "CampaignStarted",
    "CaseNotKept",
    "CaseResumed",
    "CaseSkipped",
    "CompileFinished",
    "Event",
    "FailureFound",
    "FailureMapped",
    "Found",
    "KernelBroke",
    "KernelFinished",
    "KernelSkipped",
    "KernelStarted",
    "KernelSummary",
    "Listener",
    "Shrunk",
    "TrialFinished",
    "Worst",
    "to_all",
]

Phase = Literal["replay", "generate", "shrink"]


@dataclass(frozen=True, slots=True)
class CampaignStarted:
    """The run's header: what differs from the default settings, what it runs on, which kernels."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    kernels: tuple[str, ...]
    seconds: float | None


@dataclass(frozen=True, slots=True)
class KernelSkipped:
    """A kernel that cannot run here, and why."""

    kernel: str
    reason: str


@dataclass(frozen=True, slots=True)
class CaseSkipped:
    """A stored Case that the kernel does not take here, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class CaseNotKept:
    """A Case that could not be written to disk, and why. `failing`: it shows a Failure; else it was only about to run."""

    case: Case
    reason: str
    failing: bool


@dataclass(frozen=True, slots=True)
class CaseResumed:
    """A Case was in flight when `deaths` earlier runs died; it comes first."""

    case: Case
    deaths: int


@dataclass(frozen=True, slots=True)
class KernelStarted:
    """A kernel's turn begins: variants in its pool, how many of them need a compile first."""

    kernel: str
    variants: int
    compiles: int


@dataclass(frozen=True, slots=True)
class CompileFinished:
    """One compile is done."""

    kernel: str
    key: str
    seconds: float
    error: str | None


@dataclass(frozen=True, slots=True)
class TrialFinished:
    """One distinct Case was tried."""

    kernel: str
    phase: Phase
    case: Case
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class FailureFound:
    """A Failure of a new identity, not yet shrunk; the Case is on disk at `path`."""

    identity: Identity
    case: Case
    verdict: Verdict
    cases_before: int
    seconds: float
    path: str | None


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The minimal Case of a Failure. `partly`: the budget for shrinking ran out first."""

    identity: Identity
    case: Case
    verdict: Verdict
    partly: bool
    trials: int
    path: str | None
    rate: tuple[int, int] | None = None
    """It showed in so many of so many runs; None: every time."""
    sighted: Identity | None = None
    """What it was called when it was found, where that was another name."""


@dataclass(frozen=True, slots=True)
class FailureMapped:
    """Error maps of a minimal Case are kept at `path`, relative to the run's folder; or why there are none."""

    identity: Identity
    path: str | None
    reason: str = ""
    first: str | None = None
    """Those of the Case as it was found, where that is another: a larger one shows where errors lie."""


@dataclass(frozen=True, slots=True)
class Worst:
    """One output's record over a kernel's Cases: judged, not judged, the worst error over its budget, wrong.

    `doubted`: of the judged Cases those of which elements are left out, since mask_mod is in doubt (`Figures.doubted`).
    """

    cases: int = 0
    unjudged: int = 0
    worst: float = 0.0
    failures: int = 0
    sigmas: float = 0.0
    r: float = 0.0
    z: float = 0.0
    aggregated: int = 0
    """Cases in which R and z were taken."""
    doubted: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """One Failure of the run, with its minimal Case."""

    identity: Identity
    case: Case
    verdict: Verdict
    partly: bool
    path: str | None
    cases_to_find: int
    seconds_to_find: float
    shrink_trials: int
    rate: tuple[int, int] | None = None
    """It showed in so many of so many runs; None: every time."""


@dataclass(frozen=True, slots=True)
class KernelSummary:
    """One kernel's row: distinct Cases tried (those of shrinking apart), rates, compiles, outputs, failures."""

    kernel: str
    cases: int
    shrink_cases: int
    seconds: float
    compiles: int
    compile_seconds: float
    outputs: dict[OutputName, Worst]
    found: tuple[Found, ...]
    features: dict[str, int] = field(default_factory=dict)
    replaced: int = 0
    """Child processes that died or were put down."""
    refused: int = 0
    """Variants that the compiler refused, of which nothing was tried."""
    recoveries: tuple[float, ...] = ()
    """Seconds from each death of a child to the next verdict."""

    @property
    def rate(self) -> float:
        """Cases per second of trial time."""
        return self.cases / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class KernelBroke:
    """A kernel's turn ended early, by an error that is no finding: a module that cannot be imported, or attnfuzz's own fault."""

    kernel: str
    error: str


@dataclass(frozen=True, slots=True)
class KernelFinished:
    """A kernel's turn is over."""

    summary: KernelSummary


@dataclass(frozen=True, slots=True)
class CampaignFinished:
    """The run is over. `interrupted`: by the user; what was found until then is reported."""

    summaries: tuple[KernelSummary, ...]
    skipped: tuple[KernelSkipped, ...]
    seconds: float
    interrupted: bool = False
    broken: tuple[KernelBroke, ...] = ()
    """Kernels whose turn ended by an error."""
    lost: str | None = None
    """Why the run ended early, where a kernel broke the device for this process."""
    not_kept: str | None = None
    """Why Cases could not be written to disk, where they could not: failures without a path are in `found` all the same."""

    @property
    def found(self) -> tuple[Found, ...]:
        """All failures of all kernels."""
        return tuple(each for summary in self.summaries for each in summary.found)


Event = (
    CampaignStarted
    | KernelSkipped
    | CaseSkipped
    | CaseNotKept
    | CaseResumed
    | KernelStarted
    | CompileFinished
    | TrialFinished
    | FailureFound
    | Shrunk
    | FailureMapped
    | KernelBroke
    | KernelFinished
    | CampaignFinished
)
Listener = Callable[[Event], None]


def to_all(*listeners: Listener) -> Listener:
    """One listener that tells each of `listeners`, in their order."""

    def tell(event: Event) -> None:
        for each in listeners:
            each(event)

    return tell
