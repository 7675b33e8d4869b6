"""The place of an interpreted launch in its device code: statement, calling functions, and names of tensors."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from attnfuzz.kernels.support.absent import Absent
from attnfuzz.kernels.support.memory import Site
from attnfuzz.kernels.triton.interpreter.views import View

try:
    import triton
    import triton.language as tl
    import triton.runtime.interpreter as shipped
except ImportError:
    triton = tl = shipped = Absent("triton")

__all__ = ["callers", "is_device_code", "site", "title"]

_MODULES = ("accesses", "interpreter", "launches", "memory", "reached", "shadow", "shortcuts", "sites", "views")
_OWN = frozenset(str(Path(__file__).with_name(f"{name}.py")) for name in _MODULES)
_TRITON = str(Path(getattr(triton, "__file__", None) or "/absent/triton.py").parent) + os.sep


def is_device_code(code: CodeType) -> bool:
    """Whether code is a function that Triton's interpreter has rewritten, and neither Triton's nor the interpreter's own."""
    if code.co_filename in _OWN or code.co_filename.startswith(_TRITON):
        return False
    rewritten = shipped.InterpretedFunction.rewritten_fn.values()
    return any(getattr(each, "__code__", None) is code for each in rewritten)


def site() -> Site:
    """The statement of device code that is being executed."""
    frame = next(_device_frames(), None)
    return Site("?", 0, "", "?") if frame is None else _sited(frame)


def callers() -> tuple[Site, ...]:
    """The calling statements, from the launched function on."""
    return tuple(_sited(frame) for frame in _device_frames())[:0:-1]


def title(view: View) -> str:
    """Format a tensor: the name of the launch's argument, shape and dtype."""
    frames = list(_device_frames())
    named = frames[-1].f_locals if frames else {}
    for name, value in named.items():
        if (part := _part(value, view)) is not None:
            return f"{name}{part} {view}"
    return f"a tensor {view}"


def _part(value: Any, view: View) -> str | None:
    """Path from an argument to `view`: "", "[1]" for part of a tuple; None: `view` is not part of it."""
    if isinstance(value, tuple | tl.tuple):
        for index, each in enumerate(value):
            if (part := _part(each, view)) is not None:
                return f"[{index}]{part}"
        return None
    kind = getattr(getattr(value, "handle", None), "dtype", None)
    return "" if getattr(kind, "view", None) is view else None


def _device_frames() -> Iterator[FrameType]:
    """Yield the frames of device code, the innermost first, up to the launch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in _OWN:
            if not name.startswith(_TRITON):
                yield frame
        elif frame.f_code.co_name == "launch":
            return
        frame = frame.f_back


def _sited(frame: FrameType) -> Site:
    name, line = frame.f_code.co_filename, frame.f_lineno
    return Site(Path(name).name, line, linecache.getline(name, line).strip(), frame.f_code.co_name)
