"""Derivatives of a score_mod's tree, as trees: with respect to the score, and to a loaded element of a captured tensor."""

from __future__ import annotations

from collections.abc import Callable

from attnfuzz.kernels.expressions.tree import Expression, const, node, number, where

__all__ = ["by_load", "by_score"]


def by_score(tree: Expression) -> Expression:
    """d tree / d score; where the arguments of min or max are equal, that of the first."""
    return _derivative(tree, lambda each: each.op == "score")


def by_load(tree: Expression, load: Expression) -> Expression:
    """d tree / d `load`, one of its loads."""
    return _derivative(tree, lambda each: each == load)


def _derivative(tree: Expression, is_variable: Callable[[Expression], bool]) -> Expression:
    zero, one = const(0.0), const(1.0)
    slopes: dict[Expression, Expression] = {}
    for each in tree.walk():
        if each.kind != "float":
            continue
        slopes[each] = one if is_variable(each) else _rule(each, [slopes.get(arg, zero) for arg in each.args], zero)
    return slopes[tree]


def _rule(x: Expression, d: list[Expression], zero: Expression) -> Expression:
    a = x.args
    if all(number(each) == 0.0 for each in d):
        return zero
    match x.op:
        case "add":
            return _sum(d[0], d[1])
        case "sub":
            return _sum(d[0], _negative(d[1]))
        case "mul":
            return _sum(_product(d[0], a[1]), _product(a[0], d[1]))
        case "neg":
            return _negative(d[0])
        case "tanh":
            return _product(const(1.0) - x * x, d[0])
        case "exp":
            return _product(x, d[0])
        case "sigmoid":
            return _product(x * (const(1.0) - x), d[0])
        case "abs":
            return where(a[0] >= 0.0, d[0], _negative(d[0]))
        case "where":
            return where(a[0], d[1], d[2])
        case "min":
            return where(a[0] <= a[1], d[0], d[1])
        case "max":
            return where(a[0] >= a[1], d[0], d[1])
    return zero


def _sum(left: Expression, right: Expression) -> Expression:
    if number(left) == 0.0:
        return right
    return left if number(right) == 0.0 else left + right


def _product(left: Expression, right: Expression) -> Expression:
    for one, other in ((left, right), (right, left)):
        if number(one) == 0.0:
            return one
        if number(one) == 1.0:
            return other
    return left * right


def _negative(x: Expression) -> Expression:
    value = number(x)
    return const(-float(value)) if isinstance(value, float) else node("neg", x)
