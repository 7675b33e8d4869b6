"""Triton functions that a function reaches by the globals of its module and of the modules of its package."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["innermost", "triton_files"]

_FOREIGN = {"attnfuzz", "builtins", "numpy", "torch", "triton", *sys.stdlib_module_names}
"""Packages whose globals are not looked at."""


def innermost(function: Callable[..., Any]) -> Any:
    """Return the function beneath partials and decorators; the class of an object that can be called."""
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    return inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner)


def triton_files(function: Callable[..., Any]) -> list[str] | None:
    """Return the source files of the Triton functions that `function` reaches; None where it reaches none.

    Without a look at calls: a module counts if the function's module, or one of its package's that this one reaches, has it, or
    something of it, among its globals.
    """
    if "triton" not in sys.modules:
        return None
    files: dict[str, None] = {}
    any_there = False
    for name, values in _modules(innermost(function)):
        own = [each for each in values if type(each).__module__.partition(".")[0] == "triton"]
        any_there |= bool(own)
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and any(_module_of(each) == name for each in own):
            files[str(Path(file).absolute())] = None
    return list(files) if any_there else None


def _modules(start: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield the modules that are reached, by name, and the values of their globals."""
    first = str(getattr(start, "__module__", ""))
    package, seen, waiting = first.partition(".")[0], {first}, deque([first])
    while waiting:
        name = waiting.popleft()
        # A function of a module that was imported by its file may not be in sys.modules.
        module: Mapping[str, Any] = vars(sys.modules[name]) if name in sys.modules else getattr(start, "__globals__", {})
        values = list(module.values())
        yield name, values
        if name != first and name.partition(".")[0] != package:
            continue
        for each in values:
            other = _module_of(each)
            if other not in seen and other.partition(".")[0] not in _FOREIGN and other in sys.modules:
                seen.add(other)
                waiting.append(other)


def _module_of(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    while type(value).__module__.partition(".")[0] == "triton" and hasattr(value, "fn"):
        value = value.fn
    return value.__module__ or "" if isinstance(value, FunctionType | type) else ""
