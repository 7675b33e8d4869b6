"""Marks on disk of what is compiled: the backends' own caches hold the code, and a later run need not ask them.

A mark that is wrong, since a cache was emptied, costs time only: the first trial compiles.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnfuzz.harness.core import environment
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.support import cache, process_setup

__all__ = ["Marks"]


class Marks:
    """Remembers compile keys for one device and one set of versions, kernel by kernel.

    Args:
        device: what is compiled for.
        described: device and versions, as `Executor.describe` returns them; without versions nothing is remembered.
    """

    def __init__(self, device: Device, described: Mapping[str, Any]) -> None:
        self._device = device
        self._around = {
            "device": described.get("device"),
            "versions": described.get("versions"),
            "python": sys.prefix,
            "compilers": environment.compiler_variables(),
        }
        self._sources: dict[str, str] = {}

    def has(self, kernel: str, key: str) -> bool:
        """Whether an earlier run has compiled it."""
        path = self._path(kernel, key)
        return path is not None and path.exists()

    def add(self, kernel: str, key: str) -> None:
        """Remember that it is compiled."""
        if (path := self._path(kernel, key)) is not None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()

    def _path(self, kernel: str, key: str) -> Path | None:
        if not self._around["versions"]:
            return None
        parts = [self._around, self._device, kernel, self._source(kernel), key]
        name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
        try:
            return cache.folder("compiled") / name[:2] / name
        except OSError:
            # A home that cannot be written.
            return None

    def _source(self, kernel: str) -> str:
        """Return what differs where a kernel was changed: files, sizes and times of the modules of its package, its variables."""
        if kernel not in self._sources:
            module = sys.modules.get(type(registry.get(kernel)).__module__)
            file = getattr(module, "__file__", None)
            # A kernel may call others of its package, and attnfuzz's own those of support/.
            folders = {Path(file).parent} if file else set()
            if module is not None and module.__name__.startswith("attnfuzz."):
                folders.add(Path(cache.__file__).parent)
            states = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for x in folders for each in x.glob("*.py")]
            setup = process_setup.setup_of(registry.get(kernel))
            variables = sorted(setup.environment) if setup else []
            self._sources[kernel] = hashlib.sha256(json.dumps([sorted(states), variables]).encode()).hexdigest()
        return self._sources[kernel]
