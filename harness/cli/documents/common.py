"""Documents of every command, and parts that those of several commands share."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from attnfuzz.harness.campaign.explain import Explanation

__all__ = ["CaseObject", "EventLine", "ExplanationText", "Format", "LedgerError", "Project", "WrongUse"]

Format = Literal[1]
CaseObject = dict[str, Any]
"""As a case file has it."""


class Project(msgspec.Struct):
    """Settings from a pyproject.toml."""

    path: str
    settings: dict[str, Any]


class ExplanationText(Explanation, frozen=True, kw_only=True):
    """An explanation and, as `text`, what attnfuzz prints of it, line by line."""

    text: list[str]


class LedgerError(msgspec.Struct):
    """A wrong entry of the ledger, and its line."""

    error: str
    line: int


class WrongUse(msgspec.Struct):
    """What a command with --json prints for exit code 2, if it has no result."""

    format: Format
    error: str


class EventLine(msgspec.Struct):
    """A line of `attnfuzz run --events`; what else is in it depends on `event`. `after`: seconds since the start.

    "worker": a worker's process has died; with its number (`worker`), `kernel`, `ending` and whether it is `replaced`.
    """

    format: Format
    event: Literal["started", "progress", "failure", "shrunk", "worker", "kernel", "finished"]
    after: float
