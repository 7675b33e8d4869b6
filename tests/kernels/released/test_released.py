"""Kernels of other packages as subjects: what is said without the packages, what runs with them, the findings kept."""

from __future__ import annotations

import dataclasses
import importlib.util
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from support.paths import ROOT

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.executor import executor_for
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.cli.options import asked_for, every_kernel
from attnfuzz.harness.gate.ledger import Entry, case_of, check_kernels, read_ledger
from attnfuzz.harness.gate.parts.correctness import replay
from attnfuzz.harness.gate.result import Finding
from attnfuzz.harness.gate.subjects import named
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Deviations, Device
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.kernels.released import DISTRIBUTIONS
from attnfuzz.kernels.released.subject import Package, Released, released
from attnfuzz.kernels.support import memory
from attnfuzz.strategies.case import Case, Recipe

FOLDER = ROOT / "tests/corpus/released"
LEDGER = read_ledger(FOLDER / "ledger.toml", date.today())
NAMES = [each for each in registry.names() if registry.is_released(each)]
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
HIDDEN = sorted({each.kernel for each in LEDGER.entries} - set(NAMES))


def kernel_of(name: str) -> Released:
    kernel = registry.get(name)
    assert isinstance(kernel, Released)
    return kernel


def function(q: Any, k: Any, v: Any) -> Any:
    raise AssertionError


# --- without the packages


@pytest.mark.parametrize("name", [*NAMES, *HIDDEN])
def test_a_package_that_is_missing_is_said_with_the_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(name)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module, *more: None if module == own else find(module, *more))
    own = kernel.package.module
    outside = f"{kernel.package.options} {kernel.package.distribution}".strip()
    remedy = outside if kernel.package.outside_extra else "'attnfuzz[released]'"
    for device in ("cpu", "cuda"):
        assert kernel.unavailable(device) == f"{kernel.package.distribution} is not installed: pip install {remedy}"


def test_a_missing_module_that_a_package_needs() -> None:
    package = Package("acme-attention", "json", needs=("no_such_module",))
    assert str(package.missing()).startswith("no_such_module, which acme-attention needs, is not installed")
    assert Package("acme-attention", "json").missing() is None


def test_a_kernel_that_needs_an_older_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package("acme-attention", "json")
    old = released(function, name="released.acme.old", package=package, like="dense", files=(), triton_before=(1, 0))
    new = released(function, name="released.acme.new", package=package, like="dense", files=(), triton_before=(99, 0))
    pytest.importorskip("triton")
    assert "lacks functions that acme-attention uses: pip install 'triton<1.0'" in str(old.unavailable("cpu"))
    assert new.unavailable("cpu") is None


def test_limits_that_no_capability_states_are_asked() -> None:
    def refuses(problem: Problem) -> str | None:
        return "seqlen_q=3: not three" if 3 in problem.seqlens_q else None

    package = Package("acme-attention", "json")
    kernel = released(function, name="released.acme", package=package, like="dense", files=(), gradients=False, refuses=refuses)
    forms: dict[str, Any] = {"packing": "dense", "dim_qk": 64, "dim_v": 64, "needs": Needs(outputs=("o",))}
    problems = [Problem(seqlens_q=(n,), seqlens_k=(n,), **forms) for n in (2, 3)]
    (config,) = kernel.configs(problems[0])
    assert [kernel.supports(each, config, "cpu") for each in problems] == [None, "seqlen_q=3: not three"]
    with pytest.raises(BadArgument, match="not three"):
        kernel.build(problems[1], config, "cpu")


def test_limits_of_a_gpu_are_none_of_the_interpreter() -> None:
    def too_wide(problem: Problem) -> str | None:
        return "dim_qk=128: it does not fit" if problem.dim_qk == 128 else None

    package = Package("acme-attention", "json")
    limits: dict[str, Any] = {"dims": ((64, 64), (128, 128)), "gradients": False, "gpu_limits": too_wide}
    kernel = released(function, name="released.acme", package=package, like="dense", files=(), **limits)
    forms: dict[str, Any] = {"packing": "dense", "seqlens_q": (2,), "seqlens_k": (2,), "needs": Needs(outputs=("o",))}
    narrow, wide = (Problem(dim_qk=dim, dim_v=dim, **forms) for dim in (64, 128))
    (config,) = kernel.configs(wide)
    assert [kernel.supports(wide, config, device) for device in ("cpu", "cuda")] == [None, "dim_qk=128: it does not fit"]
    assert kernel.supports(narrow, config, "cuda") is None


@pytest.mark.parametrize("name", ["released.fla.parallel", "released.fla.parallel_varlen"])
@pytest.mark.parametrize(
    ("dims", "dtype", "fits"),
    [
        ((96, 96), "float32", False),
        ((128, 128), "float32", False),
        ((64, 128), "float32", True),
        ((128, 128), "float16", True),
        ((256, 256), "bfloat16", False),
    ],
)
def test_dims_whose_tiles_exceed_shared_memory(name: str, dims: tuple[int, int], dtype: Any, fits: bool) -> None:
    kernel, packing = kernel_of(name), "ragged" if name.endswith("varlen") else "dense"
    forms: dict[str, Any] = {"packing": packing, "causal": "bottom_right", "dtype": dtype}
    problem = Problem(seqlens_q=(33,), seqlens_k=(33,), dim_qk=dims[0], dim_v=dims[1], needs=Needs(outputs=("o",)), **forms)
    (config,) = kernel.configs(problem)
    assert kernel.supports(problem, config, "cpu") is None
    reason = kernel.supports(problem, config, "cuda")
    assert reason is None if fits else "exceed the shared memory" in str(reason)


@pytest.mark.parametrize(
    ("lengths", "window", "causal", "groups", "why"),
    [
        (((3, 2), (2, 5)), (0, None), None, 1, "windows of these forms: both"),
        (((3, 2), (2, 5)), (None, 0), None, 1, "windows of these forms: both"),
        (((3,), (3,)), (4, 0), None, 1, "one side alone"),
        (((3,), (3,)), (0, 4), None, 1, "one side alone"),
        (((3,), (3,)), (4, 9), None, 1, None),
        (((3,), (1,)), (2, 1), None, 1, "one side alone"),
        (((2,), (1,)), (2, 1), None, 1, None),
        (((3,), (3,)), (1, 1), None, 1, None),
        (((3,), (3,)), (0, None), "bottom_right", 1, None),
        (((3,), (3,)), (None, 0), "bottom_right", 1, None),
        (((1,), (3,)), (0, None), "bottom_right", 1, "one side alone"),
        (((1,), (3,)), (None, 0), "bottom_right", 1, None),
        (((1, 1), (3, 2)), None, None, 2, "their LSE"),
        (((1, 1), (3, 2)), (9, 9), "bottom_right", 2, "their LSE"),
        (((1, 1), (3, 2)), (1, 1), None, 2, None),
        (((1, 1), (3, 2)), None, None, 1, None),
        (((1, 2), (3, 2)), None, None, 2, None),
        (((1,), (3,)), None, None, 2, None),
    ],
)
def test_what_is_known_to_be_wrong_is_left_to_another_kernel(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], window: Any, causal: Any, groups: int, why: str | None
) -> None:
    forms: dict[str, Any] = {"window": window, "causal": causal, "heads": groups, "kv_heads": 1, "dim_qk": 64, "dim_v": 64}
    problem = Problem(seqlens_q=lengths[0], seqlens_k=lengths[1], needs=Needs(outputs=("o", "lse")), **forms)
    listed, every = (kernel_of(f"released.flag_gems.{name}") for name in ("varlen", "varlen_all"))
    (config,) = listed.configs(problem)
    assert every.supports(problem, config, "cuda") is None
    reason = listed.supports(problem, config, "cuda")
    assert reason is None if why is None else why in str(reason)


# --- by which names they run


def test_they_are_listed_and_left_out_where_no_kernel_is_named() -> None:
    assert set(NAMES) <= {each.name for each in every_kernel(released=True).kernels}
    assert not set(NAMES) & {each.name for each in every_kernel().kernels}
    assert not set(NAMES) & {each.name for each in named([], ROOT)[0]}
    assert not set(HIDDEN) & set(registry.names())


def test_names_that_begin_alike_are_one_group() -> None:
    assert [each.name for each in asked_for(["released"]).kernels] == NAMES
    assert [each.name for each in asked_for(["released.fla"]).kernels] == [
        "released.fla.parallel",
        "released.fla.parallel_varlen",
    ]
    assert [each.name for each in named(["released.fla"], None)[0]] == ["released.fla.parallel", "released.fla.parallel_varlen"]
    # A kernel's own name comes first.
    assert [each.name for each in asked_for(["triton.flex"]).kernels] == ["triton.flex"]
    assert len(asked_for(["released", "released.fla", "released.fla.parallel"]).kernels) == len(NAMES)
    with pytest.raises(registry.UnknownKernel):
        asked_for(["releas"])


def test_every_package_is_named_where_versions_are_read() -> None:
    assert {kernel_of(each).package.distribution for each in [*NAMES, *HIDDEN]} == set(DISTRIBUTIONS)


# --- with the packages


def installed(name: str, device: Device) -> Released:
    kernel = kernel_of(name)
    if reason := kernel.unavailable(device):
        pytest.skip(reason)
    return kernel


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_few_cases_find_nothing_that_is_not_known(name: str, device: Device) -> None:
    settings = Settings(device=device, max_examples=8, seed=3, out=None, maps=False)
    done = run_campaign([installed(name, device)], settings, lambda _: None)
    own = [each for each in LEDGER.on(device, date.today()).entries if each.kernel == name]
    for each in done.findings:
        assert each.failure is not None
        finding = Finding.of("campaign", each.identity, each.failure.message)
        assert any(entry.covers(finding) for entry in own), finding


SQUARE = Problem(
    seqlens_q=(128,), seqlens_k=(128,), packing="dense", dim_qk=64, dim_v=64, heads=2, kv_heads=2, causal="top_left",
    needs=Needs(outputs=("o", "dk", "dv")),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.interpreted
def test_scaled_k_in_half_precision_is_declared_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = installed("released.flag_gems.sdpa_all", "cpu")
    deviations = kernel.capabilities.deviations
    assert deviations == Deviations(half_scaled_k=True, half_partials=True)
    less = replace(kernel.capabilities, deviations=replace(deviations, half_scaled_k=False))
    failed = []
    for each in (kernel, dataclasses.replace(kernel, capabilities=less)):
        monkeypatch.setattr(registry, "_registered", {})
        registry.register(each)
        case = Case(kernel=kernel.name, problem=SQUARE, recipe=Recipe(pattern="large_logits"), config=Config())
        failed.append({failure.output for failure in run_trial(case, "cpu").failures})
    assert failed == [set(), {"dk", "dv"}]


# --- findings


def test_the_ledger_has_every_kept_case() -> None:
    assert sorted(each.case for each in LEDGER.entries if each.case) == sorted(FOLDER.glob("*.json"))
    check_kernels(LEDGER, ())
    told = (ROOT / "docs/findings.md").read_text()
    for entry in LEDGER.entries:
        stored = case_of(entry)
        assert stored is not None
        assert stored.finding.identity is not None
        assert entry.covers(Finding.of("campaign", stored.finding.identity, stored.finding.message))
        distribution = kernel_of(entry.kernel).package.distribution
        assert distribution in stored.finding.versions
        assert f"`{stored.path.stem}`" in told


def test_what_only_the_interpreter_can_report_is_of_the_cpu() -> None:
    for entry in LEDGER.entries:
        assert (entry.device == "cpu") or entry.kind not in get_args(memory.MemoryKind), entry
        assert (entry.device == "cuda") or entry.kind != "illegal-access", entry


def finding_id(entry: Entry) -> str:
    return Path(entry.case or "").stem


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entry", LEDGER.entries, ids=finding_id)
def test_a_finding_still_shows_in_the_installed_version(entry: Entry, device: Device) -> None:
    if entry.device not in (None, device):
        pytest.skip(f"it shows on {entry.device} only")
    kernel, stored = installed(entry.kernel, device), case_of(entry)
    assert stored is not None
    with closing(executor_for([kernel], Settings(device=device, out=None))) as executor:
        part = replay(kernel, device, [stored], executor)
    fixed = f"{finding_id(entry)}: its case passes; take the entry out, and say in docs/findings.md which version fixes it"
    assert any(map(entry.covers, part.findings)), f"{fixed} ({part.summary})"
