"""The console that all output of the commands goes through: foreign text is spelled out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from attnfuzz.harness.core.github import on_github, without_commands
from attnfuzz.harness.core.text import printable

__all__ = ["SafeConsole"]


_COLUMNS = 80
"""Where the width is not known."""


class SafeConsole(Console):
    """A rich Console that obeys no text: `printable` spells what it holds, and no line is a workflow command of GitHub's.

    rich's own colours and cursor movements are added later, so they remain.
    """

    def __init__(self, **options: Any) -> None:
        # ":boom:" in an exception's message is text, not a picture.
        super().__init__(emoji=False, **options)
        if self.width < 1:
            # COLUMNS=0, as some terminals and editors have it: nothing would be printed.
            self.width = _COLUMNS

    def render_str(self, text: str, **options: Any) -> Text:
        """Spell a string before its width is measured."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Spell whatever came in by another way than a string."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    @property
    def file(self) -> IO[str]:
        """Return the stream that is written to."""
        stream = cast("IO[str]", Console.file.fget(self))  # type: ignore[attr-defined]
        return cast("IO[str]", _WithoutCommands(stream)) if on_github() else stream

    @file.setter
    def file(self, stream: IO[str]) -> None:
        self._file = stream


class _WithoutCommands:
    """A text stream on which no line is a workflow command. Lines are those that rich has laid out: it may have broken them."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Do as a stream does."""
        return self._stream.write(without_commands(text))
