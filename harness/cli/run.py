"""`attnfuzz run` and `attnfuzz demo`."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import click

from attnfuzz.harness.campaign.events import to_all
from attnfuzz.harness.campaign.options import settings_from
from attnfuzz.harness.cli.options import (
    CLEAN,
    FAILURES,
    INTERRUPTED,
    WRONG_USE,
    asked_for,
    console,
    json_option,
    kernels_option,
    out_option,
    run_options,
    seed_option,
)
from attnfuzz.harness.core.environment import has_cuda, prepare, resolve_device
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.report import machine
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Kernel

if TYPE_CHECKING:
    from rich.console import Console

    from attnfuzz.harness.report.recorder import Recorder

__all__ = ["demo_command", "run_command"]


@click.command("run")
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@kernels_option
@run_options
@json_option
def run_command(kernels: tuple[str, ...], more_kernels: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Fuzz kernels (default: all that can run here) and shrink what fails to minimal Cases."""
    settings = settings_from(options, resolve_device(options["device"]))
    if settings.in_process:
        # Triton has one mode for a process, chosen at its import; a third party's module may import it.
        prepare(settings.device)
    chosen = asked_for(kernels, more_kernels)
    click.get_current_context().exit(_campaign(chosen, settings, as_json=as_json))


def _campaign(kernels: list[Kernel], settings: Any, *, as_json: bool) -> int:
    from attnfuzz.harness.campaign.campaign import campaign
    from attnfuzz.harness.report.terminal import Terminal

    terminal = Terminal(console(stderr=True), live=False) if as_json else Terminal(console())
    with _recorder(settings) as recorder:
        finished = campaign(kernels, settings, to_all(terminal, recorder))
    if as_json:
        click.echo(dumps(machine.campaign_object(finished)))
    if finished.not_kept:
        # Told on the terminal alone: a machine must not take what is in the folder for all that was found.
        return WRONG_USE
    if finished.found or finished.lost:
        return FAILURES
    if finished.broken:
        return WRONG_USE
    return INTERRUPTED if finished.interrupted else CLEAN


def _recorder(settings: Any) -> Recorder:
    from attnfuzz.harness.report.recorder import Recorder

    return Recorder(settings.out, lambda text: click.echo(f"warning: {text}", err=True))


@click.command("demo")
@out_option
@seed_option
@json_option
def demo_command(out: str, seed: int, as_json: bool) -> None:
    """Find, shrink, show and reproduce a real bug planted in a copy of triton.varlen; exit 0 if all of that worked."""
    from attnfuzz.harness.campaign.campaign import campaign
    from attnfuzz.harness.campaign.settings import Settings
    from attnfuzz.harness.report.terminal import Terminal

    device: Device = "cuda" if has_cuda() else "cpu"
    settings = Settings(device=device, max_examples=150, max_failures=1, seed=seed, out=f"{out}/demo", replay=False)
    terminal = console(stderr=as_json)
    if not as_json:
        terminal.print("A sequence without queries returns before its dK and dV are written (flash-attention issue 2421).\n")
    with _recorder(settings) as recorder:
        finished = campaign([registry.get("demo.varlen")], settings, to_all(Terminal(terminal), recorder))
    planted = [each for each in finished.found if each.identity.kind == "unwritten" and each.identity.output in ("dk", "dv")]
    reproduced = [_again(each.path, device, terminal) for each in planted if each.path]
    worked = bool(reproduced) and all(reproduced)
    if as_json:
        click.echo(dumps({**machine.campaign_object(finished), "reproduced": worked}))
    else:
        terminal.print("found, shrunk and reproduced" if worked else "[red]the planted bug was not found and reproduced[/]")
    click.get_current_context().exit(CLEAN if worked else FAILURES)


def _again(path: str, device: Device, terminal: Console) -> bool:
    """Whether the case file fails again in a fresh process."""
    command = [sys.executable, "-m", "attnfuzz.harness.cli", "repro", path, "--device", device]
    terminal.print(f"\n$ attnfuzz repro {path}", highlight=False, soft_wrap=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    terminal.print(done.stdout.rstrip() or done.stderr.rstrip(), highlight=False, markup=False, soft_wrap=True)
    return done.returncode == FAILURES
