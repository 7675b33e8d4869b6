"""How fast triton.flex is beside PyTorch's compiled flex_attention, on the same tensors and masks, by turns in one run on a GPU.

    python benchmarks/flex.py [--case NAME]... [--kernel NAME] [--configs N] [--try "tile_m=128 num_stages=2"]...
        [--batch N] [--heads N] [--seqlen N] [--long N] [--dim D] [--dtype T] [--rounds N] [--autotune] [--json FILE]

A row per contestant and direction: milliseconds of a call among many, back to back, at the clocks which they bring about
(benchmarks/settled.py), and those clocks; the median of the rounds; TFLOP/s of the visible scores' operations alone, and the
speed as a multiple of flex_attention's. The cases:
"causal", "full" (no mask), "softcap" and "alibi" (both causal), and "window", a sliding window of 1024 keys over `--long`
tokens of one sequence, by turns with "full" there, of whose time (with the same kernel's fastest Config) its share is told.
`--try` adds a Config: the fastest one's choices with those named changed, whether configs(problem) has it or not. What cannot
be compiled or run is told and left out.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from attnfuzz.harness.cli.options import file_to_write
from attnfuzz.harness.core.environment import device_name, resolve_device, versions
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Inputs
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.expressions.named import alibi
from attnfuzz.kernels.expressions.tree import to_data
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.triton.blockmask import band_of
from attnfuzz.strategies.case import Recipe

CASES = ("causal", "full", "softcap", "alibi", "window")
WINDOW = 1024
CAP = 20.0
PEER = "flex_attention"
FAR = 0.02
"""Of the largest value: more than half precision explains."""


@dataclass(frozen=True)
class Setting:
    """One problem to time, and how PyTorch says the same."""

    label: str
    problem: Problem
    score_mod: Callable[..., Any] | None = None


def helpers(name: str) -> ModuleType:
    """Another file of this folder."""
    spec = importlib.util.spec_from_file_location(f"benchmark_of_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def visible(problem: Problem) -> int:
    """Scores that causal and window leave, of all heads and sequences."""
    n_q, n_k = problem.seqlens_q[0], problem.seqlens_k[0]
    band = band_of(problem)
    rows = (min(n_k - 1, i + band.high) - max(0, i + band.low) + 1 for i in range(n_q))
    return problem.batch * problem.heads * sum(max(0, row) for row in rows)


def operations(problem: Problem) -> tuple[int, int]:
    """Floating-point operations of forward and backward."""
    scores = visible(problem)
    return scores * 2 * (problem.dim_qk + problem.dim_v), scores * 2 * (3 * problem.dim_qk + 2 * problem.dim_v)


def settings(names: tuple[str, ...], plain: Problem, long: Problem) -> list[Setting]:
    """Those of `names`; each window beside its dense problem."""
    causal = replace(plain, causal="bottom_right")
    found = {
        "causal": [Setting("causal", causal)],
        "full": [Setting("full", plain)],
        "softcap": [Setting("softcap", replace(causal, softcap=CAP), _softcap)],
        "alibi": [Setting("alibi", replace(causal, score_mod=to_data(alibi())), _alibi(plain.heads))],
        "window": [
            Setting("window's full", long),
            Setting("window", replace(long, causal="bottom_right", window=(WINDOW - 1, None))),
        ],
    }
    return [setting for name in names for setting in found[name]]


def _softcap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:  # noqa: ARG001 - a score_mod's signature
    import torch

    return CAP * torch.tanh(score / CAP)


def _alibi(heads: int) -> Callable[..., Any]:
    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:  # noqa: ARG001 - a score_mod's signature
        import torch

        return score - torch.exp2(-8.0 * (h + 1) / heads) * (i - j).abs()

    return score_mod


def peer(setting: Setting, inputs: Inputs, autotune: bool) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Forward and backward of compiled flex_attention with the same mask in blocks."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    problem = setting.problem
    q, k, v, d_o = (x.transpose(1, 2).detach() for x in (inputs.q, inputs.k, inputs.v, inputs.d_o))
    qkv = tuple(x.requires_grad_() for x in (q, k, v))
    band = band_of(problem)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:  # noqa: ARG001 - a mask_mod's signature
        return (j - i <= band.high) & (j - i >= band.low)

    lengths = (problem.seqlens_q[0], problem.seqlens_k[0])
    # Not compiled: of 16,384 tokens that took longer than a hundred seconds.
    mask = None if band.everything else create_block_mask(mask_mod, None, None, *lengths, device="cuda")
    # Shapes that have changed would be compiled as dynamic ones.
    compiled = torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs" if autotune else None)

    def forward() -> Any:
        return compiled(*qkv, setting.score_mod, mask, problem.scale, problem.groups > 1)

    return forward, lambda o: torch.autograd.grad(o, qkv, d_o, retain_graph=True)


def contestants(
    common: ModuleType, setting: Setting, inputs: Inputs, kernel: Any, configs: int | None, tries: list[Config], autotune: bool
) -> list[Any]:
    """flex_attention, and the kernel with its Configs and those to try; what cannot be built is told and left out."""
    found = []
    try:
        found.append(common.Contestant(PEER, *peer(setting, inputs, autotune)))
    except Exception as error:
        _left_out(PEER, error)
    for config in dict.fromkeys((*kernel.configs(setting.problem)[:configs], *tries)):
        name = f"{kernel.name} {config}"
        try:
            built = kernel.build_any(setting.problem, config)
            found.append(
                common.Contestant(
                    name,
                    lambda built=built: built.forward(inputs),
                    lambda kept, built=built: built.backward(inputs, *kept),
                )
            )
        except Exception as error:
            _left_out(name, error)
    return found


def differences(found: list[Any]) -> None:
    """Tell where O or dQ of a contestant is far from flex_attention's, which comes first: then its time means nothing."""
    if not found or found[0].name != PEER:
        return
    try:
        o = found[0].forward()
        expected = [x.detach().transpose(1, 2).float() for x in (o, found[0].backward(o)[0])]
    except Exception as error:
        _left_out(PEER, error)
        return
    for each in found[1:]:
        try:
            kept = each.forward()
            for name, e, got in zip(("O", "dQ"), expected, (kept[0], each.backward(kept)[0]), strict=True):
                off = float((got.float() - e).abs().max() / e.abs().max())
                if not off < FAR:
                    click.echo(f"{each.name}: {name} is off by {off:.2g} of the largest value from {PEER}'s", err=True)
        except Exception as error:
            _left_out(each.name, error)


def _left_out(name: str, error: Exception) -> None:
    click.echo(f"{name}: left out: {type(error).__name__}: {str(error)[:300]}", err=True)


def timed(settled: ModuleType, found: dict[Setting, list[Any]], rounds: int) -> list[dict[str, Any]]:
    """Rows of the contestants of several settings, all by turns: the GPU is as warm for one as for another."""
    label = "{}: {}".format
    together = [replaced(each, name=label(setting.label, each.name)) for setting, each_of in found.items() for each in each_of]
    times, clocks = settled.timed(together, rounds)
    rows = []
    for setting, each_of in found.items():
        names = {each.name: name for each in each_of if (name := label(setting.label, each.name)) in times}
        own_times, own_clocks = ({own: of[name] for own, name in names.items()} for of in (times, clocks))
        rows += rows_of(setting, own_times, own_clocks)
    return rows


def rows_of(
    setting: Setting, times: dict[str, tuple[float, float]], clocks: dict[str, tuple[float | None, float | None]]
) -> list[dict[str, Any]]:
    """A row per contestant and direction; the ratio is of speeds, so that more than 1 is faster than flex_attention."""
    found = []
    for name, pair in times.items():
        for direction, ms, count, index in zip(("forward", "backward"), pair, operations(setting.problem), (0, 1), strict=True):
            ratio = times[PEER][index] / ms if PEER in times else None
            found.append(
                {
                    "case": setting.label, "kernel": name, "direction": direction, "ms": ms, "mhz": clocks[name][index],
                    "tflops": count / ms / 1e9, "x": ratio,
                }
            )  # fmt: skip
    return found


def shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The window's time as a part of the dense problem's by the same kernel, with the Config that is fastest there.

    "x scores" is that part as a multiple of the part of the scores.
    """
    dense: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row["case"] == "window's full":
            of = (_kernel(row), row["direction"])
            dense[of] = min(row, dense.get(of, row), key=lambda row: row["ms"])
    return [
        {
            "kernel": row["kernel"], "direction": row["direction"],
            "share": row["ms"] / full["ms"], "x scores": full["tflops"] / row["tflops"],
        }
        for row in rows
        if row["case"] == "window" and (full := dense.get((_kernel(row), row["direction"])))
    ]  # fmt: skip


def _kernel(row: dict[str, Any]) -> str:
    """A contestant's name without its Config: a kernel may have another default for windows."""
    return str(row["kernel"]).partition(" ")[0]


def parsed(text: str, base: Config) -> Config:
    """`base` with the choices named in "name=value ..." changed.

    Raises:
        BadParameter: no such choice, or no number.
    """
    changed = dict(base)
    for part in text.replace(",", " ").split():
        name, _, value = part.partition("=")
        if name not in base or not value.isdigit():
            raise click.BadParameter(f"{part!r}: give name=number of {', '.join(base)}", param_hint="--try")
        changed[name] = int(value)
    return Config(changed)


@click.command()
@click.option("--case", "cases", multiple=True, default=CASES, show_default=True, type=click.Choice(CASES))
@click.option("--kernel", "kernel_name", default="triton.flex", show_default=True)
@click.option("--configs", type=click.IntRange(min=0), help="So many Configs of the kernel [default: all].")
@click.option("--try", "tries", multiple=True, help='A further Config: "tile_m=128 tile_n=128".')
@click.option("--batch", default=4, show_default=True, type=click.IntRange(min=1))
@click.option("--heads", default=32, show_default=True, type=click.IntRange(min=1))
@click.option("--seqlen", default=4096, show_default=True, type=click.IntRange(min=1))
@click.option("--long", "long_seqlen", default=16384, show_default=True, type=click.IntRange(min=1))
@click.option("--dim", default=128, show_default=True, type=click.IntRange(min=1))
@click.option("--dtype", default="float16", show_default=True, type=click.Choice(["float16", "bfloat16"]))
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(min=1))
@click.option("--autotune", is_flag=True, help="flex_attention by max-autotune.")
@click.option("--json", "json_file", metavar="FILE", callback=file_to_write, help="Write the figures as JSON.")
def main(
    cases: tuple[str, ...], kernel_name: str, configs: int | None, tries: tuple[str, ...], batch: int, heads: int, seqlen: int,
    long_seqlen: int, dim: int, dtype: Any, rounds: int, autotune: bool, json_file: Path | None,
) -> None:  # fmt: skip
    """Print a row per case, contestant and direction."""
    resolve_device("cuda")
    common, settled, kernel = helpers("kernels"), helpers("settled"), registry.get(kernel_name)
    plain = Problem(
        seqlens_q=(seqlen,) * batch, seqlens_k=(seqlen,) * batch, packing="dense", heads=heads, kv_heads=heads,
        dim_qk=dim, dim_v=dim, dtype=dtype,
    )  # fmt: skip
    long = replace(plain, seqlens_q=(long_seqlen,), seqlens_k=(long_seqlen,))
    rows: list[dict[str, Any]] = []
    for case in cases:
        found = {}
        for setting in settings((case,), plain, long):
            inputs = materialise(setting.problem, Recipe(), "cuda")
            base = next(
                (each for each in kernel.configs(setting.problem) if each["tile_m"] == 128), kernel.configs(setting.problem)[0]
            )
            chosen = [parsed(text, base) for text in tries]
            found[setting] = contestants(common, setting, inputs, kernel, configs, chosen, autotune)
            differences(found[setting])
        rows += timed(settled, found, rounds)
        click.echo(f"{case}: done", err=True)
    table = Table("case", "kernel", "direction", "ms", "MHz", "TFLOP/s", f"x {PEER}")
    for row in sorted(rows, key=lambda row: (row["case"], row["direction"], row["ms"])):
        ratio = "-" if row["x"] is None else f"{row['x']:.2f}"
        mhz = "-" if row["mhz"] is None else f"{row['mhz']:.0f}"
        table.add_row(row["case"], row["kernel"], row["direction"], f"{row['ms']:.3f}", mhz, f"{row['tflops']:.0f}", ratio)
    console = Console(width=240)
    console.print(table)
    for row in shares(rows):
        told = f"{row['share']:.2%} of the time, {row['x scores']:.3f} x the scores' {row['share'] / row['x scores']:.2%}"
        console.print(f"window / full, {row['direction']}, {row['kernel']}: {told}")
    if json_file is not None:
        made = {"device": device_name("cuda"), "versions": versions(), "rows": rows, "shares": shares(rows)}
        json_file.write_text(dumps(made), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except (BadArgument, click.ClickException) as error:
        click.echo(f"error: {error.format_message() if isinstance(error, click.ClickException) else error}", err=True)
        sys.exit(2)
