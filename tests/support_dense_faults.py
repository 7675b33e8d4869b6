"""Faults of released dense kernels, planted in copies of the dense TileLang kernels by editing their device code."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.planted import Edit, planted_copy
from attnfuzz.kernels.tilelang.dense import Reduction, TileLangDense

DEVICE = "attnfuzz.kernels.tilelang.dense_device"


@dataclass(frozen=True)
class DenseFault:
    """One fault, how the backward it is planted in adds up a group's shares, and the mask under which it shows."""

    name: str
    edits: tuple[Edit, ...]
    reduction: Reduction = "atomic"
    causal: bool = False


DENSE_FAULTS = (
    DenseFault(
        "LSE rows of the last tile left unwritten",
        (
            Edit(
                "if row_0 + i < n_q:\n                    LSE[",
                "if row_0 + tile_m <= n_q:\n                    LSE[",
            ),
        ),
        "none",
    ),
    DenseFault(
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
    DenseFault(
        "group shares stored over each other",
        (Edit("head, 0:dim_v])\n\n    return dense_backward", "head - head % groups, 0:dim_v])\n\n    return dense_backward"),),
        "split",
    ),
    DenseFault(
        "no offset in the backward's loop bound",
        (Edit("begin = T.max(0, key_0 - offset) // tile_m", "begin = key_0 // tile_m"),),
        causal=True,
    ),
    DenseFault(
        "no offset in the forward's loop bound",
        (Edit("T.min(n_k, row_0 + tile_m + offset)", "T.min(n_k, row_0 + tile_m)"),),
        "none",
        causal=True,
    ),
    DenseFault("group index", (Edit("kv_head = head // groups", "kv_head = head % kv_heads", times=2),)),
    DenseFault(
        "tail keys unmasked in the forward",
        (
            Edit(
                "s[i, j] = T.if_then_else(key_0 + j < n_k, T.cast(0, ACC), -T.infinity(ACC))",
                "s[i, j] = T.if_then_else(key_0 + j < n_k + tile_n, T.cast(0, ACC), -T.infinity(ACC))",
            ),
        ),
    ),
    DenseFault(
        "the guard of rows without keys gone from the backward",
        (
            Edit(
                "T.if_then_else(lse_log2[i] == -T.infinity(ACC), 0.0, T.exp2(p[j, i] * scale_log2 - lse_log2[i]))",
                "T.exp2(p[j, i] * scale_log2 - lse_log2[i])",
            ),
        ),
        causal=True,
    ),
    DenseFault("rescale dropped", (Edit("acc[i, d] = acc[i, d] * rescale[i]", "acc[i, d] = acc[i, d] * 1.0"),)),
    DenseFault("LSE of base 2", (Edit("m[i] * exponent + T.log(", "m[i] * scale_log2 + T.log("),), "none"),
    DenseFault(
        "Delta's products in half",
        (
            Edit(
                "T.cast(o_rows[i, d], ACC) * T.cast(do_rows[i, d], ACC)",
                "T.cast(T.cast(T.cast(o_rows[i, d], ACC) * T.cast(do_rows[i, d], ACC), dtype), ACC)",
            ),
        ),
    ),
)


def faulty_dense(fault: DenseFault) -> Kernel:
    """A copy of a dense kernel with `fault`, under a name of its own."""
    name = f"test.dense.{fault.name.replace(' ', '_').replace(chr(39), '')}"
    return TileLangDense(name, fault.reduction, functools.partial(planted_copy, DEVICE, fault.edits))
