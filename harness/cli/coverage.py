"""`attnfuzz coverage`."""

from __future__ import annotations

import click

from attnfuzz.harness.cli.complete import complete_kernels
from attnfuzz.harness.cli.options import (
    asked_for,
    console,
    device_option,
    echo_json,
    json_option,
    profile_option,
    seed_option,
)
from attnfuzz.harness.core.environment import resolve_device
from attnfuzz.kernels.errors import reject

__all__ = ["coverage_command"]

_CASES = 2000


@click.command("coverage")
@click.argument("kernel", metavar="KERNEL", shell_complete=complete_kernels)
@click.option(
    "--max-examples", type=click.IntRange(min=1), default=_CASES, show_default=True, metavar="N", help="Distinct Cases to draw."
)
@seed_option
@device_option
@profile_option
@click.option(
    "--lines",
    type=click.IntRange(min=1),
    metavar="N",
    help="Run the first N Cases in a child process, and show which lines of the Triton functions never ran.",
)
@json_option
def coverage_command(
    kernel: str, max_examples: int, seed: int, device: str, profile: str, lines: int | None, as_json: bool
) -> None:
    """Draw Cases of a kernel (a name, or package.module:OBJECT) as a run does, and show what they reach and what they never do.

    Features, pairs of features, relations between sizes; with --lines also lines, branches and masks of its Triton functions.
    """
    from attnfuzz.harness.audit.coverage.measure import measure
    from attnfuzz.harness.audit.coverage.report import CoverageProgress, coverage_object, show_coverage
    from attnfuzz.harness.campaign.settings import Settings
    from attnfuzz.harness.campaign.settings import profile as profile_of

    if lines is not None and lines > max_examples:
        raise reject("lines", lines, f"only {max_examples} Cases are drawn", "give a larger --max-examples, or fewer lines")
    settings = Settings(
        device=resolve_device(device), profile=profile_of(profile).name, max_examples=max_examples, seed=seed, out=None
    )
    subject, *others = asked_for([kernel]).kernels
    if others:
        names = ", ".join(each.name for each in (subject, *others))
        raise reject("kernel", kernel, "it is the beginning of several names", f"give one of {names}")
    with CoverageProgress(console(stderr=as_json)) as progress:
        coverage = measure(subject, settings, lines or 0, progress)
    if as_json:
        echo_json(coverage_object(coverage))
    else:
        show_coverage(console(), coverage)
