"""Keys that a score_mod hides by a large number, in tiles before the one key that a query sees: a maximum that must cancel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from support.triton_mode import interpreted

pytest.importorskip("torch")

from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.expressions.tree import KV, Q, S, const, to_data, where
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case, Recipe

NUMBERS = (-65504.0, -1e9, -1e38)
DTYPES = ("float16", "bfloat16", "float32")


def tried(name: str, device: Device, by: float, **changed: Any) -> None:
    kernel = registry.get(name)
    if reason := kernel.unavailable(device):
        pytest.skip(reason)
    problem = Problem(
        **{"seqlens_q": (300,), "seqlens_k": (330,), "packing": "dense", "dim_qk": 64, "dim_v": 64, **changed},
        causal="top_left",
        score_mod=to_data(where(KV >= Q, S, S + const(by))),
    )
    configs = [each for each in kernel.configs(problem) if kernel.supports(problem, each, device) is None]
    if not configs:
        pytest.skip(f"{name} does not support it")
    for config in {configs[0], configs[-1]}:
        verdict = run_trial(Case(kernel=name, problem=problem, config=config, recipe=Recipe()), device)
        assert verdict.status == "pass", [each.message for each in verdict.failures]
        assert not verdict.figures["o"].unjudged


@interpreted
@pytest.mark.parametrize("by", NUMBERS)
def test_triton_on_a_cpu(by: float) -> None:
    tried("triton.flex", "cpu", by, seqlens_q=(70,), seqlens_k=(80,), dtype="float32")


def on_gpu() -> Iterator[Any]:
    """Each is a compile of two Configs: by default every number and every dtype of triton.flex, but not all pairs of them."""
    pairs = list(itertools.product(DTYPES, NUMBERS))
    default = {("triton.flex", *each) for each in zip(DTYPES, NUMBERS, strict=True)} | {("triton.flex.tf32", "float32", -1e9)}
    for name in ("tilelang.modified", "triton.flex", "triton.flex.tf32"):
        for dtype, by in pairs:
            yield pytest.param(name, dtype, by, marks=[] if (name, dtype, by) in default else [pytest.mark.slow])


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype", "by"), list(on_gpu()))
def test_on_a_gpu(name: str, dtype: str, by: float) -> None:
    tried(name, "cuda", by, dtype=dtype)
