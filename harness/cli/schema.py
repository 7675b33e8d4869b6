"""The JSON that commands print, as types: `json_schema` makes a JSON Schema of them (docs/reference/attnfuzz.schema.json).

The commands make their objects elsewhere; a test compares what they print with this.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from attnfuzz.harness.audit.conformance.row import Row
from attnfuzz.harness.audit.coverage.source import FunctionCoverage
from attnfuzz.harness.campaign.account import Times
from attnfuzz.harness.campaign.coverage import Worst
from attnfuzz.harness.campaign.explain import Explanation
from attnfuzz.harness.gate.result import Outcome, PartName, Waiver
from attnfuzz.harness.isolation.disturbances import Disturbances
from attnfuzz.harness.judge.failure import Identity, Kind
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import OutputName

__all__ = ["json_schema"]

_Format = Literal[1]
_Case = dict[str, Any]
"""As a case file has it."""


class Project(msgspec.Struct):
    """Settings from a pyproject.toml."""

    path: str
    settings: dict[str, Any]


class ExplanationText(Explanation, frozen=True, kw_only=True):
    """An explanation and, as `text`, what attnfuzz prints of it, line by line."""

    text: list[str]


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
    case: _Case
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


class LedgerError(msgspec.Struct):
    """A wrong entry of the ledger, and its line."""

    error: str
    line: int


class Campaign(msgspec.Struct):
    """The result of a run, or of several as one."""

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


class Run(Campaign):
    """What `attnfuzz run --json` prints, and `fleet`."""

    format: _Format
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

    format: _Format
    command: Literal["merge"]
    out: str
    runs: list[str]
    case_files: int
    in_flight: int
    incomplete: list[str]
    without_case: list[str]
    left_out: list[str]


class ReproOnce(msgspec.Struct):
    """What `attnfuzz repro --json` prints. `ids`: the identities of the failures of `verdict`."""

    format: _Format
    command: Literal["repro"]
    way: Literal["once"]
    outcome: Literal["FIXED", "FAILED", "UNJUDGED"]
    device: Device
    ids: list[str]
    verdict: Verdict
    runs: int
    case: _Case
    plot: str | None = None
    no_plot: str = ""


class RepeatFailure(msgspec.Struct):
    """One bug among the runs of a Case: in how many, and first in which."""

    id: str
    identity: Identity
    runs: int
    first: int
    message: str


class ReproRepeat(msgspec.Struct):
    """What `attnfuzz repro --repeat N --json` prints. `interval`: of the rate, 95 % confidence."""

    format: _Format
    command: Literal["repro"]
    way: Literal["repeat"]
    device: Device
    asked: int
    runs: int
    failed: int
    rate: float | None
    interval: tuple[float, float]
    interrupted: bool
    failures: list[RepeatFailure]
    case: _Case


class ReproShrink(msgspec.Struct):
    """What `attnfuzz repro --shrink --json` prints."""

    format: _Format
    command: Literal["repro"]
    way: Literal["shrink"]
    outcome: Literal["SMALLER", "MINIMAL", "STOPPED", "FIXED"]
    device: Device
    case: _Case
    id: str | None
    identity: Identity | None
    verdict: Verdict
    path: str | None
    repro: str | None
    trials: int
    seconds: float
    partly: bool
    rate: tuple[int, int] | None
    explanation: ExplanationText | None


class ReproExplain(msgspec.Struct):
    """What `attnfuzz repro --explain --json` prints. `written`: whether the case file holds the explanation now."""

    format: _Format
    command: Literal["repro"]
    way: Literal["explain"]
    outcome: Literal["EXPLAINED", "FIXED"]
    device: Device
    case: _Case
    explanation: ExplanationText | None
    trials: int
    seconds: float
    written: bool


class ReproScript(msgspec.Struct):
    """What `attnfuzz repro --script FILE --json` prints."""

    format: _Format
    command: Literal["repro"]
    way: Literal["script"]
    script: str
    exact: bool
    device: Device
    note: str | None
    case: _Case


class GateFinding(msgspec.Struct):
    """One bug of a gated kernel. `id`: None where no Case shows it, as for a slower kernel."""

    part: PartName
    kernel: str
    message: str
    id: str | None
    kind: Kind | None
    output: OutputName | None
    check: str
    detail: str
    case: str | None
    blob: str | None
    described: dict[str, str]
    waiver: Waiver | None
    repro: str | None


class GatePart(msgspec.Struct):
    """One part of a kernel's gate."""

    name: PartName
    outcome: Outcome
    summary: str
    findings: list[GateFinding]
    figures: dict[str, Any]
    seconds: float
    not_kept: str
    complete: bool


class GateKernel(msgspec.Struct):
    """One kernel's gate."""

    kernel: str
    outcome: Outcome
    why: str
    file: str
    line: int
    parts: list[GatePart]


class Gate(msgspec.Struct):
    """What `attnfuzz gate --json` prints."""

    format: _Format
    command: Literal["gate"]
    outcome: Literal["pass", "fail", "error", "interrupted", "known", "skipped"]
    against: str
    kernels: list[GateKernel]
    untouched: int
    ledger: str | None
    ledger_errors: list[LedgerError]
    notes: list[str]
    seconds: float
    environment: dict[str, Any]
    interrupted: bool
    written: str | None
    project: Project | None


class ListedKernel(msgspec.Struct):
    """One kernel and where it runs here; `reasons`: why not elsewhere; `proof`: what was shown without its hardware."""

    kernel: str
    backend: str
    packings: list[str]
    dtypes: list[str]
    dims: list[tuple[int, int]]
    causal: list[str | None]
    outputs: list[OutputName]
    runs_on: list[Device]
    reasons: dict[str, str]
    proof: str | None


class KernelList(msgspec.Struct):
    """What `attnfuzz list --json` prints."""

    format: _Format
    command: Literal["list"]
    kernels: list[ListedKernel]


class Conformance(msgspec.Struct):
    """What `attnfuzz check-adapter --json` prints. `right`: all checks ran, and none found anything wrong."""

    format: _Format
    command: Literal["check-adapter"]
    kernel: str
    device: Device
    right: bool
    complete: bool
    interrupted: bool
    checks: list[Row]
    seconds: float


class StoredCase(msgspec.Struct):
    """A case file. `id`: of its failure, None if the file does not say; `case_id`: of the Case; `elements`: of q, k and v."""

    kernel: str
    output: OutputName | None
    kind: Kind | None
    check: str
    elements: int
    lengths: str
    age_seconds: int
    last_seen: str
    minimal: bool
    id: str | None
    case_id: str
    file: str


class RemovedCase(StoredCase):
    """A case file that was removed, for a dry run: would be."""

    reason: str


class LeftFile(msgspec.Struct):
    """A file that was not read or not removed, and why."""

    file: str
    reason: str


class CaseList(msgspec.Struct):
    """What `attnfuzz corpus list --json` prints."""

    format: _Format
    command: Literal["corpus list"]
    folder: str
    cases: list[StoredCase]
    unreadable: list[LeftFile]


class CaseRemoval(msgspec.Struct):
    """What `attnfuzz corpus prune --json` prints, and `minimise`. `kept`: how many case files there are then."""

    format: _Format
    command: Literal["corpus prune", "corpus minimise"]
    dry_run: bool
    removed: list[RemovedCase]
    left: list[LeftFile]
    kept: int
    interrupted: bool


class CheckedFailure(msgspec.Struct):
    """One bug, as `attnfuzz.harness.CheckFailure`."""

    id: str
    kernel: str
    kind: Kind
    output: OutputName | None
    check: str
    message: str
    detail: str
    case: _Case | None
    blob: str | None
    path: str | None
    minimal: bool
    text: str


class Checked(msgspec.Struct):
    """One output over all Cases of a check."""

    cases: int
    unjudged: int
    worst: float
    wrong: int


class Check(msgspec.Struct):
    """What `attnfuzz.harness.CheckResult.to_object` returns."""

    format: _Format
    command: Literal["check"]
    ok: bool
    reason: str
    kernel: str
    device: Device
    seed: int
    failures: list[CheckedFailure]
    cases: int
    outputs: dict[OutputName, Checked]
    never_drawn: dict[str, list[str]]
    seconds: float
    seconds_to_first: float | None


class ReachedPair(msgspec.Struct):
    """Two features, each as name and value, and the number of Cases that had both."""

    features: list[tuple[str, str]]
    cases: int


class MissingPair(msgspec.Struct):
    """Two features that no drawn Case had together, and a Case with both that the kernel takes."""

    features: list[tuple[str, str]]
    case: _Case


class FeaturePairs(msgspec.Struct):
    """Pairs of features. `share_of_declared`: of the pairs of abilities that the kernel declares, without values and checks."""

    share: float
    share_of_declared: float
    reached: list[ReachedPair]
    missing: list[MissingPair]


class Lines(msgspec.Struct):
    """What ran of a kernel's Triton functions, by file. `reason`: why nothing is known; `failed`: Cases that failed."""

    cases: int
    failed: int
    reason: str
    files: dict[str, list[FunctionCoverage]]


class Coverage(msgspec.Struct):
    """What `attnfuzz coverage --json` prints.

    `never`: values that Cases could have had and none had. `compiled_variants`: those that a run draws from; null: from all.
    """

    format: _Format
    command: Literal["coverage"]
    kernel: str
    device: Device
    profile: str
    seed: int
    cases: int
    seconds_to_draw: float
    compiled_variants: int | None
    features: dict[str, int]
    drawn: dict[str, dict[str, int]]
    never: dict[str, list[str]]
    pairs: FeaturePairs
    lines: Lines | None


class WrongUse(msgspec.Struct):
    """What a command with --json prints for exit code 2, if it has no result."""

    format: _Format
    error: str


class EventLine(msgspec.Struct):
    """A line of `attnfuzz run --events`; what else is in it depends on `event`. `after`: seconds since the start."""

    format: _Format
    event: Literal["started", "progress", "failure", "shrunk", "kernel", "finished"]
    after: float


_DOCUMENTS = (
    *(Run, Merge, ReproOnce, ReproRepeat, ReproShrink, ReproExplain, ReproScript, Gate, KernelList),
    *(Conformance, CaseList, CaseRemoval, Check, Coverage, WrongUse, EventLine),
)
_NUMBERS = {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of every document, each by its name in `$defs`. A number may be "inf", "-inf" or "nan"."""
    _, components = msgspec.json.schema_components(_DOCUMENTS, ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "attnfuzz, format 1",
        "anyOf": [{"$ref": f"#/$defs/{each.__name__}"} for each in _DOCUMENTS if each is not EventLine],
        "$defs": {name: _with_infinities(each) for name, each in sorted(components.items())},
    }


def _with_infinities(schema: Any) -> Any:
    if isinstance(schema, dict):
        if schema.get("type") == "number":
            return {**{name: value for name, value in schema.items() if name != "type"}, **_NUMBERS}
        if isinstance(text := schema.get("description"), str):
            schema = {**schema, "description": " ".join(text.split())}
        return {name: _with_infinities(each) for name, each in schema.items()}
    return [_with_infinities(each) for each in schema] if isinstance(schema, list) else schema
