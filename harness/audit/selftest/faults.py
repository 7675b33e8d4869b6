"""`attnfuzz selftest faults`: the harness on kernels whose faults are known."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.events import Finding, KernelSummary, Listener
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.campaign.worker_processes import WorkerProcesses
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.isolation import reaper
from attnfuzz.harness.isolation.executors import Executor
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.outcomes import ExecutionError
from attnfuzz.harness.report.describe import lengths
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.problem import Dtype, Problem
from attnfuzz.strategies.case import Case

__all__ = ["FaultRow", "Faults", "Leaks", "fault_names", "faults", "row_of", "summaries_of"]

_CASES = 150
_FOUR_BUGS_CASES = 400
_RESTARTS: dict[Device, int] = {"cpu": 200, "cuda": 10}
_GOOD: dict[Device, tuple[str, ...]] = {"cpu": ("torch.reference_cpu",), "cuda": ("fault.triton.none", "fault.tilelang.none")}
_DEADLINE: dict[Device, float] = {"cpu": 3.0, "cuda": 5.0}
_MEMORY: dict[Device, int | None] = {"cpu": 1 << 30, "cuda": None}
_FOUR = {("crash", "0x1"), ("exception", "1x1"), ("hang", "1x17"), ("mismatch", "1x1")}
"""(kind, lengths of the minimal Case) of the kernel with four bugs."""
_SHRINK = 1200.0
"""Seconds that shrinking a fault may take: much more than it needs on a machine that does nothing else."""
_MEMORY_GROWTH = 64 << 20
_READY = 5


@dataclass(frozen=True, slots=True)
class FaultRow:
    """One fault: what the harness should find, what it finds, and what is wrong with that."""

    kernel: str
    title: str
    expected: str
    got: str
    minimal: str
    rate: str
    cases: int
    trials: int
    recovery: float | None
    """Median of the seconds from a death to the next verdict."""
    wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leaks:
    """The parent before and after many restarts: file descriptors, bytes of memory, and processes left over."""

    restarts: int
    seconds: float
    descriptors: tuple[int, int]
    memory: tuple[int, int]
    left: tuple[str, ...]
    ready: float = 0.0
    """Median seconds from a death to the next verdict with a spare child ready."""

    @property
    def wrong(self) -> tuple[str, ...]:
        """What grew, and what is left over."""
        reasons = [f"left behind: {each}" for each in self.left]
        if self.descriptors[1] > self.descriptors[0]:
            reasons.append(f"file descriptors grew from {self.descriptors[0]} to {self.descriptors[1]}")
        if self.memory[1] - self.memory[0] > _MEMORY_GROWTH:
            reasons.append(f"memory grew by {(self.memory[1] - self.memory[0]) >> 20} MiB")
        return tuple(reasons)


@dataclass(frozen=True, slots=True)
class Faults:
    """All rows, and the restarts."""

    rows: tuple[FaultRow, ...]
    leaks: Leaks
    seconds: float
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether every row is right and nothing leaks."""
        return not self.leaks.wrong and not any(row.wrong for row in self.rows)


def fault_names(device: Device) -> tuple[str, ...]:
    """The fault kernels for `device`, in the table's order."""
    if device == "cpu":
        from attnfuzz.kernels.faults import host

        return (*(f"fault.{each.slug}" for each in host.FAULTS), "fault.four")
    from attnfuzz.kernels.faults import device as on_device

    slugs = [each.slug for each in on_device.FAULTS if each.kind]
    return tuple(f"fault.{backend}.{slug}" for backend in on_device.BACKENDS for slug in slugs)


def faults(
    device: Device,
    listener: Listener,
    only: Sequence[str] = (),
    restarts: int | None = None,
    workers: int = 1,
    budget: float | None = None,
) -> Faults:
    """Run a campaign over every fault kernel and then correct ones, and then restart children many times.

    Args:
        device: where.
        listener: gets the events of the campaigns.
        only: names of fault kernels; empty: all.
        restarts: how many; None: 200 on the CPU, 10 on CUDA, where each takes seconds.
        workers: of the campaigns; more than one are processes.
        budget: seconds of each of the two campaigns, which then begin with the first variants that are compiled; None: no limit.

    Raises:
        BadArgument: an unknown fault kernel, or no correct kernel runs here.
    """
    start = time.monotonic()
    chosen, good = _chosen(device, only), _good(device)
    backends = sorted({registry.get(name).backend for name in (*chosen, *good)})
    compiles = _DEADLINE[device] if device == "cpu" else None
    executor = Isolated(device, backends=backends, deadline=_DEADLINE[device], compile_deadline=compiles, memory=_MEMORY[device])
    try:
        with tempfile.TemporaryDirectory() as folder:
            summaries: list[KernelSummary] = []
            one_bug = [name for name in chosen if name != "fault.four"] + good
            four_bugs = [name for name in chosen if name == "fault.four"]
            for names, most, most_failures in ((one_bug, _CASES, 1), (four_bugs, _FOUR_BUGS_CASES, None)):
                settings = Settings(
                    device=device,
                    max_examples=most,
                    max_failures=most_failures,
                    out=folder,
                    plain=True,
                    maps=False,
                    deadline=_DEADLINE[device],
                    memory=_MEMORY[device],
                    workers=workers,
                    # Each row is of what its own processes do.
                    share_gpu=False,
                    shrink=_SHRINK,
                    budget=budget,
                    all_variants=True,
                )
                summaries += summaries_of(names, settings, listener, executor) if names else ()
        rows = tuple(row_of(device, summary) for summary in summaries)
        executor.limit(None)  # the campaigns' time does not end the restarts
        leaks = _restarted(executor, device, _RESTARTS[device] if restarts is None else restarts)
        described = executor.describe()
    finally:
        executor.close()
    left = tuple(f"process {each.pid}" for each in reaper.marked(executor.run))
    leaks = replace(leaks, left=left)
    return Faults(rows, leaks, time.monotonic() - start, described)


def summaries_of(names: Sequence[str], settings: Settings, listener: Listener, executor: Executor) -> tuple[KernelSummary, ...]:
    """Run a campaign over the kernels of these names; `executor` only compiles where the settings ask for several workers.

    Raises:
        ExecutionError: a kernel could not be tried, or workers died.
        KeyboardInterrupt: the campaign was interrupted.
    """
    group = WorkerProcesses if settings.workers > 1 else None
    finished = run_campaign([registry.get(name) for name in names], settings, listener, executor, group)
    if finished.interrupted:
        raise KeyboardInterrupt
    if finished.lost:
        raise ExecutionError(finished.lost)
    for broken in finished.broken:
        raise ExecutionError(f"{broken.kernel}: {broken.error}")
    return finished.summaries


def _chosen(device: Device, only: Sequence[str]) -> list[str]:
    names = fault_names(device)
    for each in only:
        if each not in names:
            raise reject("fault", each, "no such fault kernel", f"use one of {', '.join(names)}")
    return [name for name in names if not only or name in only]


def _good(device: Device) -> list[str]:
    """Names of the correct kernels that can run here."""
    names = [name for name in _GOOD[device] if registry.get(name).unavailable(device) is None]
    if not names:
        raise BadArgument(
            f"device={device!r}: no correct kernel can run here to follow the faulty ones; install torch and triton"
        )
    return names


def row_of(device: Device, summary: KernelSummary) -> FaultRow:
    """Return what a campaign over a fault should find, what it has found, and what is wrong with that."""
    title, kinds, minimal = _expectation(device, summary.kernel)
    expected = " or ".join(kinds)
    findings, wrong = summary.findings, []
    if summary.kernel == "fault.four":
        pairs = {(each.identity.kind, lengths(each.case)) for each in findings}
        wrong += [f"{kind} with {case} is missing" for kind, case in sorted(_FOUR - pairs)]
        wrong += [f"{kind} with {case} is unexpected" for kind, case in sorted(pairs - _FOUR)]
    elif expected == "nothing":
        wrong += [f"found {each.identity}" for each in findings]
    elif not findings:
        wrong.append(f"nothing found in {counted(summary.cases, 'case')}")
    else:
        wrong += _wrong(findings[0], kinds, minimal)
        # A failure of two kinds is that of a state: alone its Case passes.
        wrong += ["its Case has none before it"] if len(kinds) > 1 and not findings[0].case.after else []
    wrong += [f"{each.identity.kind} is only partly shrunk" for each in findings if each.partly]
    return FaultRow(
        kernel=summary.kernel,
        title=title,
        expected=expected,
        got=", ".join(sorted(each.identity.kind for each in findings)) or "nothing",
        minimal=", ".join(lengths(each.case) for each in sorted(findings, key=lambda each: each.identity.kind)),
        rate=", ".join(f"{each.rate[0]}/{each.rate[1]}" for each in findings if each.rate),
        cases=summary.cases,
        trials=summary.shrink_cases,
        recovery=statistics.median(summary.recoveries) if summary.recoveries else None,
        wrong=tuple(wrong),
    )


def _wrong(finding: Finding, kinds: tuple[str, ...], minimal: str) -> list[str]:
    wrong = []
    if finding.identity.kind not in kinds:
        wrong.append(f"its kind is {finding.identity.kind}, not {' or '.join(kinds)}")
    if lengths(finding.case) != minimal or finding.case.problem.heads != 1:
        wrong.append(f"the minimal case is {minimal} with 1 head")
    if finding.rate is not None:
        wrong.append(f"it shows every time, not in {finding.rate} runs")
    return wrong


def _expectation(device: Device, name: str) -> tuple[str, tuple[str, ...], str]:
    """(title, kinds of which the failure has one, minimal lengths)."""
    if name == "fault.four":
        return "four bugs", (", ".join(sorted(kind for kind, _ in _FOUR)),), ""
    if device == "cpu" and name in _GOOD["cpu"]:
        return "a correct kernel, after all of these", ("nothing",), ""
    if device == "cpu":
        from attnfuzz.kernels.faults import host

        fault = next(each for each in host.FAULTS if f"fault.{each.slug}" == name)
        return fault.title, (fault.kind or "nothing", *([fault.also] if fault.also else [])), fault.minimal
    from attnfuzz.kernels.faults import device as on_device

    planted = next(each for each in on_device.FAULTS if name.endswith(f".{each.slug}"))
    return f"{name.split('.')[1]}: {planted.title}", (planted.kind or "nothing",), planted.minimal


def _restarted(executor: Isolated, device: Device, count: int) -> Leaks:
    """Run one fault `count` times, a process each; then time a few with a spare child ready and a correct Case after each."""
    name, dim = ("fault.abort", 16) if device == "cpu" else ("fault.triton.address", 64)
    dtype: Dtype = "float32" if device == "cpu" else "float16"
    kernel = registry.get(name)

    def case(keys: int) -> Case:
        problem = Problem(seqlens_q=(1,), seqlens_k=(keys,), dim_qk=dim, dim_v=dim, dtype=dtype)
        return Case(kernel=name, problem=problem, config=kernel.configs(problem)[0])

    before: tuple[int, int] = (0, 0)
    start = time.monotonic()
    for number in range(count):
        if number == min(5, count - 1):
            before = _held()
        executor.trial(case(3))
    seconds = time.monotonic() - start
    after = _held() if count else before
    ready = []
    for _ in range(_READY):
        executor.trial(case(2))
        executor.settle()
        executor.trial(case(3))
        died = time.monotonic()
        executor.trial(case(2))
        ready.append(time.monotonic() - died)
    return Leaks(count, seconds, (before[0], after[0]), (before[1], after[1]), (), statistics.median(ready))


def _held() -> tuple[int, int]:
    """(open file descriptors, bytes of memory) of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        pages = int(file.read().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")  # noqa: PTH208
