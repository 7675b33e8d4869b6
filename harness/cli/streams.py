"""Standard streams: what is written to them by other ways than the console, and how they outlive their readers.

They also know whether anything was written: a command that printed nothing has no result.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from attnfuzz.harness.core.github import shown

__all__ = ["command_github", "echo", "echo_before", "outlive_readers", "watched_stdout"]


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text to stdout, or stderr with `err`; what a terminal or GitHub's runner would obey in it is spelled out."""
    _write(shown(text), err=err, nl=nl)


def echo_before(text: str) -> None:
    """Print a line to stdout that is not a result: a command that prints no more than this has none."""
    echo(text)
    if isinstance(sys.stdout, _Outliving):
        sys.stdout.written = False


def command_github(line: str, *, err: bool = False) -> None:
    """Print a workflow command, the only output that GitHub's runner is to obey; `line` escapes what is foreign in it."""
    _write(line, err=err)


def _write(text: str, *, err: bool, nl: bool = True) -> None:
    # The stream is named: click by itself goes around one that encodes as ASCII, and so around `_Outliving`.
    click.echo(text, sys.stderr if err else sys.stdout, nl=nl)


_ESCAPE = "attnfuzz.escape"
"""What the encoding of a stream lacks is written as in JSON, which stays JSON by that."""


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error(_ESCAPE, _escaped)


class _Outliving:
    """A text stream that drops what is written after its pipe lost its reader (`| head -1`), and raises nothing.

    Args:
        stream: where text goes.
        droppable: also drop what cannot be written for another reason, such as a full disk.
    """

    def __init__(self, stream: Any, droppable: bool = False) -> None:
        self._stream = stream
        self._dropped = OSError if droppable else BrokenPipeError
        self.written = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Do as a stream does."""
        self.written = self.written or bool(text)
        try:
            return int(self._stream.write(text))
        except self._dropped:
            self._away()
            return len(text)

    def flush(self) -> None:
        """Do as a stream does."""
        try:
            self._stream.flush()
        except self._dropped:
            self._away()

    def _away(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # The descriptor, not the object: the buffer must go somewhere, or Python's last flush fails.
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def outlive_readers() -> None:
    """Make this process's stdout and stderr outlive their readers; open a closed one to /dev/null.

    Characters that their encoding lacks are escaped. A full stderr changes no exit code.
    """
    for name, own in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - as long as the process lives
        elif own is not None and stream is own:
            if own.errors in ("strict", "surrogateescape"):  # else the user has chosen
                own.reconfigure(errors=_ESCAPE)
            setattr(sys, name, _Outliving(stream, droppable=name == "stderr"))


@contextmanager
def watched_stdout() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether the block has written anything to stdout."""
    before = sys.stdout
    watched = before if isinstance(before, _Outliving) else _Outliving(before)
    watched.written, sys.stdout = False, watched
    try:
        yield lambda: watched.written
    finally:
        if sys.stdout is watched:
            sys.stdout = before
