"""A PrimFunc that evaluates many trees over a tile, and Problems of the dense TileLang kernel with trees."""

# No `from __future__ import annotations`: TileLang evaluates the annotations of a PrimFunc as it builds it.
from typing import Any

import tilelang.language as T  # noqa: N812

from attnfuzz.kernels.expressions.tree import KV, Data, H, Q, S, const, parse, tanh, to_data, to_float, where
from attnfuzz.kernels.problem import Problem
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
