"""The bank of mutants: the direct Case of each shows it, the kernel without it passes that Case, and a wrong file is refused."""

from __future__ import annotations

import functools
import itertools
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from support import mutants as bank
from support.mutants import SUBJECTS, Mutant, Need, kernel_of, module_of, mutants

from attnfuzz.harness.core import environment
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.sequence import run_sequence
from attnfuzz.kernels import registry
from attnfuzz.kernels.faults.planted import planted_copy
from attnfuzz.kernels.tilelang import build
from attnfuzz.kernels.triton import blockmask
from attnfuzz.strategies.case import Case, Recipe, case_from_json
from attnfuzz.strategies.variants import all_variants


@functools.cache
def of_the_right_kernel(case: str) -> Verdict:
    return run_sequence(case_from_json(case), "cpu")


ALWAYS = {"ADD-01", "MSK-19", "LSE-18", "STR-10", "PRC-01-modified"}
"""Cases of several blocks take a second each, and compiles several: those few always that no other test has."""

DEADLINE = 10.0
"""Seconds after which a child hangs."""


def marks_of(mutant: Mutant) -> list[pytest.MarkDecorator]:
    """Triton's interpreter runs in a process of its own where Triton is compiled."""
    slow = mutant.isolated or mutant.held_out or (mutant.kernel != "triton.varlen" and mutant.id not in ALWAYS)
    interpreted = [pytest.mark.interpreted] * (mutant.backend == "triton")
    return [*interpreted, *[pytest.mark.slow] * slow]


def in_a_child(mutant: Mutant, case: Case) -> Verdict:
    executor = Isolated("cpu", backends=[mutant.backend], deadline=DEADLINE)
    try:
        return executor.trial(case)
    finally:
        executor.close()


def wrong_outputs(verdict: Verdict) -> set[str]:
    """The outputs that are wrong, gradients of captured tensors by "d <name>"."""
    failures = [each for each in verdict.failures if each.output or each.check.startswith("d ")]
    return {each.output or each.check for each in failures}


@pytest.mark.parametrize(
    "mutant", [pytest.param(each, id=each.id, marks=marks_of(each)) for each in mutants().values() if each.device == "cpu"]
)
def test_its_direct_case_shows_it(mutant: Mutant) -> None:
    if reason := registry.get(mutant.kernel).unavailable("cpu"):
        pytest.skip(reason)
    if mutant.fused and platform.machine() == "x86_64" and "fma" not in build._cpu_features():
        pytest.skip("this processor rounds products and sums one by one")
    environment.prepare("cpu")
    kernel = registry.register(kernel_of(mutant))
    try:
        case = mutant.direct_case(kernel.name)
        verdict = in_a_child(mutant, case) if mutant.isolated else run_sequence(case, "cpu")
    finally:
        registry.unregister(kernel.name)
    assert {each.kind for each in verdict.failures} == set(mutant.kinds)
    assert wrong_outputs(verdict) == set(mutant.outputs)
    right = of_the_right_kernel(mutant.direct_case(mutant.kernel).canonical())
    assert right.status == "pass", right.failures


CHECKER = "only a memory checker sees it"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(each, id=each.id, marks=pytest.mark.interpreted) for each in mutants().values() if CHECKER in each.not_on_gpu],
)
def test_a_gpu_cannot_show_what_only_the_memory_checker_sees(mutant: Mutant) -> None:
    """What they read past an end, where bands lie as on a GPU, or store twice, changes nothing."""
    if reason := registry.get(mutant.kernel).unavailable("cpu"):
        pytest.skip(reason)
    environment.prepare("cpu")
    kernel = registry.register(kernel_of(mutant))
    try:
        verdict = run_sequence(mutant.direct_case(kernel.name), "cpu")
    finally:
        registry.unregister(kernel.name)
    assert verdict.status == "pass", verdict.failures


def test_a_bug_of_streams_has_lists_of_all_streams_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Case alone shows it: a CPU has one stream, and on a GPU a plain call has made the lists before."""
    mutant = mutants()["HST-42"]
    planted = planted_copy(module_of(mutant.kernel, "masks"), mutant.edits("masks"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    assert (blockmask.stream_of("cuda"), planted.stream_of("cuda")) == (7, 0)


def without(case: Case, need: Need) -> list[Case]:
    """Cases that lack what a bug is said to need, and are like its direct one in all else."""
    p = case.problem
    match need:
        case "values":
            return [replace(case, recipe=Recipe(seed=case.recipe.seed))]
        case "kv_heads":
            return [replace(case, problem=replace(p, heads=p.groups, kv_heads=1))]
        case "sequences":
            pairs = itertools.combinations(zip(p.seqlens_q, p.seqlens_k, strict=True), 2)
            return [replace(case, problem=replace(p, seqlens_q=(a[0], b[0]), seqlens_k=(a[1], b[1]))) for a, b in pairs]
        case "tiles":
            tile_m, tile_n = (case.config.tile(name, 1) * max(1, 2 // p.batch) for name in ("tile_m", "tile_n"))
            lengths = tuple(min(n, tile_m) for n in p.seqlens_q), tuple(min(n, tile_n) for n in p.seqlens_k)
            return [replace(case, problem=replace(p, seqlens_q=lengths[0], seqlens_k=lengths[1]))]


def verdicts_without(mutant: Mutant) -> list[Verdict]:
    environment.prepare("cpu")
    kernel = registry.register(kernel_of(mutant))
    try:
        cases = [each for need in mutant.needs for each in without(mutant.direct_case(kernel.name), need)]
        return [run_sequence(each, "cpu") for each in cases]
    finally:
        registry.unregister(kernel.name)


@pytest.mark.parametrize(
    "mutant", [pytest.param(each, id=each.id, marks=marks_of(each)) for each in mutants().values() if each.needs]
)
def test_without_what_it_needs_it_does_not_show(mutant: Mutant) -> None:
    if reason := registry.get(mutant.kernel).unavailable("cpu"):
        pytest.skip(reason)
    verdicts = verdicts_without(mutant)
    assert verdicts
    assert {each.status for each in verdicts} == {"pass"}


@pytest.mark.interpreted
def test_a_need_that_a_bug_does_not_have_is_noticed() -> None:
    """Other values show it too."""
    mutant = mutants()["MSK-05"]
    if reason := registry.get(mutant.kernel).unavailable("cpu"):
        pytest.skip(reason)
    assert [each.status for each in verdicts_without(replace(mutant, needs=("values",)))] == ["fail"]


def test_those_are_there() -> None:
    assert mutants().keys() >= ALWAYS


@pytest.mark.parametrize("name", SUBJECTS)
def test_without_a_patch_it_is_the_kernel(name: str) -> None:
    """With its own capabilities and Configs: those that a campaign draws from."""
    kernel, planted = (
        registry.get(name),
        kernel_of(Mutant(id="no", source="", mechanism="", kernel=name, outputs=(), kinds=(), patches=(), case="{}")),
    )
    assert (planted.name, planted.capabilities) == ("mutant.no", kernel.capabilities)
    problem = next(each.problem(kernel.capabilities) for each in all_variants(kernel, kernel.capabilities.devices[0]))
    assert planted.configs(problem) == kernel.configs(problem)
    assert [Path(each).name for each in planted.files] == [Path(each).name for each in kernel.files]


WRONG = {
    "another id": ('id = "RAG-03"', 'id = "RAG-99"', "its id is 'RAG-99'; a file is named by its id"),
    "an unknown field": ('kernel = "', 'colour = "red"\nkernel = "', "unknown field `colour`"),
    "an unknown kernel": ('"triton.varlen"', '"triton.nothing"', "kernel='triton.nothing': no bugs are planted in it"),
    "an unknown part": ('part = "device"', 'part = "masks"', "part='masks': triton.varlen has no such part"),
    "a patch that does not fit": ("old = 'if start_n", "old = 'if begin_n", "it occurs 0 times"),
    "no code": ("new = 'if ", "new = 'if if ", "is no Python with them"),
    "no Case": ('"problem"', '"problme"', "case.problem: it is missing"),
}


@pytest.mark.parametrize(("old", "new", "text"), list(WRONG.values()), ids=list(WRONG))
def test_a_file_that_is_wrong_is_refused_with_its_name(
    old: str, new: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (bank.FOLDER / "RAG-03.toml").read_text()
    assert old in content
    (tmp_path / "RAG-03.toml").write_text(content.replace(old, new, 1))
    monkeypatch.setattr(bank, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"RAG-03\.toml: ") as caught:
        bank.mutants.__wrapped__()
    assert text in str(caught.value)


def test_what_is_held_out_is_no_part_of_the_bank() -> None:
    out = {each.id for each in mutants().values() if each.held_out}
    assert out == {each.stem for each in bank.HELD_OUT.glob("*.toml")}
    assert len(out) >= 50
    assert {each.id for each in mutants().values()} - out == {each.stem for each in bank.FOLDER.glob("*.toml")}


def test_an_id_is_of_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "RAG-03.toml").write_text((bank.FOLDER / "RAG-03.toml").read_text())
    monkeypatch.setattr(bank, "HELD_OUT", tmp_path)
    with pytest.raises(ValueError, match=r"RAG-03\.toml: the bank has a mutant of that id too"):
        bank.mutants.__wrapped__()
