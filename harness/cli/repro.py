"""`attnfuzz repro`: run a case file or blob again, in one of several ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnfuzz.harness.cli.complete import complete_cases
from attnfuzz.harness.cli.options import (
    CLEAN,
    FAILURES,
    INTERRUPTED,
    WRONG_USE,
    check_owner,
    console,
    deadline_option,
    device_option,
    echo_json,
    in_process_option,
    json_option,
    kernel_option,
    like_option,
    no_memory_check_option,
    writable,
    write_file,
)
from attnfuzz.harness.cli.picture import Picture
from attnfuzz.harness.cli.project import on_command_line
from attnfuzz.harness.cli.streams import echo
from attnfuzz.harness.core.environment import prepare, resolve_device
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.report import machine
from attnfuzz.kernels.errors import BadArgument, reject

if TYPE_CHECKING:
    from attnfuzz.harness.campaign.corpus import CaseFile
    from attnfuzz.harness.repro.reproduce import Where

__all__ = ["repro_command"]

_WAYS = ("sanitize", "script", "repeat", "shrink", "explain", "pdb")
"""Options that each say how a Case is run: at most one of them."""
_SENSELESS = {
    "sanitize": {"in_process": "compute-sanitizer watches a process of its own"},
    "script": {
        "in_process": "a script runs in a process of its own",
        "no_memory_check": "a script does not run under the harness",
    },
    "pdb": {"as_json": "a debugger talks to a person", "deadline": "nothing ends what runs in a debugger"},
}
"""Options that have no effect with a way, and why."""
_OPTION = {"as_json": "json"}
_LONGEST = 300
"""Letters of a case's path in an error; a blob has more."""


@click.command("repro")
@click.argument("case", metavar="CASE", shell_complete=complete_cases)
@kernel_option
@like_option
@device_option
@deadline_option
@in_process_option
@no_memory_check_option
@click.option(
    "--sanitize",
    metavar="memcheck|racecheck|initcheck",
    help="Run it under NVIDIA's compute-sanitizer: exit 0 clean, 1 if that reports anything [deadline: 10m for all of it].",
)
@click.option(
    "--script",
    metavar="FILE",
    help="Write a script of at most 40 lines that shows the failure, for others; - for stdout.",
)
@click.option(
    "--exact", is_flag=True, help="With --script: the case's own tensors, to the bit, and the expected outputs in the file."
)
@click.option("--repeat", type=int, metavar="N", help="Run it N times, and show how often and how it fails.")
@click.option("--shrink", is_flag=True, help="Shrink further; a smaller case file is written beside this one.")
@click.option("--explain", is_flag=True, help="Vary each part of the case, and show which matter; the case file holds it then.")
@click.option("--budget", metavar="60s", help="Time for --shrink or --explain [default: 60s].")
@click.option("--plot", metavar="FILE.png", help="Draw error over budget of each output (.png, .svg, .pdf, or into a folder).")
@click.option("--pdb", is_flag=True, help="Run it in this process, and stop in pdb where it fails.")
@json_option
def repro_command(case: str, owner: str | None, like: str | None, as_json: bool, **options: Any) -> None:
    """Run a case file, or the blob of one (AF1-...), again: FIXED (exit 0), FAILED (1), UNJUDGED or an error (2)."""
    from attnfuzz.harness.campaign.blob import stored_case
    from attnfuzz.harness.campaign.settings import duration
    from attnfuzz.harness.repro.reproduce import Where

    # What a project sets for all commands is no contradiction to a way that has no use for it.
    way = _way({name: value if on_command_line(name) else None for name, value in {**options, "as_json": as_json}.items()})
    stored = stored_case(case)
    deadline, budget = options["deadline"], options["budget"]
    where = Where(
        device=options["device"],
        in_process=options["in_process"],
        deadline=None if deadline is None else duration(deadline, "deadline"),
        memory_check=not options["no_memory_check"],
    )
    picture = None if options["plot"] is None else Picture(options["plot"], stored)
    if where.in_process or way == "pdb":
        prepare(resolve_device(where.device))
    try:
        check_owner(owner, case, stored.case.kernel, stored.finding.target, like)
        stored = replace(stored, case=where.prepared(stored.case)[2]) if way != "sanitize" else stored
        match way:
            case "sanitize":
                code = _sanitized(stored, options["sanitize"], where, as_json=as_json)
            case "script":
                code = _script(stored, options["script"], where, exact=options["exact"], as_json=as_json)
            case "repeat":
                code = _repeated(stored, options["repeat"], where, as_json=as_json)
            case "shrink":
                code = _shrunk(stored, 60.0 if budget is None else duration(budget), where, as_json=as_json)
            case "explain":
                code = _explained(stored, 60.0 if budget is None else duration(budget), where, as_json=as_json)
            case "pdb":
                code = _debugged(stored, where)
            case _:
                code = _again(stored, where, picture, as_json=as_json)
    except BadArgument as error:
        raise BadArgument(f"{case if len(case) <= _LONGEST else f'{case[:21]}...'}: {error}") from None
    click.get_current_context().exit(code)


def _way(options: Mapping[str, Any]) -> str | None:
    """Return the way that the options ask for, None for a plain run.

    Raises:
        BadArgument: they ask for two, or one has no effect with the way.
    """
    ways = [name for name in _WAYS if _is_set(options[name])]
    if len(ways) > 1:
        reason = f"--{ways[0]} and --{ways[1]} are two ways to run a case"
        raise reject(ways[1], options[ways[1]], reason, "give one of them")
    way = ways[0] if ways else None
    if way and options["plot"] is not None:
        raise reject("plot", options["plot"], f"--{way} draws nothing", f"leave --{way} out")
    for name, reason in _SENSELESS.get(way or "", {}).items():
        if _is_set(options[name]):
            option = _OPTION.get(name, name.replace("_", "-"))
            raise reject(name, options[name], reason, f"leave --{option} out")
    if options["budget"] is not None and way not in ("shrink", "explain"):
        raise reject("budget", options["budget"], "it limits shrinking", "give it with --shrink or --explain")
    if options["exact"]:
        if way != "script":
            raise reject("exact", True, "it is a way to write a script", "give it with --script FILE")
        if options["deadline"] is not None:
            raise reject("deadline", options["deadline"], "an exact script is written without running it", "leave --deadline out")
    if way == "script" and options["script"] == "-" and options["as_json"]:
        raise reject("script", "-", "the script itself would be between the JSON", "give --script a file, or leave --json out")
    return way


def _is_set(value: Any) -> bool:
    # By identity: 0 equals False, but --repeat 0 is set.
    return value is not None and value is not False


def _again(stored: CaseFile, where: Where, picture: Picture | None, *, as_json: bool) -> int:
    from attnfuzz.harness.repro.report import show_reproduction
    from attnfuzz.harness.repro.reproduce import reproduce

    identity = stored.finding.identity
    done = reproduce(stored.case, where, rate=stored.rate, output=identity.output if identity else None)
    if as_json:
        result = {
            "way": "once",
            "outcome": done.outcome,
            "device": done.device,
            "ids": [each.identity.key for each in done.verdict.failures],
            "verdict": machine.verdict_object(done.verdict),
            "runs": done.runs,
            "case": stored.case.to_object(),
        }
        echo_json({**result, **(picture.draw(done, where) if picture else {})})
    else:
        show_reproduction(console(), stored, done)
        if picture:
            picture.show(console(), done, where)
    return {"FIXED": CLEAN, "FAILED": FAILURES, "UNJUDGED": WRONG_USE}[done.outcome]


def _sanitized(stored: CaseFile, tool: str, where: Where, *, as_json: bool) -> int:
    from attnfuzz.harness.repro.sanitize.report import sanitized_object, show_sanitized
    from attnfuzz.harness.repro.sanitize.sanitize import sanitize

    done = sanitize(stored.case, tool, where.device, deadline=where.deadline)
    if as_json:
        echo_json({"way": "sanitize", **sanitized_object(stored, done)})
    else:
        show_sanitized(console(), stored, done)
    return CLEAN if done.clean else FAILURES


def _script(stored: CaseFile, target: str, where: Where, *, exact: bool, as_json: bool) -> int:
    """Write the script; the file stays as it was if there is an error."""
    from attnfuzz.harness.repro.script.script import script_of
    from attnfuzz.harness.repro.script.short import DEADLINE, short_script

    # Known before the script runs, which takes seconds.
    file = None if target == "-" else writable(target, "script")
    device, _ = where.device_for(stored.case)
    script = script_of(stored, device) if exact else short_script(stored, device, where.deadline or DEADLINE)
    if file is None:
        echo(script.text, nl=False)
    else:
        write_file(file, script.text, "script")
        if as_json:
            result = {"script": str(file), "exact": exact, "device": device, "note": script.note, "case": stored.case.to_object()}
            echo_json({"way": "script", **result})
        else:
            ran = "" if exact else "; it was run, and shows the failure"
            echo(f"written: {file}{ran}; run it by `python {file}`: exit 0 is OK, 1 is FAILED")
    if script.note and not as_json:
        echo(f"note: {script.note}", err=True)
    return CLEAN


def _repeated(stored: CaseFile, count: int, where: Where, *, as_json: bool) -> int:
    from attnfuzz.harness.report.progress import progress_on
    from attnfuzz.harness.repro.report import repetition_object, show_repetition
    from attnfuzz.harness.repro.reproduce import repeat

    failed = 0
    with progress_on(console(stderr=True), bar=True, note=True, left=True) as progress:
        task = progress.add_task("running", total=max(1, count), note="")

        def each(runs: int, verdict: Any) -> None:
            nonlocal failed
            failed += verdict.failure is not None
            progress.update(task, completed=runs, note=f"{runs} of {counted(count, 'run')}, {failed} failed")

        done = repeat(stored.case, count, where, each)
    if as_json:
        echo_json({"way": "repeat", **repetition_object(stored, done)})
    else:
        show_repetition(console(), stored, done)
    return FAILURES if done.failed else INTERRUPTED if done.interrupted else CLEAN


def _shrunk(stored: CaseFile, seconds: float, where: Where, *, as_json: bool) -> int:
    from attnfuzz.harness.campaign.blob import is_blob
    from attnfuzz.harness.report.describe import lengths
    from attnfuzz.harness.report.progress import progress_on
    from attnfuzz.harness.repro.report import reshrunk_object, show_reshrunk
    from attnfuzz.harness.repro.reshrink import shrink_further

    # The result for a blob goes into the current folder.
    folder = Path() if is_blob(str(stored.path)) else stored.path.parent
    with progress_on(console(stderr=True), note=True) as progress:
        task = progress.add_task("shrinking", total=None, note="")
        done = shrink_further(
            stored, seconds, where, folder,
            lambda trial, case: progress.update(task, note=f"trial {trial}: {lengths(case)}"),
        )  # fmt: skip
    if as_json:
        echo_json({"way": "shrink", **reshrunk_object(done)})
    else:
        show_reshrunk(console(), stored, done)
    return CLEAN if done.outcome == "FIXED" else FAILURES


def _explained(stored: CaseFile, seconds: float, where: Where, *, as_json: bool) -> int:
    from attnfuzz.harness.report.progress import progress_on
    from attnfuzz.harness.repro.explain import explain_stored
    from attnfuzz.harness.repro.report import explained_object, show_explained

    with progress_on(console(stderr=True), note=True) as progress:
        task = progress.add_task("explaining", total=None, note="")
        done = explain_stored(stored, seconds, where, lambda trial, _: progress.update(task, note=f"trial {trial}"))
    if as_json:
        echo_json({"way": "explain", **explained_object(stored, done)})
    else:
        show_explained(console(), stored, done)
    return CLEAN if done.outcome == "FIXED" else FAILURES


def _debugged(stored: CaseFile, where: Where) -> int:
    from attnfuzz.harness.campaign.runner import TrialRunner
    from attnfuzz.harness.repro.debug import RecordingExecutor, enter
    from attnfuzz.harness.repro.report import show_reproduction
    from attnfuzz.harness.repro.reproduce import Reproduction

    device, _ = where.device_for(stored.case)
    executor = RecordingExecutor(device, memory_check=where.memory_check)
    runner = TrialRunner(executor)
    failed = runner.run(stored.case, rate=stored.rate).failure is not None
    record = executor.record
    show_reproduction(console(), stored, Reproduction("FAILED" if failed else "FIXED", device, record.verdict, runner.trials))
    if not failed:
        return CLEAN
    if record.raised is not None:
        echo("\npdb stops where the kernel raised, with its own variables in reach.")
        if record.depth:
            echo(f"`up {record.depth}` goes to its call, with inputs, kernel, case, problem (in backward o and lse, too).")
    else:
        echo("\npdb stops with these in reach:")
        echo("   inputs, outputs           what the kernel got and returned; inputs.q, outputs.dk, ...")
        if record.reference:
            echo('   reference, budget, error  by output, float64, heads first (heads, tokens[, dim]): error["dk"], ...')
        echo("   verdict, case, kernel     verdict.failures says what is wrong and where")
    echo("`q` leaves.")
    enter(record, stored.case)
    return FAILURES
