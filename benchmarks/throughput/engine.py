"""Cases a second of `attnfuzz run --json`, as a user calls it, by kernel and number of workers."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from throughput.campaigns import NotMeasured
from throughput.gpu import Gpu
from throughput.plan import Plan
from throughput.processes import Session
from throughput.tables import Column, Sheet, medians

__all__ = ["measure", "sheets"]

_COMMAND = Path(__file__).with_name("first_case.py")
_PATIENCE = 1800.0
"""Seconds beyond the budget, for compiles and shrinking, after which a run counts as hanging."""


def measure(plan: Plan) -> list[dict[str, Any]]:
    """Measure every kernel alone, and all of them in one run, with each number of workers; rounds alternate them."""
    contestants = [(name,) for name in plan.kernels] + [plan.kernels] * (len(plan.kernels) > 1)
    rows = []
    for number in range(plan.rounds):
        for kernels in contestants[:: 1 if number % 2 == 0 else -1]:
            for workers in plan.workers_here:
                what = f"engine, round {number + 1}: {', '.join(kernels)}, {workers} workers"
                more = plan.attempt(what, partial(_run, plan, kernels, workers, number))
                rows += more
                plan.say(f"{what}: {more[0]['warm'] or 0:.1f} Cases/s" if more else what)
    return rows


def _run(plan: Plan, kernels: tuple[str, ...], workers: str, seed: int) -> list[dict[str, Any]]:
    """Run the command once; the seed of each round is another one."""
    with plan.folder() as (folder, caches):
        options = plan.options(workers, budget=f"{plan.seconds}s", seed=str(seed), device=plan.device, out=str(folder / "out"))
        words = [word for name, text in options.items() for word in (f"--{name}", text)]
        command = [sys.executable, "-P", str(_COMMAND), str(folder / "first"), "run", *kernels, "--json", *words]
        with Gpu(plan.device == "cuda") as gpu, Session(command, folder, caches) as session:
            session.wait(plan.seconds + _PATIENCE)
            end = session.ended or time.monotonic()
        first = _first_case(folder / "first")
        row = row_of(kernels, workers, plan.caches, session, first, end)
        return [row | {"busy": None if first is None else gpu.busy(first, end), "peak": gpu.peak}]


def _first_case(note: Path) -> float | None:
    """Return when the first Case was judged; None if none was."""
    return float(note.read_text(encoding="ascii")) if note.exists() else None


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
        '"all" counts from the start of the command, "trials" from its first Verdict on; busy: mean over the trials\' '
        "time. The median of the rounds.",
        *(["Runs with failures spend time on shrinking: their rates are no measure of the engine."]
          if any(row["failures"] for row in rows) else []),
    ]  # fmt: skip
    return [Sheet("engine: attnfuzz run", columns, medians(rows, ("kernel", "workers", "caches")), notes)]
