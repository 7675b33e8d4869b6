"""`attnfuzz list`: one line a kernel, or all that is declared about the kernels that are named."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import click
import msgspec

from attnfuzz.harness.cli.complete import complete_kernels
from attnfuzz.harness.cli.options import asked_for, console, echo_json, every_kernel, json_option, kernels_option
from attnfuzz.harness.cli.streams import echo
from attnfuzz.harness.core.text import one_line
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.support.third_party import ThirdPartyError, guarded
from attnfuzz.kernels.targets import checked_name

__all__ = ["list_command"]

_DEVICES: tuple[Device, ...] = get_args(Device)
_UNDECLARED = "not declared"
_LABEL = 22
"""Columns of the names in the details of a kernel."""
_SHORTEST_REASON = 16
"""Columns; where there are fewer, the table has no reasons."""


@click.command("list")
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...", shell_complete=complete_kernels)
@kernels_option
@json_option
def list_command(kernels: tuple[str, ...], more_kernels: tuple[str, ...], as_json: bool) -> None:
    """List all kernels and where each can run on this machine, or show what the named ones can do."""
    names = (*kernels, *more_kernels)
    asked = asked_for(names) if names else every_kernel(released=True)
    named = asked.kernels if names else ()
    rows = [*map(_row, asked.kernels), *(_broken(*each) for each in asked.broken)]
    rows = rows if names else sorted(rows, key=lambda row: str(row["kernel"]))
    if as_json:
        echo_json({"kernels": rows})
        return
    width = console().width
    details = (line for each in zip(named, rows, strict=False) for line in _details(*each, width))
    echo("\n".join(details if named else _table(rows, width)))


def _row(kernel: Kernel) -> dict[str, Any]:
    try:
        return guarded(lambda: _declared(kernel))
    except ThirdPartyError as error:
        return _broken(checked_name(kernel), f"asking what it declares failed with {error}; fix that")


def _broken(name: str, reason: str) -> dict[str, Any]:
    empty: dict[str, Any] = {key: [] for key in ("packings", "dtypes", "dims", "causal", "outputs", "runs_on")}
    return {"kernel": name, "backend": "?", **empty, "reasons": {"any device": reason}, "proof": None}


def _declared(kernel: Kernel) -> dict[str, Any]:
    can = kernel.capabilities
    here = {device: kernel.unavailable(device) if device in can.devices else _UNDECLARED for device in _DEVICES}
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
        "proof": _proof(kernel),
    }


def _proof(kernel: Kernel) -> str | None:
    """Return what the kernel says has been shown of it where its hardware was not at hand, or None."""
    proof = getattr(kernel, "proof", None)
    return None if proof is None else one_line(str(proof))


def _table(rows: list[dict[str, Any]], width: int) -> Iterator[str]:
    """Yield one line a kernel; the reason why it cannot run somewhere ends, at a word, where the line does.

    Behind an empty line, what has been shown of kernels whose hardware was not at hand.
    """
    cells = [("kernel", "packings", *_DEVICES, "why not"), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)][:-1]
    left = width - sum(widths) - 2 * len(widths)
    for *firsts, reason in cells:
        short = textwrap.shorten(reason, left, placeholder=" ...") if left >= _SHORTEST_REASON else ""
        yield "  ".join([*map(str.ljust, firsts, widths), short]).rstrip()
    shown = [f"{one_line(row['kernel'])}: {row['proof']}" for row in rows if row["proof"] is not None]
    if shown:
        yield ""
    for text in shown:
        yield from textwrap.wrap(
            text, max(width, _LABEL), subsequent_indent="   ", break_long_words=False, break_on_hyphens=False
        )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    reasons = {device: reason for device, reason in row["reasons"].items() if reason != _UNDECLARED}
    here = ["yes" if each in row["runs_on"] else "-" if row["reasons"].get(each) == _UNDECLARED else "no" for each in _DEVICES]
    differ = len(set(reasons.values())) > 1
    why = dict.fromkeys(f"{device}: {reason}" if differ else reason for device, reason in reasons.items())
    return one_line(row["kernel"]), ", ".join(row["packings"]), *here, "; ".join(why)


def _details(kernel: Kernel, row: dict[str, Any], width: int) -> Iterator[str]:
    """Yield the lines of one kernel: where it runs here, its capabilities by the names of their fields, its files."""
    lines: dict[str, str] = {device: row["reasons"].get(device, "runs here") for device in _DEVICES}
    if row["proof"] is not None:
        lines["proof"] = row["proof"]
    lines |= {name: _text(name, value) for name, value in msgspec.structs.asdict(kernel.capabilities).items()}
    yield one_line(f"{kernel.name} ({kernel.backend})")
    for name, text in lines.items():
        parts = textwrap.wrap(text, max(width - _LABEL - 3, _LABEL), break_long_words=False, break_on_hyphens=False)
        yield from _labelled(name, parts)
    yield from _labelled("files", map(one_line, map(str, kernel.files)))


def _labelled(name: str, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f"   {'' if number else name:<{_LABEL}}{line}"


def _text(name: str, value: Any) -> str:
    """Return one capability in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "only the pairs of dims" if name == "dim_multiple" else "any"
    if name == "dims":
        return ", ".join(f"{qk}/{v}" for qk, v in value)
    if isinstance(value, dict):
        return "; ".join(f"{device}: {', '.join(each)}" for device, each in value.items()) or "as dtypes"
    if isinstance(value, msgspec.Struct):
        parts = {each: part for each, part in msgspec.structs.asdict(value).items() if part}
        return ", ".join(each if part is True else f"{each} {_text(each, part)}" for each, part in parts.items()) or "none"
    if isinstance(value, tuple):
        return ", ".join("no" if each is None else str(each) for each in value) or "none"
    return str(value)
