"""Tensors copied to the host at once; on a GPU, how often judging one Case waits for the device."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from attnfuzz.harness.core.clock import Clock
from attnfuzz.harness.judge.host import on_host
from attnfuzz.harness.judge.judge import judge_by_oracle
from attnfuzz.harness.judge.truth import is_tiny
from attnfuzz.harness.trial.batch import run_batch
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Deviations, Outputs
from attnfuzz.kernels.expressions.tree import KV, Q, S, to_data
from attnfuzz.kernels.problem import Layout, Problem
from attnfuzz.oracles import attention
from attnfuzz.strategies.case import Case, Recipe

TINY: dict[str, Any] = {"seqlens_q": (5, 3), "seqlens_k": (6, 4), "dim_qk": 8, "dim_v": 8, "heads": 2, "kv_heads": 1}
LARGER = {**TINY, "seqlens_q": (150, 40, 70), "seqlens_k": (160, 40, 90), "dim_qk": 64, "dim_v": 64}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 4.0},
    "score_mod": {"score_mod": to_data(S * 0.5 + 0.25)},
    "mask_mod": {"mask_mod": to_data(Q >= KV - 3)},
}


def test_what_is_on_the_host_stays_as_it_is() -> None:
    tensors = [torch.randn(3, 4), torch.arange(5)]
    assert all(one is other for one, other in zip(on_host(tensors), tensors, strict=True))


@pytest.mark.gpu
def test_copies_are_the_tensors_whatever_their_dtype_and_layout() -> None:
    base = torch.arange(60, device="cuda").view(3, 4, 5)
    tensors = [
        (base > 7)[:, 1:], base.to(torch.float16).mT, torch.zeros((0, 3), device="cuda"), base.float()[..., ::2],
        torch.full((), 7.5, dtype=torch.float64, device="cuda"), base.to(torch.bfloat16), torch.arange(3), base.int(),
        base.to(torch.bfloat16).as_strided((1, 1, 1), (0, 0, 0), 7),
    ]  # fmt: skip
    copies = on_host(tensors)
    for one, other in zip(copies, tensors, strict=True):
        assert (one.device.type, one.dtype, one.shape) == ("cpu", other.dtype, other.shape)
        assert torch.equal(one, other.cpu())


def waits(problem: Problem) -> int:
    """How often the oracle and the judgement of right outputs wait for the device."""
    inputs = materialise(problem, Recipe(), "cuda")
    references = [attention.reference(problem, each) for each in attention.sequences(inputs)]
    half = inputs.q.dtype

    def joined(name: str, dtype: torch.dtype) -> torch.Tensor:
        x = torch.cat([getattr(each, name) for each in references], 1).to(dtype)
        return x if name == "lse" else x.transpose(0, 1).contiguous()

    values = {name: joined(name, torch.float32 if name == "lse" else half) for name in ("o", "lse", "dq", "dk", "dv")}
    captured = tuple(sum(each.captured[name] for each in references).float() for name in references[0].captured)  # type: ignore[misc]
    outputs = Outputs(**values, d_captured=captured)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            verdict, _ = judge_by_oracle("test", inputs, outputs, Deviations(), Config(), "cuda", Clock())
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert verdict.status == "pass", verdict.failures
    return sum("synchroniz" in str(each.message) for each in heard)


@pytest.mark.gpu
def test_an_expanded_gradient_of_one_element_is_judged() -> None:
    """It ended a campaign after a minute: one of 65,000 Cases had one."""
    kernel = registry.get("triton.varlen")
    layout = Layout(expanded=True)
    problem = Problem(seqlens_q=(1,), seqlens_k=(3,), dim_qk=16, dim_v=1, dtype="bfloat16", layout_do=layout)
    case = Case(kernel=kernel.name, problem=problem, config=kernel.configs(problem)[0])
    assert run_trial(case, "cuda").status == "pass"
    assert [each.status for each in run_batch([case, replace(case, recipe=Recipe(seed=1))], "cuda")] == ["pass"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_one_case_is_judged_with_few_waits(form: str) -> None:
    """Where processes share a GPU in turns, each wait lasts until all others have had theirs."""
    tiny, larger = (Problem(**{**of, **FORMS[form]}) for of in (TINY, LARGER))
    assert is_tiny(tiny)
    assert not is_tiny(larger)
    # The inputs; the outputs; the gradients of captured tensors.
    assert waits(tiny) <= 4
    # Figures; statistics of all outputs; gradients of captured tensors, and what a mask in doubt leaves out.
    assert waits(larger) <= 6
