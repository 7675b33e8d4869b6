"""The file that a run leaves for reports, `DIR/runs/STAMP.json`: header, figures, coverage, failures, as far as it has come."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from attnfuzz.harness.campaign.coverage import EDGES
from attnfuzz.harness.core.files import Unreadable, decoded, read_file, write_whole
from attnfuzz.harness.core.text import dumps
from attnfuzz.kernels.errors import BadArgument, reject, shown

__all__ = [
    "FORMAT",
    "MOST_BYTES",
    "Broken",
    "FailureRecord",
    "KernelRecord",
    "Number",
    "OutputRecord",
    "Refused",
    "RunRecord",
    "number",
    "read_run",
    "runs_of",
    "write_run",
]

FORMAT: Final = 1
MOST_BYTES: Final = 32 << 20
"""Of one file: what is larger was not written here."""
Number: TypeAlias = float | Literal["inf", "-inf", "nan"]
"""JSON has no infinities."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Stamp: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\Z", max_length=120)]
"""Part of a file's name: of nothing but the file itself."""
State = Literal["running", "finished", "interrupted", "error"]


class OutputRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One output of one kernel: Cases judged and not, wrong in how many, the worst, and the worst of each Case as a histogram.

    `doubted`: of the judged ones those of which elements are left out, since mask_mod is in doubt.
    """

    cases: Count = 0
    unjudged: Count = 0
    doubted: Count = 0
    failures: Count = 0
    worst: Number = 0.0
    sigmas: Number = 0.0
    r: Number = 0.0
    z: Number = 0.0
    histogram: list[Count] = []

    def __post_init__(self) -> None:
        if not self.histogram:
            self.histogram = [0] * (len(EDGES) + 2)
        if len(self.histogram) != len(EDGES) + 2:
            raise ValueError(f"a histogram has {len(EDGES) + 2} bins")


class KernelRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One kernel's part of the run: Cases, times, figures of each output, counts of what was reached and drawn."""

    kernel: str
    cases: Count = 0
    shrink_cases: Count = 0
    reruns: Count = 0
    seconds: Seconds = 0.0
    """Of trials, shrinking left out; 0 until the turn is over."""
    compiles: Count = 0
    compile_seconds: Seconds = 0.0
    failed_unjudged: Count = 0
    refused: Count = 0
    unreached: Count = 0
    replaced: Count = 0
    replayed: Count = 0
    not_replayed: Count = 0
    variants: Count = 0
    ended: bool = False
    outputs: dict[str, OutputRecord] = {}
    captured: dict[str, OutputRecord] = {}
    """Gradients of sinks, and of other captured tensors."""
    features: dict[str, Count] = {}
    drawn: dict[str, dict[str, Count]] = {}
    never_drawn: dict[str, list[str]] = {}
    """What the kernel declares and no Case had; empty until the turn is over."""
    stages: dict[str, Seconds] = {}
    """Seconds spent in each stage of all trials, shrinking included."""


class FailureRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One failure: what it is, its minimal Case, its pattern, its error maps, and the line that runs it again."""

    kernel: str
    title: str
    fingerprint: str
    kind: str
    output: str | None = None
    check: str = ""
    case_id: str = ""
    case: dict[str, Any] = {}
    """Empty where it is too large."""
    told: list[tuple[str, str]] = []
    """The Case in words, name and value."""
    messages: list[str] = []
    pattern: str = ""
    detail: str = ""
    path: str | None = None
    repro: str | None = None
    maps: str | None = None
    """Relative to DIR."""
    first_maps: str | None = None
    """Those of the Case as it was found, which is larger and shows more of where the errors lie."""
    no_maps: str = ""
    """Why there are none."""
    shrunk: bool = False
    partly: bool = False
    rate: tuple[Count, Count] | None = None
    cases_to_find: Count = 0
    seconds_to_find: Seconds = 0.0
    shrink_trials: Count = 0
    explanation: list[tuple[str, str]] = []
    """What matters of the minimal Case, title and text."""


class Refused(msgspec.Struct, kw_only=True):
    """A kernel that did not run, or whose turn was ended by an error, and why; or a Case that was not tried."""

    what: str
    reason: str


class RunRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One run, as far as it has come."""

    format: int
    stamp: Stamp
    session: str
    """Shared by the runs of one process, and of the workers of one pytest: a report shows them together."""
    started: str
    updated: str
    state: State = "running"
    error: str = ""
    seconds: Seconds = 0.0
    settings: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    kernels: list[KernelRecord] = []
    skipped: list[Refused] = []
    broken: list[Refused] = []
    not_tried: list[Refused] = []
    lost: str = ""
    failures: list[FailureRecord] = []
    more_failures: Count = 0
    """Failures beyond those that a file holds; their Cases are on disk like all others."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A run file that cannot be read, and why."""

    path: str
    error: str


def number(value: float) -> Number:
    """A float as JSON can say it."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def write_run(folder: Path, run: RunRecord) -> Path:
    """Write whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / "runs" / f"{run.stamp}.json"
    write_whole(path, dumps(msgspec.to_builtins(run)) + "\n")
    return path


def read_run(path: Path) -> RunRecord:
    """Read what `write_run` wrote.

    Raises:
        BadArgument: the file cannot be read, is broken, or of another version.
    """
    remedy = "remove it, or report with the version that wrote it"
    content = read_file(path, MOST_BYTES, argument="run", remedy=remedy)
    try:
        data = decoded(content)
        if not isinstance(data, dict) or type(data.get("format")) is not int:
            raise reject("run", str(path), "it is not a record of a run", remedy)
        if data["format"] != FORMAT:
            raise reject("run", str(path), f"its format is {shown(data['format'])}, this attnfuzz reads {FORMAT}", remedy)
        return msgspec.convert(data, RunRecord)
    except (Unreadable, msgspec.ValidationError) as error:
        raise reject("run", str(path), f"it is broken ({error})", remedy) from None


def runs_of(folder: Path) -> Iterator[RunRecord | Broken]:
    """The runs of a folder, oldest first; a file that cannot be read is a Broken in its place."""
    for path in sorted((folder / "runs").glob("*.json")):
        try:
            yield read_run(path)
        except BadArgument as error:
            yield Broken(str(path), str(error))
