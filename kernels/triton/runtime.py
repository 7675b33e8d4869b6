"""Triton in one of its two modes: compiled on CUDA, or interpreted on the CPU. A process keeps its mode.

Triton chooses the mode during its first import, from TRITON_INTERPRET; `load` sets that variable first.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections import Counter
from types import ModuleType
from typing import Any

from attnfuzz.kernels.contract import BuildError, Device
from attnfuzz.kernels.errors import WrongProcess
from attnfuzz.kernels.support.installed_torch import sees_cuda

__all__ = ["VARIABLE", "compile_counts", "hash_own_files", "load", "mode", "unavailable"]

_NEEDED: dict[Device, tuple[str, ...]] = {"cpu": ("torch", "triton", "numpy"), "cuda": ("torch", "triton")}
VARIABLE = "TRITON_INTERPRET"
"""The environment variable that selects Triton's mode."""

_compiles: Counter[str] = Counter()
_ready: set[Device] = set()


def mode() -> Device | None:
    """The mode in which Triton was imported; None before its import."""
    jit = sys.modules.get("triton.runtime.jit")
    standard = sys.modules.get("triton.language.standard")
    if jit is None or standard is None:
        return None
    # The variable may have changed since the import: Triton's own library shows the mode.
    return "cuda" if isinstance(standard.cdiv, jit.JITFunction) else "cpu"


def load(device: Device) -> ModuleType:
    """Import `triton` in the mode that `device` needs; later calls are cheap.

    On the CPU this also repairs the interpreter (`attnfuzz.kernels.triton.interpreter.interpreter`).

    Raises:
        WrongProcess: this process has imported Triton in the other mode.
        BuildError: Triton cannot be imported.
    """
    if device in _ready:
        return sys.modules["triton"]
    current = mode()
    if current not in (None, device):
        now, remedy = ("compiled", f"{VARIABLE}=1") if current == "cuda" else ("interpreted", f"no {VARIABLE}")
        raise WrongProcess(
            f"device={device!r}: Triton was imported in its {now} mode, and a process has one mode; "
            f"use another process for {device!r}, started with {remedy}"
        )
    if device == "cpu":
        os.environ[VARIABLE] = "1"
    else:
        os.environ.pop(VARIABLE, None)
    try:
        triton = importlib.import_module("triton")
        importlib.import_module("triton.language")
    except ImportError as error:
        raise BuildError(f"triton cannot be imported: {error}") from error
    if device == "cpu":
        importlib.import_module("attnfuzz.kernels.triton.interpreter.interpreter").install()
    else:
        _count_compiles(triton)
    _ready.add(device)
    return triton


def hash_own_files() -> None:
    """Have Triton hash its own files, which are part of the key of all that it caches: a second, and none in a fork after that.

    Needs `load`. A Triton without that function does it when it compiles.
    """
    with contextlib.suppress(Exception):  # its files may be unreadable, which its compiles report
        importlib.import_module("triton.runtime.cache").triton_key()


def unavailable(device: Device) -> str | None:
    """Why Triton cannot run on `device` of this machine, or None."""
    for package in _NEEDED[device]:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install {package}"
    if device == "cuda" and not sees_cuda():
        return "no CUDA device: torch.cuda.is_available() is False"
    return None


def compile_counts() -> dict[str, int]:
    """Count compiles in this process (disk-cache hits included) per device function; always empty in the interpreter."""
    return dict(_compiles)


def _count_compiles(triton: Any) -> None:
    """Count the compiles that Triton's compiler reports, and pass each report on to an existing listener.

    The hook after a compile cannot be used: Triton 3.6 writes a kernel's constants as JSON for it, which fails for functions.
    """
    before = triton.knobs.compilation.listener

    def count(*args: Any, **kwargs: Any) -> None:
        function = getattr(kwargs["src"], "fn", None)
        if function is not None:
            _compiles[f"{function.fn.__module__}.{function.fn.__name__}"] += 1
        if before is not None:
            before(*args, **kwargs)

    triton.knobs.compilation.listener = count
