"""The bank of mutants: each can still be planted, its direct Case shows it, and the kernel without it passes that Case."""

from __future__ import annotations

import functools

import pytest
from support.mutants import MODULES, Mutant, kernel_of, mutants

from attnfuzz.harness.core import environment
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.faults.planted import planted_source
from attnfuzz.strategies.case import case_from_json

EACH = pytest.mark.parametrize("mutant", mutants().values(), ids=lambda each: each.id)


@EACH
def test_each_patch_fits_its_kernel(mutant: Mutant) -> None:
    assert mutant.patches
    for part, module in MODULES[mutant.kernel].items():
        file, source = planted_source(module, mutant.edits(part))
        compile(source, file, "exec")
    assert {each.part for each in mutant.patches} <= MODULES[mutant.kernel].keys()


@functools.cache
def of_the_right_kernel(case: str) -> Verdict:
    return run_trial(case_from_json(case), "cpu")


# Cases of several blocks take a second each: those few always that no other test has.
ALWAYS = {"ADD-01", "MSK-19", "LSE-18", "STR-10"}
SOME = [
    pytest.param(each, id=each.id, marks=[pytest.mark.slow] * (each.kernel == "triton.flex" and each.id not in ALWAYS))
    for each in mutants().values()
]


@pytest.mark.interpreted
@pytest.mark.parametrize("mutant", SOME)
def test_its_direct_case_shows_it(mutant: Mutant) -> None:
    pytest.importorskip("triton")
    environment.prepare("cpu")
    kernel = registry.register(kernel_of(mutant))
    try:
        verdict = run_trial(mutant.direct_case(kernel.name), "cpu")
    finally:
        registry.unregister(kernel.name)
    assert {each.kind for each in verdict.failures} == set(mutant.kinds)
    assert {each.output for each in verdict.failures} >= set(mutant.outputs)
    right = of_the_right_kernel(mutant.direct_case(mutant.kernel).canonical())
    assert right.status == "pass", right.failures
