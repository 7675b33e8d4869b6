"""`attnfuzz gate`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnfuzz.harness.cli.complete import complete_kernels
from attnfuzz.harness.cli.options import (
    CLEAN,
    FAILURES,
    INTERRUPTED,
    WRONG_USE,
    announce,
    console,
    deadline_option,
    device_option,
    echo_json,
    gate_profile_option,
    json_option,
    no_memory_check_option,
    out_option,
    seed_option,
    verbosity_of,
    verbosity_options,
    writable,
    write_file,
)
from attnfuzz.harness.cli.project import current_project, project_line, project_object
from attnfuzz.harness.cli.streams import command_github
from attnfuzz.harness.core.environment import resolve_device
from attnfuzz.kernels.errors import BadArgument, reject

if TYPE_CHECKING:
    from attnfuzz.harness.gate.plan import Choice
    from attnfuzz.harness.gate.result import Gate
    from attnfuzz.harness.report.progress import Verbosity

__all__ = ["gate_command"]


@click.command("gate", context_settings={"allow_extra_args": True})
@click.option("--base", metavar="REF", help="Gate what changed since the checkout left this branch, tag or commit.")
@click.option("--baseline", metavar="FILE", help="Gate what changed since FILE was written.")
@click.option("--write", metavar="FILE", help="Measure the kernels as they are, and write FILE for a later --baseline.")
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="NAME|MODULE:OBJECT",
    shell_complete=complete_kernels,
    help="Gate this kernel, changed or not; repeatable.",
)
@click.option("--all", "everything", is_flag=True, help="Gate every kernel of the checkout, changed or not.")
@device_option
@gate_profile_option
@click.option("--budget", metavar="60s", help="Time for all kernels' campaigns [default: 5m, or none with --max-examples].")
@click.option("--max-examples", type=int, metavar="N", help="Distinct Cases of each kernel's campaign.")
@seed_option
@click.option("--cases", type=int, metavar="N", help="Cases on which errors are compared [default: 24 on the CPU, 64 on CUDA].")
@click.option("--accuracy-threshold", default=1.25, show_default=True, metavar="X", help="Errors may grow by this factor.")
@click.option("--speed", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True, help="auto: on CUDA only.")
@click.option("--speed-threshold", default=1.10, show_default=True, metavar="X", help="Times may grow by this factor.")
@click.option("--rounds", default=25, show_default=True, metavar="N", help="Rounds that time head and base alternately.")
@click.option(
    "--compile", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True, help="auto: where it can be done."
)
@click.option("--arch", metavar="sm_90a,...", help="Architectures of the compile table [default: the command's own].")
@out_option
@click.option("--corpus", multiple=True, metavar="DIR", help="More case files to replay than those of --out; repeatable.")
@click.option("--ledger", metavar="FILE", help="Known failures [default: attnfuzz-ledger.toml, if there].")
@click.option("--markdown", metavar="FILE", help="Write a summary as Markdown [also to $GITHUB_STEP_SUMMARY, if set].")
@click.option("--junit", metavar="FILE", help="Write the result as JUnit XML.")
@click.option("--annotate", is_flag=True, help="Print GitHub annotations [default: in GitHub Actions].")
@deadline_option
@no_memory_check_option
@verbosity_options
@json_option
def gate_command(
    base: str | None,
    baseline: str | None,
    write: str | None,
    kernels: tuple[str, ...],
    everything: bool,
    device: str,
    profile: str,
    budget: str | None,
    max_examples: int | None,
    seed: int,
    cases: int | None,
    accuracy_threshold: float,
    speed: Choice,
    speed_threshold: float,
    rounds: int,
    compile: Choice,  # noqa: A002 - the option's name
    arch: str | None,
    out: str,
    corpus: tuple[str, ...],
    ledger: str | None,
    markdown: str | None,
    junit: str | None,
    annotate: bool,
    deadline: str | None,
    no_memory_check: bool,
    quiet: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Gate the kernels that a change touches: corpus, campaign, accuracy, determinism, compile table and speed.

    Exit 0: all pass, or the ledger allows the failures; 1: a kernel or a ledger entry fails; 2: wrong use, or a part cannot run.
    """
    if extra := click.get_current_context().args:
        remedy = f"to gate a kernel, changed or not, give {shlex.join(part for name in extra for part in ('--kernel', name))}"
        raise reject("arguments", " ".join(extra), "`gate` takes options only", remedy)
    verbosity = verbosity_of(quiet=quiet, verbose=verbose)
    from attnfuzz.harness.campaign.settings import duration
    from attnfuzz.harness.campaign.settings import profile as profile_of
    from attnfuzz.harness.gate.plan import Plan
    from attnfuzz.harness.gate.result import not_begun

    project = current_project()
    plan = Plan(
        device=resolve_device(device),
        profile=profile_of(profile).name,
        base=base,
        baseline=None if baseline is None else Path(baseline),
        write=None if write is None else writable(write),
        kernels=kernels,
        known=project.kernels if project else (),
        everything=everything,
        # Kernels of a project are imported from its folder.
        folder=Path(project.folder) if project and project.kernels and not kernels else Path.cwd(),
        out=out,
        corpora=corpus,
        ledger=None if ledger is None else Path(ledger),
        budget=None if budget is None else duration(budget),
        max_examples=max_examples,
        seed=seed,
        deadline=None if deadline is None else duration(deadline, "deadline"),
        memory_check=not no_memory_check,
        cases=cases,
        accuracy_threshold=accuracy_threshold,
        speed_threshold=speed_threshold,
        speed=speed,
        rounds=rounds,
        compile=compile,
        architectures=tuple(each.strip() for each in arch.split(",") if each.strip()) if arch else (),
    )
    against = f"writes {write}" if write else f"gates against {base or baseline}"
    announce(f"{against} with seed {seed}", verbosity, as_json=as_json)
    from attnfuzz.harness.gate.gate import gate
    from attnfuzz.harness.gate.report.terminal import GateProgress

    files = {name: writable(path, name) for name, path in (("markdown", markdown), ("junit", junit)) if path is not None}
    if line := project_line():
        console(stderr=as_json).print(line, highlight=False, soft_wrap=True, markup=False)
    try:
        with GateProgress(console(stderr=as_json), verbosity) as progress:
            done = gate(plan, progress)
    except BadArgument as error:
        # A report that is empty, or missing, counts as green in some places.
        _write_reports(not_begun(str(error)), files)
        raise
    _report(done, files, annotate=annotate, as_json=as_json, verbosity=verbosity)
    click.get_current_context().exit(_code(done))


def _report(done: Gate, files: dict[str, Path], *, annotate: bool, as_json: bool, verbosity: Verbosity) -> None:
    from attnfuzz.harness.core.github import on_github
    from attnfuzz.harness.gate.report import github
    from attnfuzz.harness.gate.report import terminal as report

    if as_json:
        echo_json({**report.gate_object(done), "project": project_object()})
    else:
        report.show_gate(console(), done, verbosity)
    if annotate or on_github():
        for line in github.annotation_lines(done):
            # Not among the JSON.
            command_github(line, err=as_json)
    _write_reports(done, files)


def _write_reports(done: Gate, files: dict[str, Path]) -> None:
    from attnfuzz.harness.gate.report import github
    from attnfuzz.harness.gate.report import terminal as report
    from attnfuzz.harness.gate.report.junit import junit

    text = report.markdown(done)
    wrong = []
    for name, content in (("junit", junit(done)), ("markdown", text)):
        try:
            if name in files:
                write_file(files[name], content, name)
        except BadArgument as error:  # after which the other is still written
            wrong.append(error)
    if (summary := github.summary_file()) is not None:
        github.append_summary(summary, text)
    if wrong:
        raise BadArgument("\n".join(map(str, wrong)))


def _code(done: Gate) -> int:
    if done.not_kept:
        return WRONG_USE
    return {"fail": FAILURES, "error": WRONG_USE, "interrupted": INTERRUPTED, "pass": CLEAN}[done.outcome]
