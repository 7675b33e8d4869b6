"""Cases a second of `attnfuzz run --json`, as a user calls it, by kernel and number of workers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from throughput.campaigns import NotMeasured
from throughput.gpu import Gpu
from throughput.plan import Plan
from throughput.processes import ATTNFUZZ, Session
from throughput.tables import Column, Sheet, medians

__all__ = ["measure", "sheets"]

_TICK = 0.02
_PATIENCE = 1800.0
"""Seconds beyond the budget, for compiles and shrinking, after which a run counts as hanging."""


def measure(plan: Plan) -> list[dict[str, Any]]:
    """Measure every kernel alone, and all of them in one run, with each number of workers; rounds alternate them."""
    contestants = [(name,) for name in plan.kernels] + [plan.kernels] * (len(plan.kernels) > 1)
    rows = []
    for number in range(plan.rounds):
        for kernels in contestants[:: 1 if number % 2 == 0 else -1]:
            for workers in plan.workers_here:
                rows.append(_run(plan, kernels, workers, number))
                rate = rows[-1]["warm"]
                plan.say(f"engine, round {number + 1}: {rows[-1]['kernel']}, {workers} workers: {rate or 0:.1f} Cases/s")
    return rows


def _run(plan: Plan, kernels: tuple[str, ...], workers: str, seed: int) -> dict[str, Any]:
    """Run the command once; the seed of each round is another one."""
    with plan.folder() as (folder, caches):
        options = plan.options(workers, budget=f"{plan.seconds}s", seed=str(seed), device=plan.device, out=str(folder / "out"))
        command = [
            *ATTNFUZZ,
            "run",
            *kernels,
            "--json",
            *(word for name, text in options.items() for word in (f"--{name}", text)),
        ]
        with Gpu(plan.device == "cuda") as gpu, Session(command, folder, caches) as session:
            first = _first_launch(session, folder / "out", session.started + plan.seconds + _PATIENCE)
            session.wait(plan.seconds + _PATIENCE)
            end = session.ended or time.monotonic()
        return row_of(kernels, workers, plan.caches, session, first, end) | {
            "busy": None if first is None else gpu.busy(first, end),
            "peak": gpu.peak,
        }


def _first_launch(session: Session, out: Path, end: float) -> float | None:
    """Return when the journal had its first Case, which is then about to be judged; None if it never had."""
    while time.monotonic() < end:
        # A hidden file is not complete yet.
        if any(not each.name.startswith(".") for each in out.glob("inflight/*")):
            return time.monotonic()
        if not session.running:
            break
        time.sleep(_TICK)
    return None


def row_of(
    kernels: tuple[str, ...], workers: str, caches: str, session: Session, first: float | None, end: float
) -> dict[str, Any]:
    """Return the figures of one run: `cold` counts from the start of the process, `warm` from its first Case.

    Raises:
        NotMeasured: it printed no result.
    """
    try:
        result = json.loads(session.text("stdout"))
    except json.JSONDecodeError:
        raise NotMeasured(f"attnfuzz run {' '.join(kernels)}: no result: {session.text('stderr')[-2000:]}") from None
    cases = sum(each["cases"] for each in result["kernels"])
    return {
        "kernel": kernels[0] if len(kernels) == 1 else f"all {len(kernels)}",
        "workers": workers,
        "caches": caches,
        "cases": cases,
        "shrink_cases": sum(each["shrink_cases"] for each in result["kernels"]),
        "failures": len(result["failures"]),
        "wall": end - session.started,
        "first": None if first is None else first - session.started,
        "compile_seconds": sum(each["compile_seconds"] for each in result["kernels"]),
        "cold": cases / (end - session.started),
        "warm": None if first is None else cases / (end - first),
    }


def sheets(rows: list[dict[str, Any]]) -> list[Sheet]:
    """Return the table: medians over the rounds."""
    columns = [
        Column("kernel", "kernel"), Column("workers", "workers"), Column("caches", "caches"), Column("cases", "Cases", ".0f"),
        Column("wall", "wall s", ".1f"), Column("first", "first after s", ".1f"), Column("compile_seconds", "compiles s", ".1f"),
        Column("cold", "Cases/s, all", ".1f"), Column("warm", "Cases/s, trials", ".1f"), Column("failures", "failures", ".0f"),
        Column("busy", "GPU busy %", ".0f"), Column("peak", "GPU MiB", ".0f"),
    ]  # fmt: skip
    notes = [
        '"all" counts from the start of the command, "trials" from the first Case in the journal; busy: mean over the trials\' '
        "time. The median of the rounds.",
        *(["Runs with failures spend time on shrinking: their rates are no measure of the engine."]
          if any(row["failures"] for row in rows) else []),
    ]  # fmt: skip
    return [Sheet("engine: attnfuzz run", columns, medians(rows, ("kernel", "workers", "caches")), notes)]
