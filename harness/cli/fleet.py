"""`attnfuzz fleet`: a run whose workers are on the nodes of a Ray cluster."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import click

from attnfuzz.harness.campaign.options import seed_of, settings_from
from attnfuzz.harness.cli.complete import complete_kernels
from attnfuzz.harness.cli.options import (
    asked_for,
    json_option,
    kernels_option,
    run_options,
    verbosity_of,
    verbosity_options,
    writable,
)
from attnfuzz.harness.cli.run import announce_run, campaign, event_lines, known_failures
from attnfuzz.harness.core.environment import resolve_device
from attnfuzz.kernels.errors import reject

__all__ = ["fleet_command"]


@click.command("fleet")
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...", shell_complete=complete_kernels)
@click.option(
    "--address",
    default="auto",
    show_default=True,
    metavar="auto|ray://HOST:PORT|local",
    help="The Ray cluster; auto: the one of this node; local: one of this machine alone.",
)
@click.option(
    "--workers-per-gpu", type=click.IntRange(1, 1000), metavar="N", help="Workers that share a GPU [default: what fills one]."
)
@kernels_option
@run_options
@verbosity_options
@json_option
def fleet_command(
    kernels: tuple[str, ...],
    more_kernels: tuple[str, ...],
    address: str,
    workers_per_gpu: int | None,
    quiet: bool,
    verbose: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Fuzz kernels on all nodes of a Ray cluster, with one report, one corpus and one journal here.

    This node must be able to run the kernels as well: it compiles their variants. Options are those of `attnfuzz run`; --workers
    limits the workers of all nodes together.
    """
    verbosity = verbosity_of(quiet=quiet, verbose=verbose)
    options["seed"] = seed_of(options)
    for_machines = as_json or options["events"] == "-"
    announce_run("runs on a cluster", (*kernels, *more_kernels), options["seed"], verbosity, as_json=for_machines)
    from attnfuzz.harness.campaign.fleet.cluster import joined, places_in
    from attnfuzz.harness.campaign.fleet.workers import FleetWorkers

    if options["in_process"]:
        raise reject("in-process", True, "the workers of a fleet have processes of their own", "use attnfuzz run")
    most = None if options["workers"] == "auto" else settings_from(options, "cpu").workers
    settings = settings_from({**options, "workers": "1"}, resolve_device(options["device"]))
    asked = asked_for(kernels, more_kernels)
    known = None if options["ledger"] is None else known_failures(options["ledger"], asked.kernels, settings.device)
    file = None if options["table"] is None else writable(options["table"], "table")
    lines = event_lines(options["events"], as_json=as_json)
    with joined(address):
        places = places_in(settings.device, address, workers_per_gpu, most)
        settings = replace(settings, workers=places.count)
        group = partial(FleetWorkers, places=places)
        code = campaign(asked, settings, known, file, lines, as_json=as_json, verbosity=verbosity, group=group)
    click.get_current_context().exit(code)
