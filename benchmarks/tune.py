"""Which Config of the TileLang kernels is fastest, measured on this GPU: kernels/tilelang/tuned.json is what it writes.

    python benchmarks/tune.py [--dims 128/128]... [--dtype T]... [--jobs N] --out FILE

A row per function (the forward, each way of the backward), dims, dtype and mask: the candidates that fit the shared memory are
compiled side by side by `--jobs` processes, then take turns on a GPU, alone on it; a median each. What gives other values than
the first candidate is left out and told. Rows that were not measured now stay as they are in FILE.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import track

from attnfuzz.harness.core.environment import device_name, resolve_device, versions
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.tilelang.build import compiled
from attnfuzz.kernels.tilelang.hopper import CONFIGS, PAD, fits
from attnfuzz.kernels.tilelang.tuned import ARCH, NAMES, Row, Table, config_of, key_of, read

Tiles = tuple[int, int, int, int]

KERNELS = {
    "dense none": "tilelang.mha",
    "dense none pipelined": "tilelang.mha_pipelined",
    "dense atomic": "tilelang.gqa.atomic",
    "dense split": "tilelang.gqa.split",
    "ragged atomic": "tilelang.gqa_varlen.atomic",
    "ragged split": "tilelang.gqa_varlen.split",
}
"""The kernel that a row's function is built by; "dense" and "ragged" alone, the forwards, by the first of each."""
BATCH, HEADS, SEQLEN = 4, 32, 4096
ROUNDS, ALIKE = 7, 0.02
FORWARD: tuple[Tiles, ...] = (
    (128, 128, 256, 2), (128, 128, 256, 1), (128, 112, 256, 2), (128, 96, 256, 2), (128, 160, 256, 2), (128, 64, 256, 2),
)  # fmt: skip
FORWARD_SINGLE: tuple[Tiles, ...] = ((128, 64, 256, 2), (128, 64, 256, 1), (64, 64, 128, 2), (64, 64, 128, 1))
BACKWARD: tuple[Tiles, ...] = ((64, 128, 256, 2), (64, 128, 256, 1), (128, 128, 256, 1), (128, 128, 256, 2))
BACKWARD_SINGLE: tuple[Tiles, ...] = ((64, 128, 256, 1), (64, 64, 128, 2), (64, 64, 128, 1))
SMALL: tuple[Tiles, ...] = ((64, 64, 128, 1), (32, 32, 64, 1))
"""Where nothing else fits."""


class Task(msgspec.Struct, frozen=True):
    """One row to measure."""

    of: str
    dim_qk: int
    dim_v: int
    dtype: str
    causal: bool

    @property
    def forward(self) -> bool:
        """Whether it is a forward's."""
        return " " not in self.of

    def kernel(self) -> Any:
        """The kernel that builds it."""
        return registry.get(next(name for of, name in KERNELS.items() if of == self.of or of.startswith(f"{self.of} ")))

    def problem(self) -> Problem:
        """4 sequences of 4,096 tokens, 32 heads, MHA."""
        return Problem(
            seqlens_q=(SEQLEN,) * BATCH, seqlens_k=(SEQLEN,) * BATCH, packing="ragged" if "ragged" in self.of else "dense",
            heads=HEADS, kv_heads=HEADS, dim_qk=self.dim_qk, dim_v=self.dim_v, dtype=self.dtype,  # type: ignore[arg-type]
            causal="bottom_right" if self.causal else None,
        )  # fmt: skip

    def candidates(self) -> list[Tiles]:
        """Those that fit beside the smallest tiles in the other direction."""
        single = self.dtype == "float32"
        given = (FORWARD_SINGLE if single else FORWARD) if self.forward else (BACKWARD_SINGLE if single else BACKWARD)
        return [tiles for tiles in given if self.fits(tiles)] or [tiles for tiles in SMALL if self.fits(tiles)][:1]

    def fits(self, tiles: Tiles) -> bool:
        """Beside the smallest tiles in the other direction."""
        whole = "ragged" not in self.of or not any(PAD % tile for tile in tiles[:2])
        return whole and fits(self.problem(), self.config(tiles), beside=self.of == "ragged atomic")

    def config(self, tiles: Tiles) -> Any:
        """A Config of `tiles`, and the smallest ones in the other direction."""
        smallest: Any = tuple(CONFIGS[-1].integer(name) for name in NAMES)
        return config_of(tiles, smallest) if self.forward else config_of(smallest, tiles)


def name_of(tiles: Tiles) -> str:
    """As in Row.tflops."""
    return f"{tiles[0]} x {tiles[1]} {tiles[2]} {tiles[3]}"


class Compile(msgspec.Struct, frozen=True):
    """One function of a kernel, which several tasks may need."""

    kernel: str
    factory: str
    options: tuple[tuple[str, Any], ...]


def compiles(task: Task, tiles: Tiles) -> set[Compile]:
    """What a candidate needs."""
    kernel = task.kernel()
    # The first kernel with this device code: the cache on disk is the functions'.
    first = next(name for name in KERNELS.values() if registry.get(name).files[0] == kernel.files[0])
    found = kernel.functions(task.problem(), task.config(tiles), "cuda").values()
    return {Compile(first, each.factory, tuple(sorted(each.options.items()))) for each in found}


def compile_one(function: Compile) -> str | None:
    """Put a compiled function into TileLang's cache; what went wrong, or None."""
    try:
        kernel: Any = registry.get(function.kernel)
        compiled(kernel.device_code(), function.factory, dict(function.options), "cuda")
    except Exception as error:
        return str(error)[-300:]
    return None


def measure(task: Task, candidates: list[Tiles], gpu: int, locks: str) -> dict[str, float]:
    """TFLOP/s by candidate; 0 for one that gives other values than the first."""
    import torch

    from attnfuzz.harness.trial.inputs import materialise
    from attnfuzz.strategies.case import Recipe

    torch.cuda.set_device(gpu)
    problem = task.problem()
    built = {tiles: task.kernel().build_any(problem, task.config(tiles), "cuda") for tiles in candidates}
    with (Path(locks) / str(gpu)).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        inputs = materialise(problem, Recipe(), f"cuda:{gpu}")
        kept = () if task.forward else built[candidates[0]].forward(inputs)
        runs = {
            tiles: functools.partial(each.forward if task.forward else each.backward, inputs, *kept)
            for tiles, each in built.items()
        }
        first = runs[candidates[0]]()
        right = {tiles: run for tiles, run in runs.items() if all(map(alike, run(), first))}
        times = turns(right)
        torch.cuda.synchronize()
    scores = HEADS * BATCH * (SEQLEN * (SEQLEN + 1) / 2 if task.causal else SEQLEN**2)
    share = task.dim_qk + task.dim_v if task.forward else 3 * task.dim_qk + 2 * task.dim_v
    del inputs, kept, first, runs, right
    torch.cuda.empty_cache()
    found = {name_of(tiles): round(2 * scores * share / ms / 1e9, 1) for tiles, ms in times.items()}
    return {name_of(tiles): 0.0 for tiles in candidates} | found


def alike(x: Any, y: Any) -> bool:
    """Whether two outputs differ by no more than roundings may make them."""
    return bool((x.float() - y.float()).abs().amax() <= ALIKE * y.float().abs().amax())


def turns(contestants: dict[Tiles, Callable[[], Any]]) -> dict[Tiles, float]:
    """Median milliseconds; another order in each round, the first round not counted."""
    import torch

    times: dict[Tiles, list[float]] = {tiles: [] for tiles in contestants}
    for number in range(ROUNDS + 1):
        for tiles in random.Random(number).sample(sorted(contestants), len(contestants)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            contestants[tiles]()
            end.record()
            end.synchronize()
            times[tiles] += [begin.elapsed_time(end)] if number else []
    return {tiles: statistics.median(each) for tiles, each in times.items()}


def measured(tasks: list[Task], jobs: int) -> Iterable[Row]:
    """Compile everything, then time it, on all GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool, tempfile.TemporaryDirectory() as locks:
        needs = {(task, tiles): compiles(task, tiles) for task in tasks for tiles in task.candidates()}
        # the largest tiles take longest
        unique = sorted(set().union(*needs.values()), key=lambda each: -dict(each.options).get("tile_n", 0))
        compiling = {pool.submit(compile_one, each): each for each in unique}
        refused: set[Compile] = set()
        for future in track(as_completed(compiling), "compiling", len(unique), console=Console(stderr=True)):
            if reason := future.result():
                refused.add(compiling[future])
                click.echo(f"{compiling[future]}: left out: {reason}", err=True)
        good = {task: [tiles for tiles in task.candidates() if not needs[task, tiles] & refused] for task in tasks}
        ordered = {task: some for task, some in good.items() if some}
        timing = {
            pool.submit(measure, task, some, number % gpus, locks): (task, some)
            for number, (task, some) in enumerate(ordered.items())
        }
        for future in track(as_completed(timing), "timing", len(timing), console=Console(stderr=True)):
            task, some = timing[future]
            try:
                tflops = future.result()
            except Exception as error:
                click.echo(f"{task}: left out: {type(error).__name__}: {str(error)[:300]}", err=True)
                continue
            if not max(tflops.values()):
                click.echo(f"{task}: left out: the first candidate, {name_of(some[0])}, does not give the same twice", err=True)
                continue
            best = max(some, key=lambda tiles: tflops[name_of(tiles)])
            yield Row(
                of=task.of, arch=ARCH, dim_qk=task.dim_qk, dim_v=task.dim_v, dtype=task.dtype, causal=task.causal,
                best=best, tflops=tflops,
            )  # fmt: skip


@click.command()
@click.option("--dims", multiple=True, default=("64/64", "96/96", "128/128", "192/128"), show_default=True)
@click.option(
    "--dtype", multiple=True, default=("float16", "bfloat16", "float32"), show_default=True,
    type=click.Choice(["float16", "bfloat16", "float32"]),
)  # fmt: skip
@click.option("--of", multiple=True, default=("dense", "ragged", *KERNELS), show_default=True)
@click.option("--jobs", default=os.cpu_count(), show_default=True, type=click.IntRange(min=1))
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(dims: tuple[str, ...], dtype: tuple[str, ...], of: tuple[str, ...], jobs: int, out: Path) -> None:
    """Measure, and write the table."""
    resolve_device("cuda")
    tasks = []
    for function, pair, one, causal in itertools.product(of, dims, dtype, (True, False)):
        if function not in ("dense", "ragged", *KERNELS):
            raise click.BadParameter(f"{function!r}: use dense, ragged or one of {', '.join(KERNELS)}", param_hint="--of")
        if pair.count("/") != 1 or not all(each.isdecimal() for each in pair.split("/")):
            raise click.BadParameter(f"{pair!r} is no DIM_QK/DIM_V, such as 192/128", param_hint="--dims")
        dim_qk, dim_v = map(int, pair.split("/"))
        if not ("pipelined" in function and one == "float32"):
            tasks.append(Task(function, dim_qk, dim_v, one, causal))
    table = Table(
        device=device_name("cuda"),
        versions={name: value for name, value in versions().items() if name in ("torch", "tilelang")},
        problem=f"{BATCH} sequences of {SEQLEN} tokens, {HEADS} heads, TFLOP/s of visible scores",
        rows=(),
    )
    before = read(out.read_bytes(), str(out)) if out.exists() else table
    if msgspec.structs.replace(before, rows=()) != table:
        reason = f"it was measured with {before.device}, {before.versions}: rows of one table are of one GPU and its software"
        raise reject("out", str(out), reason, "give another file")
    temporary = out.with_suffix(".part")
    temporary.touch()
    try:
        found = {key_of(row): row for row in (*before.rows, *measured(tasks, jobs))}
    except BaseException:
        temporary.unlink()
        raise
    table = msgspec.structs.replace(table, rows=tuple(found[key] for key in sorted(found)))
    text = msgspec.json.format(msgspec.json.encode(table), indent=1).decode()
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(out)
    click.echo(f"{len(found)} rows in {out}", err=True)


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except OSError as error:
        click.echo(f"error: {error.strerror}: {error.filename}", err=True)
        sys.exit(2)
    except (BadArgument, click.ClickException) as error:
        click.echo(f"error: {error.format_message() if isinstance(error, click.ClickException) else error}", err=True)
        sys.exit(2)
