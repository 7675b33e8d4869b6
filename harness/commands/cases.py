"""`attnfuzz show` and `attnfuzz repro`: one case file."""

from __future__ import annotations

import click

from attnfuzz.harness.commands.common import (
    CLEAN,
    FAILURES,
    check_owner,
    console,
    deadline_option,
    device_option,
    in_process_option,
    json_option,
    kernel_option,
    no_memory_check_option,
)
from attnfuzz.harness.environment import prepare, resolve_device
from attnfuzz.harness.jsontext import dumps
from attnfuzz.harness.report import machine
from attnfuzz.kernels.problem import BadArgument, reject

__all__ = ["repro_command", "show_command"]


@click.command("show")
@click.argument("case", metavar="CASE")
@kernel_option
@json_option
def show_command(case: str, owner: str | None, as_json: bool) -> None:
    """Show a case file: the Problem, the values, the Config, and what was found with it."""
    from attnfuzz.harness.corpus import read_case
    from attnfuzz.harness.report.terminal import show_stored

    stored = read_case(case)
    if owner is not None:
        check_owner(owner, case, stored.case.kernel, None)
    if as_json:
        click.echo(dumps({"case": stored.case.to_object(), "found": stored.found, "path": str(stored.path)}))
    else:
        show_stored(console(), stored)


@click.command("repro")
@click.argument("case", metavar="CASE")
@kernel_option
@device_option
@deadline_option
@in_process_option
@no_memory_check_option
@click.option(
    "--sanitize",
    metavar="memcheck|racecheck|initcheck",
    help="Run it under NVIDIA's compute-sanitizer: exit 0 clean, 1 if that reports anything [deadline: 10m for all of it].",
)
@json_option
def repro_command(
    case: str,
    owner: str | None,
    device: str,
    deadline: str | None,
    in_process: bool,
    no_memory_check: bool,
    sanitize: str | None,
    as_json: bool,
) -> None:
    """Run a case file again: FIXED (exit 0), FAILED (1) or ERROR (2)."""
    from attnfuzz.harness.corpus import read_case
    from attnfuzz.harness.report.terminal import show_reproduction
    from attnfuzz.harness.reproduce import reproduce
    from attnfuzz.harness.settings import duration

    stored = read_case(case)
    if in_process:
        prepare(resolve_device(device))
    try:
        check_owner(owner, case, stored.case.kernel, stored.found.get("target"))
    except BadArgument as error:
        raise BadArgument(f"ERROR {case}: {error}") from None
    seconds = None if deadline is None else duration(deadline, "deadline")
    if sanitize is not None:
        click.get_current_context().exit(_sanitized(case, sanitize, device, seconds, in_process=in_process, as_json=as_json))
    try:
        done = reproduce(
            stored.case,
            device,
            rate=stored.rate,
            in_process=in_process,
            deadline=seconds,
            memory_check=not no_memory_check,
        )
    except BadArgument as error:
        raise BadArgument(f"ERROR {case}: {error}") from None
    if as_json:
        found = {
            "outcome": done.outcome,
            "device": done.device,
            "verdict": machine.verdict_object(done.verdict),
            "runs": done.runs,
        }
        click.echo(dumps({**found, "case": stored.case.to_object()}))
    else:
        show_reproduction(console(), stored, done)
    click.get_current_context().exit(CLEAN if done.outcome == "FIXED" else FAILURES)


def _sanitized(path: str, tool: str, device: str, seconds: float | None, *, in_process: bool, as_json: bool) -> int:
    from attnfuzz.harness.corpus import read_case
    from attnfuzz.harness.report.sanitizer import sanitized_object, show_sanitized
    from attnfuzz.harness.sanitize import sanitize

    if in_process:
        raise reject("in_process", in_process, "compute-sanitizer watches a process of its own", "leave --in-process out")
    stored = read_case(path)
    try:
        done = sanitize(stored.case, tool, device, deadline=seconds)
    except BadArgument as error:
        raise BadArgument(f"ERROR {path}: {error}") from None
    if as_json:
        click.echo(dumps(sanitized_object(stored, done)))
    else:
        show_sanitized(console(), stored, done)
    return CLEAN if done.clean else FAILURES
