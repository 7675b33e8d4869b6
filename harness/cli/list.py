"""`attnfuzz list`."""

from __future__ import annotations

from typing import Any

import click

from attnfuzz.harness.cli.options import asked_for, console, json_option, kernels_option
from attnfuzz.harness.core.text import dumps
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import BadArgument

__all__ = ["list_command"]


@click.command("list")
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@kernels_option
@json_option
def list_command(kernels: tuple[str, ...], more_kernels: tuple[str, ...], as_json: bool) -> None:
    """List the kernels (default: all), and where each can run on this machine."""
    named = [kernel.name for kernel in asked_for(kernels, more_kernels)] if kernels or more_kernels else registry.names()
    rows = [_list_row(name) for name in named]
    if as_json:
        click.echo(dumps({"kernels": rows}))
        return
    from attnfuzz.harness.report.terminal import kernel_table

    console().print(kernel_table(rows))


def _list_row(name: str) -> dict[str, Any]:
    try:
        kernel = registry.get(name)
    except BadArgument as error:
        empty: dict[str, Any] = {key: [] for key in ("packings", "dtypes", "dims", "causal", "outputs", "runs_on")}
        return {"kernel": name, "backend": "?", **empty, "reasons": {"any device": str(error)}}
    can = kernel.capabilities
    devices: tuple[Device, ...] = ("cpu", "cuda")
    here = {device: kernel.unavailable(device) if device in can.devices else "not declared" for device in devices}
    return {
        "kernel": kernel.name,
        "backend": kernel.backend,
        "packings": list(can.packings),
        "dtypes": list(can.dtypes),
        "dims": [list(pair) for pair in can.dims],
        "causal": list(can.causal),
        "outputs": list(can.outputs),
        "runs_on": [device for device, reason in here.items() if reason is None],
        "reasons": {device: reason for device, reason in here.items() if reason is not None},
    }
