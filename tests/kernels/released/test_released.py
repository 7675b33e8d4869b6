"""Kernels of other packages as subjects: what is said without the packages, what runs with them, the findings kept."""

from __future__ import annotations

import importlib.util
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from attnfuzz.harness.campaign.campaign import executor_for, run_campaign
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.cli.options import asked_for, every_kernel
from attnfuzz.harness.gate.ledger import Entry, case_of, check_kernels, read_ledger
from attnfuzz.harness.gate.parts.correctness import replay
from attnfuzz.harness.gate.result import Finding
from attnfuzz.harness.gate.subjects import named
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import BadArgument, Needs, Problem
from attnfuzz.kernels.released import DISTRIBUTIONS
from attnfuzz.kernels.released.subject import Package, Released, released

FOLDER = ROOT / "tests/corpus/released"
LEDGER = read_ledger(FOLDER / "ledger.toml", date.today())
NAMES = [each for each in registry.names() if registry.is_released(each)]
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
    remedy = f"--no-deps {kernel.package.distribution}" if kernel.package.outside_extra else "'attnfuzz[released]'"
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


def installed(name: str) -> Released:
    kernel = kernel_of(name)
    if reason := kernel.unavailable("cpu"):
        pytest.skip(reason)
    return kernel


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_few_cases_find_nothing_that_is_not_known(name: str) -> None:
    settings = Settings(device="cpu", max_examples=8, seed=3, out=None, maps=False)
    done = run_campaign([installed(name)], settings, lambda _: None)
    own = [each for each in LEDGER.entries if each.kernel == name]
    for each in done.findings:
        assert each.failure is not None
        finding = Finding.of("campaign", each.identity, each.failure.message)
        assert any(entry.covers(finding) for entry in own), finding


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


def finding_id(entry: Entry) -> str:
    return Path(entry.case or "").stem


@pytest.mark.slow
@pytest.mark.parametrize("entry", LEDGER.entries, ids=finding_id)
def test_a_finding_still_shows_in_the_installed_version(entry: Entry) -> None:
    kernel, stored = installed(entry.kernel), case_of(entry)
    assert stored is not None
    with closing(executor_for([kernel], Settings(device="cpu", out=None))) as executor:
        part = replay(kernel, "cpu", [stored], executor)
    fixed = f"{finding_id(entry)}: its case passes; take the entry out, and say in docs/findings.md which version fixes it"
    assert any(map(entry.covers, part.findings)), f"{fixed} ({part.summary})"
