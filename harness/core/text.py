"""Strict JSON text, for files and for `--json`."""

from __future__ import annotations

import json
import math
from typing import Any

from attnfuzz.harness.judge.failure import printable

__all__ = ["dumps"]


def dumps(value: Any) -> str:
    """Indented JSON with sorted keys; infinities and NaN, which JSON has not, become the strings "inf", "-inf" and "nan"."""
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
