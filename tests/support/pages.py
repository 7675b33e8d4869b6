"""Pages of the documentation and their fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

ARCHITECTURE, CONTRIBUTING = ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ARCHITECTURE, CONTRIBUTING]
README = ROOT / "README.md"
"""Its one session is run by test_readme.py."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words after it, its text and its line."""

    language: str
    words: tuple[str, ...]
    text: str
    line: int

    @property
    def file(self) -> str | None:
        return next((word.removeprefix("file=") for word in self.words if word.startswith("file=")), None)

    @property
    def commands(self) -> list[tuple[str, int]]:
        """Commands of a session, each with its exit code."""
        joined = re.sub(r"\\\n", " ", self.text)
        lines = [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
        return [(re.sub(r"\s+# exit \d+$", "", one), int((re.findall(r"# exit (\d+)$", one) or ["0"])[0])) for one in lines]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(match[1], tuple(match[2].split()), match[3], text[: match.start()].count("\n") + 1)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))
