"""One long campaign, looked at each second: its memory, its Cases so far, its processes; and whether any of that drifts.

Compared are the first and the last third of the time from the first Case to the end: memory of the coordinator and of all
processes together must agree within 5 %, Cases a second within 10 %. When the campaign is over, none of its processes may live.
Beside them is the time of a core for a piece of work: where that drifts, the machine was slower or faster, and the rate with it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from throughput.campaigns import LogFile, NotMeasured, campaign
from throughput.core import piece_of_work
from throughput.plan import Plan
from throughput.processes import Session
from throughput.tables import Column, Sheet

__all__ = ["MEMORY", "RATE", "Sample", "judged", "measure", "sheets"]

MEMORY, RATE = 0.05, 0.10
"""Limits of a drift, as parts of the first third's value."""
_EVERY = 1.0
_SAY_EVERY = 30.0
_GRACE = 5.0
"""Seconds in which the processes of a campaign that is over may end."""
_PATIENCE = 1800.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the campaign: seconds since its start, Cases so far, processes, and bytes of memory.

    `largest`: of the processes other than the coordinator. `core`: milliseconds of a core for a piece of work.
    """

    at: float
    cases: int
    processes: int
    coordinator: int
    total: int
    largest: int
    core: float


def measure(plan: Plan) -> dict[str, Any]:
    """Run one campaign for the plan's time, and return its samples, the drifts, and what is wrong."""
    with plan.folder() as (folder, caches):
        options = plan.options(plan.workers_here[-1], budget=f"{plan.seconds}s")
        with campaign(plan.kernels, plan.device, folder, options, environment=caches) as (session, log):
            samples = _samples(session, log, plan.seconds, plan.say)
            if not session.wait(_PATIENCE) or session.code:
                raise NotMeasured(f"the campaign ended with {session.code}: {session.text('stderr')[-2000:]}")
            orphans = _orphans(session)
            result = log.update().result or {}
    replaced = sum(each["processes_replaced"] for each in result.get("kernels", ()))
    return {
        "kernels": list(plan.kernels), "workers": plan.workers_here[-1], "caches": plan.caches, "orphans": orphans,
        "failures": result.get("failures", []),
        "replaced": replaced, **judged(samples, orphans),
        "samples": [[each.at, each.cases, each.processes, each.coordinator, each.total, each.largest, each.core]
                    for each in samples],
    }  # fmt: skip


def _samples(session: Session, log: LogFile, seconds: float, say: Callable[[str], None]) -> list[Sample]:
    """Look each second, for `seconds` after the first Case or until the campaign is over; which it is when this returns."""
    samples: list[Sample] = []
    said = 0.0
    while session.running and time.monotonic() - session.started < _PATIENCE + seconds:
        cases = log.update().cases
        if cases and time.monotonic() > cases[0]["trial"] + seconds:
            session.wait(_PATIENCE)
            break
        memory, now = session.memory(), time.monotonic() - session.started
        # Its end: what is left of it is no sample.
        if memory.first and session.running:
            largest = max(memory.others.values(), default=0)
            processes = 1 + len(memory.others)
            samples.append(Sample(now, len(cases), processes, memory.first, memory.total, largest, piece_of_work()))
        if now - said > _SAY_EVERY:
            said = now
            say(f"soak: {now:.0f} s, {len(cases)} Cases, {memory.total / _MIB:,.0f} MiB in {1 + len(memory.others)} processes")
        session.wait(_EVERY)
    return samples


def _orphans(session: Session) -> int:
    """Count processes that outlive the campaign by more than a grace, and kill them."""
    end = time.monotonic() + _GRACE
    while (left := session.memory().others) and time.monotonic() < end:
        time.sleep(0.1)
    session.kill_all()
    return len(left)


def judged(samples: Sequence[Sample], orphans: int) -> dict[str, Any]:
    """Return the drifts from the first to the last third of the time with Cases, and a sentence for each that is too large.

    Raises:
        NotMeasured: there are not three samples in each third.
    """
    working = [each for each in samples if each.cases]
    third = len(working) // 3
    if third < 3:
        raise NotMeasured(f"{len(working)} samples with Cases: too few for thirds; give --soak more time")
    first, last = working[:third], working[-third:]
    figures = {
        "coordinator": _of(first, last, lambda part: statistics.median(each.coordinator for each in part) / _MIB),
        "memory": _of(first, last, lambda part: statistics.median(each.total for each in part) / _MIB),
        "rate": _of(first, last, lambda part: (part[-1].cases - part[0].cases) / (part[-1].at - part[0].at)),
        "processes": _of(first, last, lambda part: statistics.median(each.processes for each in part)),
        "core": _of(first, last, lambda part: statistics.median(each.core for each in part)),
    }
    rate, core = figures["rate"], figures["core"]
    figures["pace"] = _drift(*(rate[part] * core[part] for part in ("first", "last")))
    limits = {"coordinator": MEMORY, "memory": MEMORY, "rate": RATE}
    wrong = [
        f"{name}: {figures[name]['first']:.4g} in the first third, {figures[name]['last']:.4g} in the last: "
        f"{figures[name]['drift']:+.1%}, the limit is {limit:.0%}"
        for name, limit in limits.items()
        if not abs(figures[name]["drift"]) <= limit
    ]
    wrong += [f"orphans: {orphans} processes outlived the campaign"] * bool(orphans)
    # Of the whole time, for a drift that thirds of a short soak do not show.
    for name, of in (("coordinator", "coordinator"), ("memory", "total")):
        slope, _ = statistics.linear_regression([each.at for each in working], [getattr(each, of) / _MIB for each in working])
        figures[name]["slope"] = 3600 * slope
    return {"cases": samples[-1].cases, "seconds": samples[-1].at, "figures": figures, "wrong": wrong}


def _of(first: Sequence[Sample], last: Sequence[Sample], value: Callable[[Sequence[Sample]], float]) -> dict[str, float]:
    return _drift(value(first), value(last))


def _drift(begin: float, end: float) -> dict[str, float]:
    return {"first": begin, "last": end, "drift": end / begin - 1 if begin else float("inf") if end else 0.0}


def sheets(result: dict[str, Any]) -> list[Sheet]:
    """Return the table of drifts."""
    titles = {"coordinator": "MiB of the coordinator", "memory": "MiB of all processes", "rate": "Cases a second",
              "processes": "processes",
              "core": "ms of a core for a piece of work", "pace": "Cases in the time of 1,000 pieces of work"}  # fmt: skip
    limits = {"coordinator": MEMORY, "memory": MEMORY, "rate": RATE}
    rows = [{"what": titles[name], **{key: 100 * value if key == "drift" else value for key, value in figures.items()},
             "limit": 100 * limits[name] if name in limits else None} for name, figures in result["figures"].items()]  # fmt: skip
    columns = [
        Column("what", "what"), Column("first", "first third", ",.5g"), Column("last", "last third", ",.5g"),
        Column("drift", "drift %", "+.1f"), Column("limit", "limit %", ".0f"), Column("slope", "an hour", "+,.1f"),
    ]  # fmt: skip
    sentence = (
        f"{', '.join(result['kernels'])}, {result['workers']} workers: {result['cases']:,} Cases in {result['seconds']:.0f} s, "
        f"{len(result['failures'])} failures, {result['replaced']} children replaced, {result['orphans']} orphans."
    )
    return [Sheet("soak", columns, rows, [sentence, *(f"wrong: {each}" for each in result["wrong"])])]
