"""A stand-in for a package that is not installed: modules that need it still import, whatever uses it says what is missing."""

from __future__ import annotations

from typing import Any

__all__ = ["Absent"]


class Absent:
    """Stands for `package` and everything in it, as far as a module's own top level uses it.

    Attributes are stand-ins too; a decorator gives back what it decorates; as a base class it is `object`.

    Raises:
        ImportError: it is called for anything else.
    """

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(self._package)

    def __getitem__(self, item: Any) -> Absent:
        """As a generic type, itself."""
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """As a base class, `object`."""
        return (object,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a decorator, give back the class."""
        if len(args) == 1 and not kwargs and isinstance(args[0], type):
            return args[0]
        raise ImportError(f"{self._package} is not installed: pip install {self._package}")
