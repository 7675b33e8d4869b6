"""Folder of attnfuzz's generated source and locks: one per user, safe to delete."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["folder"]


def folder(name: str) -> Path:
    """Return `$XDG_CACHE_HOME/attnfuzz/<name>` (default ~/.cache), created if missing."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    path = Path(base) / "attnfuzz" / name
    path.mkdir(parents=True, exist_ok=True)
    return path
