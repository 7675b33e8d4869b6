"""NaN that a kernel computes is "nonfinite"; NaN that stood where it never wrote is "unwritten"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from support.calls import PROBLEM, Subject

from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

Out = dict[str, torch.Tensor]


def tried(spoil: Callable[[Subject, Problem, Out], Any], problem: Problem = PROBLEM) -> tuple[Verdict, Subject]:
    subject = registry.register(Subject(spoil))
    try:
        return run_trial(Case(kernel=subject.name, problem=problem), "cpu"), subject
    finally:
        registry.unregister(subject.name)


def only(verdict: Verdict) -> Failure:
    (failure,) = verdict.failures
    return failure


def half_written(subject: Subject, problem: Problem, out: Out) -> None:
    part = torch.empty_like(out["dv"])
    part[:6] = out["dv"][:6]
    out["dv"] = part


def test_rows_never_written_are_called_so() -> None:
    verdict, subject = tried(half_written)
    failure = only(verdict)
    assert (failure.kind, failure.output) == ("unwritten", "dv")
    assert failure.message == "dV: 64 of 160 elements were never written; first at sequence 1, key 0, head 0, dim 0"
    assert failure.place is not None
    assert failure.place.got != failure.place.got
    assert len(subject.calls) == 2, "one launch more"


def test_what_is_computed_from_unwritten_memory_is_called_so() -> None:
    def spoil(subject: Subject, problem: Problem, out: Out) -> None:
        out["dk"] = torch.empty_like(out["dk"]).add_(out["dk"])

    failure = only(tried(spoil)[0])
    assert failure.kind == "unwritten"
    assert failure.message.startswith(
        "dK: 160 of 160 elements come from memory that was never written; first at sequence 0, key 0"
    )


def test_nan_that_is_computed_stays_nonfinite() -> None:
    def spoil(subject: Subject, problem: Problem, out: Out) -> None:
        out["dk"][3] = torch.nan

    assert only(tried(spoil)[0]).kind == "nonfinite"


def test_infinity_stays_nonfinite() -> None:
    def spoil(subject: Subject, problem: Problem, out: Out) -> None:
        out["o"][3] = torch.inf

    assert only(tried(spoil)[0]).kind == "nonfinite"


def test_nan_of_slack_rows_read_stays_nonfinite() -> None:
    """That is in the inputs, not in memory of the kernel's own."""

    def forward_reads(subject: Subject, problem: Problem, out: Out) -> None:
        out["dv"] += out["slack"].sum() * 0

    class Reads(Subject):
        def backward(self, inputs, o, lse):
            self.made["slack"] = inputs.v[problem.total_k :]
            return super().backward(inputs, o, lse)

    problem = replace(PROBLEM, slack_k=2)
    subject = registry.register(Reads(forward_reads))
    try:
        failure = only(run_trial(Case(kernel=subject.name, problem=problem), "cpu"))
    finally:
        registry.unregister(subject.name)
    assert (failure.kind, failure.output) == ("nonfinite", "dv")


def test_a_second_launch_that_breaks_changes_nothing() -> None:
    def spoil(subject: Subject, problem: Problem, out: Out) -> None:
        if len(subject.calls) == 2:
            raise ValueError("not twice")
        half_written(subject, problem, out)

    assert only(tried(spoil)[0]).kind == "nonfinite"


def test_a_kernel_that_is_right_is_launched_once() -> None:
    verdict, subject = tried(lambda subject, problem, out: None)
    assert verdict.status == "pass"
    assert len(subject.calls) == 1
