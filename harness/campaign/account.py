"""Where the time of a campaign goes: seconds of its workers by step, and of their child processes by stage and by check.

A worker is in one step at a time, so that its steps add up to its time. They are counted in every run: some reads of a clock
for each batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast, get_args

from attnfuzz.harness.isolation.statistics import Statistics
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.strategies.case import Case

__all__ = ["STAGES", "STEPS", "Account", "OfCheck", "Step", "Times", "counted"]

Step = Literal["turn", "campaign", "draw", "journal", "start", "trial", "shrink", "other"]
"""What a worker does.

turn: waits for its next turn, the time in which there is nothing to try until a compile ends included. campaign: asks the
coordinator other questions and waits for the answers, and reports to it. draw: waits for a round that is being drawn. journal:
writes it. start: waits for a new child process. trial: waits for a child that has Cases. shrink: all of the above while a finding
is open. other: the rest.
"""
STEPS: tuple[Step, ...] = get_args(Step)
STAGES = ("compile", "inputs", "kernel", "oracle", "judge")
"""Stages of a trial in a child, as `Verdict.seconds` names them."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OfCheck:
    """Cases with one check, and seconds of children in all their stages."""

    cases: int = 0
    seconds: float = 0.0

    def __add__(self, other: OfCheck) -> OfCheck:
        """Return the sum."""
        return OfCheck(self.cases + other.cases, self.seconds + other.seconds)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of workers by step and of their children by stage, Cases that were tried, batches of them, children started.

    `child`, `checks`, `cases` and `batches` are those outside shrinking; a Case that runs alone is a batch too. `checks`: the
    seconds of `child` by the Cases' checks. `lost`: batches that ended their child or were refused memory, whose Cases ran again
    in halves or one by one, which takes longer.
    """

    worker: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    child: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    checks: Mapping[str, OfCheck] = field(default_factory=dict)
    cases: int = 0
    batches: int = 0
    children: int = 0
    lost: int = 0

    def __add__(self, other: Times) -> Times:
        """Return the sum of two workers' or two turns' times."""
        return Times(
            worker=_sum(self.worker, other.worker),
            child=_sum(self.child, other.child),
            checks={
                name: self.checks.get(name, OfCheck()) + other.checks.get(name, OfCheck())
                for name in {**self.checks, **other.checks}
            },
            cases=self.cases + other.cases,
            batches=self.batches + other.batches,
            children=self.children + other.children,
            lost=self.lost + other.lost,
        )


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}


class Account:
    """Counts the times of one worker; all of it is "other" that no `step` counts.

    Args:
        statistics: of the worker's executor.
    """

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._step: Step = "other"
        self._since = time.perf_counter()
        self._begin()

    def _begin(self) -> None:
        self._worker, self._child = dict[str, float](Times().worker), dict[str, float](Times().child)
        self._checks = dict[str, OfCheck]()
        self._cases = self._batches = 0
        self._children, self._lost = self._statistics.children, self._statistics.batches_lost

    def take(self) -> Times:
        """Return the times since the last call, and begin at 0."""
        self._enter(self._step)
        children = self._statistics.children - self._children
        lost = self._statistics.batches_lost - self._lost
        times = Times(self._worker, self._child, self._checks, self._cases, self._batches, children, lost)
        self._begin()
        return times

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Count the block as `step`, but for the steps within it; within "shrink" there are none."""
        if self._step == "shrink":
            yield
            return
        before = self._enter(step)
        try:
            yield
        finally:
            self._enter(before)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Count the block as "trial", and as "start" the part of it that waits for a new child process."""
        shrinks, before = self._step == "shrink", self._statistics.start_seconds
        try:
            with self.step("trial"):
                yield
        finally:
            if not shrinks:
                starting = self._statistics.start_seconds - before
                self._worker["trial"] -= starting
                self._worker["start"] += starting

    def judged(self, cases: Sequence[Case], verdicts: Sequence[Verdict]) -> None:
        """Count the Cases of one batch, with the Verdict of each."""
        if self._step == "shrink":
            return
        self._cases, self._batches = self._cases + len(verdicts), self._batches + 1
        for case, verdict in zip(cases, verdicts, strict=True):
            for stage, seconds in verdict.seconds.items():
                self._child[stage] = self._child.get(stage, 0.0) + seconds
            self._checks[case.check] = self._checks.get(case.check, OfCheck()) + OfCheck(1, sum(verdict.seconds.values()))

    def _enter(self, step: Step) -> Step:
        """Begin a step; returns the one that it ends."""
        now = time.perf_counter()
        self._worker[self._step] += now - self._since
        before, self._step, self._since = self._step, step, now
        return before


class _Counted:
    """Stands for an object whose calls count as one step."""

    def __init__(self, target: Any, account: Account, step: Step) -> None:
        self._target, self._account, self._of = target, account, step

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        def call(*arguments: Any, **named: Any) -> Any:
            with self._account.step(self._of):
                return method(*arguments, **named)

        return call


def counted(target: T, account: Account, step: Step) -> T:
    """Return `target`, of which only methods are used, with the time of each call counted as `step`."""
    return cast("T", _Counted(target, account, step))
