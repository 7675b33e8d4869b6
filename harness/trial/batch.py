"""Trials of several Cases of one kernel in this process, with few device operations and few waits for the device.

The numbers of all inputs are computed together (noise.py). The Cases launch one after the other, without waiting for each; then
the device is waited for once, the checks of all launches are read together (writes.py), and the outputs are judged together.

What cannot be attributed to one Case of a batch is settled by running Cases alone: one that seems to have written where it may
not, one whose outputs lie in memory that another Case's launch returned too, and one that was refused memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from attnfuzz.harness.core import environment
from attnfuzz.harness.core.clock import Clock
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.judge.batch import Judged, judge_batch
from attnfuzz.harness.judge.failure import Failure, Identity
from attnfuzz.harness.judge.together import Launched
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.bands import Bands
from attnfuzz.harness.trial.bench import Bench, Steps, WentWrong
from attnfuzz.harness.trial.defaults import of_torch
from attnfuzz.harness.trial.errors import BatchLost, DeviceLost, describe_exception
from attnfuzz.harness.trial.gpu_memory import is_out_of_memory, stop_counting, when_free
from attnfuzz.harness.trial.inputs import materialise, numbers_of
from attnfuzz.harness.trial.launch import start
from attnfuzz.harness.trial.noise import Numbers
from attnfuzz.harness.trial.reading import read_together
from attnfuzz.harness.trial.supports import with_config
from attnfuzz.harness.trial.trial import CHECKS, check_runnable, run_trial, signed
from attnfuzz.harness.trial.writes import Suspicion, suspicion_of
from attnfuzz.kernels.contract import Built, Device, Inputs, Kernel, Outputs
from attnfuzz.kernels.problem import OUTPUT_NAMES, Problem
from attnfuzz.oracles.relations.transfer import Move, moved
from attnfuzz.strategies.case import CALLS, RELATIONS, Case, Recipe
from attnfuzz.strategies.earlier_calls import earlier_problems

__all__ = ["run_batch"]


def run_batch(
    cases: Sequence[Case],
    device: Device,
    enter: Callable[[str], None] | None = None,
    at: Callable[[int], None] | None = None,
    known: Collection[Identity] | None = None,
) -> list[Verdict]:
    """Run `cases`, all of one kernel; return a Verdict for each, equal to that of `run_trial` but for its seconds.

    `enter` is called with the name of each stage as it begins, `at` with the number of a Case as it begins to work: its inputs
    and launches, its work after the judgement, and its run alone. A stage that Cases share counts in equal parts. `known`: of
    these failures no pattern is looked for, and of each other one in one Case only; None: the pattern of every failure.

    Raises:
        BadArgument: a Case cannot run here.
        BatchLost: the device no longer works, or has no memory for the batch.
    """
    environment.prepare(device)
    kernels = [check_runnable(case, device) for case in cases]
    own = [with_config(kernel, case) for case, kernel in zip(cases, kernels, strict=True)]
    stop_counting()
    failures = None if known is None else {*known}
    batch = _Batch(list(zip(own, kernels, strict=True)), device, enter, at or (lambda _: None), failures)
    try:
        with of_torch():
            batch.launch()
            batch.read()
            batch.judge()
            return batch.verdicts()
    except DeviceLost as error:
        raise BatchLost(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error) or not environment.alive(device):
            raise BatchLost(f"the batch of {counted(len(cases), 'Case')} is lost: {describe_exception(error)}") from error
        raise


@dataclass(frozen=True)
class _PreparedBench(Bench):
    """The steps of one Case of a batch, with the numbers of the batch's inputs."""

    numbers: Numbers
    before: tuple[Problem, ...] = field(default=(), kw_only=True)
    """The Problems of the calls before the Case's own."""
    waits: ClassVar[bool] = False

    def earlier(self) -> tuple[Problem, ...]:
        """Return them, which were found for the batch's numbers."""
        return self.before

    def inputs(self, problem: Problem | None = None, recipe: Recipe | None = None) -> Inputs:
        """Return the tensors, of the batch's numbers."""
        with self.clock.stage("inputs"):
            return materialise(problem or self.case.problem, recipe or self.case.recipe, self.device, self.numbers)


@dataclass(frozen=True)
class _BatchBench(_PreparedBench):
    """The same for a Case to be judged with others: launches are not waited for, and their checks are kept for later."""

    suspicions: list[Suspicion] = field(default_factory=list)
    """Checks of the launches so far."""

    def launch(self, ready: Built, inputs: Inputs, *, fill: float = math.nan, bands: Bands | None = None) -> Outputs:
        """Run forward and backward on copies of `inputs`, without waiting."""
        if not math.isnan(fill):
            # The second launch of a Case that is judged already.
            return self.checked_launch(ready, inputs, fill=fill, bands=bands)
        with self.clock.stage("kernel"):
            rows = self.kernel.capabilities.slack_rows
            outcome = start(self.case, ready, inputs, self.device, fill=fill, bands=bands, wait=False, slack_rows=rows)
            if isinstance(outcome, Failure):
                raise WentWrong(outcome)
            self.suspicions.extend(outcome.writes.later())
        return outcome.outputs

    def watch(self, bands: Sequence[Bands]) -> Callable[[], Iterator[str]]:
        """Check the bands at this point of the device's work; a Case with broken ones is run alone."""
        check = "earlier memory"
        self.suspicions.extend(suspicion_of(self.case.kernel, check, each.edges()) for each in bands)
        return lambda: iter(())


@dataclass(slots=True)
class _Run:
    """One Case of a batch."""

    number: int
    bench: Bench
    suspicions: list[Suspicion]
    steps: Steps
    met: set[Identity]
    """Gets the failures of its Verdict."""
    request: Launched | Move | None = None
    """What its check waits for."""
    verdict: Verdict | None = None
    guard: Failure | None = None
    """What the checks of its launches show."""
    alone: bool = False
    """Whether it is to be run alone."""

    @property
    def launched(self) -> Launched | None:
        """The outputs that are to be judged, if it waits for that."""
        return self.request if isinstance(self.request, Launched) else None

    @property
    def move(self) -> Move | None:
        """The copies that it waits for."""
        return self.request if isinstance(self.request, Move) else None

    def resume(self, answer: Judged | list[torch.Tensor] | None = None) -> None:
        """Run the check to its next request, or to its end; then let go of its tensors."""
        try:
            self.request = self.steps.send(answer)
        except StopIteration as end:
            self.verdict = end.value
            self.met |= {each.identity for each in end.value.failures}
            self.drop()
        except WentWrong as error:
            self.verdict = Verdict(status="fail", failures=(error.failure,))
            self.alone = error.failure.kind == "out-of-memory"
            self.drop()

    def drop(self) -> None:
        """Let go of the tensors."""
        self.steps.close()
        self.request = None


class _Batch:
    """The Cases of one batch, and what they share."""

    def __init__(
        self,
        cases: Sequence[tuple[Case, Kernel]],
        device: Device,
        enter: Callable[[str], None] | None,
        at: Callable[[int], None],
        known: set[Identity] | None,
    ) -> None:
        self._device, self._enter, self._at, self._known = device, enter, at, known
        self._cases, self._runs = cases, list[_Run]()

    def launch(self) -> None:
        """Run each Case up to the judgement of its outputs."""
        clock = Clock(self._enter)
        with clock.stage("inputs"):
            earlier = [self._earlier(case, kernel) for case, kernel in self._cases]
            numbers = numbers_of(self._sources(earlier), self._device)
        met = set[Identity]() if self._known is None else self._known
        known = () if self._known is None else self._known
        for number, (case, kernel) in enumerate(self._cases):
            own = Clock(self._enter, {"inputs": clock.seconds["inputs"] / len(self._cases)})
            suspicions: list[Suspicion] = []
            before = earlier[number]
            bench: Bench = _BatchBench(case, kernel, self._device, own, numbers, suspicions, before=before, known=known)
            if case.check in RELATIONS:
                # Its launches are compared at once.
                bench = _PreparedBench(case, kernel, self._device, own, numbers, known=known)
            self._runs.append(_Run(number, bench, suspicions, CHECKS[case.check](bench), met))
        for run in self._runs:
            self._resume(run)
        self._move()

    def _earlier(self, case: Case, kernel: Kernel) -> tuple[Problem, ...]:
        return earlier_problems(kernel, case, self._device) if case.check in CALLS else ()

    def _sources(self, earlier: Sequence[tuple[Problem, ...]]) -> Iterator[tuple[Problem, Recipe]]:
        """Yield what inputs are made of: those of all Cases, and of the calls before them."""
        for (case, _), problems in zip(self._cases, earlier, strict=True):
            yield from ((each, case.recipe) for each in (case.problem, *problems))

    def _resume(self, run: _Run, answer: Judged | list[torch.Tensor] | None = None) -> None:
        self._at(run.number)
        try:
            run.resume(answer)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            run.alone = True
            run.drop()

    def _move(self) -> None:
        """Copy what checks ask to be moved, for all together, and resume them, as long as any asks."""
        while moving := [(run, run.move) for run in self._runs if run.move is not None]:
            for run in _sharing_memory(self._runs):
                run.alone = True
                run.drop()
            moving = [(run, move) for run, move in moving if not run.alone]
            # Outputs are compared before another run launches, which may return the same memory.
            moving.sort(key=lambda pair: not pair[1].outputs)
            if not moving:
                continue
            with self._shared(moving[0][1].stage, [run for run, _ in moving]):
                copies = moved([move for _, move in moving])
            for run, _ in moving:
                self._resume(run, copies.pop(0))

    def read(self) -> None:
        """Wait for the device, and read the checks of all launches."""
        waiting = [run for run in self._runs if run.launched is not None]
        with self._shared("kernel", waiting):
            environment.synchronise(self._device)
            read_together([each.reading for run in self._runs for each in run.suspicions if each.reading is not None])
        for run in self._runs:
            run.guard = next((failure for each in run.suspicions if (failure := each.failure()) is not None), None)
            run.alone = run.alone or run.guard is not None
        for run in _sharing_memory(waiting):
            run.alone = True
        for run in waiting:
            if run.alone:
                run.drop()

    def judge(self) -> None:
        """Judge all outputs together and resume the checks, as long as any asks for more to be judged."""
        while waiting := [run for run in self._runs if run.launched is not None]:
            judgements = self._judged(waiting)
            for place, run in enumerate(waiting):
                judged, judgements[place] = judgements[place], None
                self._end(run, judged)
            self._move()
            for run in _sharing_memory(self._runs):
                run.alone = True
                run.drop()

    def _judged(self, runs: Sequence[_Run]) -> list[Judged | None]:
        """Return the judgement of each run's outputs; None: it is to be judged by itself."""
        launched = [run.launched for run in runs if run.launched is not None]
        with self._shared("oracle", runs):
            try:
                return judge_batch(launched, runs[0].bench.kernel.capabilities.deviations, self._device)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
        return [None] * len(launched)

    def _end(self, run: _Run, judged: Judged | None) -> None:
        """Resume a check with the judgement of its outputs; None: they are judged here."""
        assert run.launched is not None
        if judged is None:
            self._at(run.number)
            judged = run.bench.judged(run.launched)
        self._resume(run, judged)

    def verdicts(self) -> list[Verdict]:
        """Return the Verdict of each Case, after the runs of those that must run alone."""
        # A write outside a Case's tensors may have changed another Case's.
        doubtful = any(run.guard is not None for run in self._runs)
        for run in self._runs:
            if run.alone or run.verdict is None or (doubtful and run.verdict.status == "fail"):
                self._at(run.number)
                run.drop()
                run.verdict = self._alone(run)
        return [signed(run.verdict, run.bench.clock.seconds, self._device) for run in self._runs if run.verdict is not None]

    def _alone(self, run: _Run) -> Verdict:
        """Run the Case alone; a write that only a launch after others made is still its Failure."""
        verdict = when_free(lambda: run_trial(run.bench.case, self._device, self._enter), self._device)
        for stage, seconds in verdict.seconds.items():
            _add(run.bench.clock, stage, seconds)
        if verdict.status == "pass" and run.guard is not None:
            return Verdict(status="fail", failures=(run.guard,))
        return verdict

    @contextmanager
    def _shared(self, stage: str, runs: Sequence[_Run]) -> Iterator[None]:
        """Time a stage that `runs` share in equal parts."""
        clock = Clock(self._enter)
        with clock.stage(stage):
            yield
        for run in runs:
            _add(run.bench.clock, stage, clock.seconds[stage] / len(runs))


def _add(clock: Clock, stage: str, seconds: float) -> None:
    clock.seconds[stage] = clock.seconds.get(stage, 0.0) + seconds


def _sharing_memory(runs: Sequence[_Run]) -> list[_Run]:
    """Return the runs with outputs in an allocation of another's outputs: the kernel returns the same memory every time."""
    owners: dict[int, _Run] = {}
    sharing: dict[int, _Run] = {}
    for run in runs:
        for address in _addresses(run):
            owner = owners.setdefault(address, run)
            if owner is not run:
                sharing |= {owner.number: owner, run.number: run}
    return list(sharing.values())


def _addresses(run: _Run) -> set[int]:
    """Return the addresses of the allocations of a run's outputs that are not judged yet."""
    tensors: list[Any] = []
    if run.launched is not None:
        outputs = run.launched.outputs
        tensors = [*(getattr(outputs, name) for name in OUTPUT_NAMES), *outputs.d_captured]
    elif run.move is not None:
        tensors = [*run.move.outputs]
    plain = [each for each in tensors if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout is torch.strided]
    return {each.untyped_storage().data_ptr() for each in plain} - {0}
