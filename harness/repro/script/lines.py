"""Lines of a short script: their width, literals, and calls over one or more lines."""

from __future__ import annotations

from collections.abc import Sequence

from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import OutputName

__all__ = ["GRADIENTS", "WIDTH", "literal", "where", "wrapped"]

WIDTH = 130
GRADIENTS: tuple[OutputName, ...] = ("dq", "dk", "dv")


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
