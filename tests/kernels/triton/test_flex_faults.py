"""Each planted fault of a block-sparse kernel is wrong against float64 where it must be, and triton.flex is right there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.flex import LSE_TOLERANCE, TOLERANCE, assert_right, errors, inputs_of
from support.flex_faults import DEVICE, FAULTS, MASKS, FlexFault, faulty
from support.runs import row_of
from support.triton_mode import marks

from attnfuzz.kernels.triton.flex import KERNEL

pytestmark = marks()


OFTEN = (
    "transposed lists of a sliced mask",
    "full blocks past the real length",
    "score_mod called with index 0 in the backward",
    "forward lists used in the backward",
    "LSE in base 2",
    "the -inf guard gone",
    "dLSE ignored",
    "prescale undeclared",
    "lists of the group's first head in dK and dV",
)
"""What such kernels have got wrong before; the others are tried by `-m slow`."""


@pytest.mark.parametrize(
    "fault", [pytest.param(each, id=each.name, marks=[] if each.name in OFTEN else [pytest.mark.slow]) for each in FAULTS]
)
def test_the_fault_is_wrong_and_the_kernel_is_right(fault: FlexFault) -> None:
    inputs = inputs_of(fault.problem, **fault.recipe)
    config = next(each for each in KERNEL.configs(fault.problem) if each["split"] == fault.split)
    assert_right(KERNEL, inputs, config)
    actual = errors(faulty(fault), inputs, config)
    tolerances = {**dict.fromkeys(actual, TOLERANCE[fault.problem.dtype]), "lse": LSE_TOLERANCE}
    wrong = {name for name, error in actual.items() if error > 3 * tolerances[name]}
    assert fault.shows <= wrong, actual
    if fault.only:
        assert fault.shows == wrong, actual


def test_those_are_there() -> None:
    assert set(OFTEN) <= {each.name for each in FAULTS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_can_still_be_planted(fault: FlexFault) -> None:
    for module, edits in ((DEVICE, fault.device), (MASKS, fault.masks)):
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        assert [source.count(edit.old) for edit in edits] == [edit.times for edit in edits]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [each for each in FAULTS if not each.rare], ids=lambda fault: fault.name)
def test_the_harness_finds_it(fault: FlexFault, tmp_path: Path) -> None:
    assert row_of(faulty(fault), "triton.flex", fault.name, tmp_path, causal=False)
