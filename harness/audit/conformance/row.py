"""One check of the conformance list and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attnfuzz.harness.judge.failure import Failure

__all__ = ["Row", "Status", "failing", "shortened"]

Status = Literal["ok", "wrong", "hint", "absent", "not run"]
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one check. `hint`: it works and is not declared, or is never tried; `absent`: not declared, and does not work."""

    check: str
    status: Status
    found: str = ""
    remedy: str = ""


def failing(check: str, failures: Sequence[Failure], remedy: str, right: str) -> Row:
    """Make a row: wrong by `failures`, or fulfilled as `right` says."""
    if not failures:
        return Row(check, "ok", right)
    return Row(check, "wrong", shortened("; ".join(f"{each.kind}: {each.message}" for each in failures)), remedy)


def shortened(text: str) -> str:
    """Return `text` on one line, cut to a length that fits a table."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."
