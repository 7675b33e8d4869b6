"""`attnfuzz selftest memory`: the memory checker tried on faults of memory that are known, and on kernels that have none."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.events import Found, KernelSummary, Listener
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.isolated import ExecutionError, Isolated
from attnfuzz.harness.report.describe import lengths
from attnfuzz.kernels import registry
from attnfuzz.kernels.faults.memory import FAULTS, MODULE, PlantedFault
from attnfuzz.kernels.faults.planted import planted_source
from attnfuzz.kernels.problem import BadArgument, reject

__all__ = ["CLEAN_CASES", "CleanRow", "FaultRow", "MemoryTried", "memory"]

CLEAN_CASES = 200
_CASES = 200
_BACKEND = "triton"


@dataclass(frozen=True, slots=True)
class FaultRow:
    """One planted fault: the kind and the source line that are expected, what was found, and whether that is right."""

    fault: str
    title: str
    expected: str
    line: str
    """As `file:line: text`."""
    got: str
    message: str
    minimal: str
    cases: int
    wrong: tuple[str, ...]
    """What is not as it should be."""


@dataclass(frozen=True, slots=True)
class CleanRow:
    """A kernel without a known fault: whatever is found in it is an alarm."""

    kernel: str
    cases: int
    alarms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryTried:
    """All of it."""

    rows: tuple[FaultRow, ...]
    clean: tuple[CleanRow, ...]
    seconds: float
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether every fault is found as what it is, where it is, and nothing is found in the kernels without one."""
        return not any(row.wrong for row in self.rows) and not any(row.alarms or not row.cases for row in self.clean)


def memory(listener: Listener, only: Sequence[str] = (), cases: int = CLEAN_CASES, seed: int = 0) -> MemoryTried:
    """Hunt for each planted fault, and then in every Triton kernel that runs on the CPU.

    Args:
        listener: hears the campaigns.
        only: slugs of faults; empty: all.
        cases: distinct Cases of each kernel without a fault.
        seed: same seed, same Cases.

    Raises:
        BadArgument: an unknown fault, nothing to try, or Triton cannot run here.
    """
    start = time.monotonic()
    known = tuple(each.slug for each in FAULTS)
    for slug in only:
        if slug not in known:
            raise reject("fault", slug, "no such fault", f"use some of {', '.join(known)}")
    if cases < 1:
        raise reject("cases", cases, "nothing would be tried on kernels without a fault", "give 1 or more")
    chosen = [each for each in FAULTS if not only or each.slug in only]
    clean = _clean()
    executor = Isolated("cpu", backends=[_BACKEND])
    try:
        with tempfile.TemporaryDirectory() as folder:

            def run(names: Sequence[str], most: int, *, faulty: bool) -> tuple[KernelSummary, ...]:
                failures = 1 if faulty else None
                settings = Settings(max_examples=most, max_failures=failures, out=folder, seed=seed, plain=faulty, maps=False)
                finished = run_campaign([registry.get(name) for name in names], settings, listener, executor)
                if finished.interrupted:
                    raise KeyboardInterrupt
                for broken in finished.broken:
                    raise ExecutionError(f"{broken.kernel}: {broken.error}")
                return finished.summaries

            summaries = run([f"fault.memory.{each.slug}" for each in chosen], _CASES, faulty=True)
            rows = tuple(_row(fault, summary) for fault, summary in zip(chosen, summaries, strict=True))
            good = tuple(
                CleanRow(each.kernel, each.cases, tuple(_alarm(found) for found in each.found))
                for each in run(clean, cases, faulty=False)
            )
        described = executor.describe()
    finally:
        executor.close()
    return MemoryTried(rows, good, time.monotonic() - start, described)


def _clean() -> list[str]:
    """The listed Triton kernels that are interpreted on the CPU."""
    found, told = [], []
    for name in registry.names():
        kernel = registry.get(name)
        if kernel.backend == _BACKEND and "cpu" in kernel.capabilities.devices:
            reason = kernel.unavailable("cpu")
            (told.append(reason) if reason else found.append(name))
    if not found:
        raise BadArgument(f"triton: no kernel of it can run on the CPU here: {'; '.join(told)}")
    return found


def _row(fault: PlantedFault, summary: KernelSummary) -> FaultRow:
    found = summary.found[0] if summary.found else None
    line, wrong = _line(fault), []
    message = _message(found) if found else ""
    if found is None:
        wrong.append(f"not found in {summary.cases} cases")
    else:
        if found.identity.kind != fault.kind:
            wrong.append(f"it is no {found.identity.kind}")
        if line not in message:
            wrong.append("another line is named, or none")
    return FaultRow(
        fault=fault.slug,
        title=fault.title,
        expected=str(fault.kind),
        line=line,
        got=found.identity.kind if found else "nothing",
        message=message,
        minimal=lengths(found.case) if found else "",
        cases=summary.cases,
        wrong=tuple(wrong),
    )


def _line(fault: PlantedFault) -> str:
    """Where the faulty statement stands, as a Failure must tell it."""
    file, source = planted_source(MODULE, fault.edits)
    number = next(number for number, text in enumerate(source.splitlines(), 1) if text.strip() == fault.line)
    return f"{file}:{number}: {fault.line}"


def _message(found: Found) -> str:
    failures = found.verdict.failures
    return next((each.message for each in failures if each.identity == found.identity), "")


def _alarm(found: Found) -> str:
    return re.sub(r"\s+", " ", f"{found.identity}: {_message(found)} ({found.case.canonical()})")
