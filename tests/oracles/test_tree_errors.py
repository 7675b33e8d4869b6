"""Errors of score_mods that hide keys by adding a large number: a hidden key has P = 0, and all else is judged as without it."""

from __future__ import annotations

import pytest
import torch
from support.emulated.kernel import KERNEL as EMULATED
from support.flex import dense
from support.mutants import kernel_of, mutants

from attnfuzz.harness.core import environment
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.expressions.tree import KV, Expression, Q, S, where
from attnfuzz.kernels.problem import Dtype
from attnfuzz.oracles.tree_errors import evaluated
from attnfuzz.strategies.case import Case

HIDING = (-65504.0, -1e9, -3e38)


def of(tree: Expression, score: list[float], error: float) -> tuple[list[float], list[float]]:
    """The values and errors of a tree at query 0 and keys 0, 1, ..., whose scores may be off by `error`."""
    s = torch.tensor(score, dtype=torch.float64)
    leaves = {"score": s, "q_idx": torch.zeros(1, dtype=torch.int64), "kv_idx": torch.arange(len(score))}
    value, off = evaluated(tree, leaves, {}, torch.full_like(s, error))
    return value.tolist(), off.tolist()


@pytest.mark.parametrize("by", HIDING)
def test_a_choice_has_the_error_of_the_side_that_it_takes(by: float) -> None:
    tree = where(KV <= Q, S, S + by)
    values, errors = of(tree, [1.5, 2.5], 1e-6)
    assert values == [1.5, 2.5 + by]
    assert errors[0] == 1e-6
    assert errors[1] > abs(by) * 1e-8


def test_a_choice_that_errors_may_flip_has_both_errors_and_the_difference() -> None:
    _, errors = of(where(S >= 1.0, S * 2.0, S), [1.0, 3.0], 1e-6)
    assert errors[0] > 1.0, "its sides are 2 and 1"
    assert errors[1] < 1e-5


def tried(kernel: str, by: float, dtype: Dtype) -> Verdict:
    environment.prepare("cpu")
    problem = dense(12, 20, score=where(KV <= Q + 8, S, S + by), dtype=dtype)
    return run_trial(Case(kernel=kernel, problem=problem), "cpu")


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("by", HIDING)
def test_rows_with_hidden_keys_are_judged(by: float, dtype: Dtype) -> None:
    """They were not: an error of 240 in a score of -1e9 left the row out, and one of 0.01 in -65504 made its budget wide."""
    pytest.importorskip("triton")
    right = tried("triton.flex", by, dtype)
    assert right.status == "pass"
    assert {each.unjudged for each in right.figures.values()} == {""}
    assert all(each.worst > 0.01 for name, each in right.figures.items() if dtype == "float16" and name != "lse")
    kernel = registry.register(kernel_of(mutants()["GQA-02-flex"]))
    try:
        wrong = tried(kernel.name, by, dtype)
    finally:
        registry.unregister(kernel.name)
    assert {each.output for each in wrong.failures} == {"dk", "dv"}
    assert min(wrong.figures[name].worst for name in ("dk", "dv")) > 1000, "as it is without such keys"


@pytest.mark.parametrize("by", [-1e9, -1e10, -1e38])
def test_lse_of_rows_of_hidden_keys_alone_may_overflow(by: float) -> None:
    """exp2(fma(s, log2 e, -m)) is off by |m| / 2^24 in its exponent: from -1e10 on a right kernel's sum may be infinite."""
    problem = dense(12, 20, score=where(KV + 5 <= Q, S, S + by))
    config = next(each for each in EMULATED.configs(problem) if each["exp"] == "fma")
    registry.register(EMULATED)
    try:
        verdict = run_trial(Case(kernel=EMULATED.name, problem=problem, config=config), "cpu")
    finally:
        registry.unregister(EMULATED.name)
    assert verdict.status == "pass", verdict.failures
