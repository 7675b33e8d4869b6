"""Evaluation of a modifier's tree by torch, in any dtype; differentiable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnfuzz.kernels.expressions.tree import Captured, Expression

if TYPE_CHECKING:
    import torch

__all__ = ["evaluate", "value_of"]


def evaluate(
    tree: Expression, leaves: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Evaluate the tree, broadcast over its leaves.

    Args:
        tree: a tree of any kind.
        leaves: "b", "h", "q_idx", "kv_idx" as integer tensors that broadcast, "seqlen_q" and "seqlen_k" likewise or numbers, and
            "score" where the tree has it.
        tensors: captured tensors by name; gradients reach them.
        dtype: dtype of the float nodes.
    """
    import torch

    device = next(each.device for each in leaves.values() if isinstance(each, torch.Tensor))
    values: dict[Expression, torch.Tensor] = {}
    for each in tree.walk():
        values[each] = value_of(each, [values[arg] for arg in each.args], leaves, tensors, dtype, device)
    return values[tree]


def value_of(
    x: Expression,
    a: list[torch.Tensor],
    leaves: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Evaluate one node, whose arguments have the values `a`; the other arguments are those of `evaluate`."""
    import torch

    match x.op:
        case "const" | "int" | "bool":
            kind = {"const": dtype, "int": torch.int64, "bool": torch.bool}[x.op]
            # Filled there: a copy from the host would wait for the device.
            return torch.full((), x.value, dtype=kind, device=device)
        case "score":
            score: torch.Tensor = leaves["score"]
            return score
        case "b" | "h" | "q_idx" | "kv_idx" | "seqlen_q" | "seqlen_k":
            return torch.as_tensor(leaves[x.op], device=device).to(torch.int64)
        case "load":
            assert isinstance(x.value, Captured)
            elements = tensors[x.value.name][tuple(torch.broadcast_tensors(*a))]
            return elements.to(dtype if x.kind == "float" else torch.int64)
        case "min":
            return torch.where(a[0] <= a[1], a[0], a[1])
        case "max":
            return torch.where(a[0] >= a[1], a[0], a[1])
        case "abs":
            # torch.abs has derivative 0 at 0
            return torch.where(a[0] >= 0, a[0], -a[0])
        case "where":
            return torch.where(a[0], a[1], a[2])
        case "float":
            return a[0].to(dtype)
        case "mod":
            return a[0] % a[1]
        case "div":
            return torch.div(a[0], a[1], rounding_mode="floor")
    return _FUNCTIONS[x.op](*a)


def _named(name: str) -> Any:
    def call(*a: Any) -> Any:
        import torch

        return getattr(torch, name)(*a)

    return call


_FUNCTIONS = {
    "add": _named("add"), "sub": _named("sub"), "mul": _named("mul"), "neg": _named("neg"), "tanh": _named("tanh"),
    "exp": _named("exp"), "sigmoid": _named("sigmoid"), "le": _named("le"), "lt": _named("lt"), "ge": _named("ge"),
    "gt": _named("gt"), "eq": _named("eq"), "ne": _named("ne"), "and": _named("logical_and"), "or": _named("logical_or"),
    "not": _named("logical_not"),
}  # fmt: skip
