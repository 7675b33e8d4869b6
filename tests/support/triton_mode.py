"""Triton's one mode in pytest's own process: which tests may use the interpreter there, and what refuses the others.

Tests of the CPU mode are marked `interpreted`. Where Triton is compiled, as on a GPU node, they run in a process of their own
(`support.apart`). Tests marked `any_device` use the GPU where there is one, else the interpreter. No other test may use it here:
it would fail on a GPU node, so it fails everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from types import ModuleType
from typing import Any

import pytest

from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.triton import runtime

__all__ = ["ModeGuard", "interpreted", "loaded", "marks"]

_MARKS = ("interpreted", "any_device")


def interpreted(test: Any) -> Any:
    """Mark a test as one of the CPU mode (a whole module: `pytestmark = marks()`); it is skipped without Triton."""
    for mark in marks():
        test = mark(test)
    return test


def marks() -> list[pytest.MarkDecorator]:
    """The marks of a test of the CPU mode."""
    reason = runtime.unavailable("cpu")
    return [pytest.mark.interpreted, pytest.mark.skipif(reason is not None, reason=reason or "")]


def loaded() -> ModuleType:
    """Triton in the mode of this process, for the device functions of a test module; skips the module without Triton."""
    if reason := runtime.unavailable("cpu"):
        pytest.skip(reason, allow_module_level=True)
    return _LOAD(runtime.mode() or "cpu")


_LOAD = runtime.load


class ModeGuard:
    """A plugin: fails a test that loads the interpreter unmarked, or that leaves another TRITON_INTERPRET behind."""

    def __init__(self) -> None:
        self._item: pytest.Item | None = None
        self._refused: list[str] = []

    def pytest_configure(self) -> None:
        runtime.load = self._load

    def pytest_unconfigure(self) -> None:
        runtime.load = _LOAD

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._item = item
        self._refused.clear()
        try:
            return (yield)
        finally:
            self._item = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            # A Trial takes what is raised within it for the kernel's.
            if self._refused:
                pytest.fail(self._refused[0], pytrace=False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        self._before = os.environ.get(runtime.VARIABLE)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            now = os.environ.get(runtime.VARIABLE)
            if now != self._before:
                os.environ.pop(runtime.VARIABLE, None)
                if self._before is not None:
                    os.environ[runtime.VARIABLE] = self._before
                pytest.fail(
                    f"{runtime.VARIABLE}={now!r}: the test leaves it so, it was {self._before!r} before, and device code that "
                    "is imported later would be of another mode than Triton; set it by monkeypatch",
                    pytrace=False,
                )

    def _load(self, device: Device) -> ModuleType:
        if device == "cpu" and not (self._item and any(self._item.get_closest_marker(each) for each in _MARKS)):
            subject = self._item.nodeid if self._item else "the import of a test module"
            self._refused.append(
                f"{subject} uses Triton's interpreter in pytest's own process, which fails where Triton is compiled (on a GPU "
                "node); mark the test by support.triton_mode.interpreted, or pytest.mark.any_device if it uses the GPU there"
            )
            pytest.fail(self._refused[-1], pytrace=False)
        return _LOAD(device)
