"""The error for values from outside that cannot be used."""

from __future__ import annotations

__all__ = ["BadArgument", "reject"]


class BadArgument(ValueError):
    """A value from outside that cannot be used; its text names the argument, the value, the reason and the remedy."""


def reject(argument: str, value: object, reason: str, remedy: str) -> BadArgument:
    """The error for `argument` having `value`: what, value, why, and what to do instead."""
    return BadArgument(f"{argument}={value!r}: {reason}; {remedy}")
