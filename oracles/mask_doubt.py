"""Scores in doubt under a mask_mod that compares floats: kernels evaluate it in float32, the oracle in float64.

Integers, captured float32, and results from exact arguments that float32 represents are exact. All others have the errors of
oracles/tree_errors.py and those of values that are flushed to zero. A value that may be beyond float32's range has an infinite
error, and so has a choice in doubt between different numbers. A comparison is in doubt where these errors may flip it, and `&`
and `|` are in doubt unless one side decides them. A kernel may evaluate a mask more than once, for example for lists of blocks
and again for scores; where it is in doubt, the answers may differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from attnfuzz.kernels.expressions.evaluation import value_of
from attnfuzz.kernels.expressions.tree import Expression
from attnfuzz.oracles.formats import TINY, Format
from attnfuzz.oracles.tree_errors import error_of

__all__ = ["doubtful"]

_ROUNDED = ("const", "float", "add", "sub", "mul")
"""Operations whose result is the exact one, rounded once."""
_LARGEST = Format.of("float32").largest


def doubtful(mask: Expression, leaves: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return where float32 may answer differently from float64: bool, broadcast over the leaves; None for a tree without floats.

    Args:
        mask: a bool tree without the score.
        leaves: coordinates, as `evaluate` takes them.
        tensors: captured tensors by name.
    """
    nodes = list(mask.walk())
    if all(each.kind != "float" for each in nodes):
        return None
    device = leaves["q_idx"].device
    exact = torch.zeros((), dtype=torch.float64, device=device)
    values: dict[Expression, torch.Tensor] = {}
    doubts: dict[Expression, torch.Tensor] = {}
    errors: dict[Expression, torch.Tensor] = {}
    for each in nodes:
        v = [values[arg] for arg in each.args]
        values[each] = value_of(each, v, leaves, tensors, torch.float64, device)
        e = [errors[arg] for arg in each.args if arg in errors]
        if each.kind == "bool":
            doubts[each] = _undecided(each, v, e, [doubts[arg] for arg in each.args if arg in doubts], exact)
        elif each.op == "where":
            errors[each] = _of_choice(v, e, doubts[each.args[0]])
        else:
            errors[each] = _of_number(each, values, errors, sum(e, exact))
    return doubts[mask]


def _undecided(
    x: Expression, v: Sequence[torch.Tensor], e: Sequence[torch.Tensor], doubts: Sequence[torch.Tensor], exact: torch.Tensor
) -> torch.Tensor:
    """Return where both answers are possible, from the arguments: `v` values, `e` errors of numbers, `doubts` of truth values."""
    if x.op == "bool":
        return exact > 0
    if x.op == "not":
        return doubts[0]
    if x.op in ("and", "or"):
        joined = torch.logical_and if x.op == "and" else torch.logical_or
        possible = joined(v[0] | doubts[0], v[1] | doubts[1])
        certain = joined(v[0] & ~doubts[0], v[1] & ~doubts[1])
        return possible & ~certain
    around = e[0] + e[1]
    # A NaN difference must not count as a large one.
    return (around > 0) & ~((v[0] - v[1]).abs() > around)


def _of_choice(v: Sequence[torch.Tensor], e: Sequence[torch.Tensor], doubt: torch.Tensor) -> torch.Tensor:
    """Return the error of `where`: v holds its condition and both numbers, e the errors of the numbers."""
    either = torch.where(v[1] != v[2], math.inf, torch.maximum(*e))
    return torch.where(doubt, either, torch.where(v[0], *e))


def _of_number(
    x: Expression, values: Mapping[Expression, torch.Tensor], errors: Mapping[Expression, torch.Tensor], before: torch.Tensor
) -> torch.Tensor:
    """Return the error of an int or float, whose arguments' errors add up to `before`; an int's error is 0 or infinite."""
    if x.kind == "int" or x.op == "load":
        return before
    y = values[x]
    error = error_of(x, values, errors, torch.zeros_like(before))
    error = torch.where(error > 0, error + TINY, error)
    if x.op in _ROUNDED:
        held = (y.to(torch.float32) == y) & ((y == 0) | (y.abs() >= TINY))
        error = torch.where((before == 0) & held, 0.0, error)
    return torch.where((before < math.inf) & (y.abs() + error <= _LARGEST), error, math.inf)
