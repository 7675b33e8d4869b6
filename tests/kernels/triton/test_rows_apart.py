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
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("dim_qk", "dim_v"), [pytest.param(*each, marks=[pytest.mark.slow] * bool(at)) for at, each in enumerate(BEYOND_128)]
)
def test_every_config_is_right(dim_qk: int, dim_v: int, dtype: Dtype) -> None:
    for causal in (None, "bottom_right"):
        for layouts in ({"layout_v": Layout(pitch=1)}, {"layout_do": Layout(pitch=1)}, {}):
            of = Problem(
                seqlens_q=tuple(n_q for n_q, _ in LENGTHS),
                seqlens_k=tuple(n_k for _, n_k in LENGTHS),
                dim_qk=dim_qk,
                dim_v=dim_v,
                dtype=dtype,
                causal=causal,  # type: ignore[arg-type]
                **layouts,
            )
            for config in KERNEL.configs(of):
                verdict = run_trial(Case(kernel=KERNEL.name, problem=of, config=config), "cuda")
                assert verdict.status == "pass", (config, layouts, verdict.failures)
