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
    """Return a call on one line, on three, or with one argument a line."""
    if len(line := f"{begin}{', '.join(arguments)}{end}") <= WIDTH:
        return [line]
    if len(line := f"    {', '.join(arguments)}") <= WIDTH:
        return [begin, line, end]
    return [begin, *(f"    {each}," for each in arguments), end]
