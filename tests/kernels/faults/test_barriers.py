"""Each planted fault of barriers is found under few schedules, where it is; the kernel itself is clean."""

from __future__ import annotations

import pytest

pytest.importorskip("tilelang")
torch = pytest.importorskip("torch")

from attnfuzz.kernels.errors import BadArgument  # noqa: E402
from attnfuzz.kernels.faults import barriers  # noqa: E402
from attnfuzz.kernels.faults.barriers import FAULTS, PlantedBarrier, faulty_module  # noqa: E402
from attnfuzz.kernels.faults.planted import Edit, planted_copy  # noqa: E402
from attnfuzz.kernels.tilelang import sm100_forward_device  # noqa: E402
from attnfuzz.kernels.tilelang.roles.executor import executable  # noqa: E402
from attnfuzz.kernels.tilelang.roles.explore import explore  # noqa: E402
from attnfuzz.kernels.tilelang.roles.steps import BlockProgram  # noqa: E402
from attnfuzz.kernels.tilelang.roles.trying import first_fault  # noqa: E402


def block(module: object, n_k: int = 256) -> BlockProgram:
    """A block of forward_wasp with tiles of 64 keys."""
    make = getattr(module, "forward_wasp")  # noqa: B009 - a module made at run time
    func = make(dim_qk=32, dim_v=32, causal=False, dtype="float16", tile_m=128, tile_n=64, strided=False)
    q, k = (torch.zeros((1, rows, 1, 32), dtype=torch.float16) for rows in (128, n_k))
    (program,) = executable(func, {}).programs((q, k, k, 1, 0, 1.0, q, torch.zeros((1, 1, 128))))
    return program


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.slug)
def test_a_planted_fault_is_found_where_it_is(fault: PlantedBarrier) -> None:
    shown = first_fault(block(faulty_module(fault)), 20, 0)
    assert shown is not None
    found = shown.fault
    assert (found.kind, found.role, found.barrier) == (fault.kind, fault.role, fault.barrier)
    assert (found.stage, found.iteration) == (fault.stage, fault.iteration)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.slug)
def test_exploration_finds_it_too(fault: PlantedBarrier) -> None:
    done = explore(block(faulty_module(fault)), executions=100, states=1)
    assert done.fault is not None
    assert done.fault.kind == fault.kind


def test_the_kernel_itself_is_clean() -> None:
    program = block(sm100_forward_device, n_k=192)
    assert first_fault(program, 100, 0) is None
    done = explore(program)
    assert (done.fault, done.complete, done.census.complete, done.census.stuck) == (None, True, True, 0)


def test_a_commit_that_is_left_running_has_the_stage_of_its_barrier() -> None:
    wait = "for unused in T.serial(steps, steps + STAGES):"
    shown = first_fault(block(planted_copy(barriers.MODULE, [Edit(wait, wait.replace("STAGES", "1"))])), 1, 0)
    assert shown is not None
    found = shown.fault
    assert (found.kind, found.role, found.barrier) == ("left-running", "MMA threads 160-191", "v_free[1]")
    assert (found.stage, found.iteration) == (1, 4)


def test_an_edit_that_no_longer_fits_is_refused() -> None:
    fault = PlantedBarrier("x", "x", "deadlock", "", "", 0, 0, (Edit("no such text", ""),))
    with pytest.raises(BadArgument, match="adapt the fault to the source"):
        faulty_module(fault)
    assert sm100_forward_device.__name__ == barriers.MODULE
