"""Bytecode of imported modules, where Python may not write any: each process of a campaign would compile torch once more."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

__all__ = ["bytecode_variables", "in_caches"]


def bytecode_variables() -> dict[str, str]:
    """Return environment variables for child processes that keep bytecode in a folder for caches; none where it is there already.

    Images of containers often set PYTHONDONTWRITEBYTECODE, and hold packages without bytecode: to import torch then takes five
    seconds more, in every process. Nothing is written beside the packages. As everywhere in Python, a module that changes without
    another size or time counts as unchanged.
    """
    if not sys.dont_write_bytecode or sys.pycache_prefix is not None:
        return {}
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or Path(spec.origin).with_name("__pycache__").exists():
        return {}
    return in_caches()


def in_caches() -> dict[str, str]:
    """Return environment variables by which child processes keep bytecode in attnfuzz's folder for caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or "/nonexistent", ".cache")
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(caches, "attnfuzz", "bytecode"))}
