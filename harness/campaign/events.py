"""Events of a campaign. Every output (terminal, JSON, files) listens to these; the run itself never prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attnfuzz.harness.campaign.account import Times
from attnfuzz.harness.campaign.coverage import Phase, Tally, Worst
from attnfuzz.harness.campaign.explain import Explanation
from attnfuzz.harness.isolation.disturbances import Disturbances
from attnfuzz.harness.judge.failure import Failure, Identity
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
    "Finding",
    "KernelBroke",
    "KernelFinished",
    "KernelSkipped",
    "KernelStarted",
    "KernelSummary",
    "Listener",
    "Rate",
    "ReplayStarted",
    "Shrunk",
    "TrialFinished",
    "WorkerDied",
]

Rate = tuple[int, int]
"""(runs that failed, all runs) of one Case."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One failure and its Case: as first seen, later (`shrunk`) the minimal one. `path`: of its case file, where it has one."""

    identity: Identity
    case: Case
    verdict: Verdict
    path: str | None = None
    cases_to_find: int = 0
    seconds_to_find: float = 0.0
    shrunk: bool = False
    partly: bool = False
    """Shrinking ended before all steps were tried."""
    shrink_trials: int = 0
    rate: Rate | None = None
    """None: it fails every time."""
    seldom: str = ""
    """Why it fails in fewer than half of its runs."""
    untried: int = 0
    """Cases that its process had run before, and that there was no time to run again with it, or that are not known any more."""
    explanation: Explanation | None = None
    """Which parts of the minimal Case matter; None: not shrunk, and nothing is known."""

    @property
    def minimal(self) -> bool:
        """Whether no simpler Case fails alike."""
        return self.shrunk and not self.partly

    @property
    def failure(self) -> Failure | None:
        """The Failure of this identity in the Verdict; else the first."""
        return next((each for each in self.verdict.failures if each.identity == self.identity), self.verdict.failure)


@dataclass(frozen=True, slots=True)
class CampaignStarted:
    """The run's header: what differs from the default settings, what it runs on, which kernels."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    kernels: tuple[str, ...]
    seconds: float | None
    seed: int = 0
    examples: int | None = None
    """Cases of each kernel, of this shard; None: no limit."""


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
    """A Case that could not be written to disk, and why. `failing`: it has failed; else it was about to run."""

    case: Case
    reason: str
    failing: bool


@dataclass(frozen=True, slots=True)
class CaseResumed:
    """A Case was in flight when `deaths` earlier runs died; it runs first."""

    case: Case
    deaths: int


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker's process has died while it tried `kernel` (None: it had no turn); what it was at is given out again.

    `ending`: how, such as "SIGKILL"; `replaced`: another one takes its place.
    """

    worker: int
    kernel: str | None
    ending: str
    replaced: bool


@dataclass(frozen=True, slots=True)
class KernelStarted:
    """A kernel is about to be tried: variants in its pool, compiles before the first trial, and counts of its trials.

    `tally` is the run's own: it grows while the kernel is tried.
    """

    kernel: str
    variants: int
    compiles: int
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True)
class ReplayStarted:
    """Stored Cases of a kernel are about to be tried: `cases` of all that are `stored`, for at most `seconds`."""

    kernel: str
    cases: int
    stored: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class CompileFinished:
    """One compile is done."""

    kernel: str
    config: str
    seconds: float
    error: str | None


@dataclass(frozen=True, slots=True)
class TrialFinished:
    """One trial has ended; `phase` says why the Case ran."""

    kernel: str
    phase: Phase
    case: Case
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class FailureFound:
    """A failure of a new identity, not yet shrunk; its Case is on disk. `seconds`: the most that shrinking may take."""

    finding: Finding
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A failure with its minimal Case. `before`: its identity when it was found, which shrinking may have changed."""

    finding: Finding
    before: Identity


@dataclass(frozen=True, slots=True)
class FailureMapped:
    """Error maps of a minimal Case are kept at `path`, relative to the run's folder; or why there are none."""

    identity: Identity
    path: str | None
    reason: str = ""
    first: str | None = None
    """Those of the Case as it was found, where that is another: a larger one shows where errors lie."""


@dataclass(frozen=True, slots=True)
class KernelSummary:
    """One kernel's row: distinct Cases tried, Cases of shrinking, reruns, times, compiles, outputs, findings.

    `seconds` and `compile_seconds` are sums over all workers and compiles.
    """

    kernel: str
    cases: int
    shrink_cases: int
    seconds: float
    compiles: int
    compile_seconds: float
    outputs: dict[OutputName, Worst]
    findings: tuple[Finding, ...]
    features: dict[str, int] = field(default_factory=dict)
    captured: dict[str, Worst] = field(default_factory=dict)
    """Gradients of sinks and of other captured tensors, as `Tally.captured`."""
    reruns: int = 0
    """Runs of replayed Cases beyond their first, and of Cases once more against the oracle alone."""
    replaced: int = 0
    """Child processes that died or were killed."""
    refused: int = 0
    """Variants that the compiler refused; no Case of them was tried."""
    replayed: int = 0
    """Stored Cases that were tried; `cases` counts them too."""
    not_replayed: int = 0
    """Stored Cases that were not tried, since their part of the run was over."""
    failed_unjudged: int = 0
    """Cases that failed before an output was judged (`Tally.failed_unjudged`)."""
    unreached: int = 0
    """Variants that were not compiled when the time was over; no Case of them was tried."""
    recoveries: tuple[float, ...] = ()
    """Seconds from each death of a child to the next verdict."""
    times: Times | None = None
    """Where the time of its turns went; None where it is not known."""
    disturbances: Disturbances = field(default_factory=Disturbances)
    """What others than the kernel did to its child processes, which is no failure of the kernel."""
    drawn: dict[str, dict[str, int]] = field(default_factory=dict)
    """Cases by what was drawn and its value, as `Tally.drawn`."""
    never_drawn: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What the kernel declares and no Case had, by what is drawn (`undrawn.never_drawn`)."""
    elsewhere: tuple[Finding, ...] = ()
    """Failures that another shard of the same test keeps and shrinks, each with the Case that showed it here."""

    @property
    def untried(self) -> str | None:
        """Why the absence of failures says nothing of this kernel: no Case ran, or none could be judged; else None."""
        if self.findings or self.elsewhere or any(each.cases for each in self.outputs.values()):
            return None
        if self.cases == 0:
            why = f": {self.unreached} of its variants were not compiled in this time" if self.unreached else ""
            return f"no Case was tried{why}; give it more time, or more Cases"
        # Outputs are not known where a Case has no figures, such as one whose errors are expected.
        return f"none of its {self.cases} Cases could be judged; give it smaller ones, or more memory" if self.outputs else None

    @property
    def rate(self) -> float:
        """Cases per second of trial time."""
        return self.cases / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class KernelBroke:
    """A kernel was not tried to the end, by an error that is not a finding: its module cannot be imported, or attnfuzz failed."""

    kernel: str
    error: str


@dataclass(frozen=True, slots=True)
class KernelFinished:
    """A kernel has been tried."""

    summary: KernelSummary


@dataclass(frozen=True, slots=True)
class SharedGpu:
    """How long the workers shared GPUs by CUDA's MPS, where they were to. `reason`: why no longer; None: they did to the end.

    `seconds`: from the start of the server; None: they never did. `cases`: files of the Cases whose process ended sharing, where
    no crash, hang or illegal access of their kernel was found.
    """

    seconds: float | None
    reason: str | None = None
    cases: tuple[str, ...] = ()
    repro: str = ""
    """The command that runs the first of them again."""

    def describe(self) -> str:
        """Return it in words."""
        if self.seconds is None:
            return f"the workers did not share the GPU by MPS: {self.reason}"
        text = f"the workers shared the GPU by MPS for {self.seconds:.1f} s"
        text = text if self.reason is None else f"{text}, until {self.reason}"
        if not self.cases:
            return text
        count = f"{len(self.cases)} Case{'s' * (len(self.cases) > 1)}"
        return f"{text}; no crash, hang or illegal access of its kernel was found ({count}): {self.repro} --repeat 100"


@dataclass(frozen=True, slots=True)
class CampaignFinished:
    """The run is over. `interrupted`: by the user; the findings until then are in the summaries."""

    summaries: tuple[KernelSummary, ...]
    skipped: tuple[KernelSkipped, ...]
    seconds: float
    interrupted: bool = False
    broken: tuple[KernelBroke, ...] = ()
    """Kernels that were not tried to the end, by an error."""
    lost: str | None = None
    """Why the run ended early, where a kernel broke the device for this process."""
    not_kept: str | None = None
    """Why Cases could not be written to disk, where they could not; such findings have no path."""
    seed: int | None = None
    """None: the results are of runs with several seeds."""
    shared_gpu: SharedGpu | None = None
    """None: the workers were not to share the GPU."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings of all kernels."""
        return tuple(each for summary in self.summaries for each in summary.findings)

    @property
    def elsewhere(self) -> tuple[Finding, ...]:
        """All failures that other shards keep."""
        return tuple(each for summary in self.summaries for each in summary.elsewhere)

    @property
    def untried(self) -> tuple[tuple[str, str], ...]:
        """Kernels of which the absence of failures says nothing, each with the reason; none after Ctrl-C."""
        rows = () if self.interrupted or self.lost else self.summaries
        broken = {each.kernel for each in self.broken}
        return tuple((row.kernel, row.untried) for row in rows if row.untried is not None and row.kernel not in broken)


Event = (
    CampaignStarted
    | KernelSkipped
    | CaseSkipped
    | CaseNotKept
    | CaseResumed
    | WorkerDied
    | KernelStarted
    | ReplayStarted
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
