"""Cases a second of `attnfuzz run --json`, as a user calls it, by kernel and number of workers."""

from __future__ import annotations

from functools import partial
from typing import Any

from throughput.commands import Finished, run_command
from throughput.plan import Plan
from throughput.tables import Column, Sheet, medians

__all__ = ["measure", "row_of", "sheets"]


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
    return [row_of(kernels, workers, plan.caches, run_command(plan, kernels, workers, seed))]


def row_of(kernels: tuple[str, ...], workers: str, caches: str, run: Finished) -> dict[str, Any]:
    """Return the figures of one run: `cold` counts from the start of the process, `warm` from its first Case."""
    cases = run.total("cases")
    return {
        "kernel": kernels[0] if len(kernels) == 1 else f"all {len(kernels)}",
        "workers": workers,
        "caches": caches,
        "cases": cases,
        "shrink_cases": run.total("shrink_cases"),
        "failures": len(run.result["failures"]),
        "wall": run.wall,
        "first": run.first,
        "compile_seconds": run.total("compile_seconds"),
        "cold": cases / run.wall,
        "warm": None if run.first is None else cases / (run.wall - run.first),
        "busy": run.busy,
        "peak": run.peak,
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
