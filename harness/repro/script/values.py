"""The part of trial/values.py that makes one pattern: its `Maker` with the branches and methods of all others left out."""

from __future__ import annotations

import ast

from attnfuzz.harness.repro.script.bundle import module
from attnfuzz.strategies.case import Pattern

__all__ = ["maker_of"]

_ROOTS = ("q", "k", "v", "d_o")


def maker_of(pattern: Pattern) -> str:
    """The source of `Maker` for `pattern` alone."""
    text = module("attnfuzz.harness.trial.values").text("Maker")
    [made] = ast.parse(text).body
    assert isinstance(made, ast.ClassDef)
    taken = _Taken(pattern)
    methods = {each.name: taken.visit(each) for each in made.body if isinstance(each, ast.FunctionDef)}
    first = methods.pop("__init__")
    kept = _reached(methods)
    used = {each for method in kept for each in _own_names(methods[method])}
    first.body = [each for each in first.body if not _assigned(each) or _assigned(each) & used | (_assigned(each) & {"problem"})]
    body = [each for each in made.body if not isinstance(each, ast.FunctionDef)]
    made.body = [*body, first, *(methods[name] for name in methods if name in kept)]
    return ast.unparse(ast.fix_missing_locations(made))


class _Taken(ast.NodeTransformer):
    """`match self.pattern` becomes the branch of the pattern."""

    def __init__(self, pattern: Pattern) -> None:
        self._pattern = pattern

    def visit_Match(self, node: ast.Match) -> list[ast.stmt]:
        for case in node.cases:
            values = {each.value for each in ast.walk(case.pattern) if isinstance(each, ast.Constant)}
            if not values or self._pattern in values:
                return case.body
        raise AssertionError(self._pattern)


def _reached(methods: dict[str, ast.FunctionDef]) -> set[str]:
    kept, left = set(), list(_ROOTS)
    while left:
        name = left.pop()
        if name in methods and name not in kept:
            kept.add(name)
            left.extend(_own_names(methods[name]))
    return kept


def _own_names(node: ast.AST) -> set[str]:
    """The x of every `self.x`."""
    found = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return {each.attr for each in found if isinstance(each.value, ast.Name) and each.value.id == "self"}


def _assigned(node: ast.stmt) -> set[str]:
    return {name for target in node.targets for name in _own_names(target)} if isinstance(node, ast.Assign) else set()
