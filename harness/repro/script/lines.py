"""Lines of a script: comments, width, literals, and calls over one or more lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnfuzz.harness.core.text import one_line
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import OutputName

__all__ = ["GRADIENTS", "WIDTH", "head", "literal", "where", "wrapped"]

WIDTH = 130
GRADIENTS: tuple[OutputName, ...] = ("dq", "dk", "dv")


def head(first: str, second: str, foreign: Iterable[str]) -> str:
    """Return the comments at the top of a script; of `foreign`, a case file may have chosen every character.

    `first` and `second` are ours: Python looks for the encoding of a file in its first two lines, and obeys a comment there.
    """
    lines = [first, second, *(line for text in foreign for line in text.splitlines())]
    return "\n".join(f"# {_visible(line)}".rstrip() for line in lines)


def _visible(line: str) -> str:
    """Spell out what an editor or a terminal would not show, or would obey: a script is read before it is run."""
    spelled = one_line(line)
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in spelled)


def where(device: Device) -> str:
    """Return the keyword that puts a new tensor on `device`, with a comma before it."""
    return ', device="cuda"' if device == "cuda" else ""


def literal(value: object) -> str:
    """Return the repr of a value, in double quotes where that changes nothing else."""
    plain = isinstance(value, str) and value.isascii() and value.isprintable() and not {*value} & {'"', "'", "\\"}
    return f'"{value}"' if plain else repr(value)


def wrapped(begin: str, arguments: Sequence[str], end: str) -> list[str]:
    """Return a call on one line, or with its arguments on as few lines as they fill."""
    if len(line := f"{begin}{', '.join(arguments)}{end}") <= WIDTH:
        return [line]
    lines = [f"    {arguments[0]},"]
    for each in arguments[1:]:
        if len(lines[-1]) + len(each) + 2 <= WIDTH:
            lines[-1] += f" {each},"
        else:
            lines.append(f"    {each},")
    # One line of arguments has no comma at its end.
    lines[-1] = lines[-1].removesuffix(",") if len(lines) == 1 else lines[-1]
    return [begin, *lines, end]
