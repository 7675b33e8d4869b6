"""Slack rows of outputs: whatever a kernel declares of them is checked, in a launch alone and in a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from attnfuzz.harness.trial.batch import run_batch
from attnfuzz.harness.trial.poison import POISON
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Capabilities, Inputs, SlackRows
from attnfuzz.kernels.problem import OUTPUT_NAMES, OutputName, Problem
from attnfuzz.kernels.torch.reference_cpu import KERNEL, ReferenceCpu
from attnfuzz.strategies.case import Case, Recipe

NAME = "test.slack"
RAGGED = Problem(
    seqlens_q=(5, 3), seqlens_k=(4, 6), packing="ragged", heads=2, kv_heads=1, dim_qk=16, dim_v=16, dtype="float32", slack_q=2,
    slack_k=3,
)  # fmt: skip
DENSE = replace(RAGGED, packing="dense", seqlens_q=(5, 5), seqlens_k=(4, 4))
Change = Callable[[torch.Tensor], Any]


class Subject(ReferenceCpu):
    """A kernel that changes slack rows of one of its outputs, after it has made them what it declares."""

    name = NAME

    def __init__(self, declared: SlackRows, output: OutputName, change: Change) -> None:
        self.capabilities: Capabilities = replace(KERNEL.capabilities, slack_rows=declared)
        self.declared, self.output, self.change = declared, output, change

    def build(self, problem: Problem, *arguments: Any) -> Any:
        built, subject = super().build(problem, *arguments), self

        class Changed:
            def forward(self, inputs: Inputs) -> Any:
                self.kept = built.forward(inputs)
                return tuple(subject.of(problem, name, x) for name, x in zip(("o", "lse"), self.kept, strict=True))

            def backward(self, inputs: Inputs, *_: Any) -> Any:
                gradients = built.backward(inputs, *self.kept)
                return tuple(subject.of(problem, name, x) for name, x in zip(("dq", "dk", "dv"), gradients, strict=True))

        return Changed()

    def of(self, problem: Problem, name: OutputName, values: torch.Tensor) -> torch.Tensor:
        """The output, with the slack rows that are declared, changed if it is the one."""
        dense, query = problem.packing == "dense", name in ("o", "lse", "dq")
        lengths, slack = (problem.seqlens_q, problem.slack_q) if query else (problem.seqlens_k, problem.slack_k)
        tokens, axis = lengths[0] if dense else sum(lengths), dense + (name == "lse")
        out = torch.empty_like(values) if self.declared == "untouched" else torch.zeros_like(values)
        out.narrow(axis, 0, tokens).copy_(values.narrow(axis, 0, tokens))
        if name == self.output:
            self.change(out.narrow(axis, tokens, slack))
        return out


@pytest.fixture
def failures() -> Callable[..., list[str]]:
    """The messages of a subject's Case, the same alone and in a batch."""

    def run(problem: Problem, *arguments: Any) -> list[str]:
        kernel = registry.register(Subject(*arguments))
        try:
            cases = [Case(kernel=NAME, problem=problem, recipe=Recipe(seed=seed)) for seed in range(3)]
            alone = [[each.message for each in run_trial(case, "cpu").failures] for case in cases]
            assert [[each.message for each in verdict.failures] for verdict in run_batch(cases, "cpu")] == alone
        finally:
            registry.unregister(kernel.name)
        return alone[0]

    return run


@pytest.mark.parametrize("problem", [RAGGED, DENSE], ids=["ragged", "dense"])
@pytest.mark.parametrize("output", OUTPUT_NAMES)
@pytest.mark.parametrize(
    ("declared", "change"),
    [
        ("zero", lambda rows: rows[-1:].fill_(2.0**-140)),
        ("zero", lambda rows: rows.fill_(torch.nan)),
        ("untouched", lambda rows: rows[-1:].zero_()),
        ("untouched", lambda rows: rows.fill_(torch.nan)),
    ],
    ids=["not zero", "NaN for zero", "zeroed", "NaN of its own"],
)
def test_slack_rows_that_are_not_as_declared_fail(
    failures: Callable[..., list[str]], problem: Problem, output: OutputName, declared: SlackRows, change: Change
) -> None:
    (message,) = failures(problem, declared, output, change)
    assert f"slack_rows={declared!r}" in message
    assert message.startswith({"o": "O", "lse": "LSE", "dq": "dQ", "dk": "dK", "dv": "dV"}[output])


@pytest.mark.parametrize("problem", [RAGGED, DENSE, replace(RAGGED, slack_q=0, slack_k=0)], ids=["ragged", "dense", "none"])
@pytest.mark.parametrize("declared", ["anything", "zero", "untouched"])
def test_slack_rows_that_are_as_declared_pass(failures: Callable[..., list[str]], problem: Problem, declared: SlackRows) -> None:
    assert failures(problem, declared, "o", lambda rows: rows.fill_(7.0) if declared == "anything" else None) == []


def test_lse_of_slack_rows_may_be_that_of_a_row_without_keys(failures: Callable[..., list[str]]) -> None:
    assert failures(RAGGED, "zero", "lse", lambda rows: rows.fill_(-torch.inf)) == []
    assert failures(RAGGED, "zero", "o", lambda rows: rows.fill_(-torch.inf)) != []


@pytest.mark.parametrize("break_it", [lambda o: o.untyped_storage().resize_(0) and o, lambda o: o.to("meta")])
def test_an_output_without_memory_here_is_reported_as_that(
    failures: Callable[..., list[str]], break_it: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Subject.of

    def broken(self: Subject, problem: Problem, name: OutputName, values: torch.Tensor) -> torch.Tensor:
        out = of(self, problem, name, values)
        return break_it(out) if name == "o" else out

    monkeypatch.setattr(Subject, "of", broken)
    (message,) = failures(RAGGED, "zero", "dq", lambda rows: None)
    assert message.startswith(("the memory was taken away", "O has device meta"))


def test_rows_are_judged_beside_wrong_slack_rows(failures: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    of = Subject.of

    def wrong(self: Subject, problem: Problem, name: OutputName, values: torch.Tensor) -> torch.Tensor:
        return of(self, problem, name, values + 1 if name == "dv" else values)

    monkeypatch.setattr(Subject, "of", wrong)
    numeric, slack = failures(RAGGED, "zero", "dq", lambda rows: rows.fill_(1.0))
    assert numeric.startswith("dV")
    assert slack.startswith("dQ: ")


def test_no_poison_is_another_converted() -> None:
    for dtype, (words, bits) in POISON.items():
        poison = torch.full((4,), bits, dtype=words).view(dtype)
        for other, (other_words, other_bits) in POISON.items():
            if other is not dtype:
                assert (poison.to(other).view(other_words) != other_bits).all()
                # As NumPy and compilers convert, which keep the first bits of a NaN.
                if torch.float32 in (dtype, other):
                    single, half = POISON[torch.float32][1], other_bits if dtype is torch.float32 else bits
                    mantissa = 10 if torch.float16 in (dtype, other) else 7
                    assert half & (2**mantissa - 1) != single >> (23 - mantissa) & (2**mantissa - 1)


@pytest.mark.parametrize("dtype", POISON)
def test_poison_is_a_nan_that_no_computation_makes(dtype: torch.dtype) -> None:
    words, bits = POISON[dtype]
    poison = torch.full((4,), bits, dtype=words).view(dtype)
    assert poison.isnan().all()
    nan, inf, zero = (torch.full((4,), value, dtype=dtype) for value in (torch.nan, torch.inf, 0.0))
    for computed in (nan, zero / 0, inf * 0):
        assert (computed.view(words) != bits).all()
