"""Each planted fault is found within 200 cases and shrunk to at most 2 sequences, on the CPU or on a GPU if there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.faults import FAULTS, Fault, faulty
from support.runs import row_of
from support.tilelang_faults import DENSE_FAULTS, RAGGED_FAULTS, TileLangFault, faulty_tilelang

from attnfuzz.kernels.faults import device as on_device
from attnfuzz.kernels.faults.planted import planted_source

pytestmark = pytest.mark.any_device


# A quarter of them always, another one in each of the two, the others when asked for: most of the time is compilers'.
@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        pytest.param(
            backend, fault, id=f"{backend}-{fault.name}", marks=[pytest.mark.slow] * (number % 4 != (backend == "tilelang"))
        )
        for backend in ("triton", "tilelang")
        for number, fault in enumerate(FAULTS)
    ],
)
def test_the_fault_is_found_and_shrunk(backend: str, fault: Fault, tmp_path: Path, record_property) -> None:
    kernel = faulty(backend, fault)
    record_property("fault", row_of(kernel, backend, fault.name, tmp_path, causal=fault.causal, races=fault.races))


@pytest.mark.slow
@pytest.mark.parametrize("fault", DENSE_FAULTS, ids=lambda fault: fault.name)
def test_the_fault_of_a_dense_kernel_is_found_and_shrunk(fault: TileLangFault, tmp_path: Path, record_property) -> None:
    kernel = faulty_tilelang(fault, ragged=False)
    record_property("fault", row_of(kernel, "dense", fault.name, tmp_path, causal=fault.causal, ahead=fault.ahead))


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=[pytest.mark.slow] * each.slow) for each in RAGGED_FAULTS],
    ids=lambda fault: fault.name,
)
def test_the_fault_of_a_ragged_kernel_is_found_and_shrunk(fault: TileLangFault, tmp_path: Path, record_property) -> None:
    kernel = faulty_tilelang(fault, ragged=True)
    record_property(
        "fault", row_of(kernel, "ragged", fault.name, tmp_path, causal=fault.causal, ahead=fault.ahead, races=fault.races)
    )


@pytest.mark.parametrize("fault", on_device.FAULTS, ids=lambda fault: fault.slug)
def test_a_fault_that_only_a_gpu_shows_can_still_be_planted(fault: on_device.DeviceFault) -> None:
    for backend, edits in (("triton", fault.triton), ("tilelang", fault.tilelang)):
        _, source = planted_source(f"attnfuzz.kernels.{backend}.varlen_device", edits)
        compile(source, backend, "exec")
