"""Batches of a kernel without a campaign around them: Cases a second of processes side by side, and what their GPU does.

    python benchmarks/batch.py [--device cpu|cuda] [--cases N] [--size N] [--processes N] [--mps] [--operations] [--waits]
                               [--alone] [--json FILE] [KERNEL]

Cases are those that a campaign draws, of one dtype and dims, as its batches are; the first two batches are not timed. With
--operations also what the code of this repository asks of the device, by stage and line (benchmarks/device_requests.py), and on
a GPU the operations there, by kind: all, and those of the judgement, and the calls of CUDA on the host (one process, torch's
profiler). With --waits also where a Case waits for the device, and how often: processes share it in turns, so that each wait
lasts until all others have had theirs. With --mps the processes run once more, and share the GPU at the same time by CUDA's
MPS, as those of a campaign may. With --alone also whether the Verdicts are those of the Cases alone: exit code 1 if not.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
from msgspec import to_builtins
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from attnfuzz.harness.campaign.context import batch_for
from attnfuzz.harness.campaign.settings import PROFILES, Settings
from attnfuzz.harness.cli.options import file_to_write
from attnfuzz.harness.core import environment
from attnfuzz.harness.core.gpus import gpus
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.isolation import sharing
from attnfuzz.harness.isolation.sharing import NotShared
from attnfuzz.harness.judge.batch import judge_batch
from attnfuzz.harness.trial import batch as trial_batch
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.draw import drawn
from attnfuzz.strategies.trials import trial_cases
from attnfuzz.strategies.variants import all_variants

sys.path.append(str(Path(__file__).parent))

_UNTIMED = 2
_ROUND = 200
_LINES = 40
"""Lines that are shown; a JSON file has all."""


@dataclass(slots=True)
class Timed:
    """What one process measured."""

    cases: int = 0
    wall: float = 0.0
    processor: float = 0.0
    """Seconds of a processor, of all threads."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage."""


def batches(name: str, device: Device, count: int, size: int) -> list[list[Case]]:
    """Return batches of `size` Cases of the kernel, all of the kind of which it has most variants, `count` Cases in all.

    Raises:
        BadArgument: there are no such Cases, or too few.
    """
    kernel = registry.get(name)
    variants = all_variants(kernel, device)
    kinds = Counter((each.dtype, each.dims) for each in variants)
    kind = max(kinds, key=lambda each: (kinds[each], each))
    chosen = [each for each in variants if (each.dtype, each.dims) == kind]
    # One variant: a compile for each would take minutes.
    strategy = trial_cases(kernel, device=device, limits=PROFILES["quick"].limits[device], variants=chosen[:1])

    def every() -> Iterator[Case]:
        for number in range(4 * count // _ROUND + 4):
            # The distances of huge strides are mapped, which takes longer than the Case.
            yield from (x for x in drawn(strategy, seed=number, examples=_ROUND, quota=_ROUND) if x.check != "huge_strides")

    cases = list(islice(dict.fromkeys(every()), count))
    if len(cases) < count:
        raise BadArgument(f"cases={count}: {name} has {len(cases)} distinct Cases of one variant; ask for fewer")
    return [cases[at : at + size] for at in range(0, count, size)]


def timed(name: str, device: Device, count: int, size: int, ready: Any = None) -> Timed:
    """Run all batches in this process; `ready`: a barrier that processes wait at before they begin."""
    environment.prepare(device)
    every = batches(name, device, count, size)
    for each in every[:_UNTIMED]:
        trial_batch.run_batch(each, device)
    if ready is not None:
        ready.wait()
    result, start, used = Timed(), time.perf_counter(), time.process_time()
    for each in every[_UNTIMED:]:
        for verdict in trial_batch.run_batch(each, device):
            result.cases += 1
            for stage, seconds in verdict.seconds.items():
                result.stages[stage] = result.stages.get(stage, 0.0) + seconds
    result.wall, result.processor = time.perf_counter() - start, time.process_time() - used
    return result


def side_by_side(processes: int, name: str, device: Device, count: int, size: int) -> list[Timed]:
    """Run as many processes, each with its own batches, and begin together."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(processes, mp_context=context) as pool:
        ready = manager.Barrier(processes) if processes > 1 else None
        running = [pool.submit(timed, name, device, count, size, ready) for _ in range(processes)]
        return [each.result() for each in running]


def with_mps(processes: int, name: str, device: Device, count: int, size: int) -> dict[str, Any]:
    """Run the processes with CUDA's MPS, and return their summary.

    Raises:
        BadParameter: it cannot be used here.
    """
    try:
        with _server():
            return summary(side_by_side(processes, name, device, count, size))
    except NotShared as reason:
        raise click.BadParameter(str(reason), param_hint="--mps") from None


@contextlib.contextmanager
def _server() -> Iterator[None]:
    """Start a server, and name it in the environment; end it afterwards."""
    # A socket's path has 107 characters at most.
    with (
        tempfile.TemporaryDirectory(prefix="mps-", dir="/tmp") as folder,
        contextlib.closing(sharing.start(Path(folder) / "mps", {}, gpus())) as server,
    ):
        os.environ.update(server.variables)
        try:
            yield
        finally:
            for name in sharing.VARIABLES:
                del os.environ[name]


def operations(name: str, count: int, size: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Return microseconds and number a Case, by kind, of operations on a GPU (all, the judgement's) and of calls on the host."""
    environment.prepare("cuda")
    every = batches(name, "cuda", count, size)
    for each in every[:_UNTIMED]:
        trial_batch.run_batch(each, "cuda")
    watch: type = importlib.import_module("gpu_profile").Watch
    judgement, cases = watch(), sum(len(each) for each in every[_UNTIMED:])
    before, trial_batch.judge_batch = trial_batch.judge_batch, judgement.of(judge_batch)  # type: ignore[attr-defined]
    try:
        for each in every[_UNTIMED:]:
            trial_batch.run_batch(each, "cuda")
    finally:
        trial_batch.judge_batch = before  # type: ignore[attr-defined]
    whole = watch()
    for each in every[_UNTIMED:]:
        whole.of(trial_batch.run_batch)(each, "cuda")
    return {"judgement": judgement.operations(cases), "all": whole.operations(cases), "calls": whole.calls(cases)}


def requests(name: str, device: Device, count: int, size: int) -> dict[str, dict[str, float]]:
    """Return what a Case asks of the device, by stage and by line, most first."""
    environment.prepare(device)
    every = batches(name, device, count, size)
    for each in every[:_UNTIMED]:
        trial_batch.run_batch(each, device)
    counted = importlib.import_module("device_requests").Requests(device)
    with counted.watching():
        for each in every[_UNTIMED:]:
            trial_batch.run_batch(each, device, counted.enter)
    cases = sum(len(each) for each in every[_UNTIMED:])
    return {"stages": counted.by_stage(cases), "lines": counted.by_line(cases)}


def waits(name: str, count: int, size: int) -> dict[str, float]:
    """Return how often a Case waits for the device, by the line that waits and the two that called it, most often first."""
    environment.prepare("cuda")
    every = batches(name, "cuda", count, size)
    for each in every[:_UNTIMED]:
        trial_batch.run_batch(each, "cuda")
    places, root = Counter[str](), str(Path(__file__).resolve().parent.parent)

    def note(message: Warning | str, *_: Any) -> None:
        if "synchroniz" in str(message):
            own = [each for each in traceback.extract_stack() if each.filename.startswith(root) and each.filename != __file__]
            places[" < ".join(f"{each.filename[len(root) + 1 :]}:{each.lineno}" for each in own[:-4:-1])] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for each in every[_UNTIMED:]:
                trial_batch.run_batch(each, "cuda")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    cases = sum(len(each) for each in every[_UNTIMED:])
    return {place: number / cases for place, number in places.most_common()}


def differences(name: str, device: Device, count: int, size: int) -> list[tuple[str, str, str]]:
    """Return Case, Verdict in a batch and Verdict alone, as JSON, of each Case for which they differ in more than seconds."""
    environment.prepare(device)
    different = []
    for each in batches(name, device, count, size):
        for case, together in zip(each, trial_batch.run_batch(each, device), strict=True):
            both = [dumps(to_builtins(replace(x, seconds={}))) for x in (together, run_trial(case, device))]
            if both[0] != both[1]:
                different.append((case.canonical(), *both))
    return different


def summary(runs: Sequence[Timed]) -> dict[str, Any]:
    """Return Cases a second of all processes, and milliseconds a Case: of a processor, and by stage."""
    cases = sum(each.cases for each in runs)
    stages = {stage for each in runs for stage in each.stages}
    return {
        "processes": len(runs),
        "cases": cases,
        "rate": sum(each.cases / each.wall for each in runs if each.wall),
        "processor_ms": 1e3 * sum(each.processor for each in runs) / max(1, cases),
        "ms": {stage: 1e3 * sum(each.stages.get(stage, 0.0) for each in runs) / max(1, cases) for stage in sorted(stages)},
    }


@click.command()
@click.argument("kernel", default="triton.varlen")
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda")
@click.option("--cases", default=None, type=click.IntRange(1), help="Of each process [default: six batches].")
@click.option("--size", default=None, type=click.IntRange(1), help="Cases of a batch [default: as a campaign has them].")
@click.option("--processes", default=1, show_default=True, type=click.IntRange(1))
@click.option("--mps", "shares", is_flag=True, help="Also with CUDA's MPS, by which processes share the GPU at the same time.")
@click.option("--operations", "lists", is_flag=True, help="Also what a Case asks of the device, and what a GPU does for it.")
@click.option("--waits", "finds", is_flag=True, help="Also where a Case waits for the GPU.")
@click.option("--alone", is_flag=True, help="Also compare the Verdicts with those of the Cases run alone.")
@click.option("--json", "json_file", metavar="FILE", callback=file_to_write, help="Write the figures as JSON.")
def main(
    kernel: str,
    device: str,
    cases: int | None,
    size: int | None,
    processes: int,
    shares: bool,
    lists: bool,
    finds: bool,
    alone: bool,
    json_file: Path | None,
) -> None:
    """Measure, and print the rate, the stages, and the operations."""
    where = environment.resolve_device(device)
    if finds and where != "cuda":
        raise click.BadParameter("nothing waits for a CPU; use --device cuda", param_hint="--waits")
    if shares and where != "cuda":
        raise click.BadParameter("there is no GPU to share; use --device cuda", param_hint="--mps")
    size = size or batch_for(Settings(device=where)).most
    count = cases or 6 * size
    if count <= _UNTIMED * size:
        raise click.BadParameter(f"{count}: two batches of {size} are not timed; ask for more", param_hint="--cases")
    # First: where there is no MPS, nothing is measured in vain.
    with_server = {"mps": with_mps(processes, kernel, where, count, size)} if shares else {}
    without = summary(side_by_side(processes, kernel, where, count, size))
    result = {"kernel": kernel, "device": where, "size": size, **without, **with_server}
    if lists:
        result["requests"] = requests(kernel, where, count, size)
    if lists and where == "cuda":
        result["operations"] = operations(kernel, count, size)
    if finds:
        result["waits"] = waits(kernel, count, size)
    if alone:
        result["compared"], result["different"] = count, differences(kernel, where, count, size)
    if json_file is not None:
        json_file.write_text(json.dumps(result), encoding="utf-8")
    show(result)
    if result.get("different"):
        sys.exit(1)


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    of = f"{result['processes']} processes" if result["processes"] > 1 else "one process"
    console.print(
        f"{result['kernel']} on {result['device']}, {of}, batches of {result['size']}: {result['rate']:.1f} Cases a second, "
        f"{result['processor_ms']:.2f} ms of a processor each"
    )
    with_server = result.get("mps")
    if with_server is not None:
        times = with_server["rate"] / result["rate"]
        of_processor = f"{with_server['processor_ms']:.2f} ms of a processor each"
        console.print(f"with MPS: {with_server['rate']:.1f} Cases a second, {times:.2f} times as many, {of_processor}")
    table = Table("stage", "ms a Case", *(("with MPS",) if with_server else ()))
    for stage, ms in result["ms"].items():
        table.add_row(stage, f"{ms:.2f}", *((f"{with_server['ms'].get(stage, 0.0):.2f}",) if with_server else ()))
    console.print(table)
    if "requests" in result:
        for by, most in (("stages", None), ("lines", _LINES)):
            of_case = result["requests"][by]
            table = Table(f"requests, by {by}", f"a Case: {sum(of_case.values()):.2f}")
            for place, number in islice(of_case.items(), most):
                table.add_row(place, f"{number:.2f}")
            console.print(table)
    if "operations" in result:
        table = Table("operations", "us a Case", "a Case", "of the judgement, us", "a Case")
        every = result["operations"]
        for kind, (us, number) in every["all"].items():
            of = every["judgement"].get(kind, (0.0, 0.0))
            table.add_row(kind, f"{us:.1f}", f"{number:.2f}", f"{of[0]:.1f}", f"{of[1]:.2f}")
        sums = [sum(column) for of in (every["all"], every["judgement"]) for column in zip(*of.values(), strict=True)]
        table.add_row("all", *(f"{each:.1f}" for each in sums))
        console.print(table)
        table = Table("calls of CUDA on the host", "us a Case", "a Case")
        for name, (us, number) in every["calls"].items():
            table.add_row(name, f"{us:.1f}", f"{number:.2f}")
        console.print(table)
    if "waits" in result:
        table = Table("waits for the device", f"a Case: {sum(result['waits'].values()):.2f}")
        for place, number in result["waits"].items():
            table.add_row(place, f"{number:.3f}")
        console.print(table)
    if "different" in result:
        console.print(f"{result['compared']} Verdicts beside those of the Cases alone: {len(result['different'])} differ")
        for case, together, one in result["different"][:3]:
            console.print(f"{case}\n  in a batch: {together}\n  alone:      {one}", markup=False, highlight=False)


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except (BadArgument, click.ClickException) as error:
        click.echo(f"error: {error.format_message() if isinstance(error, click.ClickException) else error}", err=True)
        sys.exit(2)
