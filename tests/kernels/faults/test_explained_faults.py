"""The explanation of a planted fault names its cause: faults of the host kernels, and of the Triton kernel in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.mutants import kernel_of, mutants
from support.runs import few_variants, try_variants

from attnfuzz.harness.campaign import explainer
from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.campaign.explain import Part
from attnfuzz.harness.core import environment
from attnfuzz.harness.report.explained import explanation_rows
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Built, Config, Device, Kernel
from attnfuzz.kernels.faults.host import FAULTS as HOST_FAULTS
from attnfuzz.kernels.faults.host import FaultyReference
from attnfuzz.kernels.faults.planted import demo_kernel
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.variants import all_variants

pytestmark = pytest.mark.interpreted


def explained(kernel: Kernel, folder: Path, most: int = 200, **options: Any) -> tuple[Finding, dict[str, Part]]:
    """The first finding of a kernel, with the parts of its explanation; its case file holds the same."""
    environment.prepare("cpu")
    registry.register(kernel)
    try:
        variants = options.pop("variants", all_variants(kernel, "cpu"))
        run = try_variants(kernel, variants, folder, seed=1, most=most, plain=True, **options)
        [finding] = run.summary().findings
    finally:
        registry.unregister(kernel.name)
    assert finding.explanation is not None
    assert read_case(Path(str(finding.path))).finding.explanation == finding.explanation
    parts = {each.part: each for each in finding.explanation.parts}
    text = dict(explanation_rows(finding.explanation))
    for each in parts.values():
        assert (each.part in text.get("matters", "")) or not each.passes or each.part == "both lengths"
    return finding, parts


def rules_of(parts: Mapping[str, Part]) -> dict[str, tuple[str, ...]]:
    """The parts that matter, with their rules."""
    return {name: each.rules for name, each in parts.items() if each.passes and name != "both lengths"}


def wrong(when: Callable[[Problem], bool]) -> Callable[[Problem, Any], None]:
    """A forward whose O is wrong for some Problems."""

    def act(problem: Problem, outputs: Any) -> None:
        if when(problem):
            outputs[0].mul_(1.5)

    return act


def keys(problem: Problem) -> int:
    return max(problem.seqlens_k)


HOST: dict[str, tuple[Callable[[Problem], bool], dict[str, tuple[str, ...]]]] = {
    "three keys": (lambda p: keys(p) >= 3, {"seqlen_k": ("from 3 keys on",)}),
    "causal": (lambda p: p.causal is not None, {"causal": ()}),
    "tail keys": (lambda p: any(n % 16 for n in p.seqlens_k), {"seqlen_k": ("seqlen_k not a multiple of tile_n=16",)}),
    "second tile": (lambda p: keys(p) > 16, {"seqlen_k": ("seqlen_k > tile_n=16", "from 17 keys on")}),
    "groups": (lambda p: p.groups > 1, {"groups": ()}),
    "several sequences": (lambda p: p.batch > 1, {"batch": ()}),
    "unequal lengths": (lambda p: any(0 < q != k > 0 for q, k in zip(p.seqlens_q, p.seqlens_k, strict=True)),
                        {"seqlen_q": ("seqlen_q != seqlen_k",), "seqlen_k": ("seqlen_q != seqlen_k",)}),
    "long queries": (lambda p: max(p.seqlens_q) > 40, {"seqlen_q": ("from 41 queries on",)}),
    "scale": (lambda p: p.softmax_scale is not None, {"softmax_scale": ()}),
}  # fmt: skip


_ALWAYS = ("causal", "tail keys", "groups")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in _ALWAYS)) for name in HOST])
def test_the_cause_of_a_fault_on_the_host_is_named(name: str, tmp_path: Path) -> None:
    when, matters = HOST[name]
    finding, parts = explained(FaultyReference(f"test.{name.replace(' ', '_')}", wrong(when)), tmp_path)
    rules = rules_of(parts)
    assert set(matters) <= set(rules)
    assert not set(rules) - set(matters) - {"seqlen_q", "seqlen_k"}, "an empty sequence has nothing to be wrong"
    for part, expected in matters.items():
        assert set(expected) <= set(rules[part]), parts[part]
    assert finding.minimal


class _ThreeConfigs(FaultyReference):
    """Three Configs, of which one is wrong."""

    tiles = (Config(tile_m=16, tile_n=16), Config(tile_m=16, tile_n=32), Config(tile_m=32, tile_n=16))

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        return self.tiles

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        return super().supports(problem, self.tiles[0], device)

    def compile_key(self, problem: Problem, config: Config) -> str:
        return f"{self.name} {config}"

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        right = FaultyReference(self.name, lambda *_: None)
        return (super() if config["tile_n"] == 32 else right).build(problem, self.tiles[0], device)


def test_the_one_config_of_three_is_named(tmp_path: Path) -> None:
    finding, parts = explained(_ThreeConfigs("test.three", wrong(lambda _: True)), tmp_path)
    assert finding.case.config == _ThreeConfigs.tiles[1]
    assert parts["config"].rules == ("tile_n=32",)
    assert set(rules_of(parts)) <= {"config", "seqlen_q", "seqlen_k"}, "an empty sequence has nothing to be wrong"
    assert "tile_n=32" in dict(explanation_rows(finding.explanation))["matters"]


@pytest.mark.slow
@pytest.mark.parametrize("slug", ["numbers", "nan", "raises", "dtype"])
def test_the_third_key_is_named_whatever_it_does(slug: str, tmp_path: Path) -> None:
    fault = next(each for each in HOST_FAULTS if each.slug == slug)
    _, parts = explained(FaultyReference(f"test.{slug}", fault.act), tmp_path)
    assert rules_of(parts).pop("seqlen_k") == ("from 3 keys on",)
    assert set(rules_of(parts)) <= {"seqlen_k", "seqlen_q"}


def test_of_a_fault_on_every_third_call_nothing_false_is_said(tmp_path: Path) -> None:
    fault = next(each for each in HOST_FAULTS if each.slug == "third")
    finding, parts = explained(FaultyReference("test.third", fault.act), tmp_path)
    assert rules_of(parts) == {}
    assert not finding.explanation.common  # type: ignore[union-attr]


@pytest.mark.slow
def test_what_failing_cases_have_in_common_is_named(tmp_path: Path) -> None:
    kernel = FaultyReference("test.common", wrong(lambda p: p.causal is not None and p.groups > 1))
    finding, _ = explained(kernel, tmp_path, most=150, max_failures=9)
    assert finding.explanation is not None
    common = {each.property: each for each in finding.explanation.common}
    assert {"causal=top_left", "groups > 1"} <= set(common)
    assert all(each.failing == each.of_failing for each in common.values())


TRITON: dict[str, tuple[set[str], set[str]]] = {
    # by id: parts that must matter, and rules that must be among those of some part
    "MSK-30": ({"causal", "seqlen_k"}, {"seqlen_k not a multiple of tile_n=32"}),
    "MSK-01": ({"causal"}, {"seqlen_q != seqlen_k"}),
    "MSK-11-tail": ({"causal", "seqlen_k"}, {"seqlen_k not a multiple of tile_n=32"}),
    "LSE-30": ({"seqlen_k"}, set()),
    "GQA-30": ({"groups", "kv_heads"}, set()),
    "GQA-02": ({"groups"}, set()),
    "RAG-14": ({"batch"}, set()),
    "RAG-03": ({"seqlen_q"}, set()),
    "PRC-31": ({"dtype"}, set()),
}

_BY_VALUES = {"LSE-30", "PRC-31"}
"""Faults that show with some values only: other dims, or another seed, have other values."""


@pytest.mark.slow
@pytest.mark.parametrize("id_", TRITON)
def test_the_cause_of_a_fault_in_triton_is_named(id_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All the time that shrinking leaves is for the explanation: on a loaded machine the interpreter is slow."""
    monkeypatch.setattr(explainer, "_SHARE", 1.0)
    _, parts = explained(kernel_of(mutants()[id_]), tmp_path)
    must, rules = TRITON[id_]
    assert must <= set(rules_of(parts)), rules_of(parts)
    assert rules <= {each for part in parts.values() for each in part.rules}
    for plain in ("slack_q", "slack_k") if id_ in _BY_VALUES else ("seed", "kv_heads", "dims", "slack_q", "slack_k"):
        assert plain in must or not (plain in parts and parts[plain].passes), parts[plain]


@pytest.mark.slow
def test_the_demos_empty_queries_are_named(tmp_path: Path) -> None:
    kernel = demo_kernel()
    variants = few_variants(all_variants(kernel, "cpu"), all_variants(kernel, "cpu")[0].config, causal=False)
    _, parts = explained(kernel, tmp_path, variants=variants)
    assert parts["seqlen_q"].value == "0"
    assert "1" in parts["seqlen_q"].passes
    assert set(rules_of(parts)) <= {"seqlen_q", "batch"}
