"""Stand-in for a package that is not installed: modules that need it still import, and any use names what is missing."""

from __future__ import annotations

from typing import Any

__all__ = ["Absent"]


class Absent:
    """Stand-in for `package` and everything in it, as far as a module's top level uses it.

    Attributes are stand-ins too; as a decorator it returns the class; as a base class it is `object`.

    Raises:
        ImportError: any other call.
    """

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(self._package)

    def __getitem__(self, item: Any) -> Absent:
        """As a generic type, return itself."""
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """As a base class, return `object`."""
        return (object,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a decorator, return the class."""
        if len(args) == 1 and not kwargs and isinstance(args[0], type):
            return args[0]
        raise ImportError(f"{self._package} is not installed: pip install {self._package}")
