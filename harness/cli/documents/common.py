"""Parts that the documents of several commands share."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from attnfuzz.harness.campaign.explain import Explanation

__all__ = ["CaseObject", "ExplanationText", "Format", "Project"]

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
