"""The verdict tried on emulated kernels that are right, and on ones that are wrong by little.

What is right must pass every time; each planted fault must be found as often as the criterion's prototype found it
(floors.py has the rates, and when one is below). Three other rules judge the same outputs.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from support.emulated.faults import FAULTS
from support.verdict.cases import Table, drawn_case, families
from support.verdict.floors import FLOORS, Floor
from support.verdict.other_rules import RULES, Rule
from support.verdict.processes import finished
from support.verdict.trials import Alarm, Judged, Work, work

from attnfuzz.kernels.errors import reject

CASES: Final = 3000
_PER_FAULT: dict[Table, int] = {"plain": 100, "mixed": 129}
"""Cases per fault beside 3000 correct ones: more than those of the floors, so that the error here is the smaller one."""
_FEWEST = 8
_CHUNK: dict[Table, int] = {"correct": 20, "plain": 1, "mixed": 3}
_TABLES: tuple[Table, ...] = ("plain", "mixed")

Progress = Callable[[str, int, int], None]
"""Gets (what is done, done, total)."""


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """Correct kernels on one family of values: cases, the worst ratio needed / allowed of any output, alarms."""

    family: str
    cases: int
    worst: float
    sigmas: float
    r: float | None
    z: float | None
    alarms: int
    unjudged: int
    """Cases in which dQ and dK could not be judged: dS overflows float16."""
    comparable: int
    """Cases that the other rules are made for: float16 or bfloat16, q not prescaled."""
    other_rules: dict[Rule, int]


@dataclass(frozen=True, slots=True)
class Rate:
    """Found in `hits` of `cases`, held against a floor: all rates in per cent."""

    hits: int
    cases: int
    floor: int
    limit: float

    @property
    def rate(self) -> float:
        """In per cent; 0 of no cases."""
        return 100 * self.hits / self.cases if self.cases else 0.0

    @property
    def below(self) -> bool:
        """Whether it is below its floor, as floors.py defines it. No case at all is below any floor."""
        return not self.cases or self.rate < self.limit

    @property
    def short(self) -> bool:
        """Whether it lies between the limit and the floor."""
        return not self.below and self.rate < self.floor


@dataclass(frozen=True, slots=True)
class FaultRow:
    """One fault in one table. `other_rules`: found by that rule where it passes the correct kernel on the same case."""

    fault: str
    title: str
    gray: bool
    table: Table
    element: Rate
    every: Rate
    other_rules: dict[Rule, int]
    outputs: dict[str, int]
    """In how many cases each output showed it."""

    @property
    def cases(self) -> int:
        """Cases in which the fault changed a bit."""
        return self.element.cases


@dataclass(frozen=True, slots=True)
class VerdictTried:
    """All of it. `alarms` are the verdict's on correct kernels, those of the fault tables' cases included."""

    families: tuple[FamilyRow, ...]
    faults: tuple[FaultRow, ...]
    alarms: tuple[Alarm, ...]
    cases: int
    elements: int
    seed: int
    jobs: int
    seconds: float

    @property
    def below(self) -> tuple[FaultRow, ...]:
        """Rows with a rate below its floor."""
        return tuple(row for row in self.faults if row.element.below or row.every.below)

    @property
    def right(self) -> bool:
        """No false alarm, and no rate below its floor."""
        return bool(self.cases) and not self.alarms and not self.below


def verdict(
    cases: int = CASES,
    *,
    seed: int = 0,
    jobs: int | None = None,
    progress: Progress = lambda *_: None,
    faults: Sequence[str] = (),
) -> VerdictTried:
    """Try the verdict on `cases` correct Cases and, in proportion, on Cases of every planted fault.

    Args:
        cases: correct ones; 3000 are the full run.
        seed: same seed, same Cases and figures, for any `jobs`.
        jobs: processes; None: one per core, 1: this one.
        progress: gets how far it is.
        faults: names of faults; empty: all.

    Raises:
        BadArgument: an unknown fault, or no case.
    """
    start = time.monotonic()
    if cases < 1:
        raise reject("cases", cases, "must be positive", "give 1 or more")
    known = tuple(each.slug for each in FAULTS)
    for each in faults:
        if each not in known:
            raise reject("fault", each, "no such fault", f"use some of {', '.join(known)}")
    jobs = jobs or len(os.sched_getaffinity(0))
    chosen = tuple(each for each in known if not faults or each in faults)
    tasks = [*_fault_work(seed, cases, chosen), *_correct_work(seed, cases)]
    total = sum(len(task.indices) for task in tasks)
    judged: list[Judged] = []
    progress("starting", 0, total)
    for part in finished(work, tasks, jobs):
        judged += part
        progress({"correct": "correct kernels"}.get(part[0].table, f"faults, {part[0].table} cases"), len(judged), total)
    judged.sort(key=lambda each: (each.table, each.index))
    return VerdictTried(
        families=tuple(_family(name, judged) for name in families("correct")),
        faults=tuple(_fault(slug, table, judged, same=not seed and cases >= CASES) for slug in chosen for table in _TABLES),
        alarms=tuple(each.alarm for each in judged if each.alarm is not None),
        cases=len(judged),
        elements=sum(each.elements for each in judged),
        seed=seed,
        jobs=jobs,
        seconds=time.monotonic() - start,
    )


def _correct_work(seed: int, cases: int) -> list[Work]:
    step = _CHUNK["correct"]
    return [Work("correct", seed, dict.fromkeys(range(at, min(cases, at + step)), ())) for at in range(0, cases, step)]


def _fault_work(seed: int, cases: int, chosen: tuple[str, ...]) -> list[Work]:
    """Each fault on the first Cases of a table in which the step that it changes occurs; faults share Cases."""
    tasks = []
    for table in _TABLES:
        wanted = max(_FEWEST, round(_PER_FAULT[table] * min(1.0, cases / CASES)))
        left = {each.slug: wanted for each in FAULTS if each.slug in chosen}
        assigned: dict[int, tuple[str, ...]] = {}
        index = 0
        while left:
            case = drawn_case(table, seed, index).case
            takes = tuple(each.slug for each in FAULTS if each.slug in left and each.applies(case.problem, case.config))
            for slug in takes:
                left[slug] -= 1
                if not left[slug]:
                    del left[slug]
            if takes:
                assigned[index] = takes
            index += 1
        items, step = list(assigned.items()), _CHUNK[table]
        tasks += [Work(table, seed, dict(items[at : at + step])) for at in range(0, len(items), step)]
    return tasks


def _family(name: str, judged: Sequence[Judged]) -> FamilyRow:
    mine = [each for each in judged if each.family == name and each.table == "correct"]
    comparable = [each for each in mine if each.comparable]
    alarmed = Counter(rule for each in comparable for rule in each.broken_rules)
    return FamilyRow(
        family=name,
        cases=len(mine),
        worst=max((each.worst for each in mine), default=0.0),
        sigmas=max((each.sigmas for each in mine), default=0.0),
        r=max((each.r for each in mine if each.r is not None), default=None),
        z=max((each.z for each in mine if each.z is not None), default=None),
        alarms=sum(each.alarm is not None for each in mine),
        unjudged=sum(each.unjudged for each in mine),
        comparable=len(comparable),
        other_rules={rule: alarmed[rule] for rule in RULES},
    )


def _fault(slug: str, table: Table, judged: Sequence[Judged], *, same: bool) -> FaultRow:
    fault = next(each for each in FAULTS if each.slug == slug)
    floor: Floor = FLOORS[slug][_TABLES.index(table)]
    tried = [(each, each.faults[slug]) for each in judged if each.table == table and slug in each.faults]
    changed = [(each, faulty) for each, faulty in tried if faulty.changed]
    n = len(changed)
    net = Counter(rule for each, faulty in changed for rule in faulty.broken_rules - each.broken_rules)
    outputs: Counter[str] = Counter(output for _, faulty in changed for output in faulty.outputs)
    element = sum(faulty.element for _, faulty in changed)
    every = sum(faulty.every for _, faulty in changed)
    return FaultRow(
        fault=slug,
        title=fault.title,
        gray=fault.gray,
        table=table,
        element=Rate(element, n, floor.element, floor.limit(every=False, cases=n, same=same)),
        every=Rate(every, n, floor.every, floor.limit(every=True, cases=n, same=same)),
        other_rules={rule: net[rule] for rule in RULES},
        outputs=dict(sorted(outputs.items())),
    )


def machine_object(done: VerdictTried) -> dict[str, Any]:
    """Everything as plain JSON values."""
    values: dict[str, Any] = msgspec.to_builtins(done)
    for row, fault in zip(done.faults, values["faults"], strict=True):
        for name in ("element", "every"):
            rate: Rate = getattr(row, name)
            fault[name] |= {"rate": rate.rate, "below": rate.below, "short": rate.short}
    return {"right": done.right, "below": [f"{row.fault} ({row.table})" for row in done.below], **values}
