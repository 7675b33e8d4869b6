"""Statements and branches of the Triton functions of a source file, and which of them a record has reached."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DeviceFunction", "FunctionCoverage", "Step", "compared", "device_functions"]

Step = tuple[int, int]
"""From a line of a function to the next that ran; 0: before its first line, or after its last."""
Mask = tuple[int, str]
"""Line and operation."""


@dataclass(frozen=True, slots=True)
class DeviceFunction:
    """A Triton function: first and last line, its statements as (first line, last line) of each head, and its ifs."""

    name: str
    first: int
    last: int
    statements: tuple[tuple[int, int], ...]
    ifs: tuple[tuple[int, int, int, int], ...]
    """First and last line of a condition, and of what runs where it holds."""


@dataclass(frozen=True, slots=True)
class FunctionCoverage:
    """What ran of one Triton function."""

    name: str
    line: int
    statements: int
    called: bool
    never: tuple[int, ...]
    """Lines of statements that never ran."""
    one_way: tuple[tuple[int, bool], ...]
    """Lines of ifs, each with the only value that its condition had."""
    one_valued: tuple[tuple[int, str, bool], ...]
    """Lines and operations of masks of which all elements had this value."""


def device_functions(path: str) -> tuple[DeviceFunction, ...]:
    """Return the Triton functions of a source file; none where it cannot be read as Python."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(_function(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _is_jitted(node))


def compared(
    functions: Sequence[DeviceFunction], steps: Iterable[Step], masks: Mapping[Mask, set[bool]]
) -> Iterator[FunctionCoverage]:
    """Yield what ran of each function of a file."""
    reached = set(steps)
    lines = {line for step in reached for line in step}
    for each in functions:
        never = tuple(first for first, last in each.statements if not lines & set(range(first, last + 1)))
        called = len(never) < len(each.statements)
        yield FunctionCoverage(
            name=each.name,
            line=each.first,
            statements=len(each.statements),
            called=called,
            never=never if called else (),
            one_way=tuple(_one_way(each, reached)) if called else (),
            one_valued=tuple(
                (line, operation, min(values))
                for (line, operation), values in sorted(masks.items())
                if each.first <= line <= each.last and len(values) == 1
            ),
        )


def _one_way(function: DeviceFunction, steps: set[Step]) -> Iterator[tuple[int, bool]]:
    """Yield the ifs whose condition had one value alone."""
    for first, last, then, end in function.ifs:
        # A condition of several lines steps from one to the next of them.
        after = {line for before, line in steps if first <= before <= last and not first <= line <= last}
        outcomes = {then <= line <= end for line in after}
        if len(outcomes) == 1:
            yield first, outcomes.pop()


def _function(node: ast.FunctionDef) -> DeviceFunction:
    statements = [each for each in ast.walk(node) if isinstance(each, ast.stmt) and each is not node and _runs(each)]
    # Of a body on the line of its condition no step shows which way it went.
    ifs = [each for each in statements if isinstance(each, ast.If) and each.body[0].lineno > _head(each)[1]]
    return DeviceFunction(
        name=node.name,
        first=node.lineno,
        last=node.end_lineno or node.lineno,
        statements=tuple(sorted({_head(each) for each in statements})),
        ifs=tuple((*_head(each), each.body[0].lineno, each.body[-1].end_lineno or each.body[-1].lineno) for each in ifs),
    )


def _is_jitted(node: ast.FunctionDef) -> bool:
    """Whether a function is decorated with `triton.jit`, alone or called."""
    named = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return any("jit" in (getattr(each, "attr", ""), getattr(each, "id", "")) for each in named)


def _runs(statement: ast.stmt) -> bool:
    """Whether a statement has code of its own."""
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.AnnAssign):
        return statement.value is not None
    return not isinstance(statement, (ast.Pass, ast.Global, ast.Nonlocal))


def _head(statement: ast.stmt) -> tuple[int, int]:
    """Return the first and the last line of a statement, without the statements inside it."""
    last = statement.end_lineno or statement.lineno
    body: list[ast.stmt] = getattr(statement, "body", [])
    return statement.lineno, max(statement.lineno, body[0].lineno - 1) if body else last
