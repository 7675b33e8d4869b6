"""Text that can be written and compared: strict JSON, printable strings, messages without numbers."""

from __future__ import annotations

import json
import math
import re
from typing import Any

__all__ = ["dumps", "normalised", "printable"]


def dumps(value: Any) -> str:
    """Return indented JSON with sorted keys; infinities and NaN, which JSON lacks, become the strings "inf", "-inf" and "nan"."""
    return json.dumps(_finite(value), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def printable(text: str) -> str:
    """Escape lone surrogates in `text`, since those cannot be written or hashed."""
    return text.encode("utf-8", "backslashreplace").decode()


def normalised(message: str) -> str:
    """Return the first line of a message, with addresses and numbers replaced by #."""
    first = message.strip().splitlines()[0] if message.strip() else ""
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", first)[:120]
