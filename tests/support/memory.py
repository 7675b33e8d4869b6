"""Faults of memory and of sequences of calls, planted in copies of the two varlen kernels: device code and host wrappers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.faults.planted import DEMO_FAULT, Edit, planted_copy
from attnfuzz.strategies.case import Check

TRITON, TILELANG = "attnfuzz.kernels.triton", "attnfuzz.kernels.tilelang"


@dataclass(frozen=True)
class MemoryFault:
    """One fault: the kinds of Failure that it may be found as, by which check, and how to plant it."""

    name: str
    backend: str
    kinds: tuple[str, ...]
    device: tuple[Edit, ...] = ()
    host: tuple[Edit, ...] = ()
    check: Check = "oracle"
    says: str = ""
    """What the message must tell."""
    dtype: str = "float16"
    checked: str = ""
    """The kind that the memory checker of interpreted kernels finds it as, if it does."""
    cpu_only: bool = False
    """Its code cannot be compiled for a GPU, or is guarded there."""


def _after(anchor: str, code: str, times: int = 1) -> Edit:
    return Edit(anchor, anchor + code, times=times)


def _before(anchor: str, code: str, times: int = 1) -> Edit:
    return Edit(anchor, code + anchor, times=times)


_KEPT = _before("def _shared_bytes(", "_KEPT: dict[Any, Any] = {}\n\n\n")
_TURNED = """    turns = _turns()
    for step in range(0, end_n, TILE_N):
        start_n = (end_n - 1) // TILE_N * TILE_N - step if turns else step
"""
_LOOP = """    acc = tl.zeros([TILE_M, PAD_QK], tl.float32)
    end_n = seqlen_k
    if CAUSAL:
        end_n = tl.minimum(seqlen_k, start_m + TILE_M + _diagonal(seqlen_q, seqlen_k))
"""
RACING = (
    Edit(_LOOP + "    for start_n in range(0, end_n, TILE_N):\n", _LOOP + _TURNED),
    _before(
        "@triton.jit\ndef _backward_queries(",
        "_TURN = [0]\n\n\ndef _turns():\n    _TURN[0] += 1\n    return _TURN[0] % 3 == 0\n\n\n",
    ),
)
"""dQ is summed over the key tiles in the one order or the other, by what happened before: what racing atomics do."""

FAULTS = (
    MemoryFault(
        "read past cu_seqlens[-1]",
        "triton",
        ("nonfinite",),
        checked="out-of-bounds",
        device=(
            Edit(
                "    begin_k, seqlen_k = _sequence(cu_seqlens_k, seq)\n    head = tl.program_id(1)\n",
                "    begin_k, seqlen_k = _sequence(cu_seqlens_k, seq)\n"
                "    seqlen_k += (seq == tl.num_programs(2) - 1).to(tl.int32)\n    head = tl.program_id(1)\n",
            ),
        ),
    ),
    MemoryFault(
        "V beyond the last key read, times P = 0",
        "triton",
        ("nonfinite",),
        checked="out-of-bounds",
        device=(
            Edit(
                "mask=_inside(cols, seqlen_k, dims_v, DIM_V, PAD_V)",
                "mask=_inside(cols, seqlen_k + TILE_N, dims_v, DIM_V, PAD_V)",
                times=2,
            ),
        ),
    ),
    MemoryFault(
        "one element past O written",
        "triton",
        ("guard",),
        checked="out-of-bounds",
        device=(_before("    lse_offsets = head.to(", "    tl.store(o + lse_stride * heads * DIM_V, 0.0)\n"),),
        says="written past the end of a tensor of the kernel's own",
    ),
    MemoryFault(
        "one element past O written",
        "tilelang",
        ("guard",),
        device=(
            _before(
                "                for i in T.Parallel(tile_m):\n                    if row_0 + i < n_q:\n"
                "                        LSE[",
                "                O[total_q - 1, heads - 1, dim_v] = T.cast(0, dtype)\n",
            ),
        ),
        says="written past the end of a tensor of the kernel's own",
        cpu_only=True,
    ),
    MemoryFault(
        "one element in front of dK written",
        "triton",
        ("guard",),
        checked="out-of-bounds",
        device=(_before("    tl.store(dk + dk_offsets", "    tl.store(dk - 1, 0.0)\n"),),
        says="written before the start of a tensor of the kernel's own",
    ),
    MemoryFault(
        "dK, dV of an empty sequence unwritten", "triton", ("unwritten",), device=(DEMO_FAULT,), says="were never written"
    ),
    MemoryFault(
        "last row of O and LSE unwritten",
        "tilelang",
        ("unwritten",),
        device=(
            Edit(
                "for i, d in T.Parallel(tile_m, dim_v):\n                    if row_0 + i < n_q:\n                        O[",
                "for i, d in T.Parallel(tile_m, dim_v):\n                    if row_0 + i < n_q - 1:\n                        O[",
            ),
        ),
        says="were never written",
    ),
    MemoryFault(
        "Delta added to a workspace assumed zero",
        "triton",
        ("unwritten",),
        checked="uninitialised",
        device=(
            Edit(
                "tl.store(delta + rows, tl.sum(o_tile * do_tile, 1), mask=rows < rows_total)",
                "old = tl.load(delta + rows, mask=rows < rows_total, other=0.0)\n"
                "    tl.store(delta + rows, old + tl.sum(o_tile * do_tile, 1), mask=rows < rows_total)",
            ),
        ),
        says="come from memory that was never written",
    ),
    MemoryFault(
        "gradients added to a workspace assumed zero",
        "tilelang",
        ("unwritten",),
        host=(Edit("(torch.zeros_like(x, dtype", "(torch.empty_like(x, dtype"),),
    ),
    MemoryFault(
        "scale of the first call kept",
        "triton",
        ("mismatch",),
        host=(Edit("float(problem.scale),", 'self.__dict__.setdefault("_scale", float(problem.scale)),', times=2),),
        check="other_scale",
    ),
    MemoryFault(
        "mask of the first call kept",
        "triton",
        ("mismatch", "nonfinite"),
        host=(Edit("{problem.dim_v} {problem.causal} {problem.dtype}", "{problem.dim_v} {problem.dtype}"),),
        check="other_mask",
    ),
    MemoryFault(
        "lengths of the first call kept",
        "triton",
        ("mismatch", "nonfinite", "unwritten"),
        checked="uninitialised",
        host=(
            Edit(
                "grid = (_tiles(inputs.max_seqlen_q, self._tile_m), problem.heads, problem.batch)",
                'rows_of_tiles = self.__dict__.setdefault("_rows", _tiles(inputs.max_seqlen_q, self._tile_m))\n'
                "        grid = (rows_of_tiles, problem.heads, problem.batch)",
            ),
        ),
        check="other_shape",
    ),
    MemoryFault(
        "workspace not cleared between calls",
        "tilelang",
        ("nondeterministic", "mismatch"),
        host=(
            _KEPT,
            Edit(
                "dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))",
                "dq, dk, dv = (_KEPT.setdefault((n, x.shape), torch.zeros_like(x, dtype=torch.float32))"
                " for n, x in enumerate((q, k, v)))",
            ),
        ),
        check="twice",
    ),
    MemoryFault(
        "outputs of the first call returned again",
        "tilelang",
        ("guard",),
        host=(
            _KEPT,
            Edit(
                "lse = torch.empty((problem.heads, q.shape[0]), dtype=torch.float32, device=q.device)",
                "lse = _KEPT.setdefault(q.shape, torch.empty((problem.heads, q.shape[0]), dtype=torch.float32, device=q.device))",
            ),
        ),
        check="twice",
        says="lies in the memory of the first call's",
    ),
    MemoryFault(
        "dQ summed in another order each time",
        "triton",
        ("nondeterministic",),
        device=RACING,
        check="twice",
        says="differ between two equal calls (declared deterministic)",
        dtype="float32",
        cpu_only=True,
    ),
)


KEPT_WORKSPACE = MemoryFault(
    "workspace of the first lengths kept",
    "triton",
    ("guard",),
    host=(
        Edit(
            "delta = torch.empty((problem.total_q, problem.heads), dtype=torch.float32, device=inputs.q.device)",
            "made = torch.empty((problem.total_q, problem.heads), dtype=torch.float32, device=inputs.q.device)\n"
            '        delta = self.__dict__.setdefault("_kept_delta", made)',
        ),
    ),
    check="other_shape",
    says="a later call wrote where it may not",
)
"""Only a process's first calls show it: memory that earlier Trials have left is watched no more."""


def planted(fault: MemoryFault, **capabilities: Any) -> Kernel:
    """A copy of the backend's varlen kernel with `fault`, under a name of its own, declaring `capabilities` besides its own."""
    name = f"test.{fault.backend}.{''.join(c if c.isalnum() else '_' for c in fault.name)}"
    package = TRITON if fault.backend == "triton" else TILELANG
    host = planted_copy(f"{package}.varlen", fault.host)
    made = host.TritonVarlen if fault.backend == "triton" else host.TileLangVarlen
    arguments: dict[str, Any] = {"name": name}
    if fault.device:
        arguments["device_code"] = functools.partial(planted_copy, f"{package}.varlen_device", fault.device)
    kernel = made(**arguments)
    kernel.capabilities = replace(kernel.capabilities, **capabilities)
    found: Kernel = kernel
    return found
