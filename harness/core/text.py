"""Text that can be written, shown and compared: strict JSON, foreign text spelled out, counts, messages without numbers."""

from __future__ import annotations

import json
import math
import re
from typing import Any

__all__ = ["counted", "dumps", "encodable", "json_line", "normalised", "one_line", "printable"]

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls of ASCII and C1, without tab and newline
    # Invisible, or they turn the text around them.
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    "\ud800-\udfff"  # lone surrogates
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""What a terminal obeys or a reader cannot see: controls, surrogates, separators, and what Unicode says to leave out of sight."""


def printable(text: str) -> str:
    r"""Spell out what a terminal obeys or a reader cannot see, as Python does (`\x1b`, `\u202e`); newlines and tabs stay."""
    return _UNSAFE.sub(_spelled, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    r"""Return `printable` of text that stands in one line: newlines and tabs are spelled too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _spelled(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def encodable(text: str) -> str:
    """Escape lone surrogates in `text`, since those cannot be written or hashed; all else stays as it is."""
    return text.encode("utf-8", "backslashreplace").decode()


def dumps(value: Any) -> str:
    """Return indented JSON with sorted keys, safe to print.

    Infinities and NaN, which JSON lacks, become the strings "inf", "-inf" and "nan".
    """
    return json_line(json.dumps(_finite(value), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False))


def json_line(text: str) -> str:
    r"""Return a JSON text of the same data that is safe to print: characters of `printable` as \uXXXX, and no `##[`."""
    return _UNSAFE.sub(_escaped, text).replace("##[", "#\\u0023[")


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1] if match[0] != "\x7f" else "\\u007f"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {encodable(key) if isinstance(key, str) else key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def counted(number: int, one: str, many: str = "") -> str:
    """Return a count with its noun: "1 case", "2 cases"; `many` where the plural has more than an s."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def normalised(message: str) -> str:
    """Return the first line of a message, with addresses and numbers replaced by #."""
    first = message.strip().splitlines()[0] if message.strip() else ""
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", first)[:120]
