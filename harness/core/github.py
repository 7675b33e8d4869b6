"""GitHub Actions, whose runner obeys lines that it reads in the output of a step: workflow commands."""

from __future__ import annotations

import os
import re

from attnfuzz.harness.core.text import printable

__all__ = ["on_github", "shown", "without_commands"]

_COMMAND = re.compile(r"^((?:\s|\x1b\[[\d;]*m)*)::", re.MULTILINE)
"""A command as the runner reads it: blanks before it count for nothing; colours may stand there too."""


def on_github() -> bool:
    """Whether this runs in GitHub Actions."""
    return os.environ.get("GITHUB_ACTIONS", "").lower() not in ("", "false", "0")


def without_commands(text: str) -> str:
    r"""Return text in which the runner sees no command; a backslash is put in: `\::error`, `#\#[group]`. As it is elsewhere."""
    return _COMMAND.sub(r"\1\\::", text).replace("##[", "#\\#[") if on_github() else text


def shown(text: str) -> str:
    """Return text for an output that a person or GitHub's runner reads: `printable`, and without commands."""
    return without_commands(printable(text))
