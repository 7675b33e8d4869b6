"""A Failure: what went wrong in a Trial, with an identity that shrinking keeps."""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import msgspec

from attnfuzz.harness.core.text import normalised
from attnfuzz.harness.judge.diagnosis.model import Pattern
from attnfuzz.kernels.problem import OutputName
from attnfuzz.kernels.support.memory import MemoryKind

__all__ = ["KINDS", "OUTPUT_TITLES", "Failure", "Identity", "Kind", "Place", "where"]

Kind = Literal[
    "mismatch",
    "aggregate",
    "nonfinite",
    "contract",
    "guard",
    "unwritten",
    "nondeterministic",
    "relation",
    "exception",
    "compile-error",
    "crash",
    "illegal-access",
    "hang",
    "out-of-memory",
    # Told by the memory checker of interpreted kernels.
    "out-of-bounds",
    "outside-view",
    "duplicate-store",
    "race",
    "uninitialised",
    "masked-load",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
_TOLD_BY_CHECK: frozenset[Kind] = frozenset(
    (
        *("mismatch", "nonfinite", "aggregate", "unwritten", "nondeterministic", "relation", "guard", "contract", "hang"),
        "out-of-memory",
        *get_args(MemoryKind),
    )
)
OUTPUT_TITLES: dict[OutputName, str] = {"o": "O", "lse": "LSE", "dq": "dQ", "dk": "dK", "dv": "dV"}


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Two failures with equal identities are the same bug: kernel, kind, output, check and message without digits."""

    kernel: str
    kind: Kind
    output: OutputName | None
    check: str
    message: str = ""

    @property
    def fingerprint(self) -> str:
        """First 8 hex digits of the identity's SHA-256."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:8]

    def __str__(self) -> str:
        output = OUTPUT_TITLES[self.output] if self.output else self.check
        return f"{self.kernel}: {self.kind} in {output}" + (f" ({self.message})" if self.message else "")


class Place(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The worst element: which sequence and position in it, head, dim; what was got, expected and allowed."""

    sequence: int
    position: int
    head: int
    dim: int | None
    got: float
    expected: float
    allowed: float


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong: kind, output, check (the rule that was broken), message for people, the worst place, the pattern."""

    kernel: str
    kind: Kind
    check: str
    message: str
    output: OutputName | None = None
    place: Place | None = None
    pattern: Pattern | None = None
    detail: str = ""
    """A traceback or a compiler's text."""

    @property
    def identity(self) -> Identity:
        """What shrinking keeps: exceptions and crashes go by their message without digits, the rest by output and check."""
        numeric = self.kind in _TOLD_BY_CHECK
        return Identity(
            kernel=self.kernel,
            kind=self.kind,
            output=self.output,
            check=self.check,
            message="" if numeric else normalised(self.message),
        )


def where(name: OutputName, place: Place) -> str:
    """ "sequence 0, key 3, head 1, dim 5"."""
    rows = "key" if name in ("dk", "dv") else "query"
    dim = "" if place.dim is None else f", dim {place.dim}"
    return f"sequence {place.sequence}, {rows} {place.position}, head {place.head}{dim}"
