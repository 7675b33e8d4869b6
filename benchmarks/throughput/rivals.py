"""The engine beside two other kinds of test suite: same kernel, same device, same seconds, each in a process of its own.

The two: a parametrised pytest suite over a fixed grid of shapes (suite_grid.py), and a Hypothesis test that builds the kernel for
each shape it draws (suite_property.py). With several workers they run under pytest-xdist. What is counted is judged tests, or
Cases, until the time is over; then each contestant is ended.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from throughput.campaigns import NotMeasured, Stamps, campaign, run_for
from throughput.plan import Plan
from throughput.processes import Session
from throughput.tables import Column, Sheet, medians

__all__ = ["CONTESTANTS", "judged_in", "measure", "sheets"]

OURS = "attnfuzz run"
SUITES = {"parametrised suite": "suite_grid.py", "Hypothesis test": "suite_property.py"}
CONTESTANTS = (OURS, *SUITES)
VARIABLE = "ATTNFUZZ_THROUGHPUT_SUITE"
JUDGED = [
    {"who": OURS, "outputs": "O, LSE, dQ, dK, dV", "rule": "every element against a float64 budget; two statistics",
     "memory": "poison, guard bands, inputs unchanged", "calls": "yes", "values": "32 patterns", "crash": "a failure; goes on"},
    {"who": "parametrised suite", "outputs": "O, dQ, dK, dV", "rule": "largest error at most twice the low-precision formula's",
     "memory": "no", "calls": "no", "values": "normal", "crash": "ends the run"},
    {"who": "Hypothesis test", "outputs": "O, dQ, dK, dV", "rule": "largest error at most twice the low-precision formula's",
     "memory": "no", "calls": "no", "values": "normal", "crash": "ends the run"},
]  # fmt: skip
"""What each contestant looks at, for the page."""


def measure(plan: Plan) -> list[dict[str, Any]]:
    """Return a row per kernel, workers, contestant and round; the order changes with each round."""
    rows = []
    for number in range(plan.rounds):
        turn = number % len(CONTESTANTS)
        for kernel in plan.kernels:
            for workers in plan.workers_here:
                for who in (*CONTESTANTS[turn:], *CONTESTANTS[:turn]):
                    what = f"rivals, round {number + 1}: {kernel}, {workers} workers, {who}"
                    more = plan.attempt(what, partial(_contestant, plan, kernel, workers, who, number))
                    rows += more
                    plan.say(f"{what}: {more[0]['judged']} judged" if more else what)
    return rows


def _contestant(plan: Plan, kernel: str, workers: str, who: str, seed: int) -> list[dict[str, Any]]:
    figures = _ours(plan, kernel, workers, seed) if who == OURS else _suite(plan, kernel, workers, who)
    return [{"kernel": kernel, "workers": workers, "caches": plan.caches, "who": who, **figures}]


def _ours(plan: Plan, kernel: str, workers: str, seed: int) -> dict[str, Any]:
    options = plan.options(workers, budget=f"{plan.seconds}s", seed=str(seed))
    with plan.folder() as (folder, caches), campaign([kernel], plan.device, folder, options, environment=caches) as (run, log):
        ended = run_for(run, plan.seconds)
        _must_have_worked(run, (0,))
        trials = log.update()
    stamps = trials.stamps(run.started, ended)
    failed = sum(each["failed"] for each in trials.cases)
    return _figures(stamps, [each["tokens"] for each in trials.cases], failed)


def _suite(plan: Plan, kernel: str, workers: str, who: str) -> dict[str, Any]:
    with plan.folder() as (folder, caches), suite(plan, kernel, workers, who, folder, caches) as run:
        ended = run_for(run, plan.seconds)
        # Failing tests and an interrupted run are results; a suite that cannot be collected is none.
        _must_have_worked(run, (0, 1, 2))
        lines = judged_in(folder / "judged")
        if not lines and not run.running:
            raise NotMeasured(f"{who}, {kernel}: nothing was judged: {run.text('stdout')[-1000:]}")
    stamps = Stamps(run.started, ended, [at for at, _, _ in lines])
    return _figures(stamps, [tokens for _, tokens, _ in lines], sum(not passed for _, _, passed in lines))


def suite(plan: Plan, kernel: str, workers: str, who: str, folder: Path, caches: Mapping[str, str]) -> Session:
    """Start pytest with one of the suites; it notes each judged test in `folder`."""
    processes = len(os.sched_getaffinity(0)) if workers == "auto" else int(workers)
    request = {"kernels": [kernel], "device": plan.device, "log": str(folder / "judged"), "parts": processes}
    command = [
        sys.executable, "-P", "-m", "pytest", "-q", "--import-mode=importlib", "-c", os.devnull, f"--rootdir={folder}",
        "-p", "no:cacheprovider", "-p", "no:attnfuzz.harness.plugin", str(Path(__file__).with_name(SUITES[who])),
        *(("-n", str(processes)) if processes > 1 else ("-p", "no:xdist")),
    ]  # fmt: skip
    return Session(command, folder, {**caches, VARIABLE: json.dumps(request), "PYTEST_ADDOPTS": ""})


def _must_have_worked(run: Session, right: tuple[int, ...]) -> None:
    if not run.running and run.code not in right:
        raise NotMeasured(f"exit code {run.code}: {run.text('stdout')[-1000:]}{run.text('stderr')[-1000:]}")


def judged_in(path: Path) -> list[tuple[float, int, bool]]:
    """Return (time, tokens, passed) of every judged test that a suite has noted; a line that is cut off is left out."""
    if not path.exists():
        return []
    whole = path.read_text(encoding="ascii").splitlines(keepends=True)
    parts = (line.split() for line in whole if line.endswith("\n"))
    return [(float(at), int(tokens), passed == "1") for at, tokens, passed in parts]


def _figures(stamps: Stamps, tokens: list[int], failures: int) -> dict[str, Any]:
    return {
        "judged": stamps.count, "wall": stamps.ended - stamps.started, "first": stamps.first, "cold": stamps.cold,
        "warm": stamps.warm, "tokens": sum(tokens) / len(tokens) if tokens else None, "failures": failures,
    }  # fmt: skip


def sheets(rows: list[dict[str, Any]]) -> list[Sheet]:
    """Return the table of rates, with ours as a multiple of each, and the table of what each judges."""
    joined = medians(rows, ("kernel", "workers", "caches", "who"))
    for row in joined:
        ours = next((each for each in joined if each["who"] == OURS and all(each[key] == row[key] for key in
                     ("kernel", "workers", "caches"))), None)  # fmt: skip
        for column in ("cold", "warm"):
            known = ours is not None and ours[column] is not None and row[column]
            row[f"x {column}"] = ours[column] / row[column] if ours is not None and known else None
    columns = [
        Column("kernel", "kernel"), Column("workers", "workers"), Column("caches", "caches"), Column("who", "contestant"),
        Column("judged", "judged", ".0f"), Column("first", "first after s", ".1f"), Column("tokens", "tokens each", ".0f"),
        Column("cold", "judged/s, all", ".1f"), Column("x cold", "ours x, all", ".2f"),
        Column("warm", "judged/s, from the first on", ".1f"), Column("x warm", "ours x, from the first on", ".2f"),
        Column("failures", "failures", ".0f"),
    ]  # fmt: skip
    note = '"all" counts from the start of the process. The median of the rounds; a round has its contestants in another order.'
    what = [
        Column("who", "contestant"), Column("outputs", "outputs"), Column("rule", "rule"), Column("memory", "memory"),
        Column("calls", "calls before, relations"), Column("values", "values"), Column("crash", "crash or hang"),
    ]  # fmt: skip
    return [Sheet("attnfuzz beside other suites", columns, joined, [note]), Sheet("what each judges", what, JUDGED)]
