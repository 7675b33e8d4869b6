"""The bank of mutants: the direct Case of each shows it, the kernel without it passes that Case, and a wrong file is refused."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from support import mutants as bank
from support.mutants import Mutant, kernel_of, mutants

from attnfuzz.harness.core import environment
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.strategies.case import case_from_json


@functools.cache
def of_the_right_kernel(case: str) -> Verdict:
    return run_trial(case_from_json(case), "cpu")


# Cases of several blocks take a second each: those few always that no other test has.
ALWAYS = {"ADD-01", "MSK-19", "LSE-18", "STR-10"}
SOME = [
    pytest.param(each, id=each.id, marks=[pytest.mark.slow] * (each.kernel == "triton.flex" and each.id not in ALWAYS))
    for each in mutants().values()
]


@pytest.mark.interpreted
@pytest.mark.parametrize("mutant", SOME)
def test_its_direct_case_shows_it(mutant: Mutant) -> None:
    pytest.importorskip("triton")
    environment.prepare("cpu")
    kernel = registry.register(kernel_of(mutant))
    try:
        verdict = run_trial(mutant.direct_case(kernel.name), "cpu")
    finally:
        registry.unregister(kernel.name)
    assert {each.kind for each in verdict.failures} == set(mutant.kinds)
    assert {each.output for each in verdict.failures} >= set(mutant.outputs)
    right = of_the_right_kernel(mutant.direct_case(mutant.kernel).canonical())
    assert right.status == "pass", right.failures


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
