"""What `attnfuzz run`, `fleet` and `merge` print with --json."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from attnfuzz.harness.campaign.account import Times
from attnfuzz.harness.campaign.coverage import Worst
from attnfuzz.harness.campaign.events import SharedGpu
from attnfuzz.harness.cli.documents.common import CaseObject, ExplanationText, Format, LedgerError, Project
from attnfuzz.harness.gate.result import Waiver
from attnfuzz.harness.isolation.disturbances import Disturbances
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.problem import OutputName

__all__ = ["Broken", "Campaign", "KernelRow", "Merge", "Run", "RunFailure", "Skipped", "Untried"]


class KernelRow(msgspec.Struct):
    """One kernel of a run. `wrong`: Cases in which something was wrong with it, by what.

    `failed_unjudged`: Cases that failed before an output was judged, such as by a crash or by an access outside a tensor.
    `replayed`: stored Cases that were tried, which `cases` counts too; `not_replayed`: those for which the time was over.
    `captured`: gradients of sinks ("sinks") and of all other captured tensors ("captured"), as of outputs.
    `drawn`: Cases by what was drawn and its value; `never_drawn`: values that the kernel declares and no Case had.
    """

    kernel: str
    cases: int
    shrink_cases: int
    reruns: int
    seconds: float
    cases_per_second: float
    compiles: int
    compile_seconds: float
    failed_unjudged: int
    refused: int
    unreached: int
    replayed: int
    not_replayed: int
    outputs: dict[OutputName, Worst]
    captured: dict[str, Worst]
    failures: int
    features: dict[str, int]
    drawn: dict[str, dict[str, int]]
    never_drawn: dict[str, list[str]]
    processes_replaced: int
    seconds_to_recover: list[float]
    times: Times | None
    disturbances: Disturbances
    wrong: Any = None


class Skipped(msgspec.Struct):
    """A kernel that cannot run here."""

    kernel: str
    reason: str


class Untried(msgspec.Struct):
    """A kernel whose clean row says nothing: no Case ran, or none could be judged."""

    kernel: str
    reason: str


class Broken(msgspec.Struct):
    """A kernel that was not tried to the end."""

    kernel: str
    error: str


class RunFailure(msgspec.Struct):
    """One bug. `known`: entries of the ledger that let it through; `repro`: the command that runs its Case again.

    `group`: the `id` of the first failure that likely has the same cause, its own where there is none before it.
    """

    id: str
    identity: Identity
    case: CaseObject
    blob: str
    verdict: Verdict
    partly_shrunk: bool
    path: str | None
    repro: str | None
    cases_to_find: int
    seconds_to_find: float
    shrink_trials: int
    rate: tuple[int, int] | None
    explanation: ExplanationText | None
    group: str
    known: list[Waiver] | None = None


class Campaign(msgspec.Struct):
    """The result of a run, or of several as one. `shared_gpu`: null where the workers were not to share it by CUDA's MPS."""

    kernels: list[KernelRow]
    skipped: list[Skipped]
    failures: list[RunFailure]
    seconds: float
    interrupted: bool
    broken: list[Broken]
    untried: list[Untried]
    lost: str | None
    not_kept: str | None
    seed: int
    shared_gpu: SharedGpu | None


class Run(Campaign):
    """What `attnfuzz run --json` prints, and `fleet`."""

    format: Format
    command: Literal["run", "fleet"]
    project: Project | None
    ledger: str | None
    ledger_errors: list[LedgerError]
    notes: list[str]
    adapters: dict[str, str] = {}
    """Modules that keep functions of files as kernels (`--like`), by the kernels' names."""


class Merge(Campaign):
    """What `attnfuzz merge --json` prints: the runs of all folders as one.

    `out`: the folder of what is merged. `runs`: their stamps. `case_files`, `in_flight`: Cases stored there, and those that runs
    left in flight. `incomplete`: what did not finish, and shards that are missing. `without_case`: failures without a Case on
    disk. `left_out`: files that cannot be read, and why.
    """

    format: Format
    command: Literal["merge"]
    out: str
    runs: list[str]
    case_files: int
    in_flight: int
    incomplete: list[str]
    without_case: list[str]
    left_out: list[str]
