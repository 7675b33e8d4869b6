"""score_mod and mask_mod as plain torch expressions, for a script that must not need the trees."""

from __future__ import annotations

from attnfuzz.kernels.expressions.tree import LEAVES, Captured, Expression, captured

__all__ = ["function_of"]

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "le": "<=", "lt": "<", "ge": ">=", "gt": ">", "eq": "==", "ne": "!=", "and": "&",
    "or": "|", "mod": "%", "div": "//",
}  # fmt: skip
_CONSTANTS = {"const": "float64", "int": "int64", "bool": "bool"}


def function_of(name: str, tree: Expression) -> str:
    """The source of a function called `name` of the tree's leaves, all of them tensors, and of its captured tensors."""
    tensors = [each.name for each in captured(tree)]
    leaves = [leaf for leaf in LEAVES if leaf != "score" or name == "score_mod"]
    return f"def {name}({', '.join([*leaves, *tensors])}):\n    return {_text(tree)}"


def _text(x: Expression) -> str:
    if x.op in _CONSTANTS:
        return f"torch.tensor({x.value!r}, dtype=torch.{_CONSTANTS[x.op]})"
    if x.op in LEAVES:
        return x.op
    if isinstance(x.value, Captured):
        return f"{x.value.name}[{', '.join(_bare(each) for each in x.args)}]"
    if x.op in _INFIX:
        left, right = x.args
        # One side at least is a tensor, so that the other may be a number.
        sides = (_inner(left), _inner(right, bare=True)) if left.args or left.op in LEAVES else (_inner(left), _inner(right))
        return f"{sides[0]} {_INFIX[x.op]} {sides[1]}"
    args = [_text(each) for each in x.args]
    match x.op:
        case "min" | "max":
            sign = "<=" if x.op == "min" else ">="
            return f"torch.where({_inner(x.args[0])} {sign} {_inner(x.args[1])}, {args[0]}, {args[1]})"
        case "abs":
            inner = _inner(x.args[0])
            return f"torch.where({inner} >= 0, {args[0]}, -{inner})"
        case "float":
            return f"{_inner(x.args[0])}.to(torch.float64)"
        case "neg":
            return f"-{_inner(x.args[0])}"
        case "not":
            return f"~{_inner(x.args[0])}"
    return f"torch.{x.op}({', '.join(args)})"


def _inner(x: Expression, *, bare: bool = False) -> str:
    """With brackets where it is an operation of its own."""
    text = _bare(x) if bare else _text(x)
    return f"({text})" if x.op in _INFIX or x.op in ("neg", "not") else text


def _bare(x: Expression) -> str:
    """A number as itself."""
    negative = isinstance(x.value, float | int) and x.value < 0
    return (f"({x.value!r})" if negative else repr(x.value)) if x.op in _CONSTANTS else _text(x)
