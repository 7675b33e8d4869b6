"""Record of the device code that interpreted launches have run: steps from line to line, and the values of masks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from attnfuzz.kernels.support.absent import Absent
from attnfuzz.kernels.triton.interpreter import sites

try:
    import triton.language as tl
    import triton.runtime.interpreter as shipped
except ImportError:
    tl = shipped = Absent("triton")

__all__ = ["Reached", "recording"]

_MASKS = {"load": ("mask", 1), "store": ("mask", 2), "atomic_add": ("mask", 2), "where": ("condition", 0)}
"""Operations of the language with a mask: its name, and its place among the arguments."""
_current: Reached | None = None
_installed = False


class Reached:
    """Device code that ran: by file, steps from one line of a function to the next, and what each mask was."""

    def __init__(self) -> None:
        self.steps: dict[str, set[tuple[int, int]]] = {}
        """Line 0: before the first of a function, or after the last."""
        self.masks: dict[tuple[str, int, str], set[bool]] = {}
        """By file, line and operation: whether elements of the mask were true, and whether some were false."""
        self._known: dict[int, tuple[CodeType, bool]] = {}
        """Whether code is of a device function, by its identity: to hash code takes longer than to run it."""

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ARG002 - as sys.settrace takes it
        """Follow a call if it is of device code."""
        if not self._is_device_code(frame.f_code):
            return None
        steps, last = self.steps.setdefault(frame.f_code.co_filename, set()), 0

        def follow(frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ARG001 - as sys.settrace takes it
            nonlocal last
            if event == "line":
                steps.add((last, frame.f_lineno))
                last = frame.f_lineno
            elif event == "return":
                steps.add((last, 0))
            return follow

        return follow

    def note_mask(self, operation: str, mask: Any, frame: FrameType) -> None:
        """Note whether a mask of device code has elements that are true, and some that are false."""
        handle = getattr(mask, "handle", None)
        if handle is None or not self._is_device_code(frame.f_code):
            return
        values = self.masks.setdefault((frame.f_code.co_filename, frame.f_lineno, operation), set())
        if len(values) < 2:
            values |= {bool(handle.data.any()), bool(handle.data.all())}

    def _is_device_code(self, code: CodeType) -> bool:
        known = self._known.get(id(code))
        if known is None:
            known = self._known[id(code)] = code, sites.is_device_code(code)
        return known[1]


@contextmanager
def recording() -> Iterator[Reached]:
    """Record all interpreted launches of this process until the end of the context."""
    global _current
    _install()
    before, _current = _current, Reached()
    try:
        yield _current
    finally:
        _current = before


def _install() -> None:
    """Make launches and masks of this process known to a record; calls after the first do nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    shipped.GridExecutor.__call__ = _launched(shipped.GridExecutor.__call__)
    for name, (argument, place) in _MASKS.items():
        noted = _noted(getattr(tl, name), name, argument, place)
        setattr(tl, name, noted)
        setattr(tl.core, name, noted)


def _launched(launch_before: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(launch_before)
    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        if _current is None:
            launch_before(self, *args, **kwargs)
            return
        before = sys.gettrace()
        sys.settrace(_current.trace)
        try:
            launch_before(self, *args, **kwargs)
        finally:
            sys.settrace(before)

    return launch


def _noted(operation_before: Callable[..., Any], name: str, argument: str, place: int) -> Callable[..., Any]:
    @functools.wraps(operation_before)
    def operation(*args: Any, **kwargs: Any) -> Any:
        if _current is not None:
            mask = args[place] if len(args) > place else kwargs.get(argument)
            _current.note_mask(name, mask, sys._getframe(1))
        return operation_before(*args, **kwargs)

    return operation
