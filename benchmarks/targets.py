"""Whether this machine reaches what the engine is to reach: one row a target, measured and wanted.

    python benchmarks/targets.py [--device cpu|cuda] [--only PART ...] [--options TEXT ...] [--json FILE] [--runs FOLDER] [--list]

Ends with 1 where a target is missed or could not be measured, and with 2 for wrong use. The parts of a GPU node take 30 minutes,
those of a CPU 6, a soak more. The compilers' caches are empty at first, and are kept from one part to the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parent))

from throughput import cli, rivals, soak
from throughput.campaigns import NotMeasured
from throughput.commands import Finished, run_command
from throughput.plan import KERNELS, Plan
from throughput.processes import cold_caches

from attnfuzz.harness.campaign.events import SharedGpu
from attnfuzz.harness.cli.options import file_to_write
from attnfuzz.harness.core.environment import resolve_device
from attnfuzz.harness.core.gpus import gpus
from attnfuzz.harness.gate.ledger import read_ledger
from attnfuzz.harness.gate.result import Finding
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.kernels.contract import Device

ROOT = Path(__file__).parent.parent
INTERPRETED, COMPILED = "triton.varlen", "tilelang.gqa.split"
"""Kernels of the CPU: Triton's interpreter, and TileLang's C target."""
LEDGER = ROOT / "tests" / "corpus" / "peers" / "ledger.toml"
"""Known defects of PyTorch's own kernels, which count as no failures."""
CORES = 16
"""Of the node of one GPU that the targets are for."""
KEPT: Path | None = None
"""Where the JSON of each run goes, with its `times`."""
OPTIONS: tuple[str, ...] = ()
"""More options of each run that is measured."""
COMPILED_ALL: set[tuple[Device, tuple[str, ...]]] = set()
"""Devices and kernels of which nothing is left to compile."""


@dataclass(frozen=True, slots=True)
class Row:
    """One target: what was measured, and the least or the most that is wanted."""

    part: str
    what: str
    measured: float | None
    least: float | None = None
    most: float | None = None
    options: str = ""

    @property
    def reached(self) -> bool:
        """Whether it was measured and is within its limit."""
        if self.measured is None:
            return False
        return (self.least is None or self.measured >= self.least) and (self.most is None or self.measured <= self.most)

    @property
    def wanted(self) -> str:
        """The limit in words."""
        return f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"


def campaign(
    device: Device, seconds: float, kernels: Sequence[str] = (), workers: str = "auto", *, warms: bool = False
) -> Finished:
    """Run `attnfuzz run` on kernels (default: all that can run here), with the caches of this process.

    `warms`: it is not measured, and has no more options.
    """
    plan = Plan(device, tuple(kernels), seconds=seconds, more=() if warms else OPTIONS)
    run = run_command(plan, tuple(kernels), workers, seed=0)
    if KEPT is not None:
        number = len(list(KEPT.glob("run-*.json"))) + 1
        figures = {name: getattr(run, name) for name in ("wall", "first", "busy", "peak", "core", "judged")}
        (KEPT / f"run-{number}.json").write_text(json.dumps({**figures, "result": run.result}), encoding="utf-8")
    if run.core is not None:
        say(f"a piece of work took {run.core:.3g} ms of a core meanwhile")
    if (shared := run.result.get("shared_gpu")) is not None:
        say(msgspec.convert(shared, SharedGpu).describe())
    counted = unknown(run)
    for each in counted:
        say(f"failure: {json.dumps(each)[:300]}")
    if known := len(run.result["failures"]) - len(counted):
        say(f"{known} known failures of PyTorch's kernels are not counted")
    return run


def unknown(run: Finished) -> list[dict[str, Any]]:
    """Return the failures of a run that the ledger does not list; with `--ledger` the run would take seconds more at its end."""
    today = date.today()
    known = read_ledger(LEDGER, today).on("cuda", today).in_force(today)
    return [each for each in run.result["failures"] if not any(entry.covers(_finding(each)) for entry in known)]


def _finding(failure: dict[str, Any]) -> Finding:
    return Finding.of("campaign", Identity(**failure["identity"]), failure["verdict"]["failures"][0]["message"])


def rate(run: Finished) -> float | None:
    """Return Cases a second from the first Verdict on."""
    return None if run.first is None else run.total("cases") / (run.wall - run.first)


def cold_node(device: Device) -> Iterable[Row]:
    """All kernels, empty caches, 120 s."""
    run = campaign(device, 120.0)
    yield Row("cold", "seconds until the end", run.wall, most=135)
    yield Row("cold", "kernels without a Case", sum(not each["cases"] for each in run.result["kernels"]), most=0)
    yield Row("cold", "failures", len(unknown(run)), most=0)
    yield Row("cold", "Cases", run.total("cases"), least=20_000)
    yield Row("cold", "GPU busy %", run.busy, least=80)


def warm_node(device: Device) -> Iterable[Row]:
    """All kernels once more, 120 s."""
    run = campaign(device, 120.0)
    yield Row("warm", "failures", len(unknown(run)), most=0)
    yield Row("warm", "Cases", run.total("cases"), least=60_000)


@contextlib.contextmanager
def one_gpu() -> Iterator[None]:
    """Have one GPU, and sixteen cores at most, which the targets of one are for."""
    cores = os.sched_getaffinity(0)
    with only(gpus()[:1]):
        os.sched_setaffinity(0, sorted(cores)[:CORES])
        try:
            yield
        finally:
            os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def only(some: Sequence[str]) -> Iterator[None]:
    """Have these GPUs alone; all that there are where none are named."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ.update({"CUDA_VISIBLE_DEVICES": ",".join(some)} if some else {})
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ.update({} if before is None else {"CUDA_VISIBLE_DEVICES": before})


def compiled(device: Device, kernels: Sequence[str] = ()) -> None:
    """Run kernels until nothing is left to compile, four times at most, after which it says what is left; once in a process.

    The default is all of ragged batches.
    """
    some = tuple(kernels) or tuple(KERNELS[device])
    for seconds in (60.0, 60.0, 60.0, 60.0):
        if any(of == device and set(some) <= set(done) for of, done in COMPILED_ALL):
            return
        # All cores that two workers leave are the compilers'.
        run = campaign(device, seconds, some, "2", warms=True)
        if not (left := run.total("unreached")):
            COMPILED_ALL.add((device, some))
    if (device, some) not in COMPILED_ALL:
        say(f"{left} variants of {', '.join(some)} are left to compile")


def varlen(device: Device) -> Iterable[Row]:
    """The kernels of ragged batches alone, 120 s on one GPU, after runs of two workers until nothing is left to compile."""
    compiled(device)
    with one_gpu():
        run = campaign(device, 120.0, KERNELS[device])
    yield Row("varlen", "failures", len(unknown(run)), most=0)
    yield Row("varlen", "Cases a second from the first Verdict on", rate(run), least=1500)
    # Without the workers' start and most of the loads of compiled code.
    yield Row("varlen", "Cases a second in the second half", run.later_rate(), least=1500)
    yield Row("varlen", "GPU busy %", run.busy, least=80)


def peers(device: Device) -> Iterable[Row]:
    """A parametrised suite beside the engine, 40 s each, after runs until nothing is left to compile for either."""
    compiled(device, KERNELS[device][:1])
    rows = rivals.measure(Plan(device, (KERNELS[device][0],), ("auto",), 40.0, 1, False, say))
    judged = {row["who"]: row["warm"] for row in rows}
    ours, theirs = judged.get(rivals.OURS), judged.get("parametrised suite")
    yield Row("peers", "times the rate of the parametrised suite", ours / theirs if ours and theirs else None, least=50)


def suite(_: Device) -> Iterable[Row]:
    """The tests of this repository, with as many processes as cores and with three quarters of them."""
    cores = len(os.sched_getaffinity(0))
    for processes in dict.fromkeys((str(cores), str(max(1, 3 * cores // 4)))):
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", processes]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - start
        failed = re.search(r"(\d+) (?:failed|error)", done.stdout)
        say("\n".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")) or " passed" in line))
        yield Row("suite", f"failed, {processes} processes", float(failed[1]) if failed else float(done.returncode), most=0)
        yield Row("suite", f"seconds, {processes} processes", seconds, most=300)


def two_gpus(device: Device) -> Iterable[Row]:
    """One GPU with its 16 cores, one with all cores, then two, 120 s each, after runs until nothing is left to compile.

    The first is what `varlen` runs, so that all have its budget.
    """
    usable, rates = gpus(), dict[str, float | None]()
    if len(usable) > 1:
        compiled(device)
        for name, had in (("and 16 cores", one_gpu()), ("and all cores", only(usable[:1])), ("", only(usable[:2]))):
            with had:
                rates[name] = rate(campaign(device, 120.0, KERNELS[device]))
    for name in ("and 16 cores", "and all cores"):
        one, two = rates.get(name), rates.get("")
        yield Row("two", f"times the rate of one GPU {name}", two / one if one and two else None, least=1.8)


def soaked(device: Device, seconds: float) -> Iterable[Row]:
    """One long campaign, with nothing left to compile on a GPU: memory and rate of its first and its last third."""
    if device == "cuda":
        compiled(device, KERNELS[device][:1])
    result = soak.measure(Plan(device, KERNELS[device][:1], ("auto",), seconds, 1, False, say))
    if KEPT is not None:
        (KEPT / "soak.json").write_text(json.dumps(result), encoding="utf-8")
    core = result["figures"]["core"]
    say(f"a piece of work took {core['first']:.3g} ms of a core in the first third, {core['last']:.3g} in the last")
    say(f"the rate at equal speed of a core drifts by {result['figures']['pace']['drift']:+.1%}")
    for name, limit in (("coordinator", soak.MEMORY), ("memory", soak.MEMORY), ("rate", soak.RATE)):
        yield Row("soak", f"drift of {name}, %", 100 * abs(result["figures"][name]["drift"]), most=100 * limit)
    yield Row("soak", "processes left behind", result["orphans"], most=0)


def cold_cpu(device: Device) -> Iterable[Row]:
    """All kernels, empty caches, as `tox -e fuzz` does."""
    run = campaign(device, 140.0)
    yield Row("cold", "seconds until the end", run.wall, most=150)
    yield Row("cold", "seconds until the first Verdict", run.first, most=60)
    yield Row("cold", "failures", len(unknown(run)), most=0)
    yield Row("cold", "Cases", run.total("cases"), least=1500)


def rates_cpu(device: Device) -> Iterable[Row]:
    """Two workers on kernels of each backend, 45 s each, and one worker beside them."""
    one, two = ([campaign(device, 45.0, (INTERPRETED,), workers) for _ in range(2)] for workers in ("1", "2"))
    yield Row("rates", f"Cases a second, {INTERPRETED}, 2 workers", rate(two[0]), least=4)
    alone, both = (max(rate(each) or 0.0 for each in runs) for runs in (one, two))
    yield Row("rates", "times the rate of one worker", both / alone if alone else None, least=1.7)
    yield Row("rates", f"Cases a second, {COMPILED}, 2 workers", rate(campaign(device, 45.0, (COMPILED,), "2")), least=12)


Part = Callable[[Device], Iterable[Row]]
PARTS: dict[Device, dict[str, Part]] = {
    "cuda": {
        "cold": cold_node, "warm": warm_node, "varlen": varlen, "peers": peers, "suite": suite, "two": two_gpus,
        "soak": lambda device: soaked(device, 600.0),
    },
    "cpu": {"cold": cold_cpu, "rates": rates_cpu, "soak": lambda device: soaked(device, 3600.0)},
}  # fmt: skip


def say(text: str) -> None:
    """Show progress."""
    click.echo(text, err=True)


def measured(device: Device, names: Sequence[str]) -> Iterable[Row]:
    """Yield the rows of some parts; one that cannot be measured is a row without a figure."""
    for name in names:
        say(f"{name} ...")
        try:
            yield from PARTS[device][name](device)
        except NotMeasured as error:
            say(f"{name}: not measured: {error}")
            yield Row(name, "not measured", None, least=0)


@click.command()
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda")
@click.option("--only", multiple=True, metavar="PART", help="Only these parts; the default is all but soak.")
@click.option("--json", "json_file", metavar="FILE", callback=file_to_write, help="Write the figures as JSON.")
@click.option(
    "--runs", type=click.Path(path_type=Path, file_okay=False), help="Keep the JSON of each run there, with its `times`."
)
@click.option(
    "--options",
    multiple=True,
    metavar="TEXT",
    help="More of each run that is measured: '--no-share-gpu --workers 16'. Several: all parts with each in turn.",
)
@click.option("--list", "lists", is_flag=True, help="Print the parts.")
def main(
    device: str, only: tuple[str, ...], json_file: Path | None, runs: Path | None, options: tuple[str, ...], lists: bool
) -> None:
    """Measure, and print a table of what is reached."""
    global KEPT, OPTIONS
    try:
        split = [tuple(shlex.split(text)) for text in options or ("",)]
    except ValueError as error:
        raise click.BadParameter(f"{error}; write them as in a shell", param_hint="--options") from None
    if runs is not None:
        try:
            runs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.BadParameter(
                f"{runs}: {error.strerror}; name a folder that can be written", param_hint="--runs"
            ) from None
    KEPT = runs
    where = resolve_device(device)
    if lists:
        click.echo(
            "\n".join(f"{name}: {(each.__doc__ or 'one long campaign').splitlines()[0]}" for name, each in PARTS[where].items())
        )
        return
    if wrong := [each for each in only if each not in PARTS[where]]:
        raise click.BadParameter(f"{wrong[0]!r}: on {where} there are {', '.join(PARTS[where])}", param_hint="--only")
    if len(options) > 1 and "cold" in (only or PARTS[where]):
        raise click.BadParameter("cold: the caches are empty once; give --only without it, or one", param_hint="--options")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="targets-", ignore_cleanup_errors=True) as folder:
        os.environ.update(cold_caches(Path(folder)))
        for words, text in zip(split, options or ("",), strict=True):
            OPTIONS = words
            for row in measured(where, only or [name for name in PARTS[where] if name != "soak"]):
                rows.append(replace(row, options=text))
                say(f"{row.part}: {row.what}: {row.measured} ({row.wanted}) {text}".rstrip())
                if json_file is not None:
                    written = [{**asdict(each), "reached": each.reached} for each in rows]
                    json_file.write_text(json.dumps(written), encoding="utf-8")
    show(rows)
    sys.exit(0 if all(each.reached for each in rows) else 1)


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table("part", "target", "measured", "wanted", "reached", "options")
    for each in rows:
        figure = "not measured" if each.measured is None else f"{each.measured:,.4g}"
        table.add_row(each.part, each.what, figure, each.wanted, "yes" if each.reached else "[red]no[/]", each.options)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    cli.run(main)
