"""Which ptxas Triton assembles its code with, before Blackwell; Triton itself is not imported for it."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
from pathlib import Path

__all__ = ["ptxas_version"]

_VARIABLE = "TRITON_PTXAS_PATH"
_RELEASE = re.compile(r"release (\d+)\.(\d+)")


def ptxas_version() -> tuple[int, int] | None:
    """(12, 8) of the one that TRITON_PTXAS_PATH names, or else, as Triton has it, of its own; None: neither can be asked."""
    own = importlib.util.find_spec("triton")
    bundled = (
        [str(Path(each) / "backends" / "nvidia" / "bin" / "ptxas") for each in own.submodule_search_locations or ()]
        if own
        else []
    )
    named = os.environ.get(_VARIABLE)
    return next((found for path in ([named] if named else []) + bundled if (found := _asked(path))), None)


@functools.cache
def _asked(path: str) -> tuple[int, int] | None:
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = _RELEASE.search(said)
    return (int(found[1]), int(found[2])) if found else None
