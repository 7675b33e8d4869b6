"""Where the time of a Case goes: one kernel's campaign with every step timed, in the parent and in the child that judges.

Both work at the same time, so there are two accounts, and each adds up to the wall time. The parent draws, writes the journal,
sends, and waits for the child. The child loads compiled code, makes inputs, runs the kernel, computes the oracle and judges;
the pipe is what lies between them, and the rest of its time it is idle. A second campaign, in one process (detail.py), splits
kernel and oracle. On CUDA a stage waits for the device only where the campaign itself does.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.journal import Journal
from attnfuzz.harness.campaign.kernel_run import KernelRun
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.strategies.case import Case
from throughput.campaigns import NotMeasured
from throughput.plan import Plan
from throughput.processes import Session
from throughput.tables import Column, Sheet, median, medians

__all__ = ["Flight", "Ledger", "TimedExecutor", "TimedJournal", "accounts", "measure", "sheets"]

CHILD = ("compile", "inputs", "kernel", "oracle", "judge")
"""Stages of a Trial, as `Verdict.seconds` names them."""
_DETAIL = Path(__file__).with_name("detail.py")
_WAITED = 2e-4
"""Seconds of waiting from which on the parent has seen the reply as soon as it came."""
_PATIENCE = 900.0


@dataclass(frozen=True, slots=True)
class Flight:
    """One Case in flight: when it was sent, when the parent began to wait, when it had the Verdict; the child's own seconds."""

    sent: float
    waiting: float
    landed: float
    stages: Mapping[str, float]


@dataclass(slots=True)
class Ledger:
    """Seconds of the parent by step, and the flights of all Cases, from the second on: the first one warms the child."""

    seconds: dict[str, float] = field(default_factory=lambda: {"journal": 0.0, "send": 0.0, "wait": 0.0, "other calls": 0.0})
    flights: list[Flight] = field(default_factory=list)
    begun: float | None = None

    def timed(self, step: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return `work` with its time counted as `step`."""

        def call(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return work(*arguments, **named)
            finally:
                if self.begun is not None:
                    self.seconds[step] += time.perf_counter() - start

        return call


class TimedJournal(Journal):
    """A journal that counts the time of its writes."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        super().__init__(folder)
        setattr(self, "launch", ledger.timed("journal", super().launch))  # noqa: B010 - a method, replaced in one object
        setattr(self, "landed", ledger.timed("journal", super().landed))  # noqa: B010


class TimedExecutor:
    """An executor that counts the time of every call of another one."""

    def __init__(self, executor: Any, ledger: Ledger) -> None:
        self._executor, self._ledger, self._sent, self._landed = executor, ledger, 0.0, 0
        self._begin, self._finish = ledger.timed("send", executor.begin), ledger.timed("wait", executor.finish)

    def begin(self, case: Case, *, patient: bool = False) -> None:
        """Send a Case; the accounts begin with the second."""
        self._sent = time.perf_counter()
        if self._ledger.begun is None and self._landed:
            self._ledger.begun = self._sent
        self._begin(case, patient=patient)

    def finish(self) -> Verdict:
        """Wait for the Verdict."""
        waiting = time.perf_counter()
        verdict: Verdict = self._finish()
        if self._ledger.begun is not None:
            self._ledger.flights.append(Flight(self._sent, waiting, time.perf_counter(), verdict.seconds))
        self._landed += 1
        return verdict

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._executor, name)
        return self._ledger.timed("other calls", value) if callable(value) else value


def measure(plan: Plan) -> list[dict[str, Any]]:
    """Return the accounts of every kernel, round after round."""
    rows = []
    for number in range(plan.rounds):
        for name in plan.kernels:
            what = f"stages, round {number + 1}: {name}"
            more = plan.attempt(what, partial(_kernel, plan, name, number))
            rows += more
            plan.say(f"{what}: {more[0]['cases']} Cases" if more else what)
    return rows


def _kernel(plan: Plan, name: str, seed: int) -> list[dict[str, Any]]:
    """Run both campaigns of one kernel with the same caches, and return its accounts."""
    with plan.folder() as (folder, caches):
        ledger = _campaign(plan, name, seed, folder, caches)
        if not ledger.flights:
            raise NotMeasured(f"fewer than two Cases were judged in {plan.seconds:g} s")
        rows = accounts(ledger, _detail(plan, name, seed, folder, caches))
    return [{"kernel": name, "caches": plan.caches, **row} for row in rows]


def _campaign(plan: Plan, name: str, seed: int, folder: Path, caches: Mapping[str, str]) -> Ledger:
    """Run one kernel's turn of a campaign, isolated, as `attnfuzz run` does."""
    kernel, ledger = registry.get(name), Ledger()
    isolated = Isolated(plan.device, backends=[kernel.backend], variables=caches)
    try:
        # Starting the children is no Case's time.
        isolated.describe()
        isolated.settle()
        journal = TimedJournal(folder, ledger)
        settings = Settings(device=plan.device, budget=plan.seconds, seed=seed, out=None)
        context = CampaignContext(settings, TimedExecutor(isolated, ledger), journal=journal, seconds=plan.seconds)
        KernelRun(kernel, context).run()
        journal.close()
    finally:
        isolated.close()
    return ledger


def _detail(plan: Plan, name: str, seed: int, folder: Path, caches: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Return seconds of the parts of each stage in a campaign within one process; empty where that process fails."""
    request = {"kernel": name, "device": plan.device, "seed": seed, "seconds": plan.seconds}
    with Session([sys.executable, "-P", str(_DETAIL), json.dumps(request)], folder, caches) as run:
        if not run.wait(plan.seconds + _PATIENCE) or run.code:
            plan.say(f"stages: {name}: kernel and oracle are not split: {run.text('stderr')[-500:]}")
            return {}
        split: dict[str, dict[str, float]] = json.loads(run.text("stdout"))
    return split


def accounts(ledger: Ledger, detail: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return a row for each step of either side: milliseconds a Case, and the share of the wall time.

    `detail`: seconds of parts of stages, which split the stage's own time in their proportion.
    """
    flights = ledger.flights
    assert ledger.begun is not None
    wall, cases = flights[-1].landed - ledger.begun, len(flights)
    stages = {name: sum(each.stages.get(name, 0.0) for each in flights) for name in CHILD}
    # Only where the parent waited does it know when the child was done.
    between = median(
        each.landed - each.sent - sum(each.stages.values()) for each in flights if each.landed - each.waiting > _WAITED
    )
    pipe = cases * between if between is not None else 0.0
    # The journal is written within the flight of no Case, so these do not overlap.
    parent = {"draw, tally": wall - sum(ledger.seconds.values()), **ledger.seconds}
    child = {**stages, "pipe": pipe, "idle": wall - sum(stages.values()) - pipe}

    def row(side: str, step: str, seconds: float) -> dict[str, Any]:
        return {"side": side, "step": step, "cases": cases, "ms": 1e3 * seconds / cases, "share": 100 * seconds / wall}

    rows = [row("parent", step, seconds) for step, seconds in parent.items()]
    for step, seconds in child.items():
        rows.append(row("child", step, seconds))
        parts = detail.get(step, {})
        for part, of_part in parts.items():
            rows.append(row("child", f"{step}: {part}", seconds * of_part / sum(parts.values())))
    return [*rows, row("both", "wall", wall)]


def sheets(rows: list[dict[str, Any]]) -> list[Sheet]:
    """Return a table for each kernel: medians over the rounds."""
    columns = [
        Column("side", "side"), Column("step", "step"), Column("ms", "ms a Case", ".3f"),
        Column("share", "% of wall time", ".1f"),
    ]  # fmt: skip
    note = (
        "Parent and child work at the same time: each side adds up to the wall time. pipe: from sending to the Verdict, less the "
        "child's stages; parts (with a dash) are in proportion to a run in one process that waits for the device after each part."
    )
    joined = medians(rows, ("kernel", "caches", "side", "step"))
    titles = dict.fromkeys((row["kernel"], row["caches"]) for row in joined)
    return [
        Sheet(f"stages: {kernel}, caches {caches}", columns, [_shown(row) for row in joined if row["kernel"] == kernel], [note])
        for kernel, caches in titles
    ]


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    stage, colon, part = row["step"].partition(": ")
    return {**row, "step": f"- {part}" if colon else stage}
