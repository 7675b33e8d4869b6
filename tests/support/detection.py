"""Detection power: how many Cases a campaign needs to find each mutant of the bank, and how small its minimal Case is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
from support.mutants import Mutant, kernel_of, mutants

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.events import Event, FailureFound, KernelSummary
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.kernels import registry
from attnfuzz.strategies.case import case_from_json

__all__ = ["Attempt", "Found", "Rates", "attempt", "rates", "simple"]

PLAIN = ("normal", "zeros")
"""Patterns of values that are plain."""
_NOT_RUN = ("compile-error", "exception", "crash", "hang")
_executors: dict[str, Isolated] = {}
"""One for all attempts on the kernels of a language: to load Triton takes longer than most of them."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A mutant by its id, the seed of a campaign, its number of Cases, and seconds for shrinking (None: those of a run)."""

    mutant: str
    seed: int
    most: int
    shrink: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a campaign made of a mutant.

    `cases` and `seconds`: to the first failure; None: there was none, and `worst` is the largest error / budget of each output.
    `case`: the minimal Case, and `shrinking`: the seconds from the first failure to it.
    """

    mutant: str
    seed: int
    cases: int | None
    seconds: float
    kind: str = ""
    output: str = ""
    case: str = ""
    shrinking: float = 0.0
    partly: bool = False
    simple: bool = False
    worst: dict[str, float] | None = None
    otherwise: str = ""
    """Why a failure that was found is not that of the bug."""


def attempt(task: Attempt) -> Found:
    """Run the campaign that `attnfuzz run` would run on a mutant, in child processes, until its first failure is shrunk."""
    mutant, found = mutants()[task.mutant], list[float]()
    kernel = kernel_of(mutant)
    if mutant.backend not in _executors:
        _executors[mutant.backend] = Isolated("cpu", backends=[mutant.backend])
    executor = _executors[mutant.backend]

    def listen(event: Event) -> None:
        if isinstance(event, FailureFound):
            found.append(time.monotonic())

    registry.register(kernel)
    settings = Settings(max_examples=task.most, max_failures=1, seed=task.seed, shrink=task.shrink, out=None)
    start = time.monotonic()
    try:
        done = run_campaign([kernel], settings, listen, executor)
    finally:
        registry.unregister(kernel.name)
    result = _of(task, done.summaries[0], start, found, time.monotonic())
    if result.cases is not None and (why := _why_not_found(mutant, result, executor)):
        return replace(result, cases=None, otherwise=why)
    return result


def _why_not_found(mutant: Mutant, result: Found, executor: Isolated) -> str | None:
    """Return why a failure is not that of the bug, or None: a text that is no code fails as well, and so may a right kernel."""
    if result.kind in _NOT_RUN and result.kind not in mutant.kinds:
        return f"it fails with {result.kind}, which the bug does not cause"
    case = msgspec.structs.replace(case_from_json(result.case), kernel=mutant.kernel)
    return None if executor.trial(case).status == "pass" else f"{mutant.kernel} fails in the same Case"


def _of(task: Attempt, summary: KernelSummary, start: float, found: Sequence[float], end: float) -> Found:
    if not summary.findings:
        worst = {name: each.worst for name, each in summary.outputs.items()}
        return Found(task.mutant, task.seed, None, end - start, worst=worst)
    first = summary.findings[0]
    case = first.case
    return Found(
        mutant=task.mutant,
        seed=task.seed,
        cases=first.cases_to_find,
        seconds=found[0] - start,
        kind=first.identity.kind,
        output=first.identity.output or "",
        case=case.canonical(),
        shrinking=end - found[0],
        partly=first.partly,
        simple=simple(case.problem.batch, case.recipe.pattern),
    )


def simple(sequences: int, pattern: str) -> bool:
    """Whether a minimal Case has at most two sequences and plain values."""
    return sequences <= 2 and pattern in PLAIN


@dataclass(frozen=True, slots=True)
class Rates:
    """Figures over attempts: how many there were and how many found the bug; median and 90th percentile of Cases to find it.

    A campaign that did not find it counts as more Cases than any, so that a percentile may be None.
    """

    attempts: int
    killed: int
    median: float | None
    ninetieth: float | None
    shrinking: float
    """Median of the seconds from the first failure to the minimal Case."""
    simple: int


def rates(found: Iterable[Found]) -> Rates:
    """Return the figures of attempts, at least one."""
    rows = list(found)
    cases = sorted(float("inf") if each.cases is None else each.cases for each in rows)
    killed = [each for each in rows if each.cases is not None]

    def percentile(share: float) -> float | None:
        value = cases[min(len(cases) - 1, int(share * len(cases)))]
        return None if value == float("inf") else value

    shrinking = statistics.median([each.shrinking for each in killed]) if killed else 0.0
    return Rates(len(rows), len(killed), percentile(0.5), percentile(0.9), shrinking, sum(each.simple for each in killed))
