"""Each planted fault of a block-sparse kernel is wrong against float64 where it must be, and triton.flex is right there."""

from __future__ import annotations

import pytest
from support.flex import LSE_TOLERANCE, TOLERANCE, assert_right, errors
from support.mutants import Mutant, kernel_of, mutants
from support.triton_mode import marks

from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.problem import OUTPUT_NAMES
from attnfuzz.kernels.triton.flex import KERNEL

pytestmark = marks()

OFTEN = {"FLX-30", "FLX-03", "FLX-31", "FLX-11", "LSE-14-flex", "LSE-12", "BWD-31", "PRC-05-flex", "FLX-36"}
"""What such kernels have got wrong before; the others are tried by `-m slow`."""


def comparable(mutant: Mutant) -> bool:
    """Whether outputs are wrong, and the kernel's are within tolerances: those are too narrow for scores of -142.

    They are relative to the largest value, which a query that sees one key does not have: its dQ and dK are 0.
    """
    case = mutant.direct_case(mutant.kernel)
    one_key = case.problem.causal == "top_left" and max(case.problem.seqlens_q) == 1 and not case.problem.sinks
    plain = case.recipe.pattern == "normal" and not one_key
    return mutant.kernel == "triton.flex" and set(mutant.kinds) <= {"mismatch", "nonfinite"} and plain


FAULTS = [each for each in mutants().values() if comparable(each)]


@pytest.mark.parametrize(
    "mutant", [pytest.param(each, id=each.id, marks=[pytest.mark.slow] * (each.id not in OFTEN)) for each in FAULTS]
)
def test_the_fault_is_wrong_and_the_kernel_is_right(mutant: Mutant) -> None:
    """By another reference than that of the oracles: torch's autograd, and tolerances in place of budgets."""
    case = mutant.direct_case(KERNEL.name)
    inputs, config = materialise(case.problem, case.recipe, "cpu"), case.config or KERNEL.configs(case.problem)[0]
    assert_right(KERNEL, inputs, config)
    actual = errors(kernel_of(mutant), inputs, config)
    tolerances = {**dict.fromkeys(actual, TOLERANCE[case.problem.dtype]), "lse": LSE_TOLERANCE}
    wrong = {name for name, error in actual.items() if error > 3 * tolerances[name]}
    if case.problem.dtype == "float32":
        assert wrong == set(mutant.outputs), actual
    else:
        # Budgets are narrower than tolerances.
        assert wrong, actual
        assert wrong <= set(mutant.outputs), actual


def test_those_are_there() -> None:
    assert {each.id for each in FAULTS} >= OFTEN
    assert {name for each in FAULTS for name in each.outputs} > set(OUTPUT_NAMES), "some are of captured tensors"
