"""Faults of released kernels, planted in copies of the dense and the ragged TileLang kernels by editing their device code."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.planted import Edit, planted_copy
from attnfuzz.kernels.tilelang.dense import TileLangDense
from attnfuzz.kernels.tilelang.ragged import TileLangRagged

DENSE, RAGGED = "attnfuzz.kernels.tilelang.dense_device", "attnfuzz.kernels.tilelang.ragged_device"

HALF = "{0}[k_start + key_0 + j, head, d] = T.cast(T.cast({1}, dtype), ACC)"


@dataclass(frozen=True)
class TileLangFault:
    """One fault, how the backward it is planted in adds up a group's shares, and the mask under which it shows."""

    name: str
    edits: tuple[Edit, ...]
    reduction: Literal["none", "atomic", "split"] = "atomic"
    causal: bool = False


DENSE_FAULTS: tuple[TileLangFault, ...] = (
    TileLangFault(
        "LSE rows of the last tile left unwritten",
        (
            Edit(
                "if row_0 + i < n_q:\n                    LSE[",
                "if row_0 + tile_m <= n_q:\n                    LSE[",
            ),
        ),
        "none",
    ),
    TileLangFault(
        "half partials",
        (
            Edit(
                "dk_acc[j, d] = dk_acc[j, d] * scale\n",
                "dk_acc[j, d] = T.cast(T.cast(dk_acc[j, d] * scale, dtype), ACC)\n"
                "            for j, d in T.Parallel(tile_n, dim_v):\n"
                "                dv_acc[j, d] = T.cast(T.cast(dv_acc[j, d], dtype), ACC)\n",
            ),
        ),
        "split",
    ),
    TileLangFault(
        "group shares stored over each other",
        (Edit("head, 0:dim_v])\n\n    return dense_backward", "head - head % groups, 0:dim_v])\n\n    return dense_backward"),),
        "split",
    ),
    TileLangFault(
        "no offset in the backward's loop bound",
        (Edit("begin = T.max(0, key_0 - offset) // tile_m", "begin = key_0 // tile_m"),),
        causal=True,
    ),
    TileLangFault(
        "no offset in the forward's loop bound",
        (Edit("T.min(n_k, row_0 + tile_m + offset)", "T.min(n_k, row_0 + tile_m)"),),
        "none",
        causal=True,
    ),
    TileLangFault("group index", (Edit("kv_head = head // groups", "kv_head = head % kv_heads", times=2),)),
    TileLangFault(
        "tail keys unmasked in the forward",
        (
            Edit(
                "s[i, j] = T.if_then_else(key_0 + j < n_k, T.cast(0, ACC), -T.infinity(ACC))",
                "s[i, j] = T.if_then_else(key_0 + j < n_k + tile_n, T.cast(0, ACC), -T.infinity(ACC))",
            ),
        ),
    ),
    TileLangFault(
        "the guard of rows without keys gone from the backward",
        (
            Edit(
                "T.if_then_else(lse_log2[i] == -T.infinity(ACC), 0.0, T.exp2(p[j, i] * scale_log2 - lse_log2[i]))",
                "T.exp2(p[j, i] * scale_log2 - lse_log2[i])",
            ),
        ),
        causal=True,
    ),
    TileLangFault("rescale dropped", (Edit("acc[i, d] = acc[i, d] * rescale[i]", "acc[i, d] = acc[i, d] * 1.0"),)),
    TileLangFault("LSE of base 2", (Edit("m[i] * exponent + T.log(", "m[i] * scale_log2 + T.log("),), "none"),
    TileLangFault(
        "Delta's products in half",
        (
            Edit(
                "T.cast(o_rows[i, d], ACC) * T.cast(do_rows[i, d], ACC)",
                "T.cast(T.cast(T.cast(o_rows[i, d], ACC) * T.cast(do_rows[i, d], ACC), dtype), ACC)",
            ),
        ),
    ),
)


RAGGED_FAULTS: tuple[TileLangFault, ...] = (
    TileLangFault(
        "whole tiles stored into the next sequence",
        (
            Edit(
                "if key_0 + j < n_k:\n                        if reduction",
                "if k_start + key_0 + j < total_k:\n                        if reduction",
                times=2,
            ),
        ),
        "split",
    ),
    TileLangFault(
        "no offset in the backward's loop bound",
        (Edit("begin = T.max(0, key_0 - offset) // tile_m", "begin = key_0 // tile_m"),),
        causal=True,
    ),
    TileLangFault(
        "LSE rows of the last tile left unwritten",
        (
            Edit(
                "if row_0 + i < n_q:\n                        LSE[",
                "if row_0 + tile_m <= n_q:\n                        LSE[",
            ),
        ),
    ),
    TileLangFault(
        "half partials",
        (
            Edit("dK[k_start + key_0 + j, head, d] = dk_acc[j, d] * scale", HALF.format("dK", "dk_acc[j, d] * scale")),
            Edit("dV[k_start + key_0 + j, head, d] = dv_acc[j, d]", HALF.format("dV", "dv_acc[j, d]")),
        ),
        "split",
    ),
    TileLangFault("group index", (Edit("kv_head = head // groups", "kv_head = head % kv_heads", times=2),)),
    TileLangFault(
        "rows beyond a sequence read as its values",
        (
            Edit(
                "whole * tile_n + j < n_k, V[k_start + whole * tile_n + j, kv_head, d]",
                "k_start + whole * tile_n + j < total_k, V[k_start + whole * tile_n + j, kv_head, d]",
            ),
        ),
    ),
    TileLangFault(
        "rows beyond a sequence read as its queries",
        (
            Edit(
                "whole * tile_m + i < n_q, dO[q_start + whole * tile_m + i, head, d]",
                "q_start + whole * tile_m + i < total_q, dO[q_start + whole * tile_m + i, head, d]",
            ),
        ),
        "split",
    ),
    TileLangFault(
        "the last tile of queries left out",
        (Edit("if whole * tile_m < n_q:", "if whole * tile_m + 1 < n_q:"),),
        causal=True,
    ),
)


def faulty_tilelang(fault: TileLangFault, *, ragged: bool) -> Kernel:
    """A copy of a dense or a ragged kernel with `fault`, under a name of its own."""
    kind = "ragged" if ragged else "dense"
    name = f"test.{kind}.{fault.name.replace(' ', '_').replace(chr(39), '')}"
    code = functools.partial(planted_copy, RAGGED if ragged else DENSE, fault.edits)
    if not ragged:
        return TileLangDense(name, fault.reduction, code)
    assert fault.reduction != "none"
    return TileLangRagged(name, fault.reduction, code)
