"""`attnfuzz run` and `attnfuzz demo`."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.markup import escape

from attnfuzz.harness.campaign.options import settings_from
from attnfuzz.harness.cli.complete import complete_kernels
from attnfuzz.harness.cli.options import (
    CLEAN,
    FAILURES,
    INTERRUPTED,
    JSON_FORMAT,
    WRONG_USE,
    Asked,
    announce,
    asked_for,
    console,
    echo_json,
    json_option,
    kernels_option,
    like_option,
    out_option,
    run_options,
    seed_option,
    verbosity_of,
    verbosity_options,
    with_like,
    writable,
    write_file,
)
from attnfuzz.harness.cli.project import project_line, project_object
from attnfuzz.harness.cli.streams import echo
from attnfuzz.harness.core.environment import has_cuda, prepare, resolve_device
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.report import interim, machine
from attnfuzz.harness.report.listeners import to_all
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.support.file_target import file_target

if TYPE_CHECKING:
    from rich.console import Console

    from attnfuzz.harness.audit.adapter_module import AdapterModule
    from attnfuzz.harness.campaign.events import CampaignFinished
    from attnfuzz.harness.gate.known import Known, LedgerResult
    from attnfuzz.harness.report.figures import Figures
    from attnfuzz.harness.report.lines import EventLines
    from attnfuzz.harness.report.progress import Verbosity
    from attnfuzz.harness.report.recorder import Recorder

__all__ = ["announce_run", "campaign", "demo_command", "event_lines", "known_failures", "run_command"]


@click.command("run")
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...", shell_complete=complete_kernels)
@kernels_option
@like_option
@run_options
@verbosity_options
@json_option
def run_command(
    kernels: tuple[str, ...],
    more_kernels: tuple[str, ...],
    like: str | None,
    quiet: bool,
    verbose: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Fuzz kernels (default: all that can run here) and shrink what fails to minimal Cases.

    A function of any file: `attnfuzz run path/to/file.py:FUNCTION --like dense`.
    """
    verbosity = verbosity_of(quiet=quiet, verbose=verbose)
    settings = settings_from(options, resolve_device(options["device"]))
    for_machines = as_json or options["events"] == "-"
    announce_run("runs", (*kernels, *more_kernels), settings.seed, verbosity, as_json=for_machines)
    if settings.in_process:
        # Triton has one mode for a process, chosen at its import; a third party's module may import it.
        prepare(settings.device)
    functions = _functions(with_like((*kernels, *more_kernels), like), settings)
    asked = asked_for(tuple(functions))
    if options["workers"] == "auto":
        from attnfuzz.harness.campaign.worker_count import useful_workers

        settings = replace(settings, workers=max(1, useful_workers(settings, len(asked.kernels))))
    known = None if options["ledger"] is None else known_failures(options["ledger"], asked.kernels, settings.device)
    file = None if options["table"] is None else writable(options["table"], "table")
    lines = event_lines(options["events"], as_json=as_json)
    keep = partial(_adapter_modules, functions, asked, settings) if verbosity != "quiet" and any(functions.values()) else None
    code = campaign(asked, settings, known, file, lines, as_json=as_json, verbosity=verbosity, keep=keep)
    click.get_current_context().exit(code)


def _functions(names: Sequence[str], settings: Any) -> dict[str, bool]:
    """Return the names, those of functions of files with what is known of their gradients, and whether each is one."""
    functions = dict[str, bool]()
    for each in names:
        file = file_target(each)
        if file is None or file.like is None:
            functions[each] = False
            continue
        from attnfuzz.harness.audit.adapter_module import with_own_gradients

        name, forward_only = with_own_gradients(each, settings.device, in_process=settings.in_process)
        functions[name] = True
        if forward_only:
            reason = "its O has no graph of torch's autograd; only its forward is tried"
            echo(f"note: kernel={each!r}: {reason}", err=True)
    return functions


def _adapter_modules(
    functions: Mapping[str, bool], asked: Asked, settings: Any, finished: CampaignFinished
) -> dict[str, AdapterModule]:
    """Return the module that keeps each function of a file as a kernel, by the kernels' names.

    Features that are not declared are tried where nothing failed and there is time: for a third of the budget, 20 s at most.
    """
    from attnfuzz.harness.audit.adapter_module import SECONDS, adapter_module

    clean = not finished.findings and not finished.interrupted
    seconds = 0.0 if not clean else SECONDS if settings.budget is None else min(SECONDS, settings.budget / 3)
    modules = {}
    for name in (each for each, is_function in functions.items() if is_function):
        kernel = registry.get(name)
        if kernel in asked.kernels and kernel.unavailable(settings.device) is None:
            modules[kernel.name] = adapter_module(name, kernel, settings.device, seconds, in_process=settings.in_process)
    return modules


def event_lines(target: str | None, *, as_json: bool) -> EventLines | None:
    """Return the listener that --events asks for; it goes on without its file where that cannot be written any more.

    Raises:
        BadArgument: it cannot be written.
    """
    if target is None:
        return None
    from attnfuzz.harness.report.lines import EventLines

    if target == "-":
        if as_json:
            raise reject("events", target, "the JSON of --json would be among them", "give --events a file, or leave --json out")
        return EventLines(lambda line: echo(line, nl=False), JSON_FORMAT)
    file = writable(target, "events").open("w", encoding="utf-8", buffering=1)  # as long as the process lives

    def write(line: str) -> None:
        try:
            file.write(line)
        except OSError as error:
            echo(f"warning: {target}: events cannot be written any more ({error.strerror})", err=True)
            lines.stop()

    lines = EventLines(write, JSON_FORMAT)
    return lines


def announce_run(does: str, kernels: tuple[str, ...], seed: int, verbosity: Verbosity, *, as_json: bool) -> None:
    """Say at once what is about to run, and its seed."""
    announce(f"{does} {', '.join(kernels) or 'all kernels'} with seed {seed}", verbosity, as_json=as_json)


def known_failures(path: str, kernels: Sequence[Kernel], device: Device) -> Known:
    """Read the ledger at `path`, for a run on `device`."""
    from attnfuzz.harness.gate.known import read_known

    return read_known(Path(path), kernels, device, date.today())


def campaign(
    asked: Asked,
    settings: Any,
    known: Known | None,
    table: Path | None,
    lines: EventLines | None = None,
    *,
    as_json: bool,
    verbosity: Verbosity = "normal",
    group: Any = None,
    keep: Callable[[CampaignFinished], dict[str, AdapterModule]] | None = None,
) -> int:
    """Run a campaign and show it; returns the exit code.

    `group` makes its workers, as in `run_campaign`; `keep` returns modules that are shown behind the result, by kernel.
    """
    on_stdout = as_json or click.get_current_context().params.get("events") == "-"
    from attnfuzz.harness.campaign.campaign import run_campaign
    from attnfuzz.harness.campaign.events import KernelBroke
    from attnfuzz.harness.gate.known import LedgerResult
    from attnfuzz.harness.report.figures import Figures
    from attnfuzz.harness.report.terminal import Terminal

    terminal = Terminal(console(stderr=on_stdout), live=False if on_stdout else None, verbosity=verbosity)
    if (line := project_line()) and verbosity != "quiet":
        terminal.console.print(line, highlight=False, soft_wrap=True, markup=False)
    figures = Figures(known.covers) if known else Figures()
    with contextlib.closing(terminal), _recorder(settings) as recorder:
        broken = [KernelBroke(*each) for each in asked.broken]
        listener = to_all(interim.listen, terminal, recorder, figures, *filter(None, [lines]))
        finished = run_campaign(asked.kernels, settings, listener, group=group, broken=broken)
    result = known.judge(finished, settings) if known else LedgerResult(((),) * len(finished.findings))
    modules = {} if keep is None else keep(finished)
    for name, module in modules.items():
        _show_module(terminal.console, name, module)
    if known:
        _show_ledger(terminal.console, known, result)
    if as_json:
        adapters = {name: each.text for name, each in modules.items()}
        echo_json({**_run_object(finished, figures, known, result), "adapters": adapters})
    if table is not None:
        failures = [failure for failure, waivers in zip(finished.findings, result.waivers, strict=True) if not waivers]
        notes = [*result.entries, *(text for text, _ in result.wrong), *result.notes]
        write_file(table, figures.markdown(finished, _command(settings.device, settings.seed), failures, notes), "table")
    untried = () if settings.may_be_empty else finished.untried
    late = _late(finished) if not asked.named and len(untried) < len(finished.summaries) else set()
    for kernel, reason in untried:
        echo(f"{'note' if kernel in late else 'error'}: kernel={kernel!r}: {reason}", err=True)
    if finished.not_kept:
        # Only the terminal says so: a machine must not take what is in the folder for all failures.
        return WRONG_USE
    if finished.lost or result.wrong or not all(result.waivers):
        return FAILURES
    if finished.broken or result.broken or {kernel for kernel, _ in untried} - late:
        return WRONG_USE
    return INTERRUPTED if finished.interrupted or result.interrupted else CLEAN


def _show_module(terminal: Console, name: str, module: AdapterModule) -> None:
    lines = [f"\nto keep {name} as a kernel, in a module of your own (attnfuzz run MODULE:KERNEL):\n", module.text]
    if module.suggestions:
        lines.append(f"\n{', '.join(module.suggestions)}: not fuzzed yet, each worked where it was tried once")
    if module.failed:
        lines.append(f"not fuzzed, wrong or an error where it was tried once: {', '.join(module.failed)}")
    if module.untried:
        lines.append(f"not tried: {', '.join(module.untried)}; attnfuzz check-adapter tries them")
    terminal.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)


def _late(finished: CampaignFinished) -> set[str]:
    """Kernels of which no variant was compiled in the time: of all that are listed, some may be too slow for a short budget."""
    return {each.kernel for each in finished.summaries if each.unreached and not each.cases}


def _show_ledger(terminal: Console, known: Known, result: LedgerResult) -> None:
    for text in (*result.entries, *result.notes):
        terminal.print(f"[yellow]{escape(text)}[/]", highlight=False, soft_wrap=True)
    for text, line in result.wrong:
        where = f"{known.ledger.path}:{line}: " if line else f"{known.ledger.path}: "
        terminal.print(f"[red]{escape(where + text)}[/]", highlight=False, soft_wrap=True)
    errors = counted(len(result.wrong), "ledger error")
    counts = f"{sum(map(bool, result.waivers))} of {counted(len(result.waivers), 'failure')} known, {errors}"
    terminal.print(f"{known.ledger.path}: {counts}", highlight=False, soft_wrap=True, markup=False)


def _run_object(finished: CampaignFinished, figures: Figures, known: Known | None, result: LedgerResult) -> dict[str, Any]:
    run = machine.campaign_object(finished)
    for row in run["kernels"]:
        row["wrong"] = figures.of(row["kernel"])
    for failure, waivers in zip(run["failures"], result.waivers, strict=True):
        failure["known"] = [asdict(each) for each in waivers]
    return {
        **run,
        "project": project_object(),
        "ledger": str(known.ledger.path) if known else None,
        "ledger_errors": [{"error": text, "line": line} for text, line in result.wrong],
        "notes": [*result.entries, *result.notes],
    }


def _command(device: Device, seed: int) -> str:
    """The command line as it was given, less where results go, with the seed that was drawn."""
    context = click.get_current_context()
    words = ["attnfuzz", context.command.name or "run", *context.params["kernels"]]
    for option in context.command.params:
        name, value = str(option.name), context.params[str(option.name)]
        left_out = name in ("kernels", "device", "out", "table", "events", "as_json")
        if not left_out and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            values = value if isinstance(value, tuple) else (value,)
            words += [word for each in values for word in (option.opts[0], *([] if each is True else [str(each)]))]
    drawn = [] if "--seed" in words else ["--seed", str(seed)]
    return shlex.join([*words, *drawn, "--device", device])


def _recorder(settings: Any) -> Recorder:
    from attnfuzz.harness.report.recorder import Recorder

    return Recorder(settings.out, lambda text: echo(f"warning: {text}", err=True))


@click.command("demo")
@out_option
@seed_option
@json_option
def demo_command(out: str, seed: int, as_json: bool) -> None:
    """Find, shrink, show and reproduce a real bug planted in a copy of triton.varlen; exit 0 if all of that worked."""
    from attnfuzz.harness.campaign.campaign import run_campaign
    from attnfuzz.harness.campaign.settings import Settings
    from attnfuzz.harness.report.terminal import Terminal

    device: Device = "cuda" if has_cuda() else "cpu"
    settings = Settings(device=device, max_examples=150, max_failures=1, seed=seed, out=f"{out}/demo", replay=False)
    terminal = console(stderr=as_json)
    if not as_json:
        terminal.print("A sequence without queries returns before its dK and dV are written (flash-attention issue 2421).\n")
    with contextlib.closing(Terminal(terminal, tried=False)) as shown, _recorder(settings) as recorder:
        finished = run_campaign([registry.get("demo.varlen")], settings, to_all(shown, recorder))
    planted = [each for each in finished.findings if each.identity.kind == "unwritten" and each.identity.output in ("dk", "dv")]
    reproduced = [_again(each.path, device, terminal) for each in planted if each.path]
    worked = bool(reproduced) and all(reproduced)
    if as_json:
        echo_json({**machine.campaign_object(finished), "reproduced": worked})
    else:
        terminal.print("found, shrunk and reproduced" if worked else "[red]the planted bug was not found and reproduced[/]")
    click.get_current_context().exit(CLEAN if worked else FAILURES)


def _again(path: str, device: Device, terminal: Console) -> bool:
    """Whether the case file fails again in a fresh process."""
    command = [sys.executable, "-m", "attnfuzz.harness.cli", "repro", path, "--device", device]
    terminal.print(f"\n$ attnfuzz repro {path}", highlight=False, soft_wrap=True, markup=False)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    terminal.print(done.stdout.rstrip() or done.stderr.rstrip(), highlight=False, markup=False, soft_wrap=True)
    return done.returncode == FAILURES
