"""Faults of the protocol among warp roles, planted in copies of sm100's forward_wasp: each is one edit of the device code."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Final

from attnfuzz.kernels.faults.planted import Edit, planted_copy
from attnfuzz.kernels.support.protocol import ProtocolKind

__all__ = ["FAULTS", "MODULE", "PlantedBarrier", "faulty_module"]

MODULE: Final = "attnfuzz.kernels.tilelang.sm100_forward_device"
SOFTMAX: Final = "compute threads 0-127"
COPIES: Final = "DMA threads 128-159"
PRODUCTS: Final = "MMA threads 160-191"


@dataclass(frozen=True, slots=True)
class PlantedBarrier:
    """One fault, and what must be reported: kind, role, barrier, stage and iteration."""

    slug: str
    title: str
    kind: ProtocolKind
    role: str
    barrier: str
    stage: int
    iteration: int
    edits: tuple[Edit, ...]


_PRIMED = "for stage in T.serial(STAGES):\n                        T.mbarrier_arrive(k_free[stage])"
_WAIT_S = "T.mbarrier_wait_parity(s_full[step % STAGES], (step // STAGES) % 2)"
_WAIT_K_FREE = "T.mbarrier_wait_parity(k_free[step % STAGES], (step // STAGES) % 2)"
_WAIT_LAST = "T.mbarrier_wait_parity(o_full, (steps - 1) % 2)"
_COPY_V = """T.tma_copy(
                        V[seq, step * tile_n : (step + 1) * tile_n, head // groups, 0:dim_v],
                        v_tile[step % STAGES, :, :],
                        barrier=v_full[step % STAGES],
                    )
                    T.mbarrier_arrive(v_full[step % STAGES])"""
_COPY_V_IN_HALVES = """T.tma_copy(
                        V[seq, step * tile_n : step * tile_n + tile_n // 2, head // groups, 0:dim_v],
                        v_tile[step % STAGES, 0 : tile_n // 2, :],
                        barrier=v_full[step % STAGES],
                    )
                    T.mbarrier_arrive(v_full[step % STAGES])
                    T.tma_copy(
                        V[seq, step * tile_n + tile_n // 2 : (step + 1) * tile_n, head // groups, 0:dim_v],
                        v_tile[step % STAGES, tile_n // 2 : tile_n, :],
                        barrier=v_full[step % STAGES],
                    )"""
_NOTHING = "T.sync_warp()"

FAULTS: Final = (
    PlantedBarrier(
        "priming", "only stage 0 is primed", "deadlock", COPIES, "k_free[1]", 1, 1,
        (Edit(_PRIMED, _PRIMED.replace("STAGES", "1")),),
    ),
    PlantedBarrier(
        "epilogue", "the epilogue does not wait for the second product", "early-read", SOFTMAX, "o_full", 0, 3,
        (Edit(_WAIT_LAST, _NOTHING),),
    ),
    PlantedBarrier(
        "phase", "the softmax waits for the wrong phase of S", "wrong-phase", SOFTMAX, "s_full[0]", 0, 0,
        (Edit(_WAIT_S, _WAIT_S.replace("(step // STAGES)", "(step // STAGES + 1)")),),
    ),
    PlantedBarrier(
        "reuse", "a stage of K is reused before its product has finished", "early-overwrite", COPIES, "k_free[0]", 0, 2,
        (Edit(_WAIT_K_FREE, _NOTHING),),
    ),
    PlantedBarrier(
        "arrival", "one softmax thread does not arrive when P is stored", "deadlock", PRODUCTS, "p_full", 0, 1,
        (Edit("T.mbarrier_arrive(p_full)", "if thread > 0:\n                        T.mbarrier_arrive(p_full)"),),
    ),
    PlantedBarrier(
        "commit", "S is read before its product has committed", "early-read", SOFTMAX, "s_full[0]", 0, 0,
        (Edit(_WAIT_S, _NOTHING),),
    ),
    PlantedBarrier(
        "bytes", "the bytes of half a tile of V are not counted when it arrives", "wrong-bytes", PRODUCTS, "v_full[0]", 0, 1,
        (Edit(_COPY_V, _COPY_V_IN_HALVES),),
    ),
)  # fmt: skip


def faulty_module(fault: PlantedBarrier) -> ModuleType:
    """Load the device code with the fault.

    Raises:
        BadArgument: an edit no longer fits the source.
    """
    return planted_copy(MODULE, fault.edits)
