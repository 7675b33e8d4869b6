"""Errors for values from outside that cannot be used, and the names that such values may give."""

from __future__ import annotations

import keyword
import unicodedata

__all__ = ["BadArgument", "NotLowered", "WrongProcess", "check_name", "reject", "shown"]

_MOST_SHOWN = 600
"""Letters of a value in a message: a path fits, a file's content does not."""
_MOST_NAME = 100


class BadArgument(ValueError):
    """Error for a value from outside that cannot be used; the text names argument, value, reason and remedy."""


class WrongProcess(BadArgument):
    """Error for a request that this process cannot fulfil whatever the kernel is, such as Triton's other mode."""


class NotLowered(Exception):
    """Error for a kernel whose machine code cannot be had without a GPU; the text gives the reason."""


def reject(argument: str, value: object, reason: str, remedy: str) -> BadArgument:
    """Make the error for `argument` having `value`, with the reason and the remedy."""
    return BadArgument(f"{argument}={shown(value)}: {reason}; {remedy}")


def shown(value: object) -> str:
    """Return the repr of a value as messages show it: a long one without its middle, for any value."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; a value nested without end
        text = f"a {type(value).__name__} that cannot be printed"
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[: _MOST_SHOWN // 2]} ... {text[-_MOST_SHOWN // 4 :]} ({len(text)} letters)"


def check_name(argument: str, name: object, what: str) -> None:
    """Check that `name` can be written into Python code as the name of an argument or a variable.

    Args:
        argument: what the name was given as.
        name: what was given.
        what: what it names, for the error.

    Raises:
        BadArgument: it is not a text, an identifier, or in Unicode's normal form (others denote the same variable); or it is a
            keyword or longer than 100 letters.
    """
    normal = isinstance(name, str) and name.isidentifier() and unicodedata.normalize("NFKC", name) == name
    if not normal or keyword.iskeyword(str(name)) or len(str(name)) > _MOST_NAME:
        remedy = f"give a Python identifier that is not a keyword, of at most {_MOST_NAME} letters"
        raise reject(argument, name, what, remedy)
