"""Trees of score_mod and mask_mod that are simpler than another: with fewer nodes, or with plainer numbers."""

from __future__ import annotations

from collections.abc import Iterator

from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.expressions.tree import Expression, S, node
from attnfuzz.strategies.modifiers import HIDING

__all__ = ["simpler_trees"]

_PLAIN = (0.0, 1.0)


def simpler_trees(tree: Expression) -> Iterator[Expression]:
    """Yield trees with fewer nodes, the smallest first, then those with one number that is plainer."""
    yield from sorted(_smaller(tree), key=_nodes)
    yield from _with_plainer_numbers(tree)


def _smaller(tree: Expression) -> Iterator[Expression]:
    """Yield trees with fewer nodes: an argument of the same kind, or the score, in place of a node."""
    for at, arg in enumerate(tree.args):
        if arg.kind == tree.kind:
            yield arg
        for each in _smaller(arg):
            yield node(tree.op, *tree.args[:at], each, *tree.args[at + 1 :], value=tree.value)
    if tree.args and tree.kind == "float" and tree.op != "load":
        yield S


def _nodes(tree: Expression) -> int:
    return 1 + sum(map(_nodes, tree.args))


def _with_plainer_numbers(tree: Expression) -> Iterator[Expression]:
    for value in _plainer(tree.value) if tree.op in ("int", "const") else ():
        yield node(tree.op, value=value)
    for at, arg in enumerate(tree.args):
        for each in _with_plainer_numbers(arg):
            try:
                yield node(tree.op, *tree.args[:at], each, *tree.args[at + 1 :], value=tree.value)
            except BadArgument:  # nothing is divided by 0
                continue


def _plainer(value: object) -> tuple[float | int, ...]:
    """Return plainer numbers of the same type: whole ones nearer to 0; of those that hide keys, those that are nearer to it."""
    if isinstance(value, int):
        towards = 1 if value > 0 else -1
        tries = dict.fromkeys((0, towards, towards * (abs(value) // 2), value - towards))
        return tuple(each for each in tries if abs(each) < abs(value))
    if value in HIDING:
        return HIDING[: HIDING.index(value)]
    return () if value in _PLAIN else _PLAIN
