"""What `attnfuzz coverage` prints with --json."""

from __future__ import annotations

from typing import Literal

import msgspec

from attnfuzz.harness.audit.coverage.source import FunctionCoverage
from attnfuzz.harness.cli.documents.common import CaseObject, Format
from attnfuzz.kernels.contract import Device

__all__ = ["Coverage", "FeaturePairs", "Lines", "MissingPair", "ReachedPair"]


class ReachedPair(msgspec.Struct):
    """Two features, each as name and value, and the number of Cases that had both."""

    features: list[tuple[str, str]]
    cases: int


class MissingPair(msgspec.Struct):
    """Two features that no drawn Case had together, and a Case with both that the kernel takes."""

    features: list[tuple[str, str]]
    case: CaseObject


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

    format: Format
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
