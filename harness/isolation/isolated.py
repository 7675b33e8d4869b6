"""Trials and compiles in child processes: a crash or a hang of a kernel becomes a Verdict, and the run goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from attnfuzz.harness.isolation.child import ChildError
from attnfuzz.harness.isolation.child_variables import child_variables
from attnfuzz.harness.isolation.compiler import BackgroundCompiler
from attnfuzz.harness.isolation.deadlines import Deadlines, scores_of
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.harness.isolation.memory_cap import memory_cap
from attnfuzz.harness.isolation.outcomes import (
    KERNEL_STAGES,
    Death,
    Error,
    ExecutionError,
    Outcome,
    OutOfTime,
    Past,
    Reply,
    Task,
    death_failure,
)
from attnfuzz.harness.isolation.supervisor import Running, Supervisor
from attnfuzz.harness.isolation.tasks import preloads
from attnfuzz.harness.isolation.verdicts import verdict_of, with_death
from attnfuzz.harness.judge.errormap import ErrorMaps
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.supports import compile_key_of
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.support.process_setup import setup_of
from attnfuzz.strategies.case import Case

__all__ = ["ExecutionError", "Isolated"]

_SPARES: dict[Device, int] = {"cpu": 1, "cuda": 2}
_LATEST = 8
"""Where a Case has hung that ends in time alone: the Cases before it that run again."""
_MOST_REASONS, _REMEMBERED_PASTS = 20, 200
_FEW = 8
"""Cases of a batch that run one by one where the harness failed for all of them together."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Cases of one kernel that run in one task, with the compile key of each."""

    cases: Sequence[Case]
    known: Collection[Identity] | None
    keys: Sequence[tuple[str, str]] = ()
    running: Running | None = None
    """None: there is one Case, which is begun as a Trial."""


class Isolated:
    """Runs everything in child processes: a crash or a hang of a kernel becomes a Verdict, and the run goes on.

    Args:
        device: where the kernels run.
        backends: backends of the kernels to run: children are forked from a process that has imported them.
        deadline: seconds that a stage may take, by default 60.
        compile_deadline: seconds that a compile may take, by default ten times the deadline.
        memory: bytes that a child and its compilers may hold; by default half of the machine's, shared by xdist's workers.
        memory_check: check every memory access of interpreted kernels.
        variables: additional environment variables of the children.
        spares: children that are kept ready; by default 1, on CUDA 2.
        forkserver: starts the children; by default one for this executor. `close` closes it.
    """

    def __init__(
        self,
        device: Device,
        *,
        backends: Sequence[str] = (),
        deadline: float | None = None,
        compile_deadline: float | None = None,
        memory: int | None = None,
        memory_check: bool = True,
        variables: Mapping[str, str] | None = None,
        spares: int | None = None,
        forkserver: Forkserver | None = None,
    ) -> None:
        self.device = device
        self._memory_check = memory_check
        self._deadlines = Deadlines(deadline, compile_deadline)
        self._last_kernel: str | None = None
        self._set_up_for: str | None = None
        self._warm_key: tuple[str, str] | None = None
        self._forkserver = forkserver or Forkserver(preloads(device, backends), child_variables(device) | dict(variables or {}))
        self.run = self._forkserver.run
        self._memory = memory_cap() if memory is None else memory
        warm = Task("attnfuzz.harness.isolation.tasks:warm", {"device": device}, {})
        self._supervisor = Supervisor(
            self._forkserver, memory=self._memory, warm=warm, spares=_SPARES[device] if spares is None else spares
        )
        self._until: float | None = None
        self._pasts: dict[Case, Past] = {}
        self.statistics = self._supervisor.statistics
        self._described: dict[str, Any] | None = None
        self._begun: tuple[Case, tuple[str, str], Running] | None = None
        self._batch: _Batch | None = None

    def begin(self, case: Case, *, patient: bool = False) -> None:
        """Send the Case to a child.

        Raises:
            BadArgument: a child cannot find the kernel.
        """
        kernel = registry.get(case.kernel)
        # An unsupported Case has no key: the child reports why.
        key = (case.kernel, compile_key_of(kernel, case.problem, case.config, self.device) or "")
        task = self._task(case, self._deadlines.full if patient else self._deadlines.of(*key, scores_of(case)))
        self._processes_of(case.kernel)
        if case.after:
            self.fresh()
        self._begun = case, key, self._supervisor.begin(task)

    def finish(self) -> Verdict:
        """Return the Verdict of the Case, also if it ended its process.

        Raises:
            BadArgument: the Case cannot run here.
            ExecutionError: the harness itself failed in the child.
        """
        assert self._begun is not None
        (case, key, running), self._begun = self._begun, None
        first = outcome = self._ended(running)
        if self._doubtful(case.kernel, outcome):
            # A hang may be slowness, and an error outside the kernel may come from earlier Cases: run again with full deadlines.
            past = running.past
            self.fresh()
            running = self._supervisor.begin(self._task(case, self._deadlines.full))
            outcome = self._ended(running)
            if (hang := self._hang_after(case, past, first, outcome)) is not None:
                outcome, running.past = hang, past
        if isinstance(outcome, Death) and outcome.why == "hang" and outcome.limit == self._deadlines.full[outcome.stage]:
            self._deadlines.note_hang(case.kernel, outcome.stage)
        verdict = self._with_late_death(case, self._verdict(case, outcome))
        if isinstance(first, Death) and first.by_itself and first.stage not in KERNEL_STAGES and not verdict.failures:
            # Neither the oracle nor the judge ends a process: something of the kernel's, such as a thread, was still at work.
            verdict = with_death(case, verdict, first)
        self._learn(case, key, verdict, running.past)
        return verdict

    def _hang_after(self, case: Case, past: Past, first: Outcome, alone: Outcome) -> Death | None:
        """Return the hang of a Case that ends in time alone, and hangs again after the latest Cases of its first process."""
        hung = isinstance(first, Death) and first.why == "hang" and not first.stopped and first.stage in KERNEL_STAGES
        if not (hung and past and not case.after and isinstance(alone, Reply)):
            return None
        assert isinstance(first, Death)
        together = msgspec.structs.replace(case, after=past.cases[-_LATEST:])
        self.fresh()
        # With full deadlines: a kernel that compiles in its calls does so again here, on cores that others use.
        outcome = self._ended(self._supervisor.begin(self._task(together, self._deadlines.full)))
        if not isinstance(outcome, Death) or (outcome.why, outcome.stage, outcome.item) != (
            "hang",
            first.stage,
            len(together.after),
        ):
            return None
        self._deadlines.note_hang(case.kernel, first.stage)
        return outcome

    def past(self, case: Case) -> Past:
        """Return what the process that gave the latest Verdict of `case` had run before it, where that Verdict was a failure."""
        return self._pasts.get(case, Past())

    def forget_pasts(self) -> None:
        """Forget all that `past` could return; each keeps up to hundreds of Cases."""
        self._pasts.clear()

    def _ended(self, running: Running) -> Outcome:
        """Return the outcome of a task.

        Raises:
            OutOfTime: the time of `limit` was over first.
        """
        outcome = self._supervisor.finish(running, self._until)
        if outcome is None:
            raise OutOfTime
        return outcome

    def _learn(self, case: Case, key: tuple[str, str], verdict: Verdict, past: Past) -> None:
        """Remember how long each stage took, what the next spare is to load, and what the process of a failure had run."""
        self._pasts.pop(case, None)
        if verdict.failures:
            self._pasts[case] = past
            if len(self._pasts) > _REMEMBERED_PASTS:
                del self._pasts[next(iter(self._pasts))]
        self._deadlines.learn(*key, verdict.seconds, scores_of(case))
        if key != self._warm_key and not any(each.check in ("build", "compile") for each in verdict.failures):
            # The next spare loads this code in advance: it is known to load.
            self._warm_key = key
            self._supervisor.hint(
                Task("attnfuzz.harness.isolation.tasks:warm", self._task(case.alone, {}).payload, {}, (case.alone,))
            )

    def ask(self, target: str, payload: Mapping[str, Any]) -> Outcome:
        """Run `target` ("module:function") with `payload`, JSON values, at full deadlines; return the outcome.

        Consecutive tasks run in the same child until one ends it.
        """
        if "kernel" in payload:
            self._processes_of(payload["kernel"]["name"], payload["kernel"])
        return self._supervisor.run(Task(target, dict(payload), self._deadlines.full))

    def trial(self, case: Case) -> Verdict:
        """Begin and finish a Trial at full deadlines."""
        self.begin(case, patient=True)
        return self.finish()

    def mapped(self, case: Case) -> ErrorMaps | str:
        """Run `case` once more, in a child, for maps of its errors, or say why there are none.

        Raises:
            BadArgument: a child cannot find the kernel.
            OutOfTime: the time of `limit` was over first.
        """
        task = Task("attnfuzz.harness.isolation.tasks:map_case", self._task(case, {}).payload, self._deadlines.full, (case,))
        if case.after:
            self.fresh()
        outcome = self._ended(self._supervisor.begin(task))
        if isinstance(outcome, Death):
            return death_failure(case.kernel, outcome).message
        if isinstance(outcome, Error):
            return f"{outcome.type}: {outcome.message}"
        result = outcome.result
        return str(result["reason"]) if "reason" in result else msgspec.convert(result["maps"], ErrorMaps)

    def batch(self, cases: Sequence[Case], known: Collection[Identity] | None = None) -> list[Verdict]:
        """Begin and finish a batch."""
        self.begin_batch(cases, known)
        return self.finish_batch()

    def begin_batch(self, cases: Sequence[Case], known: Collection[Identity] | None = None) -> None:
        """Send Cases of one kernel to a child, which runs them in one task and judges them together.

        `known`: as of `run_batch`.

        Raises:
            BadArgument: a child cannot find the kernel.
        """
        if len(cases) == 1:
            self.begin(cases[0])
            self._batch = _Batch(cases, known)
            return
        kernel = registry.get(cases[0].kernel)
        keys = [(each.kernel, compile_key_of(kernel, each.problem, each.config, self.device) or "") for each in cases]
        deadlines = [self._deadlines.of(*key, max(map(scores_of, cases)), len(cases)) for key in dict.fromkeys(keys)]
        longest = {stage: max(each[stage] for each in deadlines) for stage in self._deadlines.full}
        self._processes_of(kernel.name)
        self._batch = _Batch(cases, known, keys, self._supervisor.begin(self._batch_task(cases, known, longest)))

    def finish_batch(self) -> list[Verdict]:
        """Return the Verdicts of the Cases that were sent.

        If the child dies, the Cases run one by one; if the harness fails in it, or is refused memory, as two batches of half as
        many at first. If all pass then, the Case that was at work has the death: it was of what the Cases before it left in the
        process.

        Raises:
            BadArgument: a Case cannot run here.
            ExecutionError: the harness itself failed in the child.
            OutOfTime: the time of `limit` was over first.
        """
        assert self._batch is not None
        batch, self._batch = self._batch, None
        cases, known, running = batch.cases, batch.known, batch.running
        if running is None:
            return [self.finish()]
        outcome = self._ended(running)
        if isinstance(outcome, Error) and len(cases) > _FEW:
            # Most often it needed memory that is not free, for all Cases at once.
            self._lose(outcome)
            half = len(cases) // 2
            return [*self.batch(cases[:half], known), *self.batch(cases[half:], known)]
        if not isinstance(outcome, Reply):
            return self._one_by_one(cases, outcome, running.past)
        verdicts = [msgspec.convert(each, Verdict) for each in outcome.result]
        verdicts[0] = self._with_late_death(cases[0], verdicts[0])
        for number, (case, key, verdict) in enumerate(zip(cases, batch.keys, verdicts, strict=True)):
            self._learn(case, key, verdict, running.past.plus(cases[:number]) if verdict.failures else Past())
        return verdicts

    def _processes_of(self, name: str, parcel: dict[str, Any] | None = None) -> None:
        """Have children of its own for a kernel that sets its processes up, before they make a tensor on the device."""
        setup = None
        with contextlib.suppress(BadArgument):  # a child reports it
            setup = setup_of(registry.get(name))
        wanted = None if setup is None else name
        if wanted == self._set_up_for:
            return
        self._set_up_for, self._warm_key = wanted, None
        payload = {"device": self.device, "kernel": parcel or shipped(name)}
        self._supervisor.renew(None if wanted is None else Task("attnfuzz.harness.isolation.tasks:warm", payload, {}))

    def _lose(self, outcome: Outcome) -> None:
        """Count a batch that has no Verdicts, and begin a new child."""
        self.statistics.batches_lost += 1
        if len(self.statistics.lost) < _MOST_REASONS:
            self.statistics.lost.append(outcome.trace if isinstance(outcome, Error) else str(outcome))
        self.fresh()

    def _one_by_one(self, cases: Sequence[Case], outcome: Outcome, past: Past) -> list[Verdict]:
        self._lose(outcome)
        verdicts = []
        for each in cases:
            self.begin(each)
            verdicts.append(self.finish())
        fails_alone = any(each.failures for each in verdicts)
        if isinstance(outcome, Death) and 0 <= outcome.item < len(cases) and not fails_alone:
            case = cases[outcome.item]
            if outcome.stage in KERNEL_STAGES:
                verdicts[outcome.item] = self._verdict(case, outcome)
            elif outcome.by_itself:
                verdicts[outcome.item] = with_death(case, verdicts[outcome.item], outcome)
            self._pasts[case] = past.plus(cases[: outcome.item])
        return verdicts

    def limit(self, until: float | None) -> None:
        """End each Trial at `until` (time.monotonic), with OutOfTime; None: no such time."""
        self._until = until

    def compiler(self) -> BackgroundCompiler:
        """Return a Compiler whose compiles run in children of their own, several at once."""
        supervisor = Supervisor(self._forkserver, memory=self._memory, spares=0, owner=False, disturbed=self.statistics.disturbed)
        return BackgroundCompiler(supervisor, self.device, self._deadlines.full)

    def prepare(self) -> None:
        """Begin to load what children need, without waiting for it."""
        self._forkserver.prepare()

    def settle(self) -> None:
        """Wait until the spare children are ready."""
        self._supervisor.settle()

    def fresh(self) -> None:
        """Run the next Trial in a new process; what is at work, since an error came before its end, is ended."""
        at_work = [self._batch.running if self._batch else None, self._begun[2] if self._begun else None]
        self._batch = self._begun = None
        for running in filter(None, at_work):
            self._supervisor.kill(running)
        self._supervisor.replace()

    def describe(self) -> dict[str, Any]:
        """Return the device and the versions of the children."""
        if self._described is None:
            task = Task("attnfuzz.harness.isolation.tasks:warm", {"device": self.device}, {})
            try:
                outcome = self._supervisor.run(task)
            except ChildError:
                # A preloaded module has opened the CUDA driver, which does not survive a fork: spawning is slower, but works.
                self._forkserver.stop_forking()
                outcome = self._supervisor.run(task)
            if not isinstance(outcome, Reply):
                raise ExecutionError(outcome.trace if isinstance(outcome, Error) else outcome.output)
            self._described = outcome.result
        return self._described

    def close(self) -> None:
        """End the children and all that they started; remove their temporary files."""
        self._supervisor.close()

    def _task(self, case: Case, deadlines: Mapping[str, float]) -> Task:
        payload = {
            "kernel": shipped(case.kernel),
            "case": case.canonical(),
            "device": self.device,
            "device_name": self.describe()["device"],
            "memory_check": self._memory_check,
        }
        return Task("attnfuzz.harness.isolation.tasks:trial", payload, deadlines, (case,), self._deadlines.shared(deadlines))

    def _batch_task(self, cases: Sequence[Case], known: Collection[Identity] | None, deadlines: Mapping[str, float]) -> Task:
        payload = self._task(cases[0], {}).payload | {"cases": [each.canonical() for each in cases]}
        if known is not None:
            payload["known"] = msgspec.to_builtins(sorted(known, key=repr))
        return Task(
            "attnfuzz.harness.isolation.tasks:trials", payload, deadlines, tuple(cases), self._deadlines.shared(deadlines)
        )

    def _doubtful(self, kernel: str, outcome: Outcome) -> bool:
        if isinstance(outcome, Death):
            if outcome.stage not in KERNEL_STAGES:
                return True
            early = outcome.why == "hang" and outcome.limit < self._deadlines.full[outcome.stage]
            return early and not self._deadlines.is_known_to_hang(kernel, outcome.stage)
        # An earlier Case may have left the process broken.
        return isinstance(outcome, Error)

    def _with_late_death(self, case: Case, verdict: Verdict) -> Verdict:
        """Add a child's death between two Cases of one kernel as a failure of that kernel."""
        late = self._supervisor.take_late_death()
        previous, self._last_kernel = self._last_kernel, case.kernel
        if late is None or previous != case.kernel:
            return verdict
        return with_death(case, verdict, late)

    def _verdict(self, case: Case, outcome: Outcome) -> Verdict:
        return verdict_of(case, outcome, self.describe)
