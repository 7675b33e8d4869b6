"""A Problem's modifiers as trees, and the tensors that they read."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, reduce

import msgspec

from attnfuzz.kernels.expressions.named import softcap
from attnfuzz.kernels.expressions.tree import (  # fmt: skip
    KV,
    SEQLEN_K,
    SEQLEN_Q,
    Captured,
    Expression,
    H,
    Q,
    S,
    both,
    captured,
    node,
    parse,
    size_of,
    substitute,
    to_data,
)
from attnfuzz.kernels.problem import SINKS, Problem

__all__ = ["mask_of", "of_heads", "score_of", "shape_of", "tensors_of", "whole_mask_of"]


_SINKS = Captured(SINKS, ("heads",), gradient=True)


def score_of(problem: Problem) -> Expression | None:
    """The change of the scaled score: softcap, then score_mod; None where there is none."""
    return _score(problem.softcap, problem.score_mod)


@lru_cache(maxsize=1024)
def _score(cap: float, data: tuple[object, ...] | None) -> Expression | None:
    capped = softcap(cap) if cap else None
    tree = None if data is None else parse(data)
    if tree is None:
        return capped
    if capped is None:
        return tree
    return substitute(tree, S.op, capped)


def of_heads(problem: Problem, first: int, count: int) -> Problem:
    """The part of `problem` that is `count` query heads from `first` on, of one key/value head; captured tensors stay whole."""
    changes: dict[str, object] = {"heads": count, "kv_heads": 1}
    for name in ("score_mod", "mask_mod"):
        data = getattr(problem, name)
        if data is None:
            continue
        tree = substitute(parse(data), H.op, H + first)
        sizes = problem.sizes
        fixed: dict[Expression, Expression] = {}
        for each in tree.walk():
            value = each.value
            if isinstance(value, Captured):
                value = replace(value, sizes=tuple(sizes[at] if at in ("heads", "kv_heads") else at for at in value.sizes))
            fixed[each] = node(each.op, *(fixed[arg] for arg in each.args), value=value)
        changes[name] = to_data(fixed[tree])
    return msgspec.structs.replace(problem, **changes)


def mask_of(problem: Problem) -> Expression | None:
    """The mask_mod alone, without causal mask and window; None where there is none."""
    return None if problem.mask_mod is None else parse(problem.mask_mod)


def whole_mask_of(problem: Problem) -> Expression | None:
    """Causal mask, window and mask_mod as one tree, without the lengths; None where nothing is hidden."""
    diagonal = Q if problem.causal == "top_left" else Q + SEQLEN_K - SEQLEN_Q
    left, right = problem.window or (None, None)
    parts = [] if problem.causal is None else [diagonal >= KV]
    if left is not None:
        parts.append(diagonal - KV <= left)
    if right is not None:
        parts.append(KV - diagonal <= right)
    if (tree := mask_of(problem)) is not None:
        parts.append(tree)
    return reduce(both, parts) if parts else None


def tensors_of(problem: Problem) -> tuple[Captured, ...]:
    """The captured tensors: those of score_mod, then of mask_mod, each once; last the sinks, float32 `(heads,)`."""
    sinks = (_SINKS,) if problem.sinks else ()
    if problem.score_mod is None and problem.mask_mod is None:
        return sinks
    return (*captured(score_of(problem), mask_of(problem)), *sinks)


def shape_of(problem: Problem, tensor: Captured) -> tuple[int, ...]:
    """The shape of `tensor` in `problem`."""
    return tuple(size_of(size, problem.sizes) for size in tensor.sizes)
