"""What isolation costs: cases per second in child processes against the same in this process, by turns in one run.

    python benchmarks/isolation.py [--device cpu|cuda] [--cases N] [--rounds N] [--json FILE] [KERNEL]...

Every round runs the same drawn Cases with both executors, warm, drawing and the journal included; a kernel's cost is the
median of its rounds' costs (negative: isolated is faster, since the next Case is drawn while one runs). Exit code 1 where that
is more than 5 % (CPU) or 10 % (CUDA).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click

from attnfuzz.harness.campaign.context import CampaignContext, WorkerContext
from attnfuzz.harness.campaign.coordinator import Coordinator, LocalTurns
from attnfuzz.harness.campaign.journal import Journal
from attnfuzz.harness.campaign.kernel_state import KernelState
from attnfuzz.harness.campaign.plan import plan_of
from attnfuzz.harness.campaign.settings import PROFILES, Settings
from attnfuzz.harness.campaign.worker import Worker
from attnfuzz.harness.cli.options import file_to_write
from attnfuzz.harness.core.environment import resolve_device
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.isolation.executors import Executor, InProcess
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.strategies.pools import pool
from attnfuzz.strategies.variants import Variant, all_variants

LIMITS = {"cpu": 0.05, "cuda": 0.10}


def rate(kernel: Kernel, variants: tuple[Variant, ...], executor: Executor, device: Device, cases: int, seed: int) -> float:
    """Cases per second of one run."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(folder)
        settings = Settings(device=device, max_examples=cases, seed=seed, out=None)
        plan = replace(plan_of(kernel, settings), variants=variants, compiled=False)
        context = CampaignContext(settings)
        run = KernelState(kernel, plan, context)
        coordinator = Coordinator(context, [run], executor)
        worker = Worker(
            lambda _: (kernel, plan), WorkerContext(settings, executor, journal), coordinator, LocalTurns(coordinator)
        )
        start = time.perf_counter()
        worker.work()
        seconds = time.perf_counter() - start
        journal.close()
    if run.findings.closed:
        raise click.ClickException(
            f"{kernel.name} is wrong ({next(iter(run.findings.closed))}): only correct kernels can be timed"
        )
    return run.tally.cases / seconds


@click.command()
@click.argument("kernels", nargs=-1)
@click.option("--device", default="auto")
@click.option("--cases", default=150, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "json_file", metavar="FILE", callback=file_to_write, help="Write the figures as JSON.")
def main(kernels: tuple[str, ...], device: str, cases: int, rounds: int, json_file: Path | None) -> None:
    """Print a row per kernel: rates in this process and isolated, and what isolation costs."""
    where = resolve_device(device)
    chosen = [registry.get(name) for name in kernels or registry.names()]
    chosen = [kernel for kernel in chosen if where in kernel.capabilities.devices and kernel.unavailable(where) is None]
    pools = {kernel.name: pool(all_variants(kernel, where), PROFILES["quick"].variants[where], 0) for kernel in chosen}
    isolated = Isolated(where, backends=[kernel.backend for kernel in chosen])
    executors: dict[str, Executor] = {"in process": InProcess(where), "isolated": isolated}
    rows = []
    try:
        for kernel in chosen:
            rates: dict[str, list[float]] = {name: [] for name in executors}
            for name, executor in executors.items():
                rate(kernel, pools[kernel.name], executor, where, cases, 0)
                click.echo(f"{kernel.name}: warmed up {name}", err=True)
            for number in range(rounds):
                order = list(executors.items())[:: 1 if number % 2 == 0 else -1]
                for name, executor in order:
                    rates[name].append(rate(kernel, pools[kernel.name], executor, where, cases, number + 1))
            costs = [1 - b / a for a, b in zip(rates["in process"], rates["isolated"], strict=True)]
            rows.append({"kernel": kernel.name, **rates, "costs": costs, "cost": statistics.median(costs)})
            click.echo(
                f"{kernel.name:<22} {statistics.median(rates['in process']):7.1f} cases/s in process, "
                f"{statistics.median(rates['isolated']):7.1f} isolated: costs {statistics.median(costs):+.1%}"
            )
    finally:
        isolated.close()
    worst = max(row["cost"] for row in rows)
    click.echo(f"worst: {worst:+.1%}, limit {LIMITS[where]:.0%}")
    if json_file:
        json_file.write_text(dumps({"device": where, "rows": rows, "worst": worst}))
    sys.exit(worst > LIMITS[where])


if __name__ == "__main__":
    main()
