"""The campaign between its workers: gives out turns and rounds, knows every failure, runs the compiler, passes events on."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from attnfuzz.harness.campaign.compiles import CompileService, KeyState, Wanted
from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.corpus import repro_line
from attnfuzz.harness.campaign.coverage import Phase, Tally
from attnfuzz.harness.campaign.events import (
    CampaignFinished,
    Event,
    Finding,
    KernelBroke,
    KernelFinished,
    KernelSkipped,
    KernelSummary,
    SharedGpu,
    TrialFinished,
)
from attnfuzz.harness.campaign.journal import LeftBehind
from attnfuzz.harness.campaign.kernel_state import KernelState
from attnfuzz.harness.campaign.marks import Marks
from attnfuzz.harness.campaign.replays import SHARE
from attnfuzz.harness.campaign.rounds import Round
from attnfuzz.harness.campaign.worker_link import Turn, TurnEnd
from attnfuzz.harness.isolation.executors import Compiled, Executor
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Device
from attnfuzz.strategies.case import Case

__all__ = ["Coordinator", "LocalTurns"]

_SHORTEST = 1.0
_LONGEST: dict[Device, float] = {"cpu": 10.0, "cuda": 60.0}
"""Seconds of a turn under a budget. The new process of another kernel loads its code again, and on CUDA takes seconds."""
_PARTS = 2
"""Turns in which a kernel has its share."""
_WAIT = 0.05
_ENDS_SHARING = ("crash", "hang", "illegal-access")
"""Kinds of failures that may end the sharing of a GPU."""
_MANY = 4
"""Workers at work for each kernel from which they stay with it: kernels then have the same time within a fourth."""


class Coordinator:
    """Everything about a campaign that its workers share: it is the Campaign of worker_link.py for workers in its own process.

    Args:
        context: settings, listener, corpus, end.
        states: the kernels.
        executor: whose compiler is used.
        workers: how many there are.
    """

    def __init__(self, context: CampaignContext, states: Sequence[KernelState], executor: Executor, workers: int = 1) -> None:
        self.context, self._workers = context, workers
        self.states = {each.kernel.name: each for each in states}
        self.broken: list[KernelBroke] = []
        self.errors: list[Exception] = []
        self.shared_gpu: Callable[[], SharedGpu | None] = lambda: None
        """Returns how long the workers have shared the GPU; None: they were not to."""
        self.ended_sharing: Callable[[], tuple[Case, ...]] = tuple
        """Returns the Cases whose process ended sharing."""
        self._begun: float | None = None
        """When the first turn began."""
        self._had_turns: set[int] = set()
        """Workers that have had their first turn."""
        self._kernel_of: dict[int, str] = {}
        """The kernel of each worker's latest turn."""
        settings = context.settings
        marks = Marks(settings.device, {} if settings.in_process else executor.describe())
        self.compiles = CompileService(
            executor,
            settings.jobs,
            settings.out,
            finished=self._compiled,
            known=lambda kernel, key: self.states[kernel].know(key),
            not_written=self._not_written,
            marks=marks,
        )
        for state in self.states.values():
            if cases := state.plan.compiles(state.kernel):
                self.compiles.want(state.kernel.name, cases)

    def turn(self, worker: int) -> Turn | Literal["wait"] | None:
        """Return a worker's next turn; "wait": every kernel waits for a compiler; None: there is nothing left to do."""
        if self._late():
            return None
        now = time.monotonic()
        for state in self.states.values():
            self._end(state)
        left = [each for each in self.states.values() if not each.ended]
        able = [each for each in left if self._can_try(each, worker)]
        if not able:
            return "wait" if left else None
        at_work = 1 + sum(len(each.workers) for each in self.states.values())
        loaded = self._kernel_of.get(worker) if at_work >= _MANY * len(able) else None
        # Of kernels with as few workers, the one whose code the worker's process has loaded, then the one with least time.
        state = min(able, key=lambda each: (len(each.workers), each.kernel.name != loaded, each.seconds))
        self._kernel_of[worker] = state.kernel.name
        until = self._until(now, len(left), worker)
        return state.begin_turn(worker, until, workers=self._workers, seconds=self._replay_seconds())

    def able(self) -> int:
        """Return how many workers could begin a turn now: one a kernel without a worker, any number where Cases have no end."""
        if self._late():
            return 0
        able = [each for each in self.states.values() if not each.ended and self._can_try(each, -1)]
        return self._workers if any(each.rounds.many for each in able) else sum(not each.workers for each in able)

    def unfinished(self) -> bool:
        """Whether there is something left to do, now or once it is compiled."""
        if self._late():
            return False
        for state in self.states.values():
            self._end(state)
        return not all(state.ended for state in self.states.values())

    def _can_try(self, state: KernelState, worker: int) -> bool:
        if self.over(state.kernel.name) or state.hopeless:
            return False
        # The Cases of a run that is limited by their number must not depend on how fast the compiler is.
        if not (state.variants_ended or (self.context.end is not None and state.some_compiled)):
            return False
        return state.may_go_on(worker)

    def _until(self, now: float, kernels: int, worker: int) -> float | None:
        """Return when a turn ends: a kernel has its share of the workers' time in several turns, so that all have some early.

        The first turns of workers end one after the other: while one loads another kernel's code, others fill the GPU.
        """
        if self.context.end is None:
            return None
        # Of the whole time: shares of what is left would become shorter and shorter.
        self._begun = now if self._begun is None else self._begun
        share = (self.context.end - self._begun) * self._workers / kernels
        seconds = min(_LONGEST[self.context.settings.device], max(_SHORTEST, share / _PARTS))
        if worker not in self._had_turns:
            self._had_turns.add(worker)
            seconds *= (1 + (worker % self._workers + 1) / self._workers) / 2
        return min(self.context.end, now + seconds)

    def _replay_seconds(self) -> float | None:
        """Return the seconds of all workers together in which a kernel's stored Cases may be tried; None: no limit."""
        if self.context.end is None or self._begun is None:
            return None
        return SHARE * (self.context.end - self._begun) * self._workers / len(self.states)

    def _late(self) -> bool:
        return self.context.end is not None and time.monotonic() >= self.context.end

    def _end(self, state: KernelState) -> None:
        if not state.ended and state.is_over() and (state.broken or state.enough or state.variants_ended):
            state.start()
            state.ended = True
            self.compiles.drop(state.kernel.name)
            self.context.listener(KernelFinished(state.summary()))

    def end_turn(self, worker: int, kernel: str, end: TurnEnd) -> None:
        """Add a turn that has ended."""
        self.states[kernel].end_turn(worker, end)

    def broke(self, worker: int, kernel: str, error: Exception) -> None:
        """Try a kernel no further, for an error that is not a finding."""
        state = self.states[kernel]
        state.leave(worker)
        if not state.broken:
            state.broken = True
            self.errors.append(error)
            self.broken.append(KernelBroke(kernel, str(error)))
            self.compiles.drop(kernel)
            if len(self.states) > 1:
                self.context.listener(self.broken[-1])

    def round(self, kernel: str) -> Round | None:
        """Return the next round of a kernel."""
        return None if self.over(kernel) else self.states[kernel].rounds.take()

    def drawn(self, kernel: str, number: int, ids: Sequence[str]) -> list[int]:
        """Return which Cases of a round are to be tried."""
        return self.states[kernel].rounds.drawn(number, ids)

    def end_round(self, kernel: str, number: int) -> None:
        """Note that a round has been tried."""
        self.states[kernel].rounds.finish(number)

    def want(self, kernel: str, cases: Mapping[str, Case]) -> dict[str, KeyState]:
        """Queue compiles; returns the state of each key."""
        return self.compiles.want(kernel, cases, drawn=True, soon=not self.states[kernel].tried)

    def ready(self, kernel: str, keys: Collection[str]) -> set[str]:
        """Return those of `keys` that are compiled."""
        return {key for key in keys if self.compiles.state(kernel, key) == "ready"}

    def over(self, kernel: str) -> bool:
        """Whether a kernel is not to be tried further."""
        state = self.states[kernel]
        return state.enough or state.broken

    def count(self, seconds: float = math.inf) -> bool:
        """Count what trials have shown, for at most `seconds`; returns whether all are counted."""
        until = time.monotonic() + seconds
        return all(state.count(until) for state in self.states.values())

    def trial(self, kernel: str, phase: Phase, case: Case, verdict: Verdict, counted: bool = False) -> None:
        """Take note of a trial, and pass it on; `counted`: its counts have come by `add_counts`."""
        state = self.states[kernel]
        state.note(phase, case, verdict, counted=counted)
        if self._workers == 1:
            # No other worker waits, and the record of the run has it at once.
            state.count()
        self.context.listener(TrialFinished(kernel, phase, case, verdict))
        self.compiles.poll()

    def add_counts(self, kernel: str, tally: Tally) -> None:
        """Add what a worker has counted."""
        self.states[kernel].add_counts(tally)

    def pass_on(self, event: Event) -> None:
        """Pass an event on."""
        self.context.listener(event)

    def open(self, kernel: str, finding: Finding) -> Finding | None:
        """Keep a new failure; None where it is known, there are enough, or another shard keeps it."""
        state = self.states[kernel]
        if state.findings.knows(finding.identity) or state.findings_enough or state.findings.claimed_elsewhere(finding):
            return None
        seconds = state.seconds + finding.seconds_to_find
        dated = dataclasses.replace(finding, cases_to_find=state.tally.cases, seconds_to_find=seconds)
        return state.findings.open(dated, self.context.shrink_seconds)

    def update(self, kernel: str, before: Identity, finding: Finding) -> None:
        """Replace an open finding."""
        self.states[kernel].findings.update(before, finding)

    def close(self, kernel: str, before: Identity) -> Finding:
        """Close an open finding."""
        return self.states[kernel].close(before)

    def ignore(self, kernel: str, identities: set[Identity]) -> None:
        """Count failures as known."""
        self.states[kernel].findings.ignore(identities)

    def not_kept(self, kernel: str, case: Case, error: OSError) -> None:
        """Announce a Case that could not be written."""
        self.states[kernel].findings.announce_not_kept(case, error)

    def give_back(self, kernel: str, number: int) -> None:
        """Give out a round again whose worker is gone."""
        self.states[kernel].rounds.give_back(number)

    def leave(self, worker: int) -> None:
        """Forget a worker that is gone."""
        for state in self.states.values():
            state.leave(worker)

    def resume(self, left: Sequence[LeftBehind]) -> None:
        """Try Cases first that were in flight when a worker died."""
        for each in left:
            if each.case.kernel in self.states:
                self.states[each.case.kernel].resume(each)

    def poll(self, seconds: float = 0.0) -> None:
        """Let the compiler go on; wait for it for at most `seconds`."""
        self.compiles.poll(seconds)

    def finish(
        self, skipped: Sequence[KernelSkipped], start: float, *, interrupted: bool = False, lost: str | None = None
    ) -> CampaignFinished:
        """Close what is open, announce every kernel that is not yet, and the end."""
        summaries: list[KernelSummary] = []
        for state in self.states.values():
            if not state.started and (interrupted or lost):
                continue
            state.start()
            summaries.append(state.summary())
            if not state.ended:
                state.ended = True
                self.context.listener(KernelFinished(summaries[-1]))
        if self.context.replays:
            stored = [each for each in self.states.values() if each.earlier.stored]
            missing = [each.kernel.name for each in stored if each.earlier.not_replayed]
            self.context.replays.update({each.kernel.name: each.earlier.replayed for each in stored}, missing)
        not_kept = next((each.findings.not_kept for each in self.states.values() if each.findings.not_kept), None)
        shared = self.shared_gpu()
        finished = CampaignFinished(
            summaries=tuple(summaries),
            skipped=tuple(skipped),
            seconds=time.monotonic() - start,
            interrupted=interrupted,
            broken=tuple(self.broken),
            lost=lost,
            not_kept=not_kept,
            seed=self.context.settings.seed,
            shared_gpu=shared and self._with_unexplained(shared, summaries),
        )
        self.context.listener(finished)
        return finished

    def _with_unexplained(self, shared: SharedGpu, summaries: Sequence[KernelSummary]) -> SharedGpu:
        """Write the Cases whose process ended sharing, where their kernel has no failure that does so, and name them."""
        if (corpus := self.context.corpus) is None:
            return shared
        findings = [each for summary in summaries for each in (*summary.findings, *summary.elsewhere)]
        known, written = {each.case.kernel for each in findings if each.identity.kind in _ENDS_SHARING}, list[tuple[str, str]]()
        for case in self.ended_sharing():
            if case.kernel not in known:
                # A full disk: the reason says what they had in common.
                with contextlib.suppress(OSError):
                    path = str(corpus.write_unexplained(case))
                    written.append((path, repro_line(path, case.kernel)))
        repro = written[0][1] if written else ""
        return dataclasses.replace(shared, cases=tuple(path for path, _ in written), repro=repro)

    def _compiled(self, wanted: Wanted, done: Compiled) -> None:
        if done.error is not None:
            self.broke(-1, wanted.kernel, done.error)
        else:
            self.states[wanted.kernel].compiled(wanted, done)

    def _not_written(self, case: Case, error: OSError) -> None:
        self.states[case.kernel].findings.announce_not_kept(case, error)


class LocalTurns:
    """The turns of a worker in the campaign's own process: what it waits for is compiled meanwhile."""

    def __init__(self, coordinator: Coordinator, worker: int = 0) -> None:
        self._coordinator, self._worker = coordinator, worker

    def turn(self) -> Turn | None:
        """Return the next turn."""
        self._coordinator.poll()
        while (turn := self._coordinator.turn(self._worker)) == "wait":
            self._coordinator.poll(_WAIT)
        return turn

    def end_turn(self, kernel: str, end: TurnEnd) -> None:
        """Report how a turn ended."""
        self._coordinator.end_turn(self._worker, kernel, end)

    def broke(self, kernel: str, error: Exception) -> None:
        """Report an error that ends the trials of a kernel."""
        self._coordinator.broke(self._worker, kernel, error)
