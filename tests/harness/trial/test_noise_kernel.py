"""The numbers of the kernel for a GPU are those of noise.py: its source is compiled and run here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fused_c import Compiled, generated

from attnfuzz.harness.trial import noise
from attnfuzz.harness.trial.inputs import materialise, numbers_of
from attnfuzz.harness.trial.noise import Numbers, Request
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Recipe

SOME = [
    *(
        Request("noise", seed, name, count)
        for seed, name, count in ((0, "q", 1000), (0, "k", 1), (7, "q", 333), (2**40, "v", 64))
    ),
    Request("heavy", 3, "q", 4097),
    Request("hashed", 3, "places", 100),
    Request("hashed", 4, "none", 0),
    Request("noise", 4, "none", 0),
    Request("hashed", 5, "places", 1),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("noise"))


def values(numbers: Numbers) -> dict[Any, torch.Tensor]:
    return {each: getattr(numbers, each.kind)(each.seed, each.name, (each.count,)) for each in SOME}


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "as they are asked for"])
def test_the_numbers_are_equal_bit_for_bit(compiled: Compiled, ahead: bool) -> None:
    plain = values(Numbers("cpu", SOME if ahead else ()))
    compiled.calls.clear()
    with generated(compiled):
        ours = values(Numbers("cpu", SOME if ahead else ()))
    assert compiled.calls == {"hashed_numbers": 2 if ahead else sum(bool(each.count) for each in SOME)}
    for each, x in plain.items():
        assert ours[each].dtype == x.dtype
        assert torch.equal(ours[each], x), each


def test_a_million_numbers_are_equal(compiled: Compiled) -> None:
    plain = Numbers("cpu").noise(11, "k", (1 << 20,))
    with generated(compiled):
        assert torch.equal(Numbers("cpu").noise(11, "k", (1 << 20,)), plain)


@pytest.mark.parametrize("pattern", ["normal", "lognormal", "outlier", "fewvalued"])
def test_inputs_are_equal(compiled: Compiled, pattern: Any) -> None:
    problem, recipe = (
        Problem(seqlens_q=(5, 0, 17), seqlens_k=(9, 3, 21), packing="ragged", dim_qk=8, dim_v=8),
        Recipe(pattern=pattern, seed=9),
    )
    plain = materialise(problem, recipe, "cpu")
    with generated(compiled):
        ours = materialise(problem, recipe, "cpu", numbers_of([(problem, recipe)], "cpu"))
    for name in ("q", "k", "v", "d_o", "cu_seqlens_q"):
        assert torch.equal(getattr(ours, name), getattr(plain, name)), name


def test_one_launch_holds_no_more_than_it_may(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_BY_KERNEL", 2000)
    plain = values(Numbers("cpu", SOME))
    compiled.calls.clear()
    with generated(compiled):
        ours = values(Numbers("cpu", SOME))
    assert compiled.calls["hashed_numbers"] > 2
    assert all(torch.equal(ours[each], plain[each]) for each in SOME)


def test_beside_one_that_is_too_large_the_others_are_computed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_MOST", 2000)
    computed: list[str] = []
    plain = noise._computed

    def noted(some: list[Request], device: str) -> Any:
        computed.extend(each.name for each in some)
        return plain(some, device)

    monkeypatch.setattr(noise, "_computed", noted)
    requests = [Request("noise", 1, name, count) for name, count in (("a", 500), ("large", 1600), ("b", 1400), ("c", 200))]
    numbers = Numbers("cpu", requests)
    assert computed == ["a", "b"], "and not the last, for which there is no room"
    for each in requests:
        assert torch.equal(numbers.noise(1, each.name, (each.count,)), noise.noise(1, each.name, (each.count,), "cpu"))


def test_without_numbers_nothing_is_launched(compiled: Compiled) -> None:
    compiled.calls.clear()
    with generated(compiled):
        Numbers("cpu", [Request("noise", 0, "q", 0)])
    assert not compiled.calls
