"""Relations by generated kernels have the ratios of the plain functions: the C is compiled and run here in place of a GPU's."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from support.emulated.whole import WIDE, Emulated
from support.fused_c import Compiled, generated

from attnfuzz.harness.trial.checks.relations import _RELATIONS
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.contract import Deviations, Inputs, Outputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.oracles.relations import worst
from attnfuzz.oracles.relations.difference import Difference, Setup
from attnfuzz.strategies.case import Check, Recipe
from attnfuzz.strategies.relation_problems import related_problems

KERNEL = Emulated(capabilities=replace(WIDE, dims=((32, 24),)))
RAGGED = Problem(
    seqlens_q=(5, 0, 17, 3), seqlens_k=(9, 3, 21, 1), packing="ragged", heads=4, kv_heads=2, dim_qk=32, dim_v=24, slack_q=1,
)  # fmt: skip
"""Rows without keys, keys that no row sees (under a mask), and an empty sequence."""
DECLARED = {
    "plain": Deviations(),
    "partial sums, l from rounded P, base 2": Deviations(half_partials=True, l_from_rounded_p=True, lse_base2=True),
    "Delta of half products, partial O, LSE of splits": Deviations(
        half_delta_products=True, half_partial_o=True, half_split_lse=True
    ),
    "tf32x3": Deviations(tf32x3_on=("cpu",)),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("relations"))


def outputs(inputs: Inputs) -> Outputs:
    with torch.no_grad():
        o, lse = KERNEL.forward(inputs)
        dq, dk, dv = KERNEL.backward(inputs, o, lse)
    return Outputs(o=o, lse=lse, dq=dq, dk=dk, dv=dv)


@pytest.mark.parametrize("declared", DECLARED)
@pytest.mark.parametrize("causal", [None, "bottom_right"])
@pytest.mark.parametrize("check", [each for each in _RELATIONS if each != "huge_strides"])
def test_ratios_are_those_of_the_plain_functions(check: Check, causal: str | None, declared: str, compiled: Compiled) -> None:
    dtype = {"plain": "bfloat16", "tf32x3": "float32"}.get(declared, "float16")
    problem = replace(RAGGED, causal=causal, dtype=dtype)
    inputs = materialise(problem, Recipe(seed=3), "cpu")
    setup = Setup(inputs, related_problems(check, problem, 3), 3, "cpu", DECLARED[declared], ("o", "lse"))
    related = _RELATIONS[check](setup)
    launched = [outputs(each) for each in related.inputs]

    def compared() -> tuple[list[Difference], list[worst.Ratio]]:
        differences = list(related.differences(launched))
        return differences, worst.ratios(differences)

    plain, ratios = compared()
    assert any(each.value for each in ratios) or check in ("split_batch", "repeated_heads", "future_keys", "scaled_values")
    with generated(compiled):
        compiled.calls.clear()
        ours, values = compared()
        assert sum(compiled.calls.values()) > 10 or (check == "future_keys" and causal is None)
    for one, other in zip(ours, plain, strict=True):
        for name in ("expected", "allowed"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-9, atol=1e-40, equal_nan=True)
    assert [each.value for each in values] == pytest.approx([each.value for each in ratios], rel=1e-9)
