"""Detection power: how many Cases a campaign needs to find each mutant of the bank, and how small its minimal Case is."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
from support.mutants import Mutant, Need, kernel_of, mutants

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.events import Event, FailureFound, KernelSummary, TrialFinished
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.child import ChildError
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.outcomes import ExecutionError, OutOfTime
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.strategies.case import Case, case_from_json

__all__ = ["Attempt", "Found", "Nearest", "Rates", "attempt", "beyond", "executor", "mutant_of", "rates", "rates_by", "spread"]

PLAIN = ("normal", "zeros")
"""Patterns of values that are plain."""
_RAISED, _DEATHS = ("compile-error", "exception"), ("crash", "hang")
_NOT_RUN = (*_RAISED, *_DEATHS)
_BATCH = 8
"""Cases of a batch on a GPU: a bug that ends its process does so once for each Case of the batch, which takes seconds."""
_CAMPAIGNS = 3
"""Campaigns on a mutant at most, each after one that ended by a Case that ended its process once, as on a busy machine."""
_LEAST_SECONDS = 5.0
"""With fewer seconds left no other campaign begins."""
_AGAIN, _AGAIN_SECONDS = 3, 120.0
"""Runs of a Case that ended its process on a GPU, of which one must do so again; seconds for them, and for the right kernel's."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A mutant by its id, the seed of a campaign, its number of Cases, and seconds for shrinking (None: those of a run).

    `budget`: seconds after which it ends, before `most` Cases; None: no limit. `deadline`: seconds that a stage of a Case may
    take before it hangs, and `compiles`: compiles at once; None: those of a run. `backends`: of all attempts of this process,
    whose children have loaded them; empty: the kernel's.
    """

    mutant: str
    seed: int
    most: int
    shrink: float | None = None
    budget: float | None = None
    device: Device = "cpu"
    deadline: float | None = None
    compiles: int | None = None
    backends: tuple[str, ...] = ()


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
    cut: bool = False
    """Whether the time of the campaign was over before all of its Cases were tried."""
    error: str = ""
    """Why the campaign ended before its time: an error that is no finding."""
    device: Device = "cpu"
    on: str = ""
    """The device, as torch calls it."""


_executors: dict[tuple[Device, float | None, tuple[str, ...]], Isolated] = {}


def executor(*backends: str, device: Device = "cpu", deadline: float | None = None) -> Isolated:
    """Return the executor of all attempts on kernels of `backends`, ready: to load Triton takes longer than most of them."""
    key = (device, deadline, backends)
    if key not in _executors:
        # On a GPU each child has a context of its own, of half a GiB: one spare, since many such processes share it.
        isolated = Isolated(device, backends=backends, deadline=deadline, spares=1)
        isolated.describe()
        _executors[key] = isolated
    return _executors[key]


def _drop(isolated: Isolated) -> None:
    """Close an executor after an error: the next attempt has children of its own."""
    for key in [key for key, each in _executors.items() if each is isolated]:
        del _executors[key]
    isolated.close()


def mutant_of(id_: str) -> Mutant:
    """Return the mutant of that id, from the bank or made by an operator.

    Raises:
        ValueError: there is none.
    """
    if id_ in mutants():
        return mutants()[id_]
    changed: Mutant = importlib.import_module("support.operators.bank").operator_mutant(id_)
    return changed


def spread(ids: Sequence[str]) -> list[str]:
    """Return mutants in an order in which each kernel has its share at any time: a run that ends early says something of all."""
    of_kernel: dict[str, list[str]] = {}
    for each in ids:
        of_kernel.setdefault(mutant_of(each).kernel, []).append(each)
    places = {id_: (n + 0.5) / len(its) for its in of_kernel.values() for n, id_ in enumerate(its)}
    return sorted(ids, key=places.__getitem__)


def attempt(task: Attempt) -> Found:
    """Run the campaign that `attnfuzz run` would run on a mutant, in child processes, until its first failure is shrunk.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the campaign, which says nothing of the mutant.
    """
    mutant, start = mutant_of(task.mutant), time.monotonic()
    isolated = None
    try:
        kernel = kernel_of(mutant)
        isolated = executor(*(task.backends or (kernel.backend,)), device=task.device, deadline=task.deadline)
        registry.register(kernel)
        try:
            return replace(_tried(task, mutant, kernel, isolated), on=isolated.describe()["device"])
        finally:
            registry.unregister(kernel.name)
            isolated.limit(None)
    except (BadArgument, ExecutionError, ChildError) as error:
        if isolated is not None:
            _drop(isolated)
        seconds = time.monotonic() - start
        return Found(task.mutant, task.seed, None, seconds, device=task.device, error=f"{type(error).__name__}: {error}")


def _tried(task: Attempt, mutant: Mutant, kernel: Kernel, isolated: Isolated) -> Found:
    """Return what a campaign makes of a kernel with the bug.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the campaign.
        ExecutionError: the device was lost.
    """
    start, left, campaigns = time.monotonic(), task.budget, 0
    while True:
        result, campaigns = _campaign(task, kernel, isolated, start, left), campaigns + 1
        why = _why_not_again(task, result, isolated)
        left = None if task.budget is None else task.budget - (time.monotonic() - start)
        if not why or campaigns == _CAMPAIGNS or (left is not None and left < _LEAST_SECONDS):
            break
        # That says nothing of the bug: the same Cases again.
        isolated.limit(None)
    if why:
        times = "once" if campaigns == 1 else f"once in each of {campaigns} campaigns"
        return replace(result, cases=None, otherwise=f"it fails with {result.kind} {times}, and {why}")
    if result.cases is not None and (why := _why_not_found(task, mutant, result, isolated)):
        return replace(result, cases=None, otherwise=why)
    if task.mutant not in mutants() and result.cases == 1 and result.kind in _RAISED:
        return replace(result, runs=False)
    return result


def _campaign(task: Attempt, kernel: Kernel, isolated: Isolated, start: float, budget: float | None) -> Found:
    """Return what one campaign makes of a kernel with the bug; the seconds to its first failure count from `start`.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the campaign.
        ExecutionError: the device was lost.
    """
    # Under a budget as without one, the Cases are those of all variants: only the order depends on what is compiled first.
    settings = Settings(
        device=task.device,
        max_examples=task.most,
        max_failures=1,
        seed=task.seed,
        shrink=task.shrink,
        budget=budget,
        jobs=task.compiles,
        deadline=task.deadline,
        all_variants=True,
        batch=_BATCH,
        out=None,
    )
    listener = _Listener()
    done = run_campaign([kernel], settings, listener, isolated)
    if done.interrupted:
        raise KeyboardInterrupt
    if done.lost:
        raise ExecutionError(done.lost)
    return _of(task, done.summaries[0], start, listener, time.monotonic())


def _why_not_again(task: Attempt, result: Found, isolated: Isolated) -> str | None:
    """Return why the end of a process on a GPU, by a crash or a hang, says nothing of the bug, or None: it shows again."""
    if task.device != "cuda" or result.cases is None or result.kind not in _DEATHS:
        return None
    isolated.limit(time.monotonic() + _AGAIN_SECONDS)
    try:
        again = any(_fails_in_a_new_process(case_from_json(result.case), isolated) for _ in range(_AGAIN))
    except OutOfTime:
        return "has no Verdict of that Case again in time"
    return None if again else f"passes that Case {_AGAIN} times"


def _why_not_found(task: Attempt, mutant: Mutant, result: Found, isolated: Isolated) -> str | None:
    """Return why a failure is not that of the bug, or None: a text that is no code fails as well, and so may a right kernel.

    On a GPU a bug of memory may end its process, which the memory checker of the CPU prevents.
    """
    died = result.kind in _DEATHS and task.device == "cuda"
    if result.kind in _NOT_RUN and result.kind not in mutant.kinds and not died:
        return f"it fails with {result.kind}, which the bug does not cause"
    if task.device == "cuda":
        isolated.limit(time.monotonic() + _AGAIN_SECONDS)
    try:
        right = msgspec.structs.replace(case_from_json(result.case), kernel=mutant.kernel)
        return f"{mutant.kernel} fails in the same Case" if _fails_in_a_new_process(right, isolated) else None
    except OutOfTime:
        return f"{mutant.kernel} has no Verdict of the same Case in time"


def _fails_in_a_new_process(case: Case, isolated: Isolated) -> bool:
    """Whether a Case fails where no Case of the bug has run before it, whose stray writes another kernel would read."""
    isolated.fresh()
    return isolated.trial(case).status != "pass"


class _Listener:
    """Listener of a campaign: when failures were found, and the passing Cases that came nearest to a budget."""

    def __init__(self) -> None:
        self.drawn = 0
        """Drawn Cases with a Verdict, until the first that fails, which counts."""
        self.failing = False
        self.failures: list[float] = []
        self.minimal = 0.0
        """When the last Case of shrinking was judged."""
        self.nearest: dict[str, Nearest] = {}

    def __call__(self, event: Event) -> None:
        """Note what an event says of either."""
        if isinstance(event, TrialFinished) and event.phase == "generate" and not self.failing:
            # On a GPU the Cases of a batch are counted before the first failure among them is looked at.
            self.drawn, self.failing = self.drawn + 1, bool(event.verdict.failures)
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
        cut = task.budget is not None and summary.cases < task.most and end - start >= task.budget
        return Found(
            mutant=task.mutant,
            seed=task.seed,
            cases=None,
            seconds=end - start,
            tried=summary.cases,
            nearest=listener.nearest,
            cut=cut,
            device=task.device,
        )
    first = summary.findings[0]
    case, larger = first.case, beyond(first.case)
    cases = listener.drawn if listener.failing else first.cases_to_find
    return Found(
        mutant=task.mutant,
        seed=task.seed,
        cases=cases,
        seconds=listener.failures[0] - start,
        kind=first.identity.kind,
        output=first.identity.output or "",
        case=case.canonical(),
        tokens=case.problem.total_q + case.problem.total_k,
        shrinking=listener.minimal - listener.failures[0],
        partly=first.partly,
        beyond=larger,
        simple=not set(larger) - set(mutant_of(task.mutant).needs),
        tried=cases,
        device=task.device,
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
    most: int | None = None
    """Most Cases of those that found it."""


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
    most = max((each.cases for each in killed if each.cases is not None), default=None)
    return Rates(len(rows), len(killed), percentile(0.5), percentile(0.9), shrinking, plain, len(given) - len(rows), most)


def rates_by(found: Iterable[Found], what: Literal["kernel", "seed", "controls"]) -> dict[str, Rates]:
    """Return the figures of attempts of each kernel, of each seed, or of the controls, which any grid of shapes finds."""
    parts: dict[str, list[Found]] = {}
    for each in found:
        mutant = mutant_of(each.mutant)
        name = {"kernel": mutant.kernel, "seed": str(each.seed), "controls": "controls" if mutant.control else ""}[what]
        if name:
            parts.setdefault(name, []).append(each)
    return {name: rates(parts[name]) for name in sorted(parts)}
