"""Modules of a git checkout, as they were in another commit. Standard library only: it is copied into a `sitecustomize.py`.

A process in which this finder is installed runs the same interpreter, the same installed packages and the same attnfuzz as any
other; but what it would import from the checkout HEAD comes from BASE, a folder that holds the other commit.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["VARIABLE", "TreeFinder", "install"]

VARIABLE = "ATTNFUZZ_GATE_TREE"
"""The environment variable that says, as JSON, which trees: head, base, renamed, new."""
_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)


class TreeFinder:
    """A meta path finder that takes from `base` what the others find in `head`, both absolute folders.

    Args:
        head: the checkout.
        base: the other commit's files.
        renamed: files of `head` by what they were called in `base`, both relative.
        new: files of `head`, relative, that `base` has not. What is in neither list nor in `base` is not under version control
            (an environment, a build) and stays as it is.
    """

    def __init__(self, head: str, base: str, renamed: dict[str, str], new: Sequence[str]) -> None:
        self.head, self.base = os.path.realpath(head), os.path.realpath(base)
        self._renamed, self._new = renamed, frozenset(new)
        self.extensions: list[str] = []
        """Compiled modules that are not under version control, so that both sides share them."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module as `base` has it; None where it is none of the checkout's.

        Raises:
            ModuleNotFoundError: `head` has the module and `base` has not.
        """
        if _is_the_harness(name):
            return None
        found = self._found_in_head(name, path, target)
        if found is None:
            return self._left_in_base(name, path)
        if found.origin is None:
            return self._namespace(name, found)
        # A built-in or frozen module has an origin that is no path.
        inside = self._inside(found.origin) if found.has_location else None
        if inside is None:
            return None
        former = self._former(inside)
        if former is not None:
            return _spec(name, former, package=found.submodule_search_locations is not None)
        if inside in self._new:
            before = self._left_in_base(name, path)
            if before is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return before
        if found.origin.endswith(_EXTENSIONS):
            self.extensions.append(inside)
        return found

    def _found_in_head(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        at = None if path is None else [self._swapped(each, self.base, self.head) for each in path]
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                found = finder.find_spec(name, at, target)
                if found is not None:
                    return found
        return None

    def _left_in_base(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """A module that was deleted since, or has become another file."""
        places = [self._swapped(each, self.head, self.base) for each in (sys.path if path is None else path)]
        found = PathFinder.find_spec(name, [each for each in places if _under(each, self.base) is not None])
        return None if found is None or found.origin is None else found

    def _namespace(self, name: str, found: ModuleSpec) -> ModuleSpec | None:
        places = list(found.submodule_search_locations or ())
        if all(self._inside(each) is None for each in places):
            return None
        made = ModuleSpec(name, None, is_package=True)
        made.submodule_search_locations = [self._swapped(each, self.head, self.base) for each in places]
        return made

    def _former(self, inside: str) -> str | None:
        for name in (inside, self._renamed.get(inside)):
            if name is not None and os.path.isfile(os.path.join(self.base, name)):  # noqa: PTH113, PTH118
                return os.path.join(self.base, name)  # noqa: PTH118
        return None

    def _inside(self, path: str) -> str | None:
        # An environment that lies in the checkout is none of its code.
        return None if _under(path, os.path.realpath(sys.prefix)) is not None else _under(path, self.head)

    @staticmethod
    def _swapped(path: str, old: str, new: str) -> str:
        inside = _under(path or ".", old)
        return path if inside is None else os.path.normpath(os.path.join(new, inside))  # noqa: PTH118


def _under(path: str, folder: str) -> str | None:
    """`path` relative to `folder`, if it lies there."""
    real = os.path.realpath(path)
    return os.path.relpath(real, folder) if real == folder or real.startswith(folder + os.sep) else None


_SHARED = ("expressions", "support")
"""Packages of attnfuzz.kernels that hold no kernel."""


def _is_the_harness(name: str) -> bool:
    """attnfuzz itself stays as it is, and so do the contract and what else of its kernels is no kernel: both sides share them."""
    parts = name.split(".")
    return parts[0] == "attnfuzz" and (len(parts) < 4 or parts[1] != "kernels" or parts[2] in _SHARED)


def _spec(name: str, file: str, *, package: bool) -> ModuleSpec | None:
    places = [os.path.dirname(file)] if package else None  # noqa: PTH120
    return importlib.util.spec_from_file_location(name, file, submodule_search_locations=places)


def install() -> TreeFinder | None:
    """Install the finder that the environment asks for, before every other."""
    told = os.environ.get(VARIABLE)
    if not told:
        return None
    trees: dict[str, Any] = json.loads(told)
    finder = TreeFinder(trees["head"], trees["base"], trees["renamed"], trees["new"])
    sys.meta_path.insert(0, finder)
    return finder
