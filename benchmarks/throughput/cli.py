"""Options of benchmarks/throughput.py; its parts in turn; tables, JSON and pictures of what they measured."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from attnfuzz.harness.campaign.settings import duration
from attnfuzz.harness.cli.options import file_to_write
from attnfuzz.harness.core.environment import device_name, resolve_device, versions
from attnfuzz.harness.core.text import dumps
from attnfuzz.kernels.errors import BadArgument
from throughput.campaigns import NotMeasured
from throughput.plan import Plan, runnable
from throughput.tables import Sheet

__all__ = ["PARTS", "main", "run", "spread"]

PARTS = ("engine", "stages", "rivals", "growth")
SEVERAL = ("--only", "--kernel", "--workers")
"""Options that take several words: "--workers 1 2 auto"."""


def spread(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with an option that takes several words written once for each of them."""
    words: list[str] = []
    option, given = None, True
    for each in (*arguments, "-"):
        if each.startswith("-"):
            # One without a word is left for click to refuse.
            words += [option] if option and not given else []
            option, given = each if each in SEVERAL else None, False
            words += [] if option else [each]
        else:
            given = True
            words += [option, each] if option else [each]
    return words[:-1]


def part(name: str) -> Any:
    """The module of one part: `measure(plan)` returns rows of JSON, `sheets(rows)` their tables."""
    return importlib.import_module(f"throughput.{name}")


@click.command()
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="Only these parts; the default is all of them.")
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda")
@click.option("--kernel", "kernels", multiple=True, metavar="NAME ...")
@click.option("--workers", multiple=True, default=("1", "auto"), show_default=True, metavar="N|auto ...")
@click.option("--budget", default="30s", show_default=True, help="Time of each contestant in each round.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--cold", is_flag=True, help="Begin every run with empty compiler caches.")
@click.option("--soak", metavar="10m", help="Run one campaign for that time, and watch its memory, rate and processes.")
@click.option(
    "--read", "read_file", type=click.Path(path_type=Path, exists=True), help="Print an earlier --json; measure nothing."
)
@click.option("--json", "json_file", metavar="FILE", callback=file_to_write, help="Write the figures as JSON.")
@click.option("--plot", "plot_folder", type=click.Path(path_type=Path, file_okay=False), help="Draw the curves of growth as SVG.")
@click.option("--markdown", is_flag=True, help="Print the tables as Markdown.")
def main(
    only: tuple[str, ...], device: str, kernels: tuple[str, ...], workers: tuple[str, ...], budget: str, rounds: int, cold: bool,
    soak: str | None, read_file: Path | None, json_file: Path | None, plot_folder: Path | None, markdown: bool,
) -> None:  # fmt: skip
    """Measure, and print a table for each part."""
    if wrong := [each for each in workers if each != "auto" and not (each.isdigit() and int(each))]:
        raise click.BadParameter(f"{wrong[0]!r}: give positive numbers, or auto", param_hint="--workers")
    right = True
    if read_file is not None:
        try:
            measured = json.loads(read_file.read_text(encoding="utf-8"))
            sheets_of(measured)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise click.BadParameter(f"{read_file}: it is not what --json has written ({error})", param_hint="--read") from None
        if not measured:
            raise click.BadParameter(f"{read_file}: nothing was measured", param_hint="--read")
    else:
        where = resolve_device(device)
        chosen, refused = runnable(kernels, where)
        for each in refused:
            _say(each)
        seconds = duration(soak if soak is not None else budget, "soak" if soak is not None else "budget")
        plan = Plan(where, chosen, tuple(dict.fromkeys(workers)), seconds, rounds, cold, _say)
        measured = {
            "device": where, "cores": len(os.sched_getaffinity(0)), "versions": versions(), "kernels": chosen,
            "seconds": seconds, "rounds": rounds, "caches": plan.caches,
        }  # fmt: skip
        right = _soaked(plan, measured) if soak is not None else _measured(plan, only or PARTS, measured, json_file)
        # Last: its CUDA context would be in the GPU's memory meanwhile.
        measured["device"] = device_name(where)
    if json_file is not None:
        json_file.write_text(dumps(measured), encoding="utf-8")
    _show(sheets_of(measured), markdown)
    if plot_folder is not None:
        for path in importlib.import_module("throughput.curves").draw(measured.get("growth", []), plot_folder):
            _say(f"drawn: {path}")
    sys.exit(0 if right else 1)


def _measured(plan: Plan, names: Sequence[str], measured: dict[str, Any], json_file: Path | None) -> bool:
    """Run the parts one after the other, and return whether each has measured something; the file has them after each part."""
    for name in PARTS:
        if name in names:
            measured[name] = part(name).measure(plan)
            if json_file is not None:
                json_file.write_text(dumps(measured), encoding="utf-8")
    return all(measured[name] for name in PARTS if name in names)


def _soaked(plan: Plan, measured: dict[str, Any]) -> bool:
    measured["soak"] = part("soak").measure(plan)
    return not measured["soak"]["wrong"]


def sheets_of(measured: dict[str, Any]) -> list[Sheet]:
    """Return the tables of everything that was measured."""
    return [sheet for name in (*PARTS, "soak") if name in measured for sheet in part(name).sheets(measured[name])]


def _show(sheets: Sequence[Sheet], markdown: bool) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    for each in sheets:
        if markdown:
            click.echo(each.markdown())
        else:
            each.show(console)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _end(*_: object) -> None:
    """Handle SIGTERM as Ctrl-C: what was started is ended first."""
    raise KeyboardInterrupt


def run(command: click.Command = main) -> None:
    """Run a command; what is wrong with its use is one line and exit code 2."""
    signal.signal(signal.SIGTERM, _end)
    try:
        command(spread(sys.argv[1:]), standalone_mode=False)
    except click.Abort:
        sys.exit(130)
    except (BadArgument, NotMeasured, click.ClickException) as error:
        click.echo(f"error: {error.format_message() if isinstance(error, click.ClickException) else error}", err=True)
        sys.exit(2)
