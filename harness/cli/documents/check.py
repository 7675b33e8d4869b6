"""What a check of a function returns as an object: `CheckResult.to_object` of `attnfuzz.harness`."""

from __future__ import annotations

from typing import Literal

import msgspec

from attnfuzz.harness.cli.documents.common import CaseObject, Format
from attnfuzz.harness.judge.failure import Kind
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import OutputName

__all__ = ["Check", "Checked", "CheckedFailure"]


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
