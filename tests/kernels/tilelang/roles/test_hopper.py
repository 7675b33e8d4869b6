"""Roles that TileLang makes for Hopper: waits that the device code of the dense kernels must have, left out one at a time."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("tilelang")
torch = pytest.importorskip("torch")

from attnfuzz.kernels.faults.planted import Edit, planted_copy  # noqa: E402
from attnfuzz.kernels.support.protocol import ProtocolFault  # noqa: E402
from attnfuzz.kernels.tilelang.roles import lowering  # noqa: E402
from attnfuzz.kernels.tilelang.roles.executor import executable  # noqa: E402
from attnfuzz.kernels.tilelang.roles.machine import Machine  # noqa: E402
from attnfuzz.kernels.tilelang.roles.steps import BlockProgram  # noqa: E402
from attnfuzz.kernels.tilelang.roles.trying import first_fault  # noqa: E402
from attnfuzz.strategies.draw import draw_values  # noqa: E402
from attnfuzz.strategies.schedules import SCHEDULES  # noqa: E402

MODULE = "attnfuzz.kernels.tilelang.dense_device"
OPTIONS = {
    "dim_qk": 32,
    "dim_v": 32,
    "causal": False,
    "dtype": "float16",
    "tile_m": 64,
    "tile_n": 64,
    "threads": 128,
    "stages": 2,
}
READER, COPIER = "compute threads 128-255", "DMA threads 0-31"
FAULTS = {
    "the second product is not waited for": (
        Edit("                if ahead:\n                    T.wait_wgmma(0)\n", "                if ahead:\n"),
        ("early-read", READER, "", 0, 0),
    ),
    "K is released while its product runs": (
        Edit("last_read = q_tile[0, 0] + k_tile[0, 0] + v_last[0, 0]", "last_read = q_tile[0, 0] + v_last[0, 0]"),
        ("early-overwrite", COPIER),
    ),
}


def forward_block(*edits: Edit) -> BlockProgram:
    """A block of dense_forward with four tiles of keys."""
    module = planted_copy(MODULE, edits)
    q, k = (torch.zeros((1, rows, 1, 32), dtype=torch.float16) for rows in (64, 256))
    function = executable(module.forward(**OPTIONS, strided=False), {"tl.force_let_inline": True})
    (program,) = function.programs((q, k, k, 1, 0, 1.0, q, torch.zeros((1, 1, 64))))
    return program


def test_the_kernel_itself_is_clean() -> None:
    program = forward_block()
    assert [role.name for role in program.roles] == [COPIER, READER]
    assert first_fault(program, 100, 0) is None


@pytest.mark.parametrize("name", FAULTS)
def test_a_wait_that_is_missing_is_found(name: str) -> None:
    edit, expected = FAULTS[name]
    shown = first_fault(forward_block(edit), 1, 0)
    assert shown is not None
    found = shown.fault
    assert (found.kind, found.role, found.barrier, found.stage, found.iteration)[: len(expected)] == expected


def test_warps_that_wait_and_copy_nothing_may_wait_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The roles as TileLang makes them: nothing keeps three warps of four within one phase of the barriers."""
    monkeypatch.setattr(lowering, "copying_warp_waits", contextlib.nullcontext)
    program = forward_block()
    assert [role.name for role in program.roles] == [COPIER, "waiting threads 32-127", READER]
    shown = first_fault(program, 1 + len(program.roles), 0)
    assert shown is not None
    assert (shown.fault.kind, shown.fault.role) == ("deadlock", "waiting threads 32-127")
    assert shown.schedule == (-2,)


def test_drawn_schedules_show_it_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "copying_warp_waits", contextlib.nullcontext)
    program, found, drawn = forward_block(), 0, list[tuple[int, ...]]()
    draw_values(SCHEDULES, drawn.append, seed=3, examples=100)
    for schedule in drawn:
        try:
            Machine(program).run(schedule)
        except ProtocolFault as fault:
            found += fault.kind == "deadlock"
    assert found >= 8
