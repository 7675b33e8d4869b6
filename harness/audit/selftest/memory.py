"""`attnfuzz selftest memory`: the memory checker on known faults of memory, and on kernels that have none."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attnfuzz.harness.audit.selftest.faults import summaries_of
from attnfuzz.harness.campaign.events import Finding, KernelSummary, Listener
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.report.describe import lengths
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.faults.memory import FAULTS, MODULE, PlantedFault
from attnfuzz.kernels.faults.planted import planted_source

__all__ = ["CLEAN_CASES", "CleanRow", "MemoryRow", "MemoryTried", "memory"]

CLEAN_CASES = 200
_CASES = 200
_BACKEND = "triton"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One planted fault: its expected kind and source line, what the checker finds, and what is wrong with that."""

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


@dataclass(frozen=True, slots=True)
class CleanRow:
    """A kernel without a known fault: every finding in it is a false alarm."""

    kernel: str
    cases: int
    alarms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryTried:
    """All rows."""

    rows: tuple[MemoryRow, ...]
    clean: tuple[CleanRow, ...]
    seconds: float
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether every fault is found with its kind and line, and nothing is found in the kernels without one."""
        return not any(row.wrong for row in self.rows) and not any(row.alarms or not row.cases for row in self.clean)


def memory(listener: Listener, only: Sequence[str] = (), cases: int = CLEAN_CASES, seed: int = 0) -> MemoryTried:
    """Run a campaign for each planted fault, and one over every Triton kernel that runs on the CPU.

    Args:
        listener: gets the events of the campaigns.
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
        raise reject("cases", cases, "must be positive", "give 1 or more")
    chosen = [each for each in FAULTS if not only or each.slug in only]
    clean = _clean()
    executor = Isolated("cpu", backends=[_BACKEND])
    try:
        with tempfile.TemporaryDirectory() as folder:

            def run(names: Sequence[str], most: int, *, faulty: bool) -> tuple[KernelSummary, ...]:
                failures = 1 if faulty else None
                settings = Settings(max_examples=most, max_failures=failures, out=folder, seed=seed, plain=faulty, maps=False)
                return summaries_of(names, settings, listener, executor)

            summaries = run([f"fault.memory.{each.slug}" for each in chosen], _CASES, faulty=True)
            rows = tuple(_row(fault, summary) for fault, summary in zip(chosen, summaries, strict=True))
            good = tuple(
                CleanRow(each.kernel, each.cases, tuple(_alarm(finding) for finding in each.findings))
                for each in run(clean, cases, faulty=False)
            )
        described = executor.describe()
    finally:
        executor.close()
    return MemoryTried(rows, good, time.monotonic() - start, described)


def _clean() -> list[str]:
    """The Triton kernels of attnfuzz itself that are interpreted on the CPU."""
    names, reasons = [], []
    for name in registry.built_in_names():
        kernel = registry.get(name)
        if kernel.backend == _BACKEND and "cpu" in kernel.capabilities.devices:
            reason = kernel.unavailable("cpu")
            (reasons.append(reason) if reason else names.append(name))
    if not names:
        raise BadArgument(f"backend={_BACKEND!r}: none of its kernels can run on the CPU here: {'; '.join(reasons)}")
    return names


def _row(fault: PlantedFault, summary: KernelSummary) -> MemoryRow:
    finding = summary.findings[0] if summary.findings else None
    line, wrong = _line(fault), []
    message = _message(finding) if finding else ""
    if finding is None:
        wrong.append(f"not found in {counted(summary.cases, 'case')}")
    else:
        if finding.identity.kind != fault.kind:
            wrong.append(f"its kind is {finding.identity.kind}, not {fault.kind}")
        if line not in message:
            wrong.append("another line is named, or none")
    return MemoryRow(
        fault=fault.slug,
        title=fault.title,
        expected=str(fault.kind),
        line=line,
        got=finding.identity.kind if finding else "nothing",
        message=message,
        minimal=lengths(finding.case) if finding else "",
        cases=summary.cases,
        wrong=tuple(wrong),
    )


def _line(fault: PlantedFault) -> str:
    """Return the place of the faulty statement, as a Failure must name it."""
    file, source = planted_source(MODULE, fault.edits)
    number = next(number for number, text in enumerate(source.splitlines(), 1) if text.strip() == fault.line)
    return f"{file}:{number}: {fault.line}"


def _message(finding: Finding) -> str:
    return next((each.message for each in finding.verdict.failures if each.identity == finding.identity), "")


def _alarm(finding: Finding) -> str:
    return re.sub(r"\s+", " ", f"{finding.identity}: {_message(finding)} ({finding.case.canonical()})")
