"""Import modules of a git checkout from another commit. Standard library only: it is copied into a `sitecustomize.py`.

A process with this finder runs the same interpreter, installed packages and attnfuzz as others; but modules of the checkout
HEAD come from BASE, a folder with the files of the other commit.
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
"""Environment variable with the trees as JSON: head, base, renamed, new."""
_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)


class TreeFinder:
    """A meta path finder that takes from `base` what other finders find in `head`, both absolute folders.

    Args:
        head: the checkout.
        base: the other commit's files.
        renamed: file of `head` -> its name in `base`, both relative.
        new: files of `head`, relative, that `base` does not have. A file in neither list nor in `base` is not under version
            control (an environment, a build) and is used as it is.
    """

    def __init__(self, head: str, base: str, renamed: dict[str, str], new: Sequence[str]) -> None:
        self.head, self.base = os.path.realpath(head), os.path.realpath(base)
        self._renamed, self._new = renamed, frozenset(new)
        self.extensions: list[str] = []
        """Compiled modules that are not under version control: both sides share them."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the module in `base`; None if it is not part of the checkout.

        Raises:
            ModuleNotFoundError: `head` has the module and `base` does not.
        """
        if _is_the_harness(name):
            return None
        spec = self._spec_in_head(name, path, target)
        if spec is None:
            return self._spec_in_base(name, path)
        if spec.origin is None:
            return self._namespace(name, spec)
        # The origin of a built-in or frozen module is not a path.
        inside = self._inside(spec.origin) if spec.has_location else None
        if inside is None:
            return None
        former = self._former(inside)
        if former is not None:
            return _spec(name, former, package=spec.submodule_search_locations is not None)
        if inside in self._new:
            former_spec = self._spec_in_base(name, path)
            if former_spec is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return former_spec
        if spec.origin.endswith(_EXTENSIONS):
            self.extensions.append(inside)
        return spec

    def _spec_in_head(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        at = None if path is None else [self._swapped(each, self.base, self.head) for each in path]
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, at, target)
                if spec is not None:
                    return spec
        return None

    def _spec_in_base(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """Find a module that was deleted since, or has become another file."""
        places = [self._swapped(each, self.head, self.base) for each in (sys.path if path is None else path)]
        spec = PathFinder.find_spec(name, [each for each in places if _under(each, self.base) is not None])
        return None if spec is None or spec.origin is None else spec

    def _namespace(self, name: str, spec: ModuleSpec) -> ModuleSpec | None:
        places = list(spec.submodule_search_locations or ())
        if all(self._inside(each) is None for each in places):
            return None
        namespace = ModuleSpec(name, None, is_package=True)
        namespace.submodule_search_locations = [self._swapped(each, self.head, self.base) for each in places]
        return namespace

    def _former(self, inside: str) -> str | None:
        for name in (inside, self._renamed.get(inside)):
            if name is not None and os.path.isfile(os.path.join(self.base, name)):  # noqa: PTH113, PTH118
                return os.path.join(self.base, name)  # noqa: PTH118
        return None

    def _inside(self, path: str) -> str | None:
        # An environment inside the checkout is not part of its code.
        return None if _under(path, os.path.realpath(sys.prefix)) is not None else _under(path, self.head)

    @staticmethod
    def _swapped(path: str, old: str, new: str) -> str:
        inside = _under(path or ".", old)
        return path if inside is None else os.path.normpath(os.path.join(new, inside))  # noqa: PTH118


def _under(path: str, folder: str) -> str | None:
    """Return `path` relative to `folder`, or None if it does not lie there."""
    real = os.path.realpath(path)
    return os.path.relpath(real, folder) if real == folder or real.startswith(folder + os.sep) else None


_SHARED = ("expressions", "support")
"""Packages of attnfuzz.kernels without kernels."""


def _is_the_harness(name: str) -> bool:
    """Whether both sides share the module: all of attnfuzz except its kernels."""
    parts = name.split(".")
    return parts[0] == "attnfuzz" and (len(parts) < 4 or parts[1] != "kernels" or parts[2] in _SHARED)


def _spec(name: str, file: str, *, package: bool) -> ModuleSpec | None:
    places = [os.path.dirname(file)] if package else None  # noqa: PTH120
    return importlib.util.spec_from_file_location(name, file, submodule_search_locations=places)


def install() -> TreeFinder | None:
    """Install the finder that the environment describes, before all others."""
    content = os.environ.get(VARIABLE)
    if not content:
        return None
    trees: dict[str, Any] = json.loads(content)
    finder = TreeFinder(trees["head"], trees["base"], trees["renamed"], trees["new"])
    sys.meta_path.insert(0, finder)
    return finder
