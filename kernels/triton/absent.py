"""Stand-ins for the parts of Triton that a device module uses during its import, for a machine without Triton.

Kernels decorated by this `jit` can be read, listed and hashed, but not launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["tl", "triton"]


class _Unlaunchable:
    """A device function whose compiler is missing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: object) -> NoReturn:
        raise ModuleNotFoundError(f"{self.__name__} cannot be launched: triton is not installed; pip install triton")


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit` in both its forms, `@jit` and `@jit(...)`."""
    if function is None:
        return lambda wrapped: _jit(wrapped, **options)
    return _Unlaunchable(function)


class _Constexpr:
    """`tl.constexpr` as an annotation and around a constant."""

    def __init__(self, value: Any) -> None:
        self.value = value


class triton:  # noqa: N801 - stands for the module
    """Stand-in for the module `triton`."""

    jit = staticmethod(_jit)


class tl:  # noqa: N801 - stands for the module
    """Stand-in for the module `triton.language`."""

    constexpr = _Constexpr
