"""The adapters of docs/plug-in.md: each block of Python is at most 15 lines, and makes a kernel that passes Cases on a CPU."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.gpu_packages import LOG_2, dense, module, ragged
from support.pages import blocks
from support.paths import ROOT

from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters import Adapted
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import Limits
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.trials import trial_cases

MOST_LINES = 15
LIMITS = Limits(batch=3, heads=4, length=40, tiles=8)
NONE = (-1, -1)
ADAPTERS = [each.text for each in blocks(ROOT / "docs/plug-in.md") if each.language == "python" and "KERNEL = " in each.text]


def my_flash_attn(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False) -> Any:
    return dense(q, k, v, softmax_scale, causal, NONE)[0]


def my_varlen_attn(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, causal: bool = False
) -> Any:
    """O, and log2-sum-exp2 padded to `(batch, heads, max_seqlen_q rounded up to 128)`."""
    o, lse = ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, None, causal, NONE)
    padded = torch.full((len(cu_seqlens_q) - 1, q.shape[1], -(-max_seqlen_q // 128) * 128), 7.0)
    for row, (start, end) in zip(padded, cu_seqlens_q.unfold(0, 2, 1).tolist(), strict=True):
        row[:, : end - start] = (lse[:, start:end] / LOG_2).float()
    return o, padded


def varlen_attn_with_sinks(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    s_aux: Any = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Always causal; the sinks in q's dtype, one column of the softmax without a value."""
    o, lse = ragged(q.double(), k.double(), v.double(), cu_seqlens_q, cu_seqlens_k, None, True, NONE)
    if s_aux is not None:
        assert s_aux.dtype == q.dtype
        with_sinks = torch.logaddexp(lse, s_aux.double()[:, None])
        o, lse = o * torch.exp(lse - with_sinks).t()[..., None], with_sinks
    return (o.to(q.dtype), lse.float()) if return_lse else o.to(q.dtype)


def compiled(*shape: int) -> Any:
    def attention(q: Any, k: Any, v: Any) -> Any:
        assert (q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1]) == shape
        return dense(q, k, v, None, True, NONE)[0]

    return attention


def decode_attn(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, cache_seqlens: Any, cu_seqlens_q: Any, max_seqlen_q: int,
    causal: bool = False,
) -> Any:  # fmt: skip
    tables = [table[: -(-int(n) // k_cache.shape[1])].long() for table, n in zip(block_table, cache_seqlens, strict=True)]
    k, v = (
        torch.cat([cache[table].flatten(0, 1)[:n] for table, n in zip(tables, cache_seqlens, strict=True)])
        for cache in (k_cache, v_cache)
    )
    starts = torch.nn.functional.pad(cache_seqlens.cumsum(0), (1, 0))
    return ragged(q, k, v, cu_seqlens_q, starts, None, causal, NONE)[0]


def mypackage() -> dict[str, ModuleType]:
    functions = {each.__name__: each for each in (my_flash_attn, my_varlen_attn, varlen_attn_with_sinks)}
    modules = (
        module("mypackage"),
        module("mypackage.attention", **functions),
        module("mypackage.static", compiled=compiled),
        module("mypackage.decode", decode_attn=decode_attn),
    )
    return {each.__name__: each for each in modules}


def made(text: str, monkeypatch: pytest.MonkeyPatch) -> Adapted:
    """The kernel of a block, declared for the CPU, and registered."""
    for name, each in mypackage().items():
        monkeypatch.setitem(sys.modules, name, each)
    path = ROOT / "tests/kernels/test_plug_in_page.py"
    namespace: dict[str, Any] = {"__name__": "page", "__file__": str(path)}
    # A function that a block defines has the file of this one: an adapter looks for a source.
    exec(compile(text, str(path), "exec"), namespace)
    kernel = namespace["KERNEL"]
    kernel = dataclasses.replace(kernel, capabilities=replace(kernel.capabilities, devices=("cpu",)))
    monkeypatch.setattr(registry, "_registered", {kernel.name: kernel})
    return kernel


def test_the_forms_of_the_page_are_there() -> None:
    wanted = ("shapes=SHAPES", "lse_base=2", "sinks_in_dtype=True", "page_sizes=")
    assert all(sum(each in text for text in ADAPTERS) == 1 for each in wanted)
    assert all(len(text.splitlines()) <= MOST_LINES for text in ADAPTERS)


@pytest.mark.parametrize("text", ADAPTERS, ids=lambda text: text.partition("name=")[2].partition(",")[0].strip('"') or "mine")
def test_an_adapter_of_the_page_makes_a_kernel_that_passes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = made(text, monkeypatch)
    cases: list[Case] = []
    draw_values(trial_cases(kernel, device="cpu", limits=LIMITS), cases.append, seed=2, examples=30)
    small = [each for each in cases if max(each.problem.seqlens_k) <= 2 * LIMITS.length or kernel.capabilities.shapes][:10]
    assert len(small) > 8
    for case in small:
        assert run_trial(case, "cpu").failures == (), case
