"""A PrimFunc that evaluates many trees over a tile, and faults of the dense TileLang kernel with trees, planted in copies."""

# No `from __future__ import annotations`: TileLang evaluates the annotations of a PrimFunc as it builds it.
import functools
from dataclasses import dataclass
from typing import Any

import tilelang.language as T  # noqa: N812

from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.expressions.tree import KV, Data, H, Q, S, const, parse, tanh, to_data, to_float, where
from attnfuzz.kernels.faults.planted import Edit, planted_copy
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.tilelang.modified import TileLangModified
from attnfuzz.kernels.tilelang.printer import value


def evaluated_trees(*, trees: tuple[Data, ...], rows: int, columns: int) -> Any:
    """PrimFunc (X, b, h, seqlen_q, seqlen_k, Out): Out[t, i, j] is tree t of the score X[i, j] at q_idx i, kv_idx j."""

    def chosen(t: Any, x: Any, place: Any) -> Any:
        found = T.cast(0, "float32")
        for number, data in enumerate(trees):
            found = T.if_then_else(t == number, T.cast(value(parse(data), x, place), "float32"), found)
        return found

    @T.prim_func
    def evaluated(
        X: T.Tensor((rows, columns), "float32"),  # noqa: N803
        b: T.int32,
        h: T.int32,
        seqlen_q: T.int32,
        seqlen_k: T.int32,
        Out: T.Tensor((len(trees), rows, columns), "float32"),  # noqa: N803
    ):
        with T.Kernel(len(trees), threads=32) as t:
            for i, j in T.Parallel(rows, columns):
                Out[t, i, j] = chosen(t, X[i, j], (b, h, i, j, seqlen_q, seqlen_k))

    return evaluated


DEVICE = "attnfuzz.kernels.tilelang.dense_device"
# The first tile of keys is hidden from all queries, and some queries see none at all.
PROBLEM = Problem(
    seqlens_q=(45, 45),
    seqlens_k=(70, 70),
    packing="dense",
    dim_qk=32,
    dim_v=32,
    heads=4,
    kv_heads=2,
    softmax_scale=0.3,
    score_mod=to_data(tanh((S * 2.0 + to_float(H) * 0.5 + to_float(Q - KV) * 0.03125) * 0.2) * 5.0),
    mask_mod=to_data((KV >= 33) & (Q < 40) & ((Q + KV + H) % 3 >= 1)),
)
RISING = Problem(
    seqlens_q=(45,), seqlens_k=(70,), packing="dense", dim_qk=32, dim_v=32, score_mod=to_data(S + to_float(Q - KV) * 0.5)
)
# Each query's own key has its score, and is the last that it sees; all before it are hidden by a large number.
HIDING = Problem(
    seqlens_q=(45,),
    seqlens_k=(70,),
    packing="dense",
    dim_qk=32,
    dim_v=32,
    causal="top_left",
    score_mod=to_data(where(KV >= Q, S, S + const(-1e38))),
)
_PLACE = "(seq, head, row_0 + i, key_0 + j, n_q, n_k)"
_FORWARD = f"s[i, j] = trees.changed(s[i, j] * exponent, {_PLACE})"
_INDENT = "\n" + " " * 28
_BACKWARD = f"p[j, i] * exponent, {_PLACE}"


@dataclass(frozen=True)
class TreeFault:
    """One fault, a Problem that shows it, and the outputs that must be wrong there."""

    name: str
    shows: frozenset[str]
    edits: tuple[Edit, ...]
    only: bool = True
    """No other output is wrong."""
    problem: Problem = PROBLEM
    fused: bool = False
    """Shows only where a product and a sum are rounded once."""


def _fault(name: str, shows: str, *edits: Edit, **others: Any) -> TreeFault:
    return TreeFault(name, frozenset(shows.split()), edits, **others)


TREE_FAULTS = (
    _fault(
        "slope of score_mod left out",
        "dq dk",
        Edit(f"trees.sloped({_INDENT}ds[j, i] - delta[i], {_BACKWARD}\n", f"({_INDENT}ds[j, i] - delta[i]\n"),
    ),
    _fault(
        "slope of the changed score",
        "dq dk",
        Edit(f"delta[i], {_BACKWARD}", f"delta[i], trees.changed({_BACKWARD}), {_PLACE}"),
    ),
    _fault(
        "query and key index swapped in the backward",
        "dq dk dv",
        Edit(_BACKWARD, _BACKWARD.replace("row_0 + i, key_0 + j", "key_0 + j, row_0 + i"), times=2),
    ),
    _fault("head of the group in the backward", "dq dk dv", Edit(_BACKWARD, _BACKWARD.replace("head", "kv_head"), times=2)),
    _fault(
        "mask left out of P in the backward",
        "dv",
        Edit("p[j, i] = trees.changed(", "p[j, i] = printed(score, None).changed("),
    ),
    _fault(
        "rows beyond the queries counted in the backward",
        "dv",
        Edit(_BACKWARD, _BACKWARD.replace("n_q", "n_q + tile_m"), times=2),
        only=False,
        problem=RISING,
    ),
    _fault(
        "score_mod before the scale",
        "o lse",
        Edit(_FORWARD, f"s[i, j] = trees.changed(s[i, j], {_PLACE}) * exponent"),
        only=False,
    ),
    _fault(
        "hidden scores -1e30",
        "o lse",
        Edit(_FORWARD, f"s[i, j] = T.max(trees.changed(s[i, j] * exponent, {_PLACE}), -1e30)"),
        only=False,
    ),
    _fault(
        "a maximum of -1e38 that does not cancel",
        "o lse",
        Edit(
            "s[i, j] = T.exp2((s[i, j] - T.if_then_else(m[i] == -T.infinity(ACC), 0.0, m[i])) * scale_log2)",
            "s[i, j] = T.exp2(s[i, j] * scale_log2 - T.if_then_else(m[i] == -T.infinity(ACC), 0.0, m[i] * scale_log2))",
        ),
        only=False,
        problem=HIDING,
        fused=True,
    ),
    _fault("LSE scaled twice", "lse", Edit("m[i] * (1.0 if changed else exponent)", "m[i] * exponent"), only=False),
)  # fmt: skip


def faulty(fault: TreeFault) -> Kernel:
    """A copy of tilelang.modified with `fault`, under a name of its own."""
    name = "".join(each if each.isalnum() else "_" for each in fault.name)
    return TileLangModified(f"test.tilelang.{name}", functools.partial(planted_copy, DEVICE, fault.edits))
