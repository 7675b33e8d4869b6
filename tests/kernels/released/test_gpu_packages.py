"""Adapters of packages that run on a GPU only: their wrappers on a CPU, around stand-ins of the packages in float64."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace
from support import gpu_packages

from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Deviations
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.kernels.released import flashinfer
from attnfuzz.kernels.released.subject import Released
from attnfuzz.kernels.support import process_setup
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import Limits
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.trials import trial_cases

LIMITS = Limits(batch=3, heads=4, length=40, tiles=8)
STAND_INS: dict[str, Callable[..., dict[str, Any]]] = {
    "flash_attn": gpu_packages.flash_attn,
    "xformers": gpu_packages.xformers,
    "xformers, padded": partial(gpu_packages.xformers, packed=False),
    "flashinfer": gpu_packages.flashinfer,
}
OF = {
    "flash_attn": ("dense", "varlen"),
    "xformers": ("dense", "varlen"),
    "xformers, padded": ("varlen",),
    "flashinfer": ("single_prefill", "ragged_prefill", "paged_prefill", "decode"),
}
KERNELS = [(package, name) for package, names in OF.items() for name in names]


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(process_setup, "_process", process_setup._Process(0))


def on_cpu(package: str, name: str, monkeypatch: pytest.MonkeyPatch, wrong: str = "") -> Released:
    """The adapter around a stand-in, declared for the CPU, and registered."""
    for each, module in STAND_INS[package](wrong).items():
        monkeypatch.setitem(sys.modules, each, module)
    kernel = registry.get(f"released.{package.partition(',')[0]}.{name}")
    assert isinstance(kernel, Released)
    assert kernel.capabilities.devices == ("cuda",)
    kernel = dataclasses.replace(kernel, capabilities=replace(kernel.capabilities, devices=("cpu",)))
    registry.register(kernel)
    return kernel


def drawn(kernel: Released, count: int) -> list[Case]:
    cases: list[Case] = []
    draw_values(trial_cases(kernel, device="cpu", limits=LIMITS), cases.append, seed=5, examples=count)
    return [each for each in cases if max(each.problem.seqlens_k) <= 2 * LIMITS.length]


@pytest.mark.parametrize(("package", "name"), KERNELS)
def test_the_wrapper_passes_what_the_package_documents(package: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = on_cpu(package, name, monkeypatch)
    assert kernel.unavailable("cpu") is None
    cases = drawn(kernel, 40)
    assert len(cases) > 20
    for case in cases:
        assert run_trial(case, "cpu").failures == (), case
    problems = [each.problem for each in cases]
    assert any(each.window not in (None, (None, None)) for each in problems)
    assert any(each.batch > 1 for each in problems) or name == "single_prefill"
    assert any(each.groups > 1 for each in problems) or package.startswith("xformers")


@pytest.mark.parametrize(
    ("package", "name", "wrong"),
    [
        ("flash_attn", "dense", "base of LSE"),
        ("flash_attn", "varlen", "base of LSE"),
        ("xformers", "dense", "base of LSE"),
        ("xformers, padded", "varlen", "base of LSE"),
        *((("flashinfer", each, "base of LSE")) for each in OF["flashinfer"]),
        ("flashinfer", "ragged_prefill", "layout of LSE"),
        ("flashinfer", "decode", "pages"),
    ],
)
def test_a_package_that_does_otherwise_fails(package: str, name: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = on_cpu(package, name, monkeypatch, wrong)
    failures = [each for case in drawn(kernel, 12) for each in run_trial(case, "cpu").failures]
    # LSE of another layout has another shape, but where there are as many heads as tokens.
    found = {"lse" if each.kind == "exception" and "LSE has the shape" in each.message else each.output for each in failures}
    assert found & ({"lse"} if "LSE" in wrong else {"o"}), failures


@pytest.mark.parametrize("name", OF["flashinfer"])
def test_flashinfer_compiles_by_a_launch_of_one_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = on_cpu("flashinfer", name, monkeypatch)
    function = kernel.call.function
    calls: list[Any] = []
    compile_for = flashinfer._compiled(lambda *tensors, **given: calls.append((tensors, given)) or function(*tensors, **given))
    monkeypatch.setattr(flashinfer.inspect, "signature", lambda _: __import__("inspect").Signature.from_callable(function))
    for case in drawn(kernel, 10):
        compile_for(case.problem, "cpu")
        (q, k, v), given = calls.pop()
        assert (q.shape[-1], v.shape[-1], str(q.dtype)) == (
            case.problem.dim_qk,
            case.problem.dim_v,
            f"torch.{case.problem.dtype}",
        )
        assert (given.get("window_size", (-1, -1))[0] >= 0) == (
            case.problem.window is not None and case.problem.window[0] is not None
        )
        assert given["softcap"] == case.problem.softcap
        assert k.numel() <= 64 * case.problem.dim_qk


def test_what_they_declare() -> None:
    prefill, decode = (registry.get(f"released.flashinfer.{name}") for name in ("ragged_prefill", "decode"))
    assert prefill.capabilities.deviations == Deviations(l_from_rounded_p=True, half_partial_o=True)
    assert decode.capabilities.deviations == Deviations(half_partial_o=True)
    assert decode.capabilities.page_sizes == (16, 1, 8, 64)
    assert {registry.get(f"released.flashinfer.{each}").capabilities.window_forms for each in OF["flashinfer"]} == {("left",)}
    assert registry.get("released.flashinfer.single_prefill").capabilities.batch_max == 1
    for package in ("flash_attn", "xformers"):
        for each in OF[package]:
            kernel = registry.get(f"released.{package}.{each}")
            assert set(kernel.capabilities.outputs) == {"o", "lse", "dq", "dk", "dv"}
            assert (kernel.capabilities.groups is None) == (package == "flash_attn")


FORMS: dict[str, Any] = {"dim_qk": 64, "dim_v": 64, "needs": Needs(outputs=("o",))}


@pytest.mark.parametrize(
    ("kernel", "changes", "reason"),
    [
        ("xformers.varlen", {"window": (3, None)}, "windows beside a causal mask only"),
        ("xformers.varlen", {"seqlens_q": (3,), "seqlens_k": (2,), "causal": "bottom_right"}, "sees no key"),
        ("xformers.dense", {"window": (3, None), "packing": "dense"}, "windows of these forms: both"),
        ("flashinfer.decode", {"page_size": 16, "seqlens_q": (2,), "seqlens_k": (2,)}, "a decode has one query a sequence"),
        ("flashinfer.paged_prefill", {"page_size": 16, "window": (3, 1)}, "windows of these forms: left"),
        ("flashinfer.single_prefill", {"packing": "dense", "seqlens_q": (2, 2), "seqlens_k": (2, 2)}, "batch=2: at most 1"),
    ],
)
def test_limits_of_the_packages(kernel: str, changes: dict[str, Any], reason: str) -> None:
    problem = Problem(**{"seqlens_q": (4,), "seqlens_k": (4,), **FORMS, **changes})
    assert reason in str(registry.get(f"released.{kernel}").supports(problem, Config(), "cuda") or "")
