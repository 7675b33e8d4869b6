"""How far dV of PyTorch's attention on the CPU is off as the number of queries grows, by its flash and by its plain code.

    python benchmarks/sdpa_gradient.py [--most QUERIES] [--json FILE] [--plot FILE]

One head, 8 keys, dim 64, bfloat16, dO uniform in [0, 1). The error of dV is the largest one, divided by the largest dV of float64
autograd on the same values. README.md shows the picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnfuzz.harness.cli.options import file_to_write
from attnfuzz.harness.core.environment import versions
from attnfuzz.harness.core.text import dumps

KEYS, DIM = 8, 64
CODES = {"flash (the default)": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def gradient_of_v(code: SDPBackend, tensors: list[torch.Tensor], d_o: torch.Tensor) -> torch.Tensor:
    """Return dV, float64 (1, 1, 8, 64), of sum(dO * O)."""
    q, k, v = (each.detach().clone().requires_grad_() for each in tensors)
    with sdpa_kernel(code):
        scaled_dot_product_attention(q, k, v).backward(d_o)
    return v.grad.double()


def errors(queries: int) -> dict[str, float]:
    """Return the relative error of dV with `queries` queries, by each code."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, 1, each, DIM, generator=generator).bfloat16() for each in (queries, KEYS, KEYS)]
    d_o = torch.rand(1, 1, queries, DIM, generator=generator).bfloat16()
    expected = gradient_of_v(SDPBackend.MATH, [each.double() for each in rows], d_o.double())
    largest = expected.abs().max()
    return {name: float((gradient_of_v(code, rows, d_o) - expected).abs().max() / largest) for name, code in CODES.items()}


def draw(rows: list[dict[str, Any]], file: str) -> None:
    """Draw the errors over the number of queries."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for name, colour in zip(CODES, ("#a50f15", "#3182bd"), strict=True):
        axes.plot([row["queries"] for row in rows], [100 * row[name] for row in rows], "o-", color=colour, label=name)
    axes.axvline(32.5, color="0.6", linestyle=":", linewidth=1)
    axes.annotate(
        "32 queries", (32.5, axes.get_ylim()[1]), ha="left", va="top", color="0.4", xytext=(4, 0), textcoords="offset points"
    )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("queries")
    axes.set_ylabel("largest error of dV,\n% of its largest element")
    axes.set_title(f"scaled_dot_product_attention on the CPU, bfloat16, torch {versions()['torch']}", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
    plt.close(figure)


@click.command()
@click.option("--most", type=click.IntRange(min=8), default=32768, show_default=True, help="Largest number of queries.")
@click.option("--json", "json_file", metavar="FILE", callback=file_to_write, help="Write the errors as JSON.")
@click.option("--plot", "plot_file", metavar="FILE", help="Draw them (needs matplotlib).")
def main(most: int, json_file: Path | None, plot_file: str | None) -> None:
    """Measure the error of dV for 8, 16, ... queries."""
    rows: list[dict[str, Any]] = []
    queries = 8
    while queries <= most:
        rows.append({"queries": queries, **errors(queries)})
        click.echo(f"{queries:6} queries: " + ", ".join(f"{name} {100 * rows[-1][name]:.2f} %" for name in CODES))
        queries *= 2
    if json_file:
        json_file.write_text(dumps({"rows": rows, "versions": versions()}), encoding="utf-8")
    if plot_file:
        draw(rows, plot_file)


if __name__ == "__main__":
    main()
