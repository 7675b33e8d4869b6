"""Modifiers' trees as functions for flex_attention: one torch statement per node, captured tensors as free variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attnfuzz.kernels.expressions.evaluation import evaluate
from attnfuzz.kernels.expressions.tree import Captured, Expression, number

if TYPE_CHECKING:
    import torch

__all__ = ["function_of", "source_of"]

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "mod": "%", "le": "<=", "lt": "<", "ge": ">=", "gt": ">", "eq": "==", "ne": "!=",
    "and": "&", "or": "|",
}  # fmt: skip
_INDICES = "b, h, q_idx, kv_idx"


def source_of(tree: Expression, tensors: tuple[str, ...]) -> str:
    """Python source of `make(seqlen_q, seqlen_k, captured_<tensor>, ...)`, which returns the score_mod or mask_mod."""
    names: dict[Expression, str] = {}
    lines: list[str] = []
    constant: dict[Expression, float | int | bool] = {}
    for each in tree.walk():
        if (not each.args and number(each) is not None) or (
            each.args and each.op != "load" and all(a in constant for a in each.args)
        ):
            # torch's functions do not take plain numbers alone.
            constant[each] = _folded(each)
            names[each] = repr(constant[each])
            continue
        text = _text(each, [names[arg] for arg in each.args])
        if each.args:
            lines.append(f"        t{len(lines)} = {text}")
            text = f"t{len(lines) - 1}"
        names[each] = text
    # A result that does not depend on an index has no shape.
    value, of_score = names[tree], tree.kind == "float"
    result = f"score * 0 + {value}" if of_score else f"(q_idx >= 0) & {value}"
    parameters = f"score, {_INDICES}" if of_score else _INDICES
    variables = ", ".join(("seqlen_q", "seqlen_k", *map(_variable, tensors)))
    head = f"def make({variables}):\n    def modify({parameters}):\n"
    return head + "".join(f"{line}\n" for line in lines) + f"        return {result}\n    return modify\n"


def _variable(tensor: str) -> str:
    """Return the variable of a captured tensor, whose own name may be that of an index, of a function or of torch."""
    return f"captured_{tensor}"


def _text(x: Expression, a: list[str]) -> str:
    if x.op in _INFIX:
        return f"({a[0]} {_INFIX[x.op]} {a[1]})"
    match x.op:
        case "load":
            assert isinstance(x.value, Captured)
            return f"{_variable(x.value.name)}[{', '.join(a)}]"
        case "min":
            return f"torch.where({a[0]} <= {a[1]}, {a[0]}, {a[1]})"
        case "max":
            return f"torch.where({a[0]} >= {a[1]}, {a[0]}, {a[1]})"
        case "abs":
            return f"torch.where({a[0]} >= 0, {a[0]}, -{a[0]})"
        case "neg":
            return f"(-{a[0]})"
        case "not":
            return f"torch.logical_not({a[0]})"
        case "float":
            return f"({a[0]} + 0 * q_idx).to(torch.float32)"
        case "div":
            return f"torch.div({a[0]}, {a[1]}, rounding_mode='floor')"
        case "where":
            # torch.where does not take a plain truth value.
            condition = {"True": "q_idx >= 0", "False": "q_idx < 0"}.get(a[0], a[0])
            return f"torch.where({condition}, {a[1]}, {a[2]})"
        case "tanh" | "exp" | "sigmoid":
            return f"torch.{x.op}({', '.join(a)})"
    return x.op


def _folded(x: Expression) -> float | int | bool:
    import torch

    value: float | int | bool = evaluate(x, {"b": torch.zeros(())}, {}, torch.float64).item()
    return value


def function_of(tree: Expression, lengths: tuple[Any, Any], tensors: Mapping[str, torch.Tensor]) -> Callable[..., Any]:
    """Make the function; `lengths` are seqlen_q and seqlen_k, as 0-dimensional tensors where they must not be compiled in."""
    import torch

    names = {each.value.name: None for each in tree.walk() if isinstance(each.value, Captured)}
    space: dict[str, Any] = {"torch": torch}
    exec(compile(source_of(tree, tuple(names)), f"<{tree.kind} modifier>", "exec"), space)
    modify: Callable[..., Any] = space["make"](*lengths, *(tensors[name] for name in names))
    return modify
