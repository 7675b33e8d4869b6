"""Relations on a device beside the host: few operations, two waits, and the Verdicts of the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.beside import Beside, install
from support.long import Long

from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.batch import run_batch
from attnfuzz.harness.trial.checks import relations
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import RELATIONS, Case, Check, Recipe

THREE = Problem(seqlens_q=(5, 1, 7), seqlens_k=(6, 3, 4), heads=4, kv_heads=2, dim_qk=16, dim_v=16)
MOST, WAITS, OF_THE_BATCH = 60, 2, 1


def case_of(check: Check, seed: int = 0, name: str = "test.long") -> Case:
    problem = replace(THREE, causal="bottom_right") if check == "future_keys" else THREE
    return Case(kernel=name, problem=problem, check=check, recipe=Recipe(seed=seed))


def plain(verdict: Verdict) -> str:
    return repr(replace(verdict, seconds={}))


@pytest.fixture
def known() -> Iterator[Callable[[Any], Any]]:
    names: list[str] = []

    def register(kernel: Any) -> Any:
        names.append(kernel.name)
        return registry.register(kernel)

    yield register
    for name in names:
        registry.unregister(name)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Beside:
    return install(monkeypatch)


def verdict_beside(beside: Beside, case: Case) -> Verdict:
    with beside:
        (verdict,) = run_batch([case], "cpu")
    return verdict


@pytest.mark.parametrize("check", RELATIONS)
def test_a_small_case_takes_few_operations_and_two_waits(check: Check, beside: Beside, known: Any) -> None:
    known(Long())
    assert verdict_beside(beside, case_of(check)).status == "pass"
    assert 5 <= beside.operations["compare"] <= MOST
    assert sum(beside.waits.values()) == WAITS + OF_THE_BATCH


@pytest.mark.parametrize("check", RELATIONS)
def test_a_large_case_waits_for_each_launch_and_twice(
    check: Check, beside: Beside, known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(Long())
    monkeypatch.setattr(relations, "_ON_HOST", 0)
    assert verdict_beside(beside, case_of(check)).status == "pass"
    launches = {"split_batch": 4, "split_keys": 3, "huge_strides": 5}.get(check, 2)
    assert sum(beside.waits.values()) <= launches + WAITS + OF_THE_BATCH


@pytest.mark.parametrize("on_host", [pytest.param(1 << 16, marks=pytest.mark.slow), 0])
def test_a_batch_waits_as_often_as_one_case(on_host: int, beside: Beside, known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the Cases ask for goes to the host by one copy, and comes back by one; so do numbers that the device compares."""
    known(Long())
    monkeypatch.setattr(relations, "_ON_HOST", on_host)
    # The shift of scores is chosen by the values of the inputs, which are on the device.
    others = {"huge_strides"} if on_host else {"huge_strides", "shifted_scores"}
    cases = [case_of(check, seed) for seed in range(3) for check in RELATIONS if check not in others]
    with beside:
        verdicts = run_batch(cases, "cpu")
    assert {each.status for each in verdicts} == {"pass"}
    assert sum(beside.waits.values()) == WAITS + OF_THE_BATCH


@pytest.mark.slow
def test_a_batch_has_the_verdicts_of_its_cases_alone(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle, calls and relations of a kernel that is wrong in some of them."""
    known(Long(fault="LSE is that of the last chunk of keys", far=2))
    checks: tuple[Check, ...] = ("oracle", "twice", *RELATIONS)
    cases = [case_of(check, seed) for seed in range(2) for check in checks]
    expected = [run_trial(each, "cpu") for each in cases]
    assert {each.status for each in expected} == {"pass", "fail"}
    with install(monkeypatch):
        assert [plain(each) for each in run_batch(cases, "cpu")] == [plain(each) for each in expected]


def test_outputs_in_the_memory_of_another_case_are_judged_alone(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with one buffer for O overwrites that of an earlier Case before it is on the host."""

    class Reusing(Long):
        buffer = torch.empty(0)

        def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
            o, lse = super().forward(inputs)
            if self.number == 0:
                Reusing.buffer = torch.empty(1 << 16, dtype=o.dtype)
            self.number += 1
            kept = Reusing.buffer[: o.numel()].view(o.shape).copy_(o)
            return kept, lse

        number = 0

    known(Reusing())
    cases = [case_of("scaled_values", seed) for seed in range(3)]
    expected = [run_trial(each, "cpu") for each in cases]
    with install(monkeypatch):
        assert [plain(each) for each in run_batch(cases, "cpu")] == [plain(each) for each in expected]


FAULTS: tuple[tuple[Check, str], ...] = (
    ("split_batch", "a sequence far along reads the rows of the first"),
    ("permuted_keys", "a band of far keys is dropped"),
    ("repeated_heads", "the last head of a group is not added for far keys"),
    ("shifted_scores", "far rows have their scores capped"),
    ("constant_v", "padded keys enter the row sum of far rows"),
    ("scaled_values", "far rows of O have a bias"),
    ("future_keys", "far rows see one key too many"),
    ("split_keys", "LSE is that of the last chunk of keys"),
    ("huge_strides", "the row offset of k wraps at 2^31"),
)


@pytest.mark.parametrize("on_host", [1 << 18, 0])
@pytest.mark.parametrize(("check", "fault"), FAULTS)
def test_a_fault_has_the_verdict_of_the_cpu(
    check: Check, fault: str, on_host: int, known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {each for each, _ in FAULTS} == set(RELATIONS)
    known(Long(fault=fault, far=2))
    cases = [case_of(check, seed) for seed in range(3)]
    if check == "permuted_keys":
        cases = [replace(each, problem=replace(THREE, seqlens_q=(4,), seqlens_k=(150,))) for each in cases]
    expected = [run_trial(each, "cpu") for each in cases]
    assert any(each.status == "fail" for each in expected)
    beside = install(monkeypatch)
    monkeypatch.setattr(relations, "_ON_HOST", on_host)
    assert [plain(verdict_beside(beside, each)) for each in cases] == [plain(each) for each in expected]


class Acts(Long):
    """Does something to its inputs in one of its forwards."""

    def __init__(self, at: int, act: Callable[[Inputs, torch.Tensor], object]) -> None:
        super().__init__()
        self.at, self.act, self.number = at, act, 0

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = super().forward(inputs)
        if self.number == self.at:
            self.act(inputs, o)
        self.number += 1
        return o, lse


def writes_to_its_input(inputs: Inputs, o: torch.Tensor) -> None:
    inputs.v[0, 0, 0] += 1


def writes_past_its_input(inputs: Inputs, o: torch.Tensor) -> None:
    ctypes.memset(inputs.k.data_ptr() + inputs.k.nbytes, 1, 8)


def writes_past_its_output(inputs: Inputs, o: torch.Tensor) -> None:
    ctypes.memset(o.data_ptr() + o.nbytes, 1, 8)


def raises(inputs: Inputs, o: torch.Tensor) -> None:
    raise ValueError("no such tile")


ACTS = {
    "wrote to its input v": writes_to_its_input,
    "2-byte words were written past the end of its input k": writes_past_its_input,
    "2-byte words were written past the end of a tensor of the kernel's own": writes_past_its_output,
    "forward raised ValueError: no such tile": raises,
}


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("message", ACTS)
def test_what_a_launch_does_is_reported_though_it_is_read_later(message: str, at: int, beside: Beside, known: Any) -> None:
    known(Acts(at, ACTS[message]))
    failure = verdict_beside(beside, case_of("scaled_values")).failure
    assert failure is not None
    assert message in failure.message


def test_the_first_launch_that_is_wrong_is_reported(beside: Beside, known: Any) -> None:
    def first_writes_then_raises(inputs: Inputs, o: torch.Tensor) -> None:
        kernel.at = 1
        if kernel.number:
            raises(inputs, o)
        writes_past_its_input(inputs, o)

    kernel = known(Acts(0, first_writes_then_raises))
    failure = verdict_beside(beside, case_of("scaled_values")).failure
    assert failure is not None
    assert "past the end of its input k" in failure.message
    assert kernel.number == 1, "both launches ran"


@pytest.mark.parametrize("message", ["wrote to its input v", "2-byte words were written past the end of a tensor"])
@pytest.mark.parametrize("at", [1, 3])
def test_writes_are_found_with_rows_far_apart(message: str, at: int, beside: Beside, known: Any) -> None:
    act = writes_to_its_input if "input" in message else writes_past_its_output
    known(Acts(at, act))
    failure = verdict_beside(beside, case_of("huge_strides")).failure
    assert failure is not None
    assert message in failure.message
    assert failure.kind == "guard"
