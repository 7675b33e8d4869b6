"""Interval arithmetic over all lanes of a problem: whether an index of a modifier may lie outside its tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from attnfuzz.kernels.expressions.tree import INT32, Captured, Expression, number, size_of

__all__ = ["Sizes", "why_outside"]

Sizes: TypeAlias = dict[str, int]
_Interval: TypeAlias = tuple[int, int]


def why_outside(tree: Expression, sizes: Sizes, seqlen_q: int, seqlen_k: int) -> str | None:
    """Why some index of `tree`, or an intermediate number, may be out of range in a sequence of those lengths, or None.

    `sizes`: "batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", which tensors' sizes refer to; lengths are the longest ones.
    Conservative: both branches of `where` count, and a tensor's values are known only by its fill.
    """
    if not (seqlen_q and seqlen_k):
        return None
    lengths = {**sizes, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    ranges: dict[Expression, _Interval] = {}
    for each in tree.walk():
        if each.op == "load" and isinstance(each.value, Captured):
            for index, size in zip(each.args, each.value.sizes, strict=True):
                low, high = ranges[index]
                last = size_of(size, sizes) - 1
                if low < 0 or high > last:
                    return f"{each}: {index} is {low} to {high}, and the size is {last + 1}"
        if each.kind == "int":
            ranges[each] = _of_tensor(each.value, sizes) if isinstance(each.value, Captured) else _interval(each, ranges, lengths)
            if not all(end in INT32 for end in ranges[each]):
                return f"{each}: it may pass the range of int32"
        if each.op in ("mod", "div") and ranges[each.args[0]][0] < 0:
            # It rounds toward zero in Triton and down in torch.
            return f"{each}: {each.args[0]} may be negative"
    return None


def _interval(x: Expression, ranges: Mapping[Expression, _Interval], sizes: Sizes) -> _Interval:
    ends = [ranges[each] for each in x.args if each.kind == "int"]
    match x.op:
        case "b" | "h" | "q_idx" | "kv_idx":
            of = {"b": "batch", "h": "heads", "q_idx": "seqlen_q", "kv_idx": "seqlen_k"}[x.op]
            return 0, max(0, sizes[of] - 1)
        case "seqlen_q" | "seqlen_k":
            return sizes[x.op], sizes[x.op]
        case "int":
            return int(number(x) or 0), int(number(x) or 0)
        case "add":
            return ends[0][0] + ends[1][0], ends[0][1] + ends[1][1]
        case "sub":
            return ends[0][0] - ends[1][1], ends[0][1] - ends[1][0]
        case "mul":
            products = [i * j for i in ends[0] for j in ends[1]]
            return min(products), max(products)
        case "mod":
            return 0, min(ends[0][1], ends[1][1] - 1)
        case "div":
            return ends[0][0] // ends[1][0], ends[0][1] // ends[1][0]
        case "neg":
            return -ends[0][1], -ends[0][0]
        case "abs":
            low, high = ends[0]
            return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))
        case "min":
            return min(ends[0][0], ends[1][0]), min(ends[0][1], ends[1][1])
        case "max":
            return max(ends[0][0], ends[1][0]), max(ends[0][1], ends[1][1])
        case "where":
            return min(ends[0][0], ends[1][0]), max(ends[0][1], ends[1][1])
    raise AssertionError(x.op)


def _of_tensor(tensor: Captured, sizes: Sizes) -> _Interval:
    match tensor.fill:
        case "lengths":
            return 0, sizes["seqlen_k"]
        case "numbers":
            return 0, 7
    return 0, max(sizes["seqlen_q"], sizes["seqlen_k"])
