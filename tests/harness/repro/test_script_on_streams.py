"""Scripts of Cases on other streams and in CUDA graphs make these calls too."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.calls import PROBLEM, WIDE, Subject
from support.on_streams import Around

from attnfuzz.harness.campaign.corpus import CaseFile, StoredFinding
from attnfuzz.harness.repro.script import runtime, script
from attnfuzz.harness.repro.script.short import why_not_short
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Inputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.torch.reference_cpu import KERNEL as CORRECT
from attnfuzz.strategies.case import STREAMS, Case, Check


def stored(case: Case) -> CaseFile:
    return CaseFile(case, StoredFinding.read({}), Path("case.json"))


def packed(kernel: Any, problem: Problem, check: Check, device: Device) -> runtime.PackedCase:
    case = Case(kernel=kernel.name, problem=problem, config=kernel.configs(problem)[0], check=check)
    data, texts = script._packed(stored(case), kernel, device)
    return dataclasses.replace(data, memory=runtime.unpacked(tuple(texts)))


class Graph:
    """One that replays what a test gives it. `captures`: captures that have begun and not ended."""

    replays: Any = staticmethod(lambda: None)
    captures = 0

    def capture_begin(self, **_: Any) -> None:
        Graph.captures += 1

    def capture_end(self) -> None:
        Graph.captures -= 1

    def replay(self) -> None:
        self.replays()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a script asks of torch's streams, which are none here."""
    asked: list[str] = []

    @contextlib.contextmanager
    def current(stream: int) -> Iterator[None]:
        asked.append(f"on {stream}")
        yield

    numbers = iter(range(100))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: next(numbers))
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: asked.append("sleep"), raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return asked


class Remembering(Subject):
    """One whose last call can be made again into the same outputs, as a graph does."""

    def forward(self, inputs: Inputs) -> Any:
        results = super().forward(inputs)
        self.kept["last"] = lambda: [to.copy_(x) for to, x in zip(results, Subject.forward(self, inputs), strict=True)]
        return results

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Any:
        results = CORRECT.build(inputs.problem, self.configs(inputs.problem)[0], "cpu").backward(inputs, o, lse)

        def again() -> None:
            for to, x in zip(results, Subject.backward(self, inputs, o, lse), strict=True):
                to.copy_(x)

        self.kept["last"] = again
        return results


def test_a_script_makes_the_calls_of_its_check(streams: list[str]) -> None:
    subject = Subject(capabilities=WIDE)
    for check, expected in (
        ("other_stream", ["on 0", "sleep"] * 2),
        ("two_streams", ["on 2", "on 2", "sleep", "on 3", "sleep", "on 3"] * 2),
    ):
        streams.clear()
        case = packed(subject, PROBLEM, check, "cpu")
        assert (case.check, bool(case.beside), len(case.calls)) == (check, check == "two_streams", 2)
        assert runtime.check(case) == []
        assert streams == expected


def test_a_script_compares_what_a_graph_replays(streams: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Remembering(capabilities=replace(WIDE, cuda_graphs=("forward", "backward")))
    case = packed(subject, PROBLEM, "graph", "cpu")
    # Without a replay the outputs are those of other values.
    lines = runtime.check(case)
    assert any(line.startswith("o: ") and "are wrong" in line for line in lines)
    monkeypatch.setattr(Graph, "replays", lambda _: subject.kept["last"]())
    assert runtime.check(case) == []


@pytest.mark.usefixtures("streams")
def test_a_script_ends_a_capture_in_which_the_kernel_raises() -> None:
    def refuse(subject: Subject, problem: Problem, out: dict[str, torch.Tensor]) -> None:
        if Graph.captures:
            raise ValueError("not in a graph")

    subject = Subject(refuse, capabilities=replace(WIDE, cuda_graphs=("forward", "backward")))
    assert runtime.check(packed(subject, PROBLEM, "graph", "cpu")) == ["the kernel raised; its traceback is above"]
    assert Graph.captures == 0


def test_other_calls_are_plain_and_a_short_script_says_why_not() -> None:
    subject = Subject()
    assert packed(subject, PROBLEM, "twice", "cpu").check == ""
    for check in STREAMS:
        case = Case(kernel=subject.name, problem=PROBLEM, check=check)
        assert "elsewhere than on the default stream" in str(why_not_short(stored(case)))
        assert script.unshown(stored(case), "cuda") is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("check", "fault"),
    [
        *((check, "") for check in STREAMS),
        ("other_stream", "default stream"),
        ("two_streams", "workspace"),
        ("graph", "kept value"),
    ],
)
def test_a_script_shows_what_the_check_shows_on_the_gpu(check: Check, fault: str) -> None:
    if reason := registry.get("triton.varlen").unavailable("cuda"):
        pytest.skip(reason)
    problem = Problem(seqlens_q=(40,), seqlens_k=(40,), heads=1, dim_qk=64, dim_v=64)
    lines = runtime.check(packed(Around(fault), problem, check, "cuda"))
    assert bool(lines) == bool(fault), lines
