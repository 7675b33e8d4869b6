"""`attnfuzz calibrate`."""

from __future__ import annotations

import shlex

import click

from attnfuzz.harness.cli.options import (
    CLEAN,
    FAILURES,
    INTERRUPTED,
    WRONG_USE,
    asked_for,
    console,
    device_option,
    json_option,
    kernels_option,
    out_option,
    seed_option,
    writable,
    write_file,
)
from attnfuzz.harness.core.environment import resolve_device
from attnfuzz.harness.core.text import dumps

__all__ = ["calibrate_command"]


@click.command("calibrate")
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@kernels_option
@device_option
@click.option("--max-examples", type=int, default=1000, show_default=True, metavar="N", help="Distinct Cases per kernel.")
@seed_option
@click.option("--profile", default="quick", show_default=True, metavar="quick|gate|nightly", help="How large Cases are.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="J", help="Kernels at once [default: a quarter of the cores].")
@out_option
@click.option("--known", metavar="DIR", help="Kept defects of PyTorch's kernels [default: tests/corpus/peers, if there].")
@click.option("--write", metavar="FILE", help="Write the table as Markdown.")
@json_option
def calibrate_command(
    kernels: tuple[str, ...],
    more_kernels: tuple[str, ...],
    device: str,
    max_examples: int,
    seed: int,
    profile: str,
    jobs: int | None,
    out: str,
    known: str | None,
    write: str | None,
    as_json: bool,
) -> None:
    """Run kernels that should be right (default: all that can run here) and measure how near they come to their budgets."""
    from attnfuzz.harness.audit.calibrate import report
    from attnfuzz.harness.audit.calibrate.calibrate import calibrate, planned
    from attnfuzz.harness.audit.calibrate.known import found_at
    from attnfuzz.harness.audit.calibrate.turn import Plan
    from attnfuzz.harness.campaign.corpus import Corpus
    from attnfuzz.harness.campaign.settings import profile as profile_called

    plan = Plan(
        device=resolve_device(device),
        cases=max_examples,
        seed=seed,
        jobs=planned(jobs),
        profile=profile_called(profile).name,
        out=out,
        known=found_at(known),
    )
    chosen = asked_for(kernels, more_kernels)
    file = None if write is None else writable(write)
    Corpus(out).check()
    with report.CalibrationProgress(console(stderr=as_json)) as progress:
        done = calibrate(chosen, plan, progress)
    if as_json:
        click.echo(dumps(report.calibration_object(done)))
    else:
        report.show_calibration(console(), done)
    if file is not None:
        command = ["attnfuzz", "calibrate", *kernels, *more_kernels, "--device", plan.device, "--max-examples", str(max_examples)]
        command += [*(["--seed", str(seed)] if seed else []), *(["--profile", profile] if profile != "quick" else [])]
        write_file(file, report.markdown(done, shlex.join(command)), "write")
    code = FAILURES if done.failed else WRONG_USE if done.broken else INTERRUPTED if done.interrupted else CLEAN
    click.get_current_context().exit(code)
