"""The workers of a campaign on the nodes of a Ray cluster, started where there is room.

The campaign itself is in the process that was started by hand: one corpus, one journal of each worker, one stream of events. An
actor or a node may go at any time; then its rounds are given out again, and its Cases in flight are tried first.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.coordinator import Coordinator
from attnfuzz.harness.campaign.earlier import EarlierCase
from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.campaign.fleet.actor import FleetActor
from attnfuzz.harness.campaign.fleet.cluster import Places, has_room
from attnfuzz.harness.campaign.journal import Journal, LeftBehind
from attnfuzz.harness.campaign.worker_group import GroupWorker, WorkerGroup, WorkersLost
from attnfuzz.harness.campaign.worker_link import Turn, TurnEnd
from attnfuzz.harness.campaign.worker_main import Answer, Assignment, Message
from attnfuzz.harness.judge.errormap import ErrorMaps, write_maps
from attnfuzz.kernels.contract import Kernel
from attnfuzz.strategies.case import Case

__all__ = ["FleetWorkers"]

_AT_ONCE = 4
"""Calls of an actor at once: one waits for the worker's next message, another may interrupt the worker."""
_LOOK_EVERY, _PATIENCE = 5.0, 120.0
"""Seconds between two looks at the nodes while no worker lives, and for which a cluster may have none: others may join it."""


class _FleetWorker(GroupWorker):
    """One actor; `reference` is the call that is under way."""

    def __init__(self, number: int, actor: Any, journal: Journal | None) -> None:
        super().__init__(number)
        self.actor, self.journal = actor, journal
        self.earlier: dict[Case, EarlierCase] = {}
        """What its turn has to try first, as the campaign knows it."""
        self.closed: list[Finding] = []
        """Findings of its turn."""
        self.reference: Any = actor.pids.remote()
        self.begun = self._interrupted = False
        self._code: int | None = None

    def begin(self, assignment: Assignment) -> None:
        """Send the assignment to an actor that has been placed; OSError where it is gone."""
        import ray

        try:
            ray.get(self.reference)
        except ray.exceptions.RayError as error:
            raise EOFError(str(error)) from None
        self.begun = True
        self.actor.begin.remote(assignment)
        self.reference = self.actor.exchange.remote(None)

    def receive(self) -> Message:
        import ray

        try:
            content, code = ray.get(self.reference)
        except ray.exceptions.RayError as error:
            raise EOFError(str(error)) from None
        if code is not None:
            self._code = code
            raise EOFError(f"exit code {code}")
        message: Message = pickle.loads(content)
        # One that is interrupted waits for no answer.
        self.reference = self.actor.exchange.remote(None) if self._interrupted or not message.asks else None
        return message

    def send(self, answer: Answer) -> None:
        self.reference = self.actor.exchange.remote(pickle.dumps(answer))

    def taken(self, turn: Turn) -> Turn:
        self.earlier, self.closed = {each.case: each for each in turn.earlier}, []
        # The files of these Cases are here, and so are removed here.
        earlier = tuple(replace(each, left=each.left and replace(each.left, last=False)) for each in turn.earlier)
        return replace(turn, until=None if turn.until is None else turn.until - time.monotonic(), earlier=earlier)

    def leave_behind(self) -> None:
        if self.journal:
            self.journal.leave()

    def interrupt(self) -> None:
        self._interrupted = True
        self.actor.interrupt.remote()
        if self.reference is None:
            self.reference = self.actor.exchange.remote(None)

    def died(self) -> str | None:
        return None if self._code == 0 else "the death of its actor" if self._code is None else f"exit code {self._code}"

    def had_in_flight(self, left: LeftBehind) -> bool:
        return self.journal is not None and left.path == self.journal.path

    def end(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.actor)


class FleetWorkers(WorkerGroup):
    """Actors of Ray, started where the campaign has something to try for them.

    Args:
        kernels: what the workers will try; one that cannot be given to another process is reported by `work`.
        context: of the campaign.
        places: how many actors the cluster holds, and what each takes of it.
    """

    def __init__(self, kernels: Sequence[Kernel], context: CampaignContext, places: Places) -> None:
        import ray

        settings = context.settings
        super().__init__(context, settings.workers)
        self._places = places
        self._looked = self._roomy = time.monotonic()
        """When it was last asked whether the nodes could hold a worker, and when one last could."""
        self._actor = ray.remote(FleetActor).options(
            num_cpus=places.cpus, num_gpus=places.gpus, max_restarts=0, max_task_retries=0, max_concurrency=_AT_ONCE
        )
        own = replace(settings, workers=1, out=None, maps=settings.maps and settings.out is not None)
        backends = tuple(sorted({each.backend for each in kernels}))
        self._assignment = Assignment(own, self._parcels(kernels), backends, None, far=True, share=places.share)

    def _start(self, number: int) -> None:
        out = self._context.settings.out
        # What a machine that goes down takes with it matters less here: the Cases of other nodes outlive those.
        journal = Journal(out, durable=False) if out else None
        self._living.append(_FleetWorker(number, self._actor.remote(sys.path), journal))

    def _workers(self) -> list[_FleetWorker]:
        return [each for each in self._living if isinstance(each, _FleetWorker)]

    def _heard(self, seconds: float) -> Iterable[GroupWorker]:
        import ray

        workers = {each.reference: each for each in self._workers() if each.reference is not None}
        if not workers:
            time.sleep(seconds)
            return
        ray.wait(list(workers), num_returns=1, timeout=seconds)
        for reference in ray.wait(list(workers), num_returns=len(workers), timeout=0)[0]:
            worker = workers[reference]
            if worker.begun:
                yield worker
                continue
            try:
                worker.begin(self._assigned())
            except EOFError:
                yield worker

    def _assigned(self) -> Assignment:
        """Return the assignment with the seconds that are left: a worker that is started late ends with the others."""
        end = self._context.end
        return replace(self._assignment, end=None if end is None else max(0.0, end - time.monotonic()))

    def _step(self, coordinator: Coordinator) -> None:
        super()._step(coordinator)
        coordinator.compiles.workers = min(len(self._living), self._places.share)
        if self._living and not any(each.begun for each in self._workers()) and self._over(coordinator):
            # They wait for room in the cluster, and nothing is left for them.
            self.close()
        self._end_without_nodes()

    def _end_without_nodes(self) -> None:
        """Raise WorkersLost where no node could hold a worker for minutes: without a budget, nothing else would end the run."""
        now = time.monotonic()
        if any(each.begun for each in self._workers()):
            self._roomy = now
        elif now - self._looked > _LOOK_EVERY:
            self._looked = now
            if has_room(self._context.settings.device):
                self._roomy = now
            elif now - self._roomy > _PATIENCE:
                raise WorkersLost(
                    f"the cluster has had no node for a worker for {_PATIENCE:.0f} s; "
                    "the next run begins with the Cases in flight; start nodes by: ray start --address HOST:PORT"
                )

    def _over(self, coordinator: Coordinator) -> bool:
        late = self._context.end is not None and time.monotonic() >= self._context.end
        return late or all(each.ended or each.is_over() for each in coordinator.states.values())

    def _call(self, worker: GroupWorker, coordinator: Coordinator, method: str, arguments: tuple[Any, ...]) -> Any:
        assert isinstance(worker, _FleetWorker)
        if method == "launch":
            return self._launch(worker, *arguments)
        if method in ("landed", "abandon", "discard"):
            return getattr(worker.journal, method)(*arguments) if worker.journal else None
        if method == "store":
            return self._store(*arguments)
        if method == "end_turn":
            kernel, end = arguments
            return super()._call(worker, coordinator, method, (kernel, self._ended(worker, end)))
        value = super()._call(worker, coordinator, method, arguments)
        if method == "close":
            worker.closed.append(value)
        return value

    def _launch(self, worker: _FleetWorker, cases: tuple[Case, ...], deaths: int) -> OSError | None:
        """Write Cases to the worker's journal here, and remove what an earlier run has left of them."""
        if worker.journal is None:
            return None
        try:
            worker.journal.launch(*cases, deaths=deaths)
        except OSError as error:
            worker.journal.discard()
            worker.journal = None
            return OSError(error.errno, error.strerror, error.filename)
        for each in cases:
            left = worker.earlier[each].left if each in worker.earlier else None
            if left is not None and left.last:
                left.path.unlink(missing_ok=True)
        return None

    def _store(self, path: Path, maps: ErrorMaps) -> None:
        if self._context.settings.out:
            with contextlib.suppress(OSError):  # a run must not end for its maps
                write_maps(Path(self._context.settings.out) / path, maps)

    def _ended(self, worker: _FleetWorker, end: TurnEnd) -> TurnEnd:
        """Return the end of a turn with the Cases as the campaign knows them; of those tried, files that are replaced go."""
        not_tried = {each.case for each in end.not_tried}
        for case, each in worker.earlier.items():
            if case not in not_tried:
                each.remove_if_replaced(worker.closed)
        own = tuple(worker.earlier[each.case] for each in end.not_tried)
        worker.earlier, worker.closed = {}, []
        return replace(end, not_tried=own)

    def _interrupt(self, coordinator: Coordinator) -> None:
        for each in self._workers():
            if not each.begun:
                self._living.remove(each)
                each.end()
        super()._interrupt(coordinator)

    def close(self) -> None:
        """End every worker that is left; what they had in flight is left for the next run, which has not died of it."""
        for each in self._workers():
            each.end()
            if each.journal:
                each.journal.abandon()
        self._living.clear()
