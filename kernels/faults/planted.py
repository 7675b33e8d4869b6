"""Faults planted on purpose: an edited copy of a kernel's device code, as a separate kernel.

The original stays as it is. The copy is loaded from a real file, since both TileLang and Triton read their functions' source.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.support import cache

__all__ = ["DEMO_FAULT", "Edit", "demo_kernel", "planted_copy", "planted_source"]


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace `old`, which must occur exactly `times` times in the source, by `new`."""

    old: str
    new: str
    times: int = 1


DEMO_FAULT = Edit("if start_n < seqlen_k:", "if (start_n < seqlen_k) & (seqlen_q > 0):")
"""A sequence without queries returns before its dK and dV are stored as zeros: flash-attention's issue 2421."""


def planted_copy(module: str, edits: Sequence[Edit]) -> ModuleType:
    """Load a copy of `module` with `edits`, from a file of the module's own name in a folder named by its content.

    Raises:
        BadArgument: an edit no longer fits the source.
    """
    file, source = planted_source(module, edits)
    name = f"attnfuzz_planted_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    path = cache.folder(f"planted/{name}") / file
    if not path.exists() or path.read_text(encoding="utf-8") != source:
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(source, encoding="utf-8")
        temporary.replace(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    spec.loader.exec_module(copy)
    return copy


def planted_source(module: str, edits: Sequence[Edit]) -> tuple[str, str]:
    """Return the name of `module`'s file, and its source with `edits`, without importing it.

    Raises:
        BadArgument: an edit no longer fits the source.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    for edit in edits:
        count = source.count(edit.old)
        if count != edit.times:
            raise reject(
                "edit.old", edit.old, f"it occurs {count} times in {module}, not {edit.times}", "adapt the fault to the source"
            )
        source = source.replace(edit.old, edit.new)
    return Path(spec.origin).name, source


def demo_kernel() -> Kernel:
    """Make `demo.varlen`: triton.varlen with `DEMO_FAULT`."""
    from attnfuzz.kernels.triton.varlen import TritonVarlen

    return TritonVarlen(
        name="demo.varlen", device_code=functools.partial(planted_copy, "attnfuzz.kernels.triton.varlen_device", [DEMO_FAULT])
    )
