"""Faults of released kernels, planted in copies of the dense and the ragged TileLang kernels by editing their device code."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.faults.planted import Edit, planted_copy
from attnfuzz.kernels.tilelang.dense import TileLangDense
from attnfuzz.kernels.tilelang.ragged import TileLangRagged

DENSE, RAGGED = "attnfuzz.kernels.tilelang.dense_device", "attnfuzz.kernels.tilelang.ragged_device"


def half_shares(indent: str) -> Edit:
    """dK and dV of each query head rounded before the group is summed."""
    return Edit(
        "dk_acc[j, d] = dk_acc[j, d] * scale\n",
        "dk_acc[j, d] = T.cast(T.cast(dk_acc[j, d] * scale, dtype), ACC)\n"
        f"{indent}for j, d in T.Parallel(tile_n, dim_v):\n"
        f"{indent}    dv_acc[j, d] = T.cast(T.cast(dv_acc[j, d], dtype), ACC)\n",
    )


@dataclass(frozen=True)
class TileLangFault:
    """One fault, how the backward it is planted in adds up a group's shares, and the mask under which it shows."""

    name: str
    edits: tuple[Edit, ...]
    reduction: Literal["none", "atomic", "split"] = "atomic"
    causal: bool = False
    ahead: bool = False
    """Only in a Config of four warps, whose products are asynchronous."""
    races: bool = False
    """Rows of another sequence are stored twice, and on a GPU either block may be the last."""
    slow: bool = False
    """Run only when asked for: another fault of the same function is run always."""


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
    TileLangFault("half partials", (half_shares(" " * 12),), "split"),
    TileLangFault(
        "group shares stored over each other",
        (Edit("head, 0:dim_v])\n\n    return dense_backward", "head - head % groups, 0:dim_v])\n\n    return dense_backward"),),
        "split",
    ),
    TileLangFault(
        "no offset in the backward's loop bound",
        (Edit("begin = T.min(T.max(0, key_0 - offset), n_q - 1)", "begin = T.min(key_0, n_q - 1)"),),
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
                "s[i, j] = T.if_then_else(key_0 + j < n_k, s[i, j], -T.infinity(ACC))",
                "s[i, j] = T.if_then_else(key_0 + j < n_k + tile_n, s[i, j], -T.infinity(ACC))",
            ),
        ),
    ),
    TileLangFault(
        "the guard of rows without keys gone from the backward",
        (
            Edit(
                "LSE[seq, head, row_0 + i] == -T.infinity(ACC), T.infinity(ACC), LSE",
                "LSE[seq, head, row_0 + i] == T.infinity(ACC), T.infinity(ACC), LSE",
            ),
        ),
        causal=True,
    ),
    TileLangFault(
        "the mask left out of the tile that its edge is in",
        (Edit("if key_0 + tile_n > T.min(n_k, row_0 + offset + 1):", "if key_0 > T.min(n_k, row_0 + offset + 1):", times=2),),
        "none",
        causal=True,
    ),
    TileLangFault("rescale dropped", (Edit("acc[i, d] = acc[i, d] * rescale[i]", "acc[i, d] = acc[i, d] * 1.0"),)),
    TileLangFault("LSE of base 2", (Edit("(1.0 if changed else exponent) + T.log(", "scale_log2 + T.log("),), "none"),
    TileLangFault(
        "Delta's products in half",
        (
            Edit(
                "product[i, d] += T.cast(O[seq, row_0 + i, head, part * PARTS + d], ACC) * T.cast(\n"
                "                            dO[seq, row_0 + i, head, part * PARTS + d], ACC\n"
                "                        )",
                "product[i, d] += T.cast(\n"
                "                            O[seq, row_0 + i, head, part * PARTS + d]\n"
                "                            * dO[seq, row_0 + i, head, part * PARTS + d], ACC\n"
                "                        )",
            ),
        ),
    ),
    TileLangFault(
        "V of this tile for that of the tile before",
        (Edit("T.max(0, key_0 - tile_n) : T.max(0, key_0 - tile_n) + tile_n", "key_0 : key_0 + tile_n"),),
        "none",
        ahead=True,
    ),
    TileLangFault(
        "the last tile of V left out",
        (Edit("                T.gemm(p, v_last, acc, policy=T.GemmWarpPolicy.FullRow)\n", "                T.clear(p)\n"),),
        "none",
        ahead=True,
    ),
)


RAGGED_FAULTS: tuple[TileLangFault, ...] = (
    TileLangFault(
        "whole tiles stored into the next sequence",
        (Edit("if row_0 + i < n:\n                        X[", "if start + row_0 + i < total:\n                        X["),),
        "split",
        races=True,
    ),
    TileLangFault("sequences not apart", (Edit("(cu[seq] // PAD + seq) * PAD", "cu[seq]"),), slow=True),
    TileLangFault(
        "no offset in the backward's loop bound",
        (Edit("T.max(0, T.min(key_0 - offset, n_q - 1))", "T.max(0, T.min(key_0, n_q - 1))"),),
        causal=True,
        slow=True,
    ),
    TileLangFault(
        "LSE rows of the last tile left unwritten",
        (
            Edit(
                "if row_0 + i < n_q:\n                        LSE[",
                "if row_0 + tile_m <= n_q:\n                        LSE[",
            ),
        ),
        slow=True,
    ),
    TileLangFault("half partials", (half_shares(" " * 16),), "split", slow=True),
    TileLangFault("group index", (Edit("kv_head = head // groups", "kv_head = head % kv_heads", times=2),), slow=True),
    TileLangFault(
        "rows beyond a sequence taken for its padding",
        (Edit("row_0 + i < n, X[start + row_0 + i, head, d]", "start + row_0 + i < total, X[start + row_0 + i, head, d]"),),
    ),
    TileLangFault(
        "the last tile of queries left out",
        (Edit("T.max(1, T.ceildiv(n_q, tile_m))", "T.max(1, n_q // tile_m)"),),
        causal=True,
        slow=True,
    ),
    TileLangFault(
        "the groups' shares of one head only",
        (Edit("head * groups + group, d]", "head * groups, d]"),),
        "split",
        slow=True,
    ),
    TileLangFault(
        "the first tile of V for the last",
        (
            Edit(
                "PV[k_start + (steps - 1) * tile_n : k_start + steps * tile_n, kv_head, 0:dim_v], v_last",
                "PV[k_start : k_start + tile_n, kv_head, 0:dim_v], v_last",
            ),
        ),
        ahead=True,
        slow=True,
    ),
)


def faulty_tilelang(fault: TileLangFault, *, ragged: bool) -> Kernel:
    """A copy of a dense or a ragged kernel with `fault`, under a name of its own."""
    kind = "ragged" if ragged else "dense"
    name = f"test.{kind}.{fault.name.replace(' ', '_').replace(chr(39), '')}"
    code = functools.partial(planted_copy, RAGGED if ragged else DENSE, fault.edits)
    if not ragged:
        return TileLangDense(name, fault.reduction, code, pipelined=fault.reduction != "none")
    assert fault.reduction != "none"
    return TileLangRagged(name, fault.reduction, code)
