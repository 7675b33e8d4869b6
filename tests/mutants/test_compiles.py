"""Planted bugs compile for a GPU, where a campaign on one would else find its own planting; no GPU is needed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.mutant_code import of_device, said

from attnfuzz.kernels import registry

SELDOM = {"BWD-10", "LSE-18", "RAC-16"}
"""Bugs in code that only Triton's compiler looks at: names of a loop, and conditions of constants."""
_PARTS = 8
"""Compiles of all mutants are spread over several tests."""


def refused(folder: Path, *ids: str) -> dict[str, list[str]]:
    said_of = said(folder, "errors", *ids)
    assert set(said_of) == set(ids)
    return {id_: each for id_, each in said_of.items() if each}


def skip_without(kernel: str) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if reason := registry.get(kernel).cannot_lower():  # type: ignore[attr-defined]
        pytest.skip(reason)


@pytest.mark.slow
def test_bugs_that_an_interpreter_takes_compile_too(tmp_path: Path) -> None:
    skip_without("triton.flex")
    assert refused(tmp_path, *SELDOM) == {}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(_PARTS))
def test_every_bug_of_a_triton_kernel_compiles(part: int, tmp_path: Path) -> None:
    skip_without("triton.flex")
    assert refused(tmp_path, *[each.id for each in of_device("triton")[part::_PARTS]]) == {}


@pytest.mark.slow
def test_a_sum_without_its_last_lane_compiles(tmp_path: Path) -> None:
    skip_without("tilelang.gqa.atomic")
    assert refused(tmp_path, "CMP-09-dense") == {}
