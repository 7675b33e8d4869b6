"""What `attnfuzz list` and `corpus` print with --json."""

from __future__ import annotations

from typing import Literal

import msgspec

from attnfuzz.harness.cli.documents.common import Format
from attnfuzz.harness.judge.failure import Kind
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import OutputName

__all__ = ["CaseList", "CaseRemoval", "KernelList", "LeftFile", "ListedKernel", "RemovedCase", "StoredCase"]


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

    format: Format
    command: Literal["list"]
    kernels: list[ListedKernel]


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

    format: Format
    command: Literal["corpus list"]
    folder: str
    cases: list[StoredCase]
    unreadable: list[LeftFile]


class CaseRemoval(msgspec.Struct):
    """What `attnfuzz corpus prune --json` prints, and `minimise`. `kept`: how many case files there are then."""

    format: Format
    command: Literal["corpus prune", "corpus minimise"]
    dry_run: bool
    removed: list[RemovedCase]
    left: list[LeftFile]
    kept: int
    interrupted: bool
