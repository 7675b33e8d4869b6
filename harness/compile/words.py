"""A compiler's error, cut to what matters: the lines that say what is wrong and where, not the source that it quotes."""

from __future__ import annotations

import re

from attnfuzz.harness.judge.failure import printable

__all__ = ["cut"]

_LINES, _WIDTH = 12, 200
_WRONG = re.compile(
    r"\berror\b\s*[:#]|\berror\s*:|ptxas\S* (error|fatal)|\bfatal\b.*:|\bnvcc ended\b|out of resource", re.IGNORECASE
)
_NOISE = re.compile(
    r"^\s*$|^\s*(File|Traceback|args=|source=)|\[TileLang:.*CRITICAL\]|^=+$|please share the reproducer|^Repro command|"
    r"detected during|instantiation of|^\d+ errors? detected in|^During handling|^Stack trace|^\s*\d+: "
)
_FOLDER = re.compile(r"(?<![\w.])/(?:[\w.+@-]+/)+(?=[\w.+-]+)")
_SOURCE = re.compile(r"^(source=|\s*// |.*#include|func\.func|module \{|// -----)")


def cut(text: str) -> str:
    """At most a dozen lines of `text`: the first, which the harness or the exception wrote, then those that name an error.

    Where no line names one, the first lines. Folders are left out of file names: they are this machine's own.
    """
    lines = [line.rstrip() for line in printable(text).splitlines()]
    quoted = next((i for i, line in enumerate(lines) if _SOURCE.match(line)), len(lines))
    said = [line for line in lines[:quoted] if not _NOISE.search(line)]
    rest = [line for line in lines[quoted:] if _WRONG.search(line)]
    if any(_WRONG.search(line) for line in said[1:]) and len(said) > _LINES:
        said = said[:1] + [line for line in said[1:] if _WRONG.search(line)]
    kept = list(dict.fromkeys((*said, *rest)))[:_LINES]
    return "\n".join(_FOLDER.sub("", line)[:_WIDTH] for line in kept) or "it does not say why"
