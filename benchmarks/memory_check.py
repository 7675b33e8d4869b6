"""What the memory checker costs: forward and backward of the same drawn Cases with it and without it, interpreted on the CPU.

    python benchmarks/memory_check.py [--cases N] [--rounds N] [--seed N] [--json FILE] [KERNEL]

Every Case runs with and without, by turns, and counts with its fastest round of each; the cost is the median of the Cases'
ratios. Exit code 1 where it is more than 25 %.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from pathlib import Path

import click
from hypothesis import HealthCheck, Phase, given, seed, settings

from attnfuzz.harness.campaign.settings import PROFILES
from attnfuzz.harness.cli.options import file_to_write
from attnfuzz.harness.core import environment
from attnfuzz.harness.core.clock import Clock
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.trial.bench import Bench
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.support import memory
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import cases
from attnfuzz.strategies.pools import pool
from attnfuzz.strategies.variants import all_variants

LIMIT = 0.25


def drawn(kernel: Kernel, count: int, number: int) -> list[Case]:
    """Distinct Cases as a campaign draws them."""
    profile = PROFILES["quick"]
    variants = pool(all_variants(kernel, "cpu"), profile.variants["cpu"], number)
    found: dict[Case, None] = {}

    @seed(number)
    @settings(
        max_examples=3 * count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(cases(kernel, device="cpu", limits=profile.limits["cpu"], variants=variants))
    def draw(case: Case) -> None:
        found[case] = None

    draw()
    return list(found)[:count]


def seconds(case: Case, kernel: Kernel, *, check: bool) -> float:
    """Seconds of one forward and backward."""
    memory.check(check)
    bench = Bench(case, kernel, "cpu", Clock())
    ready, inputs = bench.ready(), bench.inputs()
    bench.launch(ready, inputs)
    return bench.clock.seconds["kernel"]


@click.command()
@click.argument("kernel", default="triton.varlen")
@click.option("--cases", default=100, show_default=True, type=click.IntRange(min=1))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", "number", default=0, show_default=True, type=click.IntRange(min=0))
@click.option("--json", "json_file", metavar="FILE", callback=file_to_write, help="Write the figures as JSON.")
def main(kernel: str, cases: int, rounds: int, number: int, json_file: Path | None) -> None:
    """Print the ratio of times with and without the checker: median, quartiles, and of all Cases together."""
    warnings.simplefilter("error", RuntimeWarning)
    environment.prepare("cpu")
    try:
        subject = registry.get(kernel)
    except BadArgument as error:
        raise click.UsageError(str(error)) from None
    if subject.backend != "triton":
        raise click.UsageError(
            f"kernel={kernel!r}: it is no Triton kernel, and nothing of it is checked; give one of backend triton"
        )
    if reason := subject.unavailable("cpu"):
        raise click.UsageError(f"kernel={kernel!r}: it cannot run on the CPU here: {reason}")
    chosen = drawn(subject, cases, number)
    seconds(chosen[0], subject, check=True)
    rows = []
    for index, case in enumerate(chosen):
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * rounds):
            check = turn % 4 in (0, 3)
            times[check].append(seconds(case, subject, check=check))
        rows.append((min(times[True]), min(times[False])))
        if (index + 1) % 20 == 0:
            click.echo(f"{index + 1} of {len(chosen)} cases", err=True)
    ratios = [on / off for on, off in rows]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    total = sum(on for on, _ in rows) / sum(off for _, off in rows)
    click.echo(
        f"{kernel}, {len(rows)} cases, forward and backward: with the memory checker {median:.3f} x the time without "
        f"(quartiles {low:.3f} and {high:.3f}, all together {total:.3f}); limit {1 + LIMIT:.2f}"
    )
    if json_file:
        json_file.write_text(dumps({"kernel": kernel, "cases": len(rows), "median": median, "total": total, "seconds": rows}))
    sys.exit(median > 1 + LIMIT)


if __name__ == "__main__":
    main()
