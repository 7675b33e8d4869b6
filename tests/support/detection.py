"""Detection power: how many Cases a campaign needs to find each mutant of the bank, and how small its minimal Case is."""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec
from support.mutants import Mutant, Need, kernel_of, mutants

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.events import Event, FailureFound, KernelSummary, TrialFinished
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.kernels import registry
from attnfuzz.strategies.case import Case, case_from_json

__all__ = ["Attempt", "Found", "Nearest", "Rates", "attempt", "beyond", "executor", "mutant_of", "rates"]

PLAIN = ("normal", "zeros")
"""Patterns of values that are plain."""
_RAISED = ("compile-error", "exception")
_NOT_RUN = (*_RAISED, "crash", "hang")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A mutant by its id, the seed of a campaign, its number of Cases, and seconds for shrinking (None: those of a run).

    `budget`: seconds after which it ends, before `most` Cases; None: no limit.
    """

    mutant: str
    seed: int
    most: int
    shrink: float | None = None
    budget: float | None = None


@dataclass(frozen=True, slots=True)
class Nearest:
    """The Case with the largest error over its budget in one output; canonical JSON."""

    ratio: float
    case: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a campaign made of a mutant.

    `cases` and `seconds`: to the first failure; None: there was none, and `nearest` has the nearest Case of each output.
    `case`: the minimal Case, `tokens`: its queries and keys, and `shrinking`: the seconds from the first failure to it, without
    those of its explanation. `beyond`: parts in which it is larger than minimal Cases should be, and `simple`: whether the bug
    needs each of them. `tried`: Cases that were drawn and judged.
    """

    mutant: str
    seed: int
    cases: int | None
    seconds: float
    kind: str = ""
    output: str = ""
    case: str = ""
    tokens: int = 0
    shrinking: float = 0.0
    partly: bool = False
    beyond: tuple[Need, ...] = ()
    simple: bool = False
    tried: int = 0
    nearest: dict[str, Nearest] = field(default_factory=dict)
    otherwise: str = ""
    """Why a failure that was found is not that of the bug."""
    runs: bool = True
    """Whether the mutant runs at all: one that raises in its first Case says nothing of a campaign."""


@functools.cache
def executor(backend: str) -> Isolated:
    """Return the executor of all attempts on a backend's kernels, ready: to load Triton takes longer than most of them."""
    isolated = Isolated("cpu", backends=[backend])
    isolated.describe()
    return isolated


def mutant_of(id_: str) -> Mutant:
    """Return the mutant of that id, from the bank or made by an operator.

    Raises:
        ValueError: there is none.
    """
    if id_ in mutants():
        return mutants()[id_]
    changed: Mutant = importlib.import_module("support.operators.bank").operator_mutant(id_)
    return changed


def attempt(task: Attempt) -> Found:
    """Run the campaign that `attnfuzz run` would run on a mutant, in child processes, until its first failure is shrunk.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the campaign, which says nothing of the mutant.
    """
    mutant, listener = mutant_of(task.mutant), _Listener()
    kernel = kernel_of(mutant)
    isolated = executor(kernel.backend)  # seconds count from where its children have loaded what they need
    registry.register(kernel)
    settings = Settings(max_examples=task.most, max_failures=1, seed=task.seed, shrink=task.shrink, budget=task.budget, out=None)
    start = time.monotonic()
    try:
        done = run_campaign([kernel], settings, listener, isolated)
    finally:
        registry.unregister(kernel.name)
        isolated.limit(None)
    if done.interrupted:
        raise KeyboardInterrupt
    result = _of(task, done.summaries[0], start, listener, time.monotonic())
    if result.cases is not None and (why := _why_not_found(mutant, result, isolated)):
        return replace(result, cases=None, otherwise=why)
    if task.mutant not in mutants() and result.cases == 1 and result.kind in _RAISED:
        return replace(result, runs=False)
    return result


def _why_not_found(mutant: Mutant, result: Found, isolated: Isolated) -> str | None:
    """Return why a failure is not that of the bug, or None: a text that is no code fails as well, and so may a right kernel."""
    if result.kind in _NOT_RUN and result.kind not in mutant.kinds:
        return f"it fails with {result.kind}, which the bug does not cause"
    case = msgspec.structs.replace(case_from_json(result.case), kernel=mutant.kernel)
    return None if isolated.trial(case).status == "pass" else f"{mutant.kernel} fails in the same Case"


class _Listener:
    """Listener of a campaign: when failures were found, and the passing Cases that came nearest to a budget."""

    def __init__(self) -> None:
        self.failures: list[float] = []
        self.minimal = 0.0
        """When the last Case of shrinking was judged."""
        self.nearest: dict[str, Nearest] = {}

    def __call__(self, event: Event) -> None:
        """Note what an event says of either."""
        if isinstance(event, FailureFound):
            self.failures.append(time.monotonic())
            self.minimal = self.failures[0]
        elif isinstance(event, TrialFinished) and event.phase == "shrink":
            self.minimal = time.monotonic()
        elif isinstance(event, TrialFinished) and event.phase == "generate":
            for name, figures in event.verdict.figures.items():
                before = self.nearest.get(name)
                if figures.elements and (before is None or figures.worst > before.ratio):
                    self.nearest[name] = Nearest(figures.worst, event.case.canonical())


def _of(task: Attempt, summary: KernelSummary, start: float, listener: _Listener, end: float) -> Found:
    if not summary.findings:
        return Found(task.mutant, task.seed, None, end - start, tried=summary.cases, nearest=listener.nearest)
    first = summary.findings[0]
    case = first.case
    larger = beyond(case)
    return Found(
        mutant=task.mutant,
        seed=task.seed,
        cases=first.cases_to_find,
        seconds=listener.failures[0] - start,
        kind=first.identity.kind,
        output=first.identity.output or "",
        case=case.canonical(),
        tokens=case.problem.total_q + case.problem.total_k,
        shrinking=listener.minimal - listener.failures[0],
        partly=first.partly,
        beyond=larger,
        simple=not set(larger) - set(mutant_of(task.mutant).needs),
        tried=first.cases_to_find,
    )


def beyond(case: Case) -> tuple[Need, ...]:
    """Return in which parts a minimal Case is beyond two sequences, two tiles of tokens, plain values or one key/value head.

    Tiles of tokens are those of its Config, over all sequences: of queries, or of keys if they are more.
    """
    p = case.problem
    sides = ((p.seqlens_q, case.config.tile("tile_m", 1)), (p.seqlens_k, case.config.tile("tile_n", 1)))
    tiles = max(sum(-(-length // tile) for length in lengths) for lengths, tile in sides)
    larger: dict[Need, bool] = {
        "sequences": p.batch > 2,
        "tiles": tiles > 2,
        "values": case.recipe.pattern not in PLAIN,
        "kv_heads": p.kv_heads > 1,
    }
    return tuple(name for name, is_larger in larger.items() if is_larger)


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
    """Minimal Cases that are larger than minimal Cases should be in no part, or only in parts that the bug needs."""
    not_run: int = 0
    """Mutants that do not run, which are no attempts."""


def rates(found: Iterable[Found]) -> Rates:
    """Return the figures of attempts, at least one."""
    given = list(found)
    rows = [each for each in given if each.runs]
    cases = sorted(float("inf") if each.cases is None else each.cases for each in rows)
    killed = [each for each in rows if each.cases is not None]

    def percentile(share: float) -> float | None:
        value = cases[min(len(cases) - 1, int(share * len(cases)))] if cases else float("inf")
        return None if value == float("inf") else value

    shrinking = statistics.median([each.shrinking for each in killed]) if killed else 0.0
    plain = sum(each.simple for each in killed)
    return Rates(len(rows), len(killed), percentile(0.5), percentile(0.9), shrinking, plain, len(given) - len(rows))
