"""What `attnfuzz repro` prints with --json, by what it was asked for."""

from __future__ import annotations

from typing import Literal

import msgspec

from attnfuzz.harness.cli.documents.common import CaseObject, ExplanationText, Format
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Device

__all__ = ["RepeatFailure", "ReproExplain", "ReproOnce", "ReproRepeat", "ReproScript", "ReproShrink"]


class ReproOnce(msgspec.Struct):
    """What `attnfuzz repro --json` prints. `ids`: the identities of the failures of `verdict`."""

    format: Format
    command: Literal["repro"]
    way: Literal["once"]
    outcome: Literal["FIXED", "FAILED", "UNJUDGED"]
    device: Device
    ids: list[str]
    verdict: Verdict
    runs: int
    case: CaseObject
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

    format: Format
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
    case: CaseObject


class ReproShrink(msgspec.Struct):
    """What `attnfuzz repro --shrink --json` prints."""

    format: Format
    command: Literal["repro"]
    way: Literal["shrink"]
    outcome: Literal["SMALLER", "MINIMAL", "STOPPED", "FIXED"]
    device: Device
    case: CaseObject
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

    format: Format
    command: Literal["repro"]
    way: Literal["explain"]
    outcome: Literal["EXPLAINED", "FIXED"]
    device: Device
    case: CaseObject
    explanation: ExplanationText | None
    trials: int
    seconds: float
    written: bool


class ReproScript(msgspec.Struct):
    """What `attnfuzz repro --script FILE --json` prints."""

    format: Format
    command: Literal["repro"]
    way: Literal["script"]
    script: str
    exact: bool
    device: Device
    note: str | None
    case: CaseObject
