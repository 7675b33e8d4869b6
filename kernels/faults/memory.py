"""Memory faults, planted in copies of triton.varlen for the memory checker: each is one edit of the device code."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.faults.planted import Edit, planted_copy
from attnfuzz.kernels.support.memory import MemoryKind

__all__ = ["FAULTS", "MODULE", "PlantedFault", "fault_kernel"]

MODULE: Final = "attnfuzz.kernels.triton.varlen_device"
_DELTA = "tl.store(delta + rows, tl.sum(o_tile * do_tile, 1), mask=rows < rows_total)"
_LSE = "tl.store(lse + lse_offsets, row_lse, mask=rows < seqlen_q)"
_DV = "tl.store(dv + dv_offsets, acc_dv.to(dv.dtype.element_ty), mask=v_inside)"


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """One fault: the Failure's kind that must be reported, and the statement that must be named."""

    slug: str
    title: str
    kind: MemoryKind | str
    edits: tuple[Edit, ...]
    line: str
    """The statement's first line."""


def _changed(slug: str, title: str, kind: MemoryKind | str, old: str, new: str) -> PlantedFault:
    """Make a fault in a statement of one line."""
    return PlantedFault(slug, title, kind, (Edit(old, new),), new)


FAULTS: Final = (
    PlantedFault(
        "load",
        "a load one element past the end of cu_seqlens",
        "out-of-bounds",
        (
            Edit(
                "end = tl.load(cu_seqlens + seq + 1)",
                "end = tl.load(cu_seqlens + seq + 1)\n    end += 0 * tl.load(cu_seqlens + seq + 2)",
            ),
        ),
        "end += 0 * tl.load(cu_seqlens + seq + 2)",
    ),
    _changed("store", "a store one element past the end of Delta", "out-of-bounds", _DELTA, _DELTA.replace("rows <", "rows <=")),
    PlantedFault(
        "view",
        "a load between the rows of a strided q",
        "outside-view",
        (
            Edit(
                "    k_offsets = _input_offsets(begin_k, cols, dims_qk, kv_head, kv_heads, k_steps, DIM_QK, STRIDED)\n"
                "    k_inside = ",
                "    if STRIDED:\n"
                "        tl.load(q + begin_q.to(tl.int64) * q_steps[0] + (heads - 1) * q_steps[1] + DIM_QK, seqlen_q > 1, 0.0)\n"
                "    k_offsets = _input_offsets(begin_k, cols, dims_qk, kv_head, kv_heads, k_steps, DIM_QK, STRIDED)\n"
                "    k_inside = ",
            ),
        ),
        "tl.load(q + begin_q.to(tl.int64) * q_steps[0] + (heads - 1) * q_steps[1] + DIM_QK, seqlen_q > 1, 0.0)",
    ),
    _changed(
        "duplicate",
        "rows clamped to the last one instead of masked",
        "duplicate-store",
        _LSE,
        "tl.store(lse + tl.minimum(lse_offsets, lse_offsets - rows + seqlen_q - 1), row_lse)",
    ),
    PlantedFault(
        "race",
        "tiles of Delta that overlap by one row",
        "race",
        (Edit("tl.program_id(0).to(tl.int64) * TILE_M", "tl.program_id(0).to(tl.int64) * (TILE_M - 1)"),),
        _DELTA,
    ),
    PlantedFault(
        "order",
        "Delta of the tile before read in the launch that writes it",
        "race",
        (
            Edit(
                f"    {_DELTA}",
                f"    tl.load(delta + rows - TILE_M, mask=(rows >= TILE_M) & (rows < rows_total), other=0.0)\n    {_DELTA}",
            ),
        ),
        "tl.load(delta + rows - TILE_M, mask=(rows >= TILE_M) & (rows < rows_total), other=0.0)",
    ),
    _changed(
        "unwritten",
        "dV of the last key of a sequence never written",
        "unwritten",
        _DV,
        _DV.replace("mask=v_inside", "mask=v_inside & (cols[:, None] < seqlen_k - 1)"),
    ),
    PlantedFault(
        "uninitialised",
        "Delta of the last row never written, and read",
        "uninitialised",
        (Edit(_DELTA, _DELTA.replace("rows < rows_total", "rows < rows_total - 1")),),
        "row_delta = tl.load(delta + (begin_q + rows).to(tl.int64) * heads + head, mask=inside, other=0.0)",
    ),
    _changed(
        "other",
        "a masked load of Delta without other=",
        "masked-load",
        "row_delta = tl.load(delta + (begin_q + rows).to(tl.int64) * heads + head, mask=inside, other=0.0)",
        "row_delta = tl.load(delta + (begin_q + rows).to(tl.int64) * heads + head, mask=inside)",
    ),
)


def fault_kernel(slug: str) -> Kernel | None:
    """Return the kernel called "fault.memory.<slug>", or None."""
    from attnfuzz.kernels.triton.varlen import TritonVarlen

    for fault in FAULTS:
        if fault.slug == slug:
            return TritonVarlen(name=f"fault.memory.{slug}", device_code=functools.partial(planted_copy, MODULE, fault.edits))
    return None
