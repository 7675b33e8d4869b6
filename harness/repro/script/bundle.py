"""Functions of several modules as one piece of source that stands by itself: what they use comes with them, in order.

Followed into this project's own modules; what is imported from elsewhere becomes import lines.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

__all__ = ["Bundle", "Module", "module"]

Place = tuple[str, str]
"""Module and name."""


class Module:
    """A module's source: its top-level definitions and where its other names come from."""

    def __init__(self, name: str) -> None:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        self.lines = Path(spec.origin).read_text(encoding="utf-8").splitlines()
        self.nodes: dict[str, ast.stmt] = {}
        self._ends: dict[str, int] = {}
        self.imported: dict[str, Place | str] = {}
        last: list[str] = []
        for node in ast.parse("\n".join(self.lines)).body:
            names = _defined(node)
            if isinstance(node, ast.Expr) and last:
                # The text under a constant goes with it.
                self._ends |= dict.fromkeys(last, node.end_lineno or node.lineno)
            for each in names:
                self.nodes[each], self._ends[each] = node, node.end_lineno or node.lineno
            if isinstance(node, ast.ImportFrom):
                self.imported |= {each.asname or each.name: (str(node.module), each.name) for each in node.names}
            elif isinstance(node, ast.Import):
                self.imported |= {each.asname or each.name: each.name for each in node.names}
            last = names if isinstance(node, ast.Assign | ast.AnnAssign) else []

    def text(self, name: str) -> str:
        """The source of a definition, with its decorators and comments."""
        node = self.nodes[name]
        decorators: list[ast.expr] = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(each.lineno for each in decorators)])
        return "\n".join(self.lines[first - 1 : self._ends[name]])


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return []


@cache
def module(name: str) -> Module:
    """The source of the module called `name`."""
    return Module(name)


class Bundle:
    """Collects definitions, each once, those that others need first.

    Args:
        own: packages whose code comes along; all other imports stay imports.
        instead: text in place of a definition's own.
        moved: where a name is taken from instead.
    """

    def __init__(
        self, own: Iterable[str], instead: Mapping[Place, str] | None = None, moved: Mapping[Place, Place] | None = None
    ) -> None:
        self._own, self._instead, self._moved = tuple(own), dict(instead or {}), dict(moved or {})
        self._done: dict[Place, None] = {}
        self._names: dict[str, Place] = {}
        self.texts: list[str] = []
        self._from: dict[str, set[str]] = defaultdict(set)
        self._plain: set[str] = set()

    def add(self, home: str, name: str) -> None:
        """The definition of `name` in module `home`, after all that it needs."""
        home, name = self._moved.get((home, name), (home, name))
        if (home, name) in self._done:
            return
        self._done[home, name] = None
        source = module(home)
        text = self._instead.get((home, name)) or source.text(name)
        for used in _names(text):
            if used in source.nodes:
                self.add(home, used)
            elif (origin := source.imported.get(used)) is not None:
                self._import(used, origin)
        if text in self.texts:  # one statement may define several names, and two modules the same one
            return
        if (taken := self._names.setdefault(name, (home, name))) != (home, name):
            raise ValueError(f"{name} is defined in {taken[0]} and in {home}")
        self.texts.append(text)

    def use(self, text: str, imported: Mapping[str, Place | str]) -> None:
        """Import lines for what `text`, written elsewhere, uses of `imported`."""
        for used in _names(text):
            if used in imported:
                self._import(used, imported[used])

    def _import(self, used: str, origin: Place | str) -> None:
        if isinstance(origin, str):
            self._plain.add(origin if origin == used else f"{origin} as {used}")
            return
        home, name = origin
        if not home.startswith(self._own):
            self._from[home].add(name if name == used else f"{name} as {used}")
            return
        self.add(home, name)
        if name != used and f"{used} = {name}" not in self.texts:
            self.texts.append(f"{used} = {name}")

    def imports(self) -> list[str]:
        """Import lines: the standard library's and others' modules first, then names of modules."""
        lines = [f"import {name}" for name in sorted(self._plain)]
        return lines + [f"from {home} import {', '.join(sorted(names))}" for home, names in sorted(self._from.items())]


def _names(text: str) -> list[str]:
    """Names that a piece of source reads, in order."""
    found = (node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name))
    return list(dict.fromkeys(found))
