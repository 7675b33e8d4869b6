"""One check of the conformance list, and what it found."""

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
    """What one check found. `hint`: it works, though it is not declared; `absent`: not declared, and it does not work."""

    check: str
    status: Status
    found: str = ""
    remedy: str = ""


def failing(check: str, failures: Sequence[Failure], remedy: str, right: str) -> Row:
    """A check that `failures` break, or that is fulfilled: `right`."""
    if not failures:
        return Row(check, "ok", right)
    return Row(check, "wrong", shortened("; ".join(f"{each.kind}: {each.message}" for each in failures)), remedy)


def shortened(text: str) -> str:
    """`text` on one line, of a length that a table can hold."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."
