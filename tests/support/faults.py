"""Twelve faults of real kernels, planted in copies of the two varlen kernels by editing their device code."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.faults.planted import DEMO_FAULT, Edit, planted_copy

TRITON, TILELANG = "attnfuzz.kernels.triton.varlen_device", "attnfuzz.kernels.tilelang.varlen_device"


@dataclass(frozen=True)
class Fault:
    """One fault: where it is known from (identifiers of real bugs where there is one), and how to plant it in each kernel."""

    name: str
    triton: tuple[Edit, ...]
    tilelang: tuple[Edit, ...]
    causal: bool = False
    """Shows under a causal mask only."""
    races: bool = False
    """Rows of another sequence are stored twice, and on a GPU either block may be the last."""


FAULTS = (
    Fault(
        "mask off by one",
        (Edit("last = rows + _diagonal(seqlen_q, seqlen_k)", "last = rows + _diagonal(seqlen_q, seqlen_k) + 1"),),
        (
            Edit("key_0 + j <= row_0 + i + offset, s[i, j]", "key_0 + j <= row_0 + i + offset + 1, s[i, j]"),
            Edit(
                "end = T.max(0, T.min(n_k, row_0 + tile_m + offset))", "end = T.max(0, T.min(n_k, row_0 + tile_m + offset + 1))"
            ),
        ),
        causal=True,
    ),
    Fault(
        "missing offset when seqlen_q != seqlen_k",
        (Edit("return seqlen_k - seqlen_q", "return 0 * (seqlen_k - seqlen_q)"),),
        (Edit("offset = n_k - n_q", "offset = 0 * (n_k - n_q)", times=2),),
        causal=True,
    ),
    Fault(
        "tail keys unmasked",
        (
            Edit("last = seqlen_k - 1", "last = seqlen_k + TAIL"),
            Edit("LN_2 = tl.constexpr(", "TAIL = tl.constexpr(1 << 20)\nLN_2 = tl.constexpr("),
        ),
        (Edit("key_0 + j < n_k, s[i, j] * scale_log2", "key_0 + j < n_k + tile_n, s[i, j] * scale_log2"),),
    ),
    Fault(
        "rescale dropped",
        (Edit("acc = acc * alpha[:, None]", "acc = acc * 1.0"),),
        (Edit("acc[i, d] = acc[i, d] * rescale[i]", "acc[i, d] = acc[i, d] * 1.0"),),
    ),
    Fault(
        "group index wrong",
        (Edit("return head // (heads // kv_heads)", "return head % kv_heads"),),
        (Edit("kv_head = head // groups", "kv_head = head % kv_heads", times=2),),
    ),
    Fault(
        "LSE in base 2",
        (
            Edit("(row_max + tl.math.log2(row_sum)) * LN_2", "(row_max + tl.math.log2(row_sum))"),
            Edit("row_lse * LOG2_E)", "row_lse)"),
        ),
        (
            Edit("m[i] * LN_2 + T.log(total[i])", "m[i] + T.log2(total[i])"),
            Edit("LSE[head, q_start + row_0 + i] * LOG2_E", "LSE[head, q_start + row_0 + i]"),
        ),
    ),
    Fault(
        "scale off by 1 % in dQ only",
        (Edit("(acc * scale).to(dq", "(acc * scale * 1.01).to(dq"),),
        (Edit("dq_acc[i, d] * scale)", "dq_acc[i, d] * (scale * 1.01))"),),
    ),
    Fault(
        "dK, dV of the group not summed",
        (Edit("for member in range(groups):", "for member in range(groups - 1, groups):"),),
        (
            Edit(
                "T.atomic_add(dK[k_start + key_0 + j, kv_head, d], dk_acc[j, d] * scale)",
                "dK[k_start + key_0 + j, kv_head, d] = dk_acc[j, d] * scale",
            ),
            Edit(
                "T.atomic_add(dV[k_start + key_0 + j, kv_head, d], dv_acc[j, d])",
                "dV[k_start + key_0 + j, kv_head, d] = dv_acc[j, d]",
            ),
        ),
    ),
    Fault(
        "tail rows stored into the next sequence",
        (Edit("o_inside = _inside(rows, seqlen_q, dims_v", "o_inside = _inside(rows, lse_stride - begin_q, dims_v"),),
        (
            Edit(
                "if row_0 + i < n_q:\n                        O[q_start",
                "if q_start + row_0 + i < total_q:\n                        O[q_start",
            ),
        ),
        races=True,
    ),
    Fault(
        "Delta missing",
        (Edit("ds = p * (dp - row_delta[:, None])", "ds = p * dp"),),
        (Edit("p[j, i] * (ds[j, i] - delta[i])", "p[j, i] * ds[j, i]"),),
    ),
    Fault(
        "zero-length sequence skipped",
        (DEMO_FAULT,),
        (
            Edit(
                "if row_0 < n_q:\n                for i, d in T.Parallel(tile_m, dim_qk):",
                "if row_0 < n_q and n_k > 0:\n                for i, d in T.Parallel(tile_m, dim_qk):",
            ),
        ),
    ),
    Fault(
        "P rounded to bf16 in an fp16 kernel",
        (Edit("p.to(v_tile.dtype)", "p.to(tl.bfloat16).to(v_tile.dtype)"),),
        (
            Edit(
                "T.copy(s, p)",
                "for i, j in T.Parallel(tile_m, tile_n):\n"
                '                        p[i, j] = T.cast(T.cast(s[i, j], "bfloat16"), dtype)',
            ),
        ),
    ),
)


def faulty(backend: str, fault: Fault) -> Kernel:
    """A copy of `backend`'s varlen kernel with `fault`, under a name of its own."""
    name = f"test.{backend}.{fault.name.replace(' ', '_').replace(',', '').replace('%', 'percent').replace('!=', 'not')}"
    if backend == "triton":
        from attnfuzz.kernels.triton.varlen import TritonVarlen

        return TritonVarlen(name=name, device_code=functools.partial(planted_copy, TRITON, fault.triton))
    from attnfuzz.kernels.tilelang.varlen import TileLangVarlen

    return TileLangVarlen(name=name, device_code=functools.partial(planted_copy, TILELANG, fault.tilelang))
