"""How fast the kernels are, beside PyTorch's own on the same tensors, by turns in one run on a GPU.

    python benchmarks/kernels.py [--seqlen N]... [--dim D]... [--groups G]... [--dtype T]... [--mask causal|full]...
        [--packing dense|ragged]... [--peer NAME]... [--json FILE] [KERNEL]...

A row per kernel, Config, problem and direction: median milliseconds, TFLOP/s, and the speed as a multiple of flash-attention 2's
and cuDNN's in scaled_dot_product_attention. All contestants take turns in each round, in another order each time, so that clocks
and heat are the same. The backward is given what the forward has kept. Operations are those of the visible scores alone:
2 (dim_qk + dim_v) each in the forward and 2 (3 dim_qk + 2 dim_v) in the backward.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from attnfuzz.harness.cli.options import file_to_write
from attnfuzz.harness.core.environment import device_name, resolve_device, versions
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Inputs, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Recipe

PEERS = ("sdpa flash", "sdpa cudnn", "flex")
WARM_UPS = 3


@dataclass(frozen=True)
class Contestant:
    """Something to time: `forward` returns what `backward` needs."""

    name: str
    forward: Callable[[], Any]
    backward: Callable[[Any], Any]


def visible(problem: Problem) -> int:
    """Scores that count, of all heads."""
    found = 0
    for n_q, n_k in zip(problem.seqlens_q, problem.seqlens_k, strict=True):
        offset = 0 if problem.causal == "top_left" else n_k - n_q
        rows = range(n_q)
        found += n_q * n_k if problem.causal is None else sum(max(0, min(n_k, i + offset + 1)) for i in rows)
    return found * problem.heads


def operations(problem: Problem) -> tuple[int, int]:
    """Floating-point operations of forward and backward."""
    scores = visible(problem)
    return scores * 2 * (problem.dim_qk + problem.dim_v), scores * 2 * (3 * problem.dim_qk + 2 * problem.dim_v)


def ours(kernel: Kernel, problem: Problem, inputs: Inputs, first: int | None) -> list[Contestant]:
    """The Configs of a kernel on the problem, or its first few."""
    found = []
    for config in kernel.configs(problem)[:first]:
        if reason := kernel.supports(problem, config, "cuda"):
            click.echo(f"{kernel.name} {config}: left out: {reason}", err=True)
        else:
            built = kernel.build(problem, config, "cuda")
            found.append(
                Contestant(
                    f"{kernel.name} {config}",
                    lambda built=built: built.forward(inputs),
                    lambda kept, built=built: built.backward(inputs, *kept),
                )
            )
    return found


def peers(problem: Problem, inputs: Inputs, names: Sequence[str] = PEERS) -> list[Contestant]:
    """scaled_dot_product_attention by two backends, and compiled flex_attention.

    Beside a ragged problem they get the same sequences, which are of one length, as a dense batch.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if problem.seqlens_q != problem.seqlens_k:
        return []
    given = (inputs.q, inputs.k, inputs.v, inputs.d_o)
    batched = given if problem.packing == "dense" else tuple(x.unflatten(0, (problem.batch, -1)) for x in given)
    q, k, v, d_o = (x.transpose(1, 2).detach() for x in batched)
    qkv = tuple(x.requires_grad_() for x in (q, k, v))
    causal, grouped = problem.causal is not None, problem.groups > 1

    def sdpa(backend: Any) -> Callable[[], Any]:
        def forward() -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=causal, enable_gqa=grouped)

        return forward

    compiled = torch.compile(flex_attention)
    lengths = (problem.seqlens_q[0], problem.seqlens_k[0])
    mask = create_block_mask(lambda _, __, i, j: i >= j, None, None, *lengths) if causal and "flex" in names else None

    def backward(o: Any) -> Any:
        return torch.autograd.grad(o, qkv, d_o, retain_graph=True)

    forwards = (
        sdpa(SDPBackend.FLASH_ATTENTION),
        sdpa(SDPBackend.CUDNN_ATTENTION),
        lambda: compiled(*qkv, block_mask=mask, enable_gqa=grouped),
    )
    return [Contestant(name, forward, backward) for name, forward in zip(PEERS, forwards, strict=True) if name in names]


def timed(contestants: list[Contestant], rounds: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds of forward and backward by name; what raises is told and left out."""
    import torch

    kept, times = {}, {}
    for each in contestants:
        try:
            for _ in range(WARM_UPS):
                kept[each.name] = each.forward()
                each.backward(kept[each.name])
            torch.cuda.synchronize()
            times[each.name] = ([], [])
        except Exception as error:
            click.echo(f"{each.name}: left out: {type(error).__name__}: {str(error)[:300]}", err=True)
    for number in range(rounds):
        # In another order each time: what runs after a heavy one has its heat.
        for each in random.Random(number).sample(contestants, len(contestants)):
            if each.name in times:
                for run, into in zip(
                    (each.forward, lambda each=each: each.backward(kept[each.name])), times[each.name], strict=True
                ):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    run()
                    end.record()
                    end.synchronize()
                    into.append(begin.elapsed_time(end))
    return {name: (statistics.median(forward), statistics.median(backward)) for name, (forward, backward) in times.items()}


def rows_of(problem: Problem, times: dict[str, tuple[float, float]]) -> list[dict[str, Any]]:
    """A row per contestant; ratios are speeds, so that more than 1 is faster than the peer."""
    label = f"B{problem.batch} H{problem.heads}/{problem.kv_heads} S{problem.seqlens_q[0]} D{problem.dim_qk}/{problem.dim_v} "
    label += f"{problem.dtype} {'causal' if problem.causal else 'full'} {problem.packing}"
    found = []
    for name, pair in times.items():
        for direction, ms, count, index in zip(("forward", "backward"), pair, operations(problem), (0, 1), strict=True):
            row: dict[str, Any] = {"problem": label, "kernel": name, "direction": direction, "ms": ms, "tflops": count / ms / 1e9}
            for peer in PEERS[:2]:
                row[f"x {peer}"] = times[peer][index] / ms if peer in times else None
            found.append(row)
    return found


@click.command()
@click.argument("kernels", nargs=-1)
@click.option("--batch", default=4, show_default=True, type=click.IntRange(min=1))
@click.option("--heads", default=32, show_default=True, type=click.IntRange(min=1))
@click.option("--seqlen", multiple=True, default=(4096,), show_default=True, type=click.IntRange(min=1))
@click.option("--dim", multiple=True, default=(128,), show_default=True, type=click.IntRange(min=1))
@click.option("--groups", multiple=True, default=(1,), show_default=True, type=click.IntRange(min=1))
@click.option("--dtype", multiple=True, default=("float16",), show_default=True, type=click.Choice(["float16", "bfloat16"]))
@click.option("--mask", multiple=True, default=("causal",), show_default=True, type=click.Choice(["causal", "full"]))
@click.option("--packing", multiple=True, default=("dense",), show_default=True, type=click.Choice(["dense", "ragged"]))
@click.option("--peer", multiple=True, default=PEERS, show_default=True, type=click.Choice(PEERS))
@click.option("--configs", type=click.IntRange(min=1), help="So many Configs of each kernel [default: all].")
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "json_file", metavar="FILE", callback=file_to_write, help="Write the figures as JSON.")
def main(
    kernels: tuple[str, ...],
    batch: int,
    heads: int,
    configs: int | None,
    peer: tuple[str, ...],
    rounds: int,
    json_file: Path | None,
    **grid: tuple[Any, ...],
) -> None:
    """Print a row per kernel, problem and direction."""
    resolve_device("cuda")
    names = kernels or [name for name in registry.names() if name.startswith(("tilelang", "triton"))]
    chosen = [registry.get(name) for name in names]
    if wrong := [each for each in grid["groups"] if heads % each]:
        raise click.BadParameter(f"{wrong[0]} does not divide --heads {heads}", param_hint="--groups")
    rows: list[dict[str, Any]] = []
    axes = ("seqlen", "dim", "groups", "dtype", "mask", "packing")
    for seqlen, dim, groups, dtype, mask, packing in itertools.product(*(grid[name] for name in axes)):
        problem = Problem(
            seqlens_q=(seqlen,) * batch, seqlens_k=(seqlen,) * batch, packing=packing,
            heads=heads, kv_heads=heads // groups, dim_qk=dim, dim_v=dim,
            dtype=dtype, causal="bottom_right" if mask == "causal" else None,
        )  # fmt: skip
        inputs = materialise(problem, Recipe(), "cuda")
        contestants = peers(problem, inputs, peer)
        for kernel in chosen:
            if problem.packing not in kernel.capabilities.packings:
                click.echo(f"{kernel.name}: left out: it takes no {problem.packing} problem", err=True)
                continue
            contestants += ours(kernel, problem, inputs, configs)
        rows += rows_of(problem, timed(contestants, rounds))
        click.echo(f"{rows[-1]['problem'] if rows else problem}: done", err=True)
    table = Table("problem", "kernel", "direction", "ms", "TFLOP/s", *(f"x {peer}" for peer in PEERS[:2]))
    for row in rows:
        ratios = (row[f"x {peer}"] for peer in PEERS[:2])
        cells = (f"{row['ms']:.3f}", f"{row['tflops']:.0f}", *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
        table.add_row(row["problem"], row["kernel"], row["direction"], *cells)
    Console(width=200).print(table)
    if json_file is not None:
        json_file.write_text(dumps({"device": device_name("cuda"), "versions": versions(), "rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except (BadArgument, click.ClickException) as error:
        click.echo(f"error: {error.format_message() if isinstance(error, click.ClickException) else error}", err=True)
        sys.exit(2)
