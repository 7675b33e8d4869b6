"""Adapters of functions with attention sinks: parameter, dtype, gradient, an LSE without them, and check-adapter's rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import adapters as support
from support.runs import run_kernel

from attnfuzz.harness.audit.conformance.check import check_adapter
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.executors import InProcess
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters import Adapted, dense
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.strategies.case import SINK_VALUES, Case, Recipe, SinkValues

SMALL: dict[str, Any] = {"dims": ((8, 8),), "devices": ("cpu",), "groups": None, "unequal": True}


def attended(q: Any, k: Any, v: Any, sinks: torch.Tensor, causal: bool, *, in_lse: bool = True) -> tuple[Any, Any]:
    """o and lse (batch, heads, seqlen_q) of sums in float32; `in_lse`: whether LSE has the sinks."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.float().repeat_interleave(groups, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q.float(), k) * q.shape[-1] ** -0.5
    n, m = s.shape[-2:]
    if causal:
        hidden = torch.arange(m) - torch.arange(n)[:, None] > m - n
        s = s.masked_fill(hidden, -math.inf)
    column = sinks.float()[None, :, None, None].expand(*s.shape[:3], 1)
    p = torch.cat([s, column], -1).softmax(-1)[..., :-1]
    o = torch.einsum("bhij,bjhd->bihd", p, v).to(q.dtype)
    return o, torch.cat([s, column], -1).logsumexp(-1) if in_lse else s.logsumexp(-1)


def plain(q, k, v, causal, return_lse):
    o, lse, _ = support.flash(q, k, v, causal=causal, return_attn_probs=True)
    return (o, lse) if return_lse else o


def with_sinks(q, k, v, causal=False, sinks=None, return_lse=False):
    if sinks is None:
        return plain(q, k, v, causal, return_lse)
    o, lse = attended(q, k, v, sinks, causal)
    return (o, lse) if return_lse else o


def with_s_aux(q, k, v, causal=False, s_aux=None, return_lse=False):
    assert s_aux is None or s_aux.dtype == q.dtype
    return with_sinks(q, k, v, causal, None if s_aux is None else s_aux, return_lse)


def lse_of_keys(q, k, v, causal=False, sink=None, return_lse=False):
    if sink is None:
        return plain(q, k, v, causal, return_lse)
    o, lse = attended(q, k, v, sink, causal, in_lse=False)
    return (o, lse) if return_lse else o


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def failures(kernel: Adapted, values: SinkValues = "moderate", **changes: Any) -> list[str]:
    plain: dict[str, Any] = {"seqlens_q": (5, 5), "seqlens_k": (9, 9), "dim_qk": 8, "dim_v": 8, "dtype": "float16"}
    needs = Needs(outputs=kernel.capabilities.outputs, dlse=kernel.capabilities.dlse)
    problem = Problem(**{**plain, "packing": "dense", "heads": 4, "kv_heads": 2, "sinks": True, "needs": needs, **changes})
    registry.register(kernel)
    assert kernel.supports(problem, Config(), "cpu") is None
    case = Case(kernel=kernel.name, problem=problem, recipe=Recipe(sinks=values))
    return [each.message for each in run_trial(case, "cpu").failures]


KERNELS: dict[str, Callable[[], Adapted]] = {
    "float32": lambda: dense(with_sinks, name="theirs.sinks", dlse=True, **SMALL),
    "q's dtype": lambda: dense(with_s_aux, name="theirs.s_aux", sinks_in_dtype=True, **SMALL),
    "LSE of the keys": lambda: dense(lse_of_keys, name="theirs.keys", lse_has_sinks=False, dlse=True, **SMALL),
    "forward only": lambda: dense(with_sinks, name="theirs.forward", gradients=False, **SMALL),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("values", SINK_VALUES)
def test_sinks_are_passed_and_their_gradient_comes_back(name: str, values: SinkValues) -> None:
    kernel = KERNELS[name]()
    assert kernel.capabilities.sinks
    assert failures(kernel, values) == []
    assert failures(kernel, values, causal="bottom_right") == []
    assert failures(kernel, sinks=False) == []


def test_an_own_backward_returns_the_gradient_of_sinks() -> None:
    def backward(d_o, q, k, v, o, lse, causal=False, sinks=None):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ((q, k, v) if sinks is None else (q, k, v, sinks))]
            out = with_sinks(*leaves[:3], causal, *leaves[3:])
            return torch.autograd.grad(out, leaves, d_o)

    assert failures(dense(with_sinks, name="theirs.own", backward=backward, **SMALL)) == []
    without = dense(with_sinks, name="theirs.own", backward=lambda *x, **y: backward(*x, **y)[:3], **SMALL)
    assert any("the backward returned 0 gradients of captured tensors where 1 is expected" in each for each in failures(without))


@pytest.mark.parametrize("name", ["LSE of the keys", "q's dtype"])
def test_an_undeclared_form_is_found(name: str) -> None:
    function = lse_of_keys if name == "LSE of the keys" else with_s_aux
    assert failures(dense(function, name="theirs.other", **SMALL))


def test_a_fault_of_sinks_is_found_by_a_campaign_and_shrunk() -> None:
    def faulty(q, k, v, causal=False, sinks=None, return_lse=False):
        # The sink of the group's first head, as of a kernel that indexes by key/value head.
        first = None if sinks is None else sinks.view(k.shape[2], -1)[:, :1].expand(-1, q.shape[2] // k.shape[2]).flatten()
        return with_sinks(q, k, v, causal, first, return_lse)

    kernel = dense(faulty, name="theirs.faulty", **{**SMALL, "dtypes": ("float16",)})
    registry.register(kernel)
    state = run_kernel(kernel, Settings(device="cpu", max_examples=120, out=None), InProcess("cpu"))
    assert state.findings.count
    for each in state.findings.closed.values():
        p = each.case.problem
        assert (p.sinks, p.groups, p.batch) == (True, 2, 1)


def test_check_adapter_tries_every_kind_of_sinks() -> None:
    registry.register(KERNELS["float32"]())
    done = check_adapter("theirs.sinks", "cpu", in_process=True)
    assert [each for each in done.rows if each.status in ("wrong", "not run")] == []
    rows = {each.check: each for each in done.rows if each.check.startswith("sinks")}
    assert set(rows) == {f"sinks, {values}" for values in SINK_VALUES}
    assert {each.found for each in rows.values()} == {"declared, and works"}
    registry.register(dense(lse_of_keys, name="theirs.sinks", **SMALL))
    done = check_adapter("theirs.sinks", "cpu", in_process=True)
    assert {each.status for each in done.rows if each.check == "sinks, moderate"} == {"wrong"}


def test_sinks_that_cannot_be_passed_are_refused() -> None:
    def without(q, k, v):
        return q

    with pytest.raises(BadArgument, match="sinks=True: without has no parameter sinks; leave it out"):
        dense(without, sinks=True, **SMALL)
    with pytest.raises(BadArgument, match="sinks_in_dtype=True: without has no parameter sinks"):
        dense(without, sinks_in_dtype=True, **SMALL)
    with pytest.raises(BadArgument, match="lse_has_sinks=False: without has no parameter sinks"):
        dense(without, lse=True, lse_has_sinks=False, **SMALL)
    kernel = dense(without, gradients=False, **SMALL)
    problem = Problem(seqlens_q=(5,), seqlens_k=(5,), dim_qk=8, dim_v=8, packing="dense", sinks=True, needs=Needs(outputs=("o",)))
    assert kernel.supports(problem, Config(), "cpu") == "sinks=True: not supported"
