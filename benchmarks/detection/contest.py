"""One way of testing on one kernel for some seconds: which Cases it fails, and whether the kernel without the bug passes them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace
from support.detection import Attempt, attempt, executor
from support.mutants import kernel_of, mutants

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.harness.isolation.outcomes import KERNEL_STAGES, Death, Reply, exception_of
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Kernel
from attnfuzz.strategies.case import Case
from detection.drawn import boundary_shapes, plain_integers
from detection.shapes import Consume, flash_attention, flex_attention, tilelang_examples

__all__ = ["METHODS", "OURS", "Method", "Result", "Turn", "failure_of", "played"]

OURS: Final = "attnfuzz"
_MOST: Final = 10**6
"""Cases of a campaign: time ends it."""
_SHRINK: Final = 0.01


@dataclass(frozen=True, slots=True)
class Method:
    """A way of testing: where its Cases come from, and its rule (None: attnfuzz's own Verdict). `shapes`, `accepts`: in words."""

    title: str
    draw: Callable[[Kernel, int, Consume], None] | None
    rule: str | None
    shapes: str
    accepts: str


METHODS: Final[dict[str, Method]] = {
    OURS: Method("attnfuzz", None, None, "a campaign", "its verdict"),
    "flash": Method(
        "flash-attention's grid", flash_attention, "twice", "its fixed grid", "twice the error of attention in the dtype"
    ),
    "tilelang": Method("TileLang's examples", tilelang_examples, "close", "its examples", "rtol = atol = 1e-2"),
    "flex": Method(
        "flex attention's suite", flex_attention, "mean", "its fixed grid", "1.1 times the mean error of eager flex attention"
    ),
    "boundary": Method(
        "boundary shapes", boundary_shapes, "tolerance", "seeded, at tile boundaries", "one tolerance for each dtype"
    ),
    "plain": Method("plain Hypothesis", plain_integers, None, "integers by Hypothesis, normal values", "attnfuzz's verdict"),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """A method's turn on a mutant, by id, or on a kernel without bugs, by name."""

    method: str
    subject: str
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Result:
    """What a turn came to. `cases`: judged within its time. `alarms`: of them, failed though the kernel has no bug there.

    `found`: how the Case that shows the bug failed; empty: none did. `exhausted`: there were no more Cases to try.
    """

    method: str
    subject: str
    cases: int
    seconds: float
    found: str = ""
    case: str = ""
    alarms: int = 0
    exhausted: bool = False


def played(turn: Turn) -> Result:
    """Play a method's turn.

    Raises:
        KeyboardInterrupt: Ctrl-C ended it.
    """
    bank = mutants()
    _ready(bank[turn.subject].kernel if turn.subject in bank else turn.subject)
    if turn.method == OURS:
        return _campaign_on_mutant(turn) if turn.subject in bank else _campaign_on_kernel(turn)
    if turn.subject not in bank:
        return _Trials(turn, turn.subject, None).result()
    kernel = kernel_of(bank[turn.subject])
    registry.register(kernel)
    try:
        return _Trials(turn, bank[turn.subject].kernel, kernel.name).result()
    finally:
        registry.unregister(kernel.name)


@functools.cache
def _ready(kernel: str) -> None:
    """Load in this process and in its children, before any time begins, what a method loads when it is first used."""
    right = registry.get(kernel)
    settings = Settings(max_examples=1, shrink=_SHRINK, out=None)
    run_campaign([right], settings, lambda _: None, executor(right.backend))


def _campaign_on_mutant(turn: Turn) -> Result:
    row = attempt(Attempt(turn.subject, turn.seed, _MOST, _SHRINK, turn.seconds))
    # A Trial that has begun may end a little after the time, and does not count then.
    found = "" if row.cases is None or row.seconds > turn.seconds else f"{row.kind} {row.output}".strip()
    seconds, case = min(row.seconds, turn.seconds), row.case if found else ""
    return Result(turn.method, turn.subject, row.tried, seconds, found, case, int(bool(row.otherwise)))


def _campaign_on_kernel(turn: Turn) -> Result:
    settings = Settings(max_examples=_MOST, seed=turn.seed, shrink=_SHRINK, budget=turn.seconds, out=None)
    kernel = registry.get(turn.subject)
    try:
        done = run_campaign([kernel], settings, lambda _: None, executor(kernel.backend))
    finally:
        executor(kernel.backend).limit(None)
    if done.interrupted:
        raise KeyboardInterrupt
    summary = done.summaries[0]
    return Result(turn.method, turn.subject, summary.cases, done.seconds, alarms=len(summary.findings))


class _Trials:
    """The Cases of a turn. The time of checks on the kernel without the bug does not count.

    Args:
        turn: method, seconds and seed.
        right: name of the kernel without the bug.
        faulty: name of the one with it; None: there is none, and all failures are false alarms.
    """

    def __init__(self, turn: Turn, right: str, faulty: str | None) -> None:
        self._turn, self._right, self._faulty = turn, right, faulty
        self._method = METHODS[turn.method]
        self._begin = time.monotonic()
        self._checks = 0.0
        self._cases = self._alarms = 0
        self._failed, self._case = "", ""
        self._ended = False

    def result(self) -> Result:
        """Try the method's Cases until the time is over, or one shows the bug."""
        assert self._method.draw is not None
        self._method.draw(registry.get(self._right), self._turn.seed, self._consume)
        seconds = min(self._spent(), self._turn.seconds)
        return Result(
            self._turn.method, self._turn.subject, self._cases, seconds, self._failed, self._case, self._alarms,
            exhausted=not self._ended,
        )  # fmt: skip

    def _spent(self) -> float:
        return time.monotonic() - self._begin - self._checks

    def _consume(self, case: Case) -> bool:
        self._ended = self._one(case)
        return self._ended

    def _one(self, case: Case) -> bool:
        """Try a Case; return whether the turn is over. One that ends after its time does not count."""
        case = replace(case, kernel=self._faulty or self._right)
        failure = failure_of(case, self._method.rule)
        if self._spent() > self._turn.seconds:
            return True
        self._cases += 1
        if failure and self._faulty is not None and not self._failed_by_right(case):
            self._failed, self._case = failure, case.canonical()
            return True
        self._alarms += bool(failure)
        return self._spent() > self._turn.seconds

    def _failed_by_right(self, case: Case) -> bool:
        start = time.monotonic()
        try:
            return bool(failure_of(replace(case, kernel=self._right), self._method.rule))
        finally:
            self._checks += time.monotonic() - start


def failure_of(case: Case, rule: str | None) -> str:
    """Run a Case in a child process, and return what fails of it by a rule, or by attnfuzz's own Verdict; empty: nothing.

    Raises:
        ExecutionError: the harness itself failed.
    """
    isolated = executor(registry.get(case.kernel).backend)
    if rule is None:
        return ", ".join(f"{each.kind} {each.output or ''}".strip() for each in isolated.trial(case).failures)
    payload = {"kernel": shipped(case.kernel), "case": case.canonical(), "device": "cpu", "rule": rule}
    outcome = isolated.ask("detection.rules:judged", payload)
    if isinstance(outcome, Reply):
        return str(outcome.result["broken"])
    if isinstance(outcome, Death):
        # A reference that takes too long says nothing of the kernel.
        return f"{outcome.why} in the {outcome.stage}" if outcome.stage in KERNEL_STAGES else ""
    raise exception_of(outcome)
