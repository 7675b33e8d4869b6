"""What `attnfuzz gate` prints with --json."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from attnfuzz.harness.cli.documents.common import Format, LedgerError, Project
from attnfuzz.harness.gate.result import Outcome, PartName, Waiver
from attnfuzz.harness.judge.failure import Kind
from attnfuzz.kernels.problem import OutputName

__all__ = ["Gate", "GateFinding", "GateKernel", "GatePart"]


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

    format: Format
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
