"""Where the time of a Case goes: `attnfuzz run KERNEL --json` with each number of workers, by the account that every run keeps.

Workers and their children work at the same time, so there are two accounts, and each adds up to the time of the workers' turns.
A worker asks its campaign, waits for Cases that are drawn, writes the journal, waits for its child, shrinks. Its child goes
through the stages of a trial; the rest of the time it reads Cases and writes Verdicts, is idle, or there is none yet. A second
table has the child's stages by the check of the Case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from attnfuzz.harness.campaign.account import STAGES, STEPS
from attnfuzz.harness.campaign.worker_count import auto_workers
from throughput.campaigns import NotMeasured
from throughput.commands import Finished, run_command
from throughput.plan import Plan
from throughput.tables import Column, Sheet, medians

__all__ = ["accounts", "measure", "sheets"]

_BY_CHECK = [
    Column("step", "check"), Column("part", "% of Cases", ".1f"), Column("own", "ms of each", ".2f"),
    Column("ms", "ms a Case of all", ".3f"), Column("share", "% of its time", ".1f"),
]  # fmt: skip


def measure(plan: Plan) -> list[dict[str, Any]]:
    """Return the accounts of every kernel with each number of workers, round after round, which alternate their order."""
    rows = []
    for number in range(plan.rounds):
        for name in plan.kernels[:: 1 if number % 2 == 0 else -1]:
            for workers in plan.workers_here:
                what = f"stages, round {number + 1}: {name}, {workers} workers"
                more = plan.attempt(what, partial(_run, plan, name, workers, number))
                rows += more
                plan.say(f"{what}: {more[0]['cases']} Cases, {more[0]['rate']:.1f} a second" if more else what)
    return rows


def _run(plan: Plan, name: str, workers: str, seed: int) -> list[dict[str, Any]]:
    count = auto_workers(plan.device, share_gpu=True) if workers == "auto" else int(workers)
    rows = accounts(run_command(plan, (name,), workers, seed), count)
    return [{"kernel": name, "workers": workers, "caches": plan.caches, **row} for row in rows]


def accounts(run: Finished, workers: int) -> list[dict[str, Any]]:
    """Return a row for each step of either side: milliseconds a Case, and the share of the workers' time.

    Raises:
        NotMeasured: no turn with a Case came to its end.
    """
    [summary] = run.result["kernels"]
    times = summary["times"]
    worker, stages, cases = times["worker"], times["child"], times["cases"]
    if not cases:
        raise NotMeasured(f"no turn with a Case came to its end in {run.wall:.1f} s")
    wall = sum(worker.values())
    child = {stage: stages[stage] for stage in STAGES}
    child |= {"shrink": worker["shrink"]}
    child["pipe, idle, or none"] = wall - sum(child.values())
    after = run.wall - (run.first or 0.0)
    of_run = {
        "cases": cases, "batch": cases / times["batches"], "children": times["children"], "rate": cases / after,
        "first": run.first, "wall": run.wall, "turns": 100 * wall / (workers * run.wall),
        "failures": len(run.result["failures"]),
    }  # fmt: skip

    def row(side: str, step: str, seconds: float) -> dict[str, Any]:
        return {"side": side, "step": step, "ms": 1e3 * seconds / cases, "share": 100 * seconds / wall, **of_run}

    rows = [row("worker", step, worker[step]) for step in STEPS]
    rows += [row("child", step, seconds) for step, seconds in child.items()]
    for check, spent in sorted(times["checks"].items(), key=lambda pair: -pair[1]["seconds"]):
        own = {"own": 1e3 * spent["seconds"] / spent["cases"], "part": 100 * spent["cases"] / cases}
        rows.append({**row("check", check, spent["seconds"]), **own})
    return [*rows, row("both", "all", wall)]


def sheets(rows: list[dict[str, Any]]) -> list[Sheet]:
    """Return a table for each kernel and number of workers: medians over the rounds."""
    columns = [
        Column("side", "side"), Column("step", "step"), Column("ms", "ms a Case", ".3f"), Column("share", "% of its time", ".1f"),
    ]  # fmt: skip
    joined = medians([*rows, *_without_a_case(rows)], ("kernel", "workers", "caches", "side", "step"))
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in joined:
        groups.setdefault((row["kernel"], row["workers"], row["caches"]), []).append(row)
    note = (
        "ms a Case: of all workers together. Worker and child work at the same time: each side adds up to the time of the turns. "
        "pipe: reading Cases and writing Verdicts."
    )
    sheets = []
    for (kernel, workers, caches), group in groups.items():
        of = f"{kernel}, {workers} workers, caches {caches}"
        steps = [row for row in group if row["side"] != "check"]
        sheets.append(Sheet(f"stages: {of}", columns, steps, [_sentence(group[0]), note]))
        if checks := sorted((row for row in group if row["side"] == "check"), key=lambda row: -row["ms"]):
            sheets.append(Sheet(f"checks: {of}", _BY_CHECK, checks, ["In the child's stages; those of a batch share its waits."]))
    return sheets


def _without_a_case(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row of zeros for each round that had no Case of a check which another round had."""
    rounds, numbers, one = Counter[Any](), Counter[Any](), {}
    for row in rows:
        run = row["kernel"], row["workers"], row["caches"]
        rounds[run] += row["side"] == "both"
        if row["side"] == "check":
            numbers[run, row["step"]] += 1
            one[run, row["step"]] = row
    for (run, check), row in one.items():
        for _ in range(rounds[run] - numbers[run, check]):
            yield {**row, "part": 0.0, "own": None, "ms": 0.0, "share": 0.0}


def _sentence(row: Mapping[str, Any]) -> str:
    first = "no Verdict came" if row["first"] is None else f"the first Verdict came after {row['first']:.1f} s"
    failures = f" {row['failures']:.0f} failures were shrunk." if row["failures"] else ""
    return (
        f"{row['cases']:.0f} Cases, {row['batch']:.1f} a batch, {row['rate']:.1f} a second from the first on; {first}, "
        f"the end after {row['wall']:.1f} s. Turns are {row['turns']:.0f} % of the workers' time since the start of the command; "
        f"{row['children']:.0f} children started.{failures}"
    )
