"""A Failure: what went wrong in a Trial and where, with an identity that shrinking keeps."""

from __future__ import annotations

import hashlib
import re
from typing import Literal, get_args

import msgspec

from attnfuzz.harness.core.text import normalised, one_line
from attnfuzz.harness.judge.diagnosis.model import Pattern
from attnfuzz.kernels.problem import SINKS, OutputName
from attnfuzz.kernels.support.memory import MemoryKind
from attnfuzz.kernels.support.protocol import PROTOCOL_KINDS

__all__ = [
    "BY_QUERY",
    "KINDS",
    "OUTPUT_TITLES",
    "PATTERNED",
    "Failure",
    "Identity",
    "Kind",
    "Place",
    "in_call_before",
    "in_earlier",
    "own_message",
    "where",
]

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
    # By the memory checker of interpreted kernels.
    "out-of-bounds",
    "outside-view",
    "duplicate-store",
    "race",
    "uninitialised",
    "masked-load",
    # By the executor of warp roles.
    "deadlock",
    "wrong-phase",
    "early-overwrite",
    "early-read",
    "wrong-bytes",
    "left-running",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
_KNOWN_BY_CHECK: frozenset[Kind] = frozenset(
    (
        *("mismatch", "nonfinite", "aggregate", "unwritten", "nondeterministic", "relation", "guard", "contract", "hang"),
        "out-of-memory",
        *get_args(MemoryKind),
        *PROTOCOL_KINDS,
    )
)
_IN_CALL_BEFORE = " (in the call before, of check "
PATTERNED: frozenset[Kind] = frozenset(("mismatch", "nonfinite", "unwritten"))
"""Kinds whose failures have a pattern, where one is looked for and found; unwritten ones are nonfinite at first."""
OUTPUT_TITLES: dict[OutputName, str] = {"o": "O", "lse": "LSE", "dq": "dQ", "dk": "dK", "dv": "dV"}
CAPTURED_TITLES: dict[str, str] = {SINKS: "d sinks", "captured": "d captured"}
"""Rows of gradients that are no outputs: that of sinks, and those of all other captured tensors together."""
BY_QUERY = ("o", "lse", "dq")
"""Outputs with a row for each query; the others have one for each key."""


def captured_row(tensor: str) -> str:
    """Return the row, a key of CAPTURED_TITLES, that counts the gradient of a captured tensor."""
    return SINKS if tensor == SINKS else "captured"


def row_of_gradient(output: str | None, check: str) -> str | None:
    """Return the row of a failure of `output` and `check`, if it is of a captured tensor's gradient; None else."""
    return captured_row(check.removeprefix("d ")) if output is None and check.startswith("d ") else None


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Kernel, kind, output, check and message without digits; failures with equal identities count as one bug."""

    kernel: str
    kind: Kind
    output: OutputName | None
    check: str
    message: str = ""

    @property
    def fingerprint(self) -> str:
        """First 8 hex digits of the identity's SHA-256."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:8]

    @property
    def key(self) -> str:
        """The identity as one word, the same in every run, on every machine and for every seed: "mine/mismatch/dq/elementwise".

        Kernel, kind, output (or "-") and check; where bugs differ by their message, also a hash of it without digits and folders.
        """
        parts = [self.kernel, self.kind, self.output or "-", self.check]
        if self.message:
            message = re.sub(r"(?:~|\.{1,2})?(?:/[^\s/'\":,;()]+)+/(?=[^\s/])", "", self.message)
            parts.append(hashlib.sha256(message.encode("utf-8", "backslashreplace")).hexdigest()[:8])
        return "/".join(re.sub(r"\s+", "_", part) for part in parts)

    def __str__(self) -> str:
        output = OUTPUT_TITLES[self.output] if self.output else self.check
        return one_line(f"{self.kernel}: {self.kind} in {output}" + (f" ({self.message})" if self.message else ""))


class Place(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The worst element: its sequence, the position in it, head and dim; got, expected and allowed values."""

    sequence: int
    position: int
    head: int
    dim: int | None
    got: float
    expected: float
    allowed: float


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong: kind, output, check (the broken rule), message for people, the worst place, the pattern."""

    kernel: str
    kind: Kind
    check: str
    message: str
    output: OutputName | None = None
    place: Place | None = None
    pattern: Pattern | None = None
    detail: str = ""
    """A traceback or a compiler's output."""

    @property
    def captured_row(self) -> str | None:
        """Return the row that counts a wrong gradient of a captured tensor; None: it is of an output, or of none."""
        return row_of_gradient(self.output, self.check)

    @property
    def identity(self) -> Identity:
        """Return what shrinking keeps: exceptions and crashes differ by message without digits, others by output and check.

        An exception in the call before a Case's own is the bug that its own call would show.
        """
        known_by_check = self.kind in _KNOWN_BY_CHECK
        return Identity(
            kernel=self.kernel,
            kind=self.kind,
            output=self.output,
            check=self.check,
            message="" if known_by_check else normalised(own_message(self.message)),
        )


def where(name: OutputName, place: Place) -> str:
    """Describe a place: "sequence 0, key 3, head 1, dim 5"."""
    rows = "query" if name in BY_QUERY else "key"
    dim = "" if place.dim is None else f", dim {place.dim}"
    return f"sequence {place.sequence}, {rows} {place.position}, head {place.head}{dim}"


def in_call_before(failure: Failure, check: str) -> Failure:
    """Return a failure of the call before a Case's own, which its check makes."""
    return msgspec.structs.replace(failure, message=f"{failure.message}{_IN_CALL_BEFORE}{check})")


def own_message(message: str) -> str:
    """Return a message without what `in_call_before` adds, also where a limit of length has cut that."""
    own, mark, rest = message.rpartition(_IN_CALL_BEFORE[:4])
    added = mark + rest
    return own if mark and (added.startswith(_IN_CALL_BEFORE) or _IN_CALL_BEFORE.startswith(added)) else message


def in_earlier(failure: Failure, number: int, count: int) -> Failure:
    """Return a failure of one of the `count` Cases that run before a Case, counted from 0: it is not the Case's own."""
    message = f"earlier Case {number + 1} of {count}: {failure.message}"
    return msgspec.structs.replace(failure, check="earlier", message=message)
