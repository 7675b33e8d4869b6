"""Simplification of modifiers' trees before they are printed: constants are computed, neutral operations removed.

Afterwards every constant is a literal, so that a printed function calls nothing on constants.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.expressions.tree import Expression, const, node, number, truth, whole

__all__ = ["folded"]

_SMALLEST, _LARGEST = 2.0**-100, 2.0**100
_COMPUTED: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "abs": abs,
    "min": min,
    "max": max,
    "tanh": math.tanh,
    "exp": math.exp,
    "sigmoid": lambda x: 0.5 * (1.0 + math.tanh(0.5 * x)),
    "le": operator.le,
    "lt": operator.lt,
    "ge": operator.ge,
    "gt": operator.gt,
    "eq": operator.eq,
    "ne": operator.ne,
    "mod": operator.mod,
    "div": operator.floordiv,
    "and": lambda x, y: x and y,
    "or": lambda x, y: x or y,
    "not": operator.not_,
    "float": float,
    "where": lambda condition, yes, no: yes if condition else no,
}


def folded(tree: Expression) -> Expression:
    """Simplify a tree: the same value, rounded less often.

    Raises:
        BadArgument: a constant part is not finite in float32.
    """
    simpler: dict[Expression, Expression] = {}
    for each in tree.walk():
        simpler[each] = _folded(each, tuple(simpler[arg] for arg in each.args))
    return simpler[tree]


def _folded(x: Expression, a: tuple[Expression, ...]) -> Expression:
    values = [number(each) for each in a]
    if a and x.op != "load" and None not in values:
        return _constant(x, values)
    if (simple := _simpler(x.op, a, values)) is not None:
        return simple
    if x.op == "mul" and x.kind == "float" and (merged := _merged(a, values)) is not None:
        return merged
    return x if a == x.args else node(x.op, *a, value=x.value)


def _constant(x: Expression, values: list[Any]) -> Expression:
    try:
        value = _COMPUTED[x.op](*values)
    except OverflowError:
        value = math.inf
    if x.kind == "float" and not abs(value) <= 3.4e38:
        raise reject("modifier", str(x), "a constant that float32 cannot hold", "leave it out")
    return {"float": const, "int": whole, "bool": truth}[x.kind](value)


def _simpler(op: str, a: tuple[Expression, ...], values: list[Any]) -> Expression | None:
    """The result of an operation that one constant argument makes trivial, or None."""
    if op == "where":
        return None if values[0] is None else a[1] if values[0] else a[2]
    if op in ("and", "or"):
        for value, other, own in ((values[0], a[1], a[0]), (values[1], a[0], a[1])):
            if value is not None:
                return own if value == (op == "or") else other
    neutral = {"add": 0, "sub": 0, "mul": 1, "div": 1}.get(op)
    if neutral is None:
        return None
    if values[1] == neutral:
        return a[0]
    return a[1] if values[0] == neutral and op in ("add", "mul") else None


def _merged(a: tuple[Expression, ...], values: list[Any]) -> Expression | None:
    """(x * c) * d as x * (c * d), unless c * d leaves the range in which both are equivalent."""
    for value, other in ((values[0], a[1]), (values[1], a[0])):
        if value is None or other.op != "mul":
            continue
        for inner, rest in (other.args, other.args[::-1]):
            factor = number(inner)
            if factor is not None and _SMALLEST <= abs(float(factor) * value) <= _LARGEST:
                product = float(factor) * value
                return rest if product == 1.0 else node("mul", rest, const(product))
    return None
