"""Values of a modifier's tree in float64, with bounds on the error of a kernel that evaluates it in fp32.

Each operation propagates the errors of its arguments to first order, with a second-order term where it is curved, and adds its
own: 2 eps of the result for arithmetic; 8 eps + 2 eps |x| for tanh, sigmoid (absolute) and exp (relative), which kernels compute
by the hardware's exponential. A choice has the error of the side that it takes; where errors may flip the comparison it is by,
the larger error of both, and the difference of its sides.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attnfuzz.kernels.expressions.evaluation import value_of
from attnfuzz.kernels.expressions.tree import Expression
from attnfuzz.oracles.formats import EPS

__all__ = ["error_of", "evaluated"]

_OWN, _FUNCTION, _LARGEST = 2 * EPS, 8 * EPS, 80.0


def evaluated(
    tree: Expression, leaves: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], error: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (value, error) of a float tree, both broadcast over the leaves; the score in `leaves` may be off by `error`."""
    device = leaves["q_idx"].device
    zero = torch.zeros((), dtype=torch.float64, device=device)
    values: dict[Expression, torch.Tensor] = {}
    errors: dict[Expression, torch.Tensor] = {}
    for each in tree.walk():
        values[each] = value_of(each, [values[arg] for arg in each.args], leaves, tensors, torch.float64, device)
        if each.kind == "float":
            errors[each] = error if each.op == "score" else error_of(each, values, errors, zero)
        elif each.kind == "bool":
            errors[each] = _doubt(each, values, errors, zero)
    return values[tree], errors[tree]


def error_of(
    x: Expression, values: Mapping[Expression, torch.Tensor], errors: Mapping[Expression, torch.Tensor], zero: torch.Tensor
) -> torch.Tensor:
    """Return the error of a float node other than the score, from its arguments; arguments without an error are exact."""
    y = values[x]
    v = [values[each] for each in x.args]
    e = [errors.get(each, zero) for each in x.args]
    match x.op:
        case "const" | "float":
            return EPS * y.abs()
        case "load":
            return zero
        case "add" | "sub":
            return e[0] + e[1] + _OWN * y.abs()
        case "mul":
            return v[0].abs() * e[1] + v[1].abs() * e[0] + e[0] * e[1] + _OWN * y.abs()
        case "neg" | "abs":
            return e[0]
        case "tanh":
            return e[0] * torch.clamp(1 - y * y + 2 * e[0], max=1.0) + _FUNCTION
        case "sigmoid":
            return e[0] * torch.clamp(y * (1 - y) + e[0], max=0.25) + _FUNCTION
        case "exp":
            return y * (torch.expm1(e[0].clamp(max=_LARGEST)) + _FUNCTION + _OWN * v[0].abs())
        case "min" | "max":
            return torch.maximum(e[0], e[1])
        case "where":
            either = torch.maximum(e[1], e[2]) + (v[1] - v[2]).abs()
            return torch.where(errors[x.args[0]] > 0, either, torch.where(v[0], e[1], e[2]))
    raise AssertionError(x.op)


def _doubt(
    x: Expression, values: Mapping[Expression, torch.Tensor], errors: Mapping[Expression, torch.Tensor], zero: torch.Tensor
) -> torch.Tensor:
    """Return a tensor above 0 where the errors of the arguments may flip a truth value."""
    e = [errors.get(each, zero) for each in x.args]
    if x.op in ("and", "or", "not"):
        return e[0] if len(e) == 1 else torch.maximum(*e)
    if not x.args or x.args[0].kind != "float":
        return zero
    around = e[0] + e[1]
    return torch.where((values[x.args[0]] - values[x.args[1]]).abs() <= around, around, zero)
