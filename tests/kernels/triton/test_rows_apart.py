"""Dims beyond 128 with rows apart, on a GPU: ptxas 12.8 has made wrong code of them (kernels/triton/varlen.py)."""

from __future__ import annotations

import pytest

from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels.problem import Dtype, Layout, Problem
from attnfuzz.kernels.triton.varlen import KERNEL
from attnfuzz.strategies.case import Case

LENGTHS = [(1, 17), (64, 80), (33, 129)]
BEYOND_128 = [(168, 16), (16, 168), (192, 128), (256, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim_qk", "dim_v", "dtype"),
    [
        (168, 16, "bfloat16"),
        pytest.param(168, 16, "float16", marks=pytest.mark.slow),
        pytest.param(16, 168, "bfloat16", marks=pytest.mark.slow),
        pytest.param(192, 128, "bfloat16", marks=pytest.mark.slow),
        pytest.param(256, 256, "float16", marks=pytest.mark.slow),
    ],
)
def test_every_config_is_right(dim_qk: int, dim_v: int, dtype: Dtype) -> None:
    for layouts in ({"layout_v": Layout(pitch=1)}, {"layout_do": Layout(pitch=1)}):
        lengths_q, lengths_k = zip(*LENGTHS, strict=True)
        of = Problem(seqlens_q=lengths_q, seqlens_k=lengths_k, dim_qk=dim_qk, dim_v=dim_v, dtype=dtype, **layouts)
        for config in KERNEL.configs(of):
            verdict = run_trial(Case(kernel=KERNEL.name, problem=of, config=config), "cuda")
            assert verdict.status == "pass", (config, layouts, verdict.failures)
