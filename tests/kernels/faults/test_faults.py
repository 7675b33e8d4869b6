"""Each planted fault is found within 200 cases and shrunk to at most 2 sequences, on the CPU or on a GPU if there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import triton_mode
from support.mutants import Mutant, kernel_of, mutants
from support.runs import row_of

from attnfuzz.kernels.faults import device as on_device
from attnfuzz.kernels.faults.planted import planted_source

ALWAYS = {"MSK-30", "RAG-14", "LSE-14-tilelang"}
"""Some of each language; the others are tried by `-m slow`: most of the time is compilers'."""


def marks_of(mutant: Mutant) -> list[pytest.MarkDecorator]:
    """Block-sparse kernels of Triton are interpreted; all others run on a GPU where there is one."""
    where = triton_mode.marks() if mutant.kernel == "triton.flex" else [pytest.mark.any_device]
    return [*where, *[pytest.mark.slow] * (mutant.id not in ALWAYS)]


@pytest.mark.parametrize(
    "mutant", [pytest.param(each, id=each.id, marks=marks_of(each)) for each in mutants().values() if each.campaign]
)
def test_the_fault_is_found_and_shrunk(mutant: Mutant, tmp_path: Path, record_property) -> None:
    how = mutant.campaign
    assert how is not None
    row = row_of(kernel_of(mutant), mutant.kernel, mutant.id, tmp_path, causal=how.causal, ahead=how.ahead, races=how.races)
    record_property("fault", row)


def test_those_are_there() -> None:
    assert {each.id for each in mutants().values() if each.campaign} >= ALWAYS


@pytest.mark.any_device
@pytest.mark.parametrize("fault", on_device.FAULTS, ids=lambda fault: fault.slug)
def test_a_fault_that_only_a_gpu_shows_can_still_be_planted(fault: on_device.DeviceFault) -> None:
    for backend, edits in (("triton", fault.triton), ("tilelang", fault.tilelang)):
        _, source = planted_source(f"attnfuzz.kernels.{backend}.varlen_device", edits)
        compile(source, backend, "exec")
