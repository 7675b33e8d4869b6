"""Error for values from outside that cannot be used."""

from __future__ import annotations

__all__ = ["BadArgument", "NotLowered", "reject"]


class BadArgument(ValueError):
    """Error for a value from outside that cannot be used; the text names argument, value, reason and remedy."""


class NotLowered(Exception):
    """Error for a kernel whose machine code cannot be had without a GPU; the text gives the reason."""


def reject(argument: str, value: object, reason: str, remedy: str) -> BadArgument:
    """Make the error for `argument` having `value`, with the reason and the remedy."""
    return BadArgument(f"{argument}={value!r}: {reason}; {remedy}")
