"""How Cases a second grow or fall: with tokens and heads of a Case, workers, the budget of a cold start, and stored Cases.

Each curve is of the first kernel. A point's x is what its Cases really had, on average, not the limit that they were drawn by.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from attnfuzz.harness.campaign.settings import PROFILES
from attnfuzz.harness.core.text import dumps
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case, Recipe
from throughput.campaigns import NotMeasured, Stamps, Trials, campaign, run_for
from throughput.plan import Plan
from throughput.processes import Session
from throughput.tables import Column, Sheet, medians

__all__ = ["CURVES", "measure", "sheets", "store_cases"]

LENGTHS: Mapping[Device, tuple[int, ...]] = {"cpu": (16, 64, 150, 300), "cuda": (64, 256, 1024, 4096)}
HEADS: Mapping[Device, tuple[int, ...]] = {"cpu": (1, 2, 4, 6), "cuda": (1, 2, 4, 8, 16)}
WORKERS = ("1", "2", "4", "8", "12", "16", "auto")
STORED = (0, 100, 1000, 10000)
BUDGETS = (1 / 8, 1 / 4, 1 / 2, 1.0)
"""As parts of --budget."""
_PATIENCE = 600.0
"""Seconds that the first trial may take to come, with ten thousand stored Cases."""
CURVES = {
    "tokens": ("tokens of a Case", "Cases/s, trials"),
    "heads": ("heads of a Case", "Cases/s, trials"),
    "workers": ("workers", "Cases/s, trials"),
    "budget": ("seconds since the start, cold caches", "Cases/s, all"),
    "corpus": ("stored Cases", "seconds to the first trial"),
}
"""x and y of each curve."""


def measure(plan: Plan) -> list[dict[str, Any]]:
    """Return a row per curve, point and round, of the first kernel."""
    measured: list[Callable[[Plan, int], list[dict[str, Any]]]] = [_tokens, _heads, _workers, _budget, _corpus]
    rows = []
    for number in range(plan.rounds):
        for curve in measured[:: 1 if number % 2 == 0 else -1]:
            points = plan.attempt(f"growth, round {number + 1}: {curve.__name__[1:]}", partial(curve, plan, number))
            rows += [{"kernel": plan.kernels[0], **row} for row in points]
            for row in points:
                plan.say(f"growth, round {number + 1}: {row['curve']} {row['point']}: {row['y'] or 0:.1f}")
    return rows


def _tokens(plan: Plan, seed: int) -> list[dict[str, Any]]:
    rows = []
    for length in LENGTHS[plan.device]:
        stamps, trials = _limited(plan, seed, length=length)
        rows.append(_row("tokens", length, _rounded(trials.mean("tokens")), stamps.warm, stamps))
    return rows


def _heads(plan: Plan, seed: int) -> list[dict[str, Any]]:
    rows = []
    for heads in HEADS[plan.device]:
        stamps, trials = _limited(plan, seed, heads=heads)
        if beyond := [each["heads"] for each in trials.cases if each["heads"] > heads]:
            raise NotMeasured(f"heads={beyond[0]}: the limit of {heads} did not reach the process that draws")
        rows.append(_row("heads", heads, _rounded(trials.mean("heads")), stamps.warm, stamps))
    return rows


def _limited(plan: Plan, seed: int, **limits: int) -> tuple[Stamps, Trials]:
    """One campaign with limits of its own; plain, since relations have limits of their own on a GPU.

    Its one worker is the process whose limits are changed (logged_run.py): other workers would draw by the profile's.
    """
    profile = PROFILES["quick"].limits[plan.device]
    smaller = {"tiles": max(profile.tiles, limits.get("heads", 0))}
    with plan.folder() as (folder, caches):
        options = {**plan.options("1", budget=f"{plan.seconds}s", seed=str(seed)), "plain": "1"}
        run = campaign(plan.kernels[:1], plan.device, folder, options, limits={**smaller, **limits}, environment=caches)
        with run as (session, log):
            ended = _trials_for(plan.seconds, session, lambda: log.update().cases)
            return log.update().stamps(session.started, ended), log.update()


def _trials_for(seconds: float, session: Session, cases: Callable[[], list[dict[str, Any]]]) -> float:
    """Let a campaign run until so many seconds after its first trial; return when that was."""
    run_for(session, _PATIENCE, lambda: bool(cases()))
    if not cases():
        raise NotMeasured(f"no Case was judged in {_PATIENCE:g} s: {session.text('stderr')[-1000:]}")
    return run_for(session, cases()[0]["trial"] - session.started + seconds)


def _workers(plan: Plan, seed: int) -> list[dict[str, Any]]:
    """More workers than cores are not measured, nor more than one where `attnfuzz run` has no --workers."""
    cores = len(os.sched_getaffinity(0))
    counts = [each for each in WORKERS if each == "auto" or int(each) <= cores] if plan.workers_here == plan.workers else ["1"]
    rows = []
    for workers in counts:
        with plan.folder() as (folder, caches):
            options = plan.options(workers, budget=f"{plan.seconds}s", seed=str(seed))
            with campaign(plan.kernels[:1], plan.device, folder, options, environment=caches) as (session, log):
                ended = _trials_for(plan.seconds, session, lambda log=log: log.update().cases)  # type: ignore[misc]
                stamps = log.update().stamps(session.started, ended)
        rows.append(_row("workers", workers, int(workers) if workers.isdigit() else None, stamps.warm, stamps))
    return rows


def _budget(plan: Plan, seed: int) -> list[dict[str, Any]]:
    """Each budget is a run of its own, with empty caches."""
    rows = []
    for part in BUDGETS:
        seconds = part * plan.seconds
        with plan.folder(cold=True) as (folder, caches):
            options = plan.options(plan.workers_here[-1], budget=f"{seconds}s", seed=str(seed))
            with campaign(plan.kernels[:1], plan.device, folder, options, environment=caches) as (session, log):
                ended = run_for(session, seconds)
                stamps = log.update().stamps(session.started, ended)
        rows.append(_row("budget", f"{seconds:g}", seconds, stamps.cold, stamps))
    return rows


def _corpus(plan: Plan, seed: int) -> list[dict[str, Any]]:
    kernel = registry.get(plan.kernels[0])
    rows = []
    for count in STORED:
        with plan.folder() as (folder, caches):
            store_cases(kernel, plan.device, folder / "out", count)
            # It is ended after its first trial, which a short budget might not reach.
            options = plan.options("1", budget=f"{_PATIENCE}s", seed=str(seed))
            with campaign(plan.kernels[:1], plan.device, folder, options, environment=caches) as (session, log):
                ended = run_for(session, _PATIENCE, lambda log=log: bool(log.update().cases))  # type: ignore[misc]
                stamps = log.update().stamps(session.started, ended)
        first = min((each - stamps.started for each in stamps.at), default=None)
        rows.append(_row("corpus", count, count, first, stamps))
    return rows


def store_cases(kernel: Kernel, device: Device, out: Path, count: int) -> None:
    """Write so many case files of `kernel`, all different, each as `attnfuzz run` writes them, with nothing known of a failure.

    Raises:
        BadArgument: the kernel does not take the simplest problem of its own dims.
    """
    can = kernel.capabilities
    dim_qk, dim_v = can.dims[0]
    problem = Problem(
        seqlens_q=(16,), seqlens_k=(16,), dim_qk=dim_qk, dim_v=dim_v, dtype=can.dtypes_for(device)[0], packing=can.packings[0],
        causal=can.causal[0],
    )  # fmt: skip
    config = kernel.configs(problem)[0]
    if reason := kernel.supports(problem, config, device):
        raise reject("kernel", kernel.name, f"it does not take one sequence of 16 tokens ({reason})", "name another one first")
    folder = out / "cases"
    folder.mkdir(parents=True)
    case = Case(kernel=kernel.name, problem=problem, config=config)
    for number in range(count):
        each = replace(case, recipe=Recipe(seed=number))
        (folder / f"{kernel.name}-o-wrong-{each.id}.json").write_text(dumps({**each.to_object(), "found": {}}), encoding="utf-8")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _row(curve: str, point: Any, x: float | None, y: float | None, stamps: Stamps) -> dict[str, Any]:
    return {"curve": curve, "point": str(point), "x": x, "y": y, "cases": stamps.count}


def sheets(rows: list[dict[str, Any]]) -> list[Sheet]:
    """Return a table for each curve: medians over the rounds."""
    joined = medians(rows, ("kernel", "curve", "point"))
    curves = []
    for curve, (x, y) in CURVES.items():
        own = [row for row in joined if row["curve"] == curve]
        if own:
            numbers = [Column("x", x, "g"), Column("y", y, ".1f"), Column("cases", "Cases", ".0f")]
            curves.append(Sheet(f"growth: {y} by {x}, {own[0]['kernel']}", [Column("point", "asked for"), *numbers], own))
    return curves
