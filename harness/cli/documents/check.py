"""What a check of a function returns (`CheckResult.to_object` of `attnfuzz.harness`), and what one of an adapter prints."""

from __future__ import annotations

from typing import Literal

import msgspec

from attnfuzz.harness.audit.conformance.row import Row
from attnfuzz.harness.cli.documents.common import CaseObject, Format
from attnfuzz.harness.judge.failure import Kind
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import OutputName

__all__ = ["Check", "Checked", "CheckedFailure", "Conformance"]


class CheckedFailure(msgspec.Struct):
    """One bug, as `attnfuzz.harness.CheckFailure`."""

    id: str
    kernel: str
    kind: Kind
    output: OutputName | None
    check: str
    message: str
    detail: str
    case: CaseObject | None
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

    format: Format
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


class Conformance(msgspec.Struct):
    """What `attnfuzz check-adapter --json` prints. `right`: all checks ran, and none found anything wrong."""

    format: Format
    command: Literal["check-adapter"]
    kernel: str
    device: Device
    right: bool
    complete: bool
    interrupted: bool
    checks: list[Row]
    seconds: float
