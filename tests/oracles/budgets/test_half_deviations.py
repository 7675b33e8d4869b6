"""Declared roundings to half precision: of products that give Delta, of O and LSE of splits of the keys, and of scaled K; and
weights of splits that are made from their LSE.

A kernel that rounds them fails unless it declares that; with the declaration it passes, and faults beside them are still found.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Container, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.emulated.whole import WIDE, Emulated

from attnfuzz.harness.judge.truth import truth
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Deviations
from attnfuzz.kernels.problem import Dtype, Needs, OutputName, Problem
from attnfuzz.oracles.budgets.bounds import budgets
from attnfuzz.strategies.case import PATTERNS, Case, Check, Pattern, Recipe

KEYS = Deviations(half_scaled_k=True)
PRODUCTS, PARTIALS = Deviations(half_delta_products=True), Deviations(half_partial_o=True)
SPLIT_LSE = Deviations(half_split_lse=True)
DECLARED = {
    "k scaled in half": KEYS,
    "delta products in half": PRODUCTS,
    "partial o in half, splits of 16": PARTIALS,
    "partial o in half, splits of 50": PARTIALS,
    "split lse in half, splits of 16": SPLIT_LSE,
    "split lse in half, splits of 50": SPLIT_LSE,
}
PROBLEMS = {
    "ragged": Problem(seqlens_q=(60, 5), seqlens_k=(100, 5), heads=4, kv_heads=2, dim_qk=64, dim_v=64, causal="bottom_right"),
    "long": Problem(seqlens_q=(40,), seqlens_k=(400,), heads=2, kv_heads=1, dim_qk=32, dim_v=32, needs=Needs(dlse=True)),
}
OF: dict[str, set[str]] = {
    "k scaled in half": {"dq", "dk", "dv"},
    "delta products in half": {"dq", "dk"},
    "partial o in half, splits of 16": {"o", "dq", "dk"},
    "partial o in half, splits of 50": {"o", "dq", "dk"},
    "split lse in half, splits of 16": {"o", "lse", "dq", "dk", "dv"},
    "split lse in half, splits of 50": {"o", "lse", "dq", "dk", "dv"},
}
RELATIONS: tuple[Check, ...] = ("repeated_heads", "scaled_values", "constant_v", "split_keys", "permuted_keys")
FEW = ("outlier", "near_overflow", "subnormal", "onehot")
"""Patterns that are tried each time."""
HALF: tuple[Dtype, ...] = ("float16", "bfloat16")


def in_turn(first: Sequence[Any], second: Sequence[Any], few: Container[Any] | None = None) -> list[Any]:
    """All combinations of two parameters with a dtype of two bytes. Every run tries one of the dtypes with each, in turn.

    Combinations whose second parameter is not among `few` are slow with both.
    """
    numbered = itertools.product(enumerate(first), enumerate(second), enumerate(HALF))
    return [
        pytest.param(one, two, dtype, marks=() if (i + j + k) % 2 == 0 and (few is None or two in few) else pytest.mark.slow)
        for (i, one), (j, two), (k, dtype) in numbered
    ]


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def failing(
    faults: set[str],
    deviations: Deviations,
    problem: Problem,
    pattern: Pattern = "normal",
    *,
    check: Check = "oracle",
    seed: int = 1,
    recipe: Recipe | None = None,
) -> set[tuple[str, OutputName | None]]:
    """Kind and output of what fails for a kernel with `faults`, some of them declared."""
    kernel = Emulated(faults=frozenset(faults), capabilities=replace(WIDE, deviations=deviations))
    registry.register(kernel)
    recipe, config = recipe or Recipe(pattern=pattern, seed=seed), Config(tile_m=32, tile_n=32)
    case = Case(kernel=kernel.name, problem=problem, recipe=recipe, config=config, check=check)
    return {(each.kind, each.output) for each in run_trial(case, "cpu").failures}


@functools.cache
def failing_plainly(
    problem: Problem, pattern: Pattern = "normal", *, check: Check = "oracle"
) -> set[tuple[str, OutputName | None]]:
    """What fails for a kernel without any of those roundings: the same for all of them."""
    return failing(set(), Deviations(), problem, pattern, check=check)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("fault", DECLARED)
def test_it_fails_if_it_is_not_declared_and_passes_if_it_is(fault: str, problem: str, dtype: Dtype) -> None:
    case = replace(PROBLEMS[problem], dtype=dtype)
    wrong = failing({fault}, Deviations(), case)
    # Of many keys without a mask, the roundings of dS hide those of Delta.
    assert wrong or (fault, problem) == ("delta products in half", "long")
    assert {output for _, output in wrong} <= OF[fault]
    assert failing({fault}, DECLARED[fault], case) == set()


@pytest.mark.parametrize(("fault", "pattern", "dtype"), in_turn([*DECLARED], PATTERNS, FEW))
def test_every_pattern_of_values_passes_if_it_is_declared(fault: str, pattern: Pattern, dtype: Dtype) -> None:
    for problem in PROBLEMS.values():
        problem = replace(problem, dtype=dtype)
        assert failing({fault}, DECLARED[fault], problem, pattern) <= failing_plainly(problem, pattern)


@pytest.mark.parametrize(("fault", "check", "dtype"), in_turn([*DECLARED], RELATIONS))
def test_relations_between_launches_hold(fault: str, check: Check, dtype: Dtype) -> None:
    for problem in PROBLEMS.values():
        plain = replace(problem, dtype=dtype, causal=None, needs=Needs())
        assert failing({fault}, DECLARED[fault], plain, check=check) <= failing_plainly(plain, check=check)


WEIGHTS = Deviations(split_lse_weights=True)
FAR = Problem(seqlens_q=(19,), seqlens_k=(185,), dim_qk=64, dim_v=64, packing="dense", softmax_scale=1.0)


@pytest.mark.parametrize("size", [128, 40])
@pytest.mark.parametrize(("dtype", "q_scale"), [("float16", 4.0), ("float32", 2.0)])
def test_weights_from_lse_fail_far_from_zero_if_they_are_not_declared(dtype: Dtype, q_scale: float, size: int) -> None:
    """Scores of -50,000 to -100,000: float32 numbers are 0.004 to 0.008 apart there, and LSE moves O by as much."""
    splits = f"splits weighted by lse, splits of {size}"

    def found(faults: set[str], deviations: Deviations, q_scale: float = q_scale) -> set[tuple[str, OutputName | None]]:
        recipe = Recipe(pattern="negative", q_scale=q_scale, k_scale=8.0)
        return failing(faults, deviations, replace(FAR, dtype=dtype), recipe=recipe)

    assert ("mismatch", "o") in found({splits}, Deviations())
    assert not found({splits}, WEIGHTS)
    assert not found(set(), Deviations())
    assert found({splits, "last key dropped"}, WEIGHTS, 2.0**-4)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("before", [Deviations(), Deviations(l_from_rounded_p=True)])
@pytest.mark.parametrize("q_scale", [2.0**-4, 4.0])
def test_weights_from_lse_widen_o_by_that_of_lse_and_delta(q_scale: float, before: Deviations, dtype: Dtype) -> None:
    inputs = materialise(replace(FAR, dtype=dtype), Recipe(pattern="negative", q_scale=q_scale, k_scale=8.0), "cpu")
    plain, declared = (budgets(inputs, each, "cpu", ties=False) for each in (before, replace(before, split_lse_weights=True)))
    assert torch.equal(declared.lse, plain.lse)
    more = {name: declared.outputs[name].allowed - plain.outputs[name].allowed for name in ("o", "dq", "dk", "dv")}
    assert {name for name, each in more.items() if bool((each > 0).any())} == {"o", "dq", "dk"}
    expected = truth(inputs, Deviations(), "cpu")
    of_lse = expected["o"].expected.abs() * 3 * 2.0**-24 * (expected["lse"].expected.abs() + 16)[..., None]
    torch.testing.assert_close(more["o"], of_lse, rtol=1e-4, atol=1e-9)


FAULTS = [
    ("k scaled in half", "delta missing"),
    ("k scaled in half", "dq scale 1 %"),
    ("k scaled in half", "group not summed"),
    ("delta products in half", "delta missing"),
    ("delta products in half", "dq scale 1 %"),
    ("delta products in half", "group not summed"),
    ("partial o in half, splits of 50", "scale 1 %"),
    ("partial o in half, splits of 50", "last key dropped"),
    ("partial o in half, splits of 50", "mask off by one"),
    ("partial o in half, splits of 50", "a split's weight 1 %"),
    ("split lse in half, splits of 50", "scale 1 %"),
    ("split lse in half, splits of 50", "last key dropped"),
    ("split lse in half, splits of 50", "mask off by one"),
    ("split lse in half, splits of 50", "group not summed"),
]


@pytest.mark.parametrize(
    ("own", "fault", "dtype"),
    [
        # The second is found in float16 alone.
        pytest.param(*each, dtype, marks=() if (number + turn) % 2 else pytest.mark.slow)
        for number, each in enumerate(FAULTS)
        for turn, dtype in enumerate(HALF)
    ],
)
def test_a_fault_beside_it_is_still_found(own: str, fault: str, dtype: Dtype) -> None:
    if (own, fault, dtype) == ("k scaled in half", "dq scale 1 %", "bfloat16"):
        pytest.skip("within what rows share of the roundings of K to bfloat16, which is not random")
    problem = replace(PROBLEMS["ragged"], dtype=dtype)
    assert failing({own}, DECLARED[own], problem) == set()
    assert failing({own, fault}, DECLARED[own], problem)


@pytest.mark.parametrize("ties", [False, True])
def test_each_widens_its_own_outputs_alone_and_nothing_in_float32(ties: bool) -> None:
    for dtype in (*HALF, "float32"):
        inputs = materialise(replace(PROBLEMS["ragged"], dtype=dtype), Recipe(), "cpu")
        plain = budgets(inputs, Deviations(), "cpu", ties=ties)
        every = {"o", "dq", "dk", "dv"}
        widened = ((PRODUCTS, {"dq", "dk"}), (PARTIALS, {"o", "dq", "dk"}), (KEYS, {"dq", "dk", "dv"}), (SPLIT_LSE, every))
        for deviations, wider in widened:
            declared = budgets(inputs, deviations, "cpu", ties=ties)
            assert torch.equal(declared.lse, plain.lse) == (deviations is not SPLIT_LSE or dtype == "float32")
            for name in ("o", "dq", "dk", "dv"):
                more = declared.outputs[name].allowed - plain.outputs[name].allowed
                # Where the error of LSE hides O's own rounding, its expected size counts in D, which may be less than it is.
                least = -0.05 if (deviations, name) == (SPLIT_LSE, "dq") else 0.0
                assert bool((more >= least * plain.outputs[name].allowed).all())
                assert bool((more > 0).any()) == (name in wider and dtype != "float32")


def test_a_product_that_overflows_leaves_its_row_and_the_keys_unjudged() -> None:
    problem = Problem(seqlens_q=(3, 3), seqlens_k=(3, 3), dim_qk=16, dim_v=16, causal="bottom_right")
    inputs = materialise(problem, Recipe(), "cpu")
    d_o, v = torch.zeros_like(inputs.d_o), torch.ones_like(inputs.v)
    d_o[1], v[:2] = 300.0, 300.0
    allowed = {name: each.allowed for name, each in truth(dataclasses.replace(inputs, d_o=d_o, v=v), PRODUCTS, "cpu").items()}
    endless = {name: allowed[name].isinf().all(-1)[0].tolist() for name in ("dq", "dk", "dv")}
    assert endless["dq"] == [False, True, False, False, False, False]
    assert endless["dk"] == [True, True, True, False, False, False]
    assert not any(endless["dv"])
    plain = truth(dataclasses.replace(inputs, d_o=d_o, v=v), Deviations(), "cpu")
    assert not any(bool(plain[name].allowed.isinf().any()) for name in ("dq", "dk", "dv"))
