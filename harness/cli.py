"""The command line. Exit codes: 0 clean, 1 failures, 2 wrong use or a broken environment, 130 interrupted with nothing found."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from attnfuzz.harness.environment import has_cuda, resolve_device, versions
from attnfuzz.harness.failure import printable
from attnfuzz.harness.jsontext import dumps
from attnfuzz.harness.report import machine
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.problem import BadArgument, reject

__all__ = ["main"]

CLEAN, FAILURES, WRONG_USE, INTERRUPTED = 0, 1, 2, 130

_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
_device = click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="auto|cpu|cuda",
    help="Where the kernels run; auto takes CUDA if there is one.",
)
_out = click.option("--out", default=".attnfuzz", show_default=True, metavar="DIR", help="Folder of case files.")
_in_process = click.option(
    "--in-process", is_flag=True, help="No child processes, for a debugger: a kernel that crashes or hangs takes attnfuzz along."
)
_deadline = click.option(
    "--deadline", metavar="60s", help="Time that a stage of a trial may take before it hangs [default: 60s]."
)
_no_memory_check = click.option(
    "--no-memory-check", is_flag=True, help="Do not check every access to memory of interpreted kernels (Triton on the CPU)."
)
_seed = click.option(
    "--seed", default=0, show_default=True, metavar="N", type=int, help="Same seed, same Cases in the same order."
)


class _Commands(click.Group):
    """Every command ends with a clear message and exit code 2 on wrong use or a broken environment, 130 on Ctrl-C."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Run, and exit with the command's code."""
        given = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        _end_like_ctrl_c(signal.SIGTERM)
        try:
            code = super().main(args=given, prog_name=prog_name, **extra)
        except click.Abort:
            code = INTERRUPTED
        except click.ClickException as error:
            code = _wrong_use(error.format_message(), as_json="--json" in given, show=error.show)
        except (BadArgument, OSError) as error:
            code = _wrong_use(_text(error), as_json="--json" in given)
        except Exception as error:
            if os.environ.get("ATTNFUZZ_DEBUG"):
                raise
            text = f"internal error: {type(error).__name__}: {error}".strip()
            remedy = "This is a fault of attnfuzz, not of a kernel; set ATTNFUZZ_DEBUG=1 to see where."
            code = _wrong_use(f"{text}\n{remedy}", as_json="--json" in given)
        sys.exit(code if isinstance(code, int) else CLEAN)


def _end_like_ctrl_c(number: signal.Signals) -> None:
    """What was found until then is reported, and no child outlives the run."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_DFL:
        signal.signal(number, interrupt)


def _text(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}; check that the path exists and can be read and written"


def _wrong_use(message: str, *, as_json: bool, show: Callable[[], None] | None = None) -> int:
    """Say what is wrong, for a machine too if asked; returns the exit code."""
    if as_json:
        click.echo(dumps({"error": message}))
    if show is not None:
        show()
    else:
        click.echo(f"error: {printable(message)}", err=True)
    return WRONG_USE


def _console(*, stderr: bool = False) -> Console:
    """The terminal's own width; wide enough for every table where the output is a file or a pipe."""
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120
    return console


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(versions().get("attnfuzz", "unknown"), prog_name="attnfuzz")
def main() -> None:
    """Differential correctness and fuzz testing of attention kernels against float64 oracles."""


@main.command("list")
@_json
def list_command(as_json: bool) -> None:
    """List the kernels, and where each can run on this machine."""
    rows = [_list_row(name) for name in registry.names()]
    if as_json:
        click.echo(dumps({"kernels": rows}))
        return
    from attnfuzz.harness.report.terminal import kernel_table

    _console().print(kernel_table(rows))


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


@main.command("run")
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@_device
@click.option("--budget", metavar="60s", help="Time for trials, compiles and shrinking not counted [default: the profile's].")
@click.option("--max-examples", type=int, metavar="N", help="Distinct Cases per kernel, instead of or besides a budget.")
@click.option("--max-failures", type=int, metavar="N", help="Failures after which a kernel's turn ends.")
@_seed
@click.option("--profile", default="quick", show_default=True, metavar="quick|gate|nightly", help="How much is tried.")
@_out
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Compiles at once [default: the cores].")
@_deadline
@click.option(
    "--memory",
    type=click.FloatRange(1, 1 << 20),
    metavar="GIB",
    help="Memory that a child process may hold, in GiB [default: half of the machine's].",
)
@_in_process
@_no_memory_check
@_json
def run_command(
    kernels: tuple[str, ...],
    device: str,
    budget: str | None,
    max_examples: int | None,
    max_failures: int | None,
    seed: int,
    profile: str,
    out: str,
    jobs: int | None,
    deadline: str | None,
    memory: float | None,
    in_process: bool,
    no_memory_check: bool,
    as_json: bool,
) -> None:
    """Fuzz kernels (default: all that can run here) and shrink what fails to minimal Cases."""
    from attnfuzz.harness import settings as options

    settings = options.Settings(
        device=resolve_device(device),
        profile=options.profile(profile).name,
        budget=None if budget is None else options.duration(budget),
        max_examples=max_examples,
        max_failures=max_failures,
        seed=seed,
        out=out,
        jobs=jobs,
        deadline=None if deadline is None else options.duration(deadline, "deadline"),
        memory=None if memory is None else _bytes(memory),
        in_process=in_process,
        memory_check=not no_memory_check,
    )
    chosen = [registry.get(name) for name in kernels or registry.names()]
    click.get_current_context().exit(_campaign(chosen, settings, as_json=as_json))


def _bytes(gib: float) -> int:
    if gib != gib:
        raise reject("memory", gib, "it is no number", "give GiB, such as 8")
    return int(gib * (1 << 30))


def _campaign(kernels: list[Kernel], settings: Any, *, as_json: bool) -> int:
    from attnfuzz.harness.campaign import campaign
    from attnfuzz.harness.report.terminal import Terminal

    if as_json:
        finished = campaign(kernels, settings, Terminal(_console(stderr=True), live=False))
        click.echo(dumps(machine.campaign_object(finished)))
    else:
        finished = campaign(kernels, settings, Terminal(_console()))
    if finished.found or finished.lost:
        return FAILURES
    if finished.broken:
        return WRONG_USE
    return INTERRUPTED if finished.interrupted else CLEAN


@main.command("show")
@click.argument("case", metavar="CASE")
@_json
def show_command(case: str, as_json: bool) -> None:
    """Show a case file: the Problem, the values, the Config, and what was found with it."""
    from attnfuzz.harness.corpus import read_case
    from attnfuzz.harness.report.terminal import show_stored

    stored = read_case(case)
    if as_json:
        click.echo(dumps({"case": stored.case.to_object(), "found": stored.found, "path": str(stored.path)}))
    else:
        show_stored(_console(), stored)


@main.command("repro")
@click.argument("case", metavar="CASE")
@_device
@_deadline
@_in_process
@_no_memory_check
@click.option(
    "--sanitize",
    metavar="memcheck|racecheck|initcheck",
    help="Run it under NVIDIA's compute-sanitizer: exit 0 clean, 1 if that reports anything [deadline: 10m for all of it].",
)
@_json
def repro_command(
    case: str,
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
        show_reproduction(_console(), stored, done)
    click.get_current_context().exit(CLEAN if done.outcome == "FIXED" else FAILURES)


@main.command("calibrate")
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@_device
@click.option("--max-examples", type=int, default=1000, show_default=True, metavar="N", help="Distinct Cases per kernel.")
@_seed
@click.option("--profile", default="quick", show_default=True, metavar="quick|gate|nightly", help="How large Cases are.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="J", help="Kernels at once [default: a quarter of the cores].")
@_out
@click.option("--known", metavar="DIR", help="Kept defects of PyTorch's kernels [default: tests/corpus/peers, if there].")
@click.option("--write", metavar="FILE", help="Write the table as Markdown.")
@_json
def calibrate_command(
    kernels: tuple[str, ...],
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
    from attnfuzz.harness.calibrate import calibrate, planned
    from attnfuzz.harness.corpus import Corpus
    from attnfuzz.harness.known import found_at
    from attnfuzz.harness.report import calibrate as report
    from attnfuzz.harness.settings import profile as profile_called
    from attnfuzz.harness.turn import Plan

    plan = Plan(
        device=resolve_device(device),
        cases=max_examples,
        seed=seed,
        jobs=planned(jobs),
        profile=profile_called(profile).name,
        out=out,
        known=found_at(known),
    )
    chosen = [registry.get(name) for name in dict.fromkeys(kernels or registry.names())]
    file = None if write is None else _writable(write)
    Corpus(out).check()
    with report.CalibrationProgress(_console(stderr=as_json)) as progress:
        done = calibrate(chosen, plan, progress)
    if as_json:
        click.echo(dumps(report.calibration_object(done)))
    else:
        report.show_calibration(_console(), done)
    if file is not None:
        command = ["attnfuzz", "calibrate", *kernels, "--device", plan.device, "--max-examples", str(max_examples)]
        command += [*(["--seed", str(seed)] if seed else []), *(["--profile", profile] if profile != "quick" else [])]
        file.write_text(report.markdown(done, shlex.join(command)), encoding="utf-8")
    code = FAILURES if done.failed else WRONG_USE if done.broken else INTERRUPTED if done.interrupted else CLEAN
    click.get_current_context().exit(code)


def _writable(path: str) -> Path:
    """Known before the run, which takes long, that its result can be kept."""
    file = Path(path)
    if file.is_dir():
        raise reject("write", path, "it is a folder", "give a file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8"):
            return file
    except OSError as error:
        raise reject("write", path, f"it cannot be written ({error.strerror})", "give a file that can be written") from None


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
        show_sanitized(_console(), stored, done)
    return CLEAN if done.clean else FAILURES


@main.group("selftest")
def selftest_group() -> None:
    """Try attnfuzz itself on faults that are known."""


@selftest_group.command("faults")
@click.argument("kernels", nargs=-1, metavar="[FAULT]...")
@_device
@_json
def selftest_faults_command(kernels: tuple[str, ...], device: str, as_json: bool) -> None:
    """Kernels that crash, hang, eat memory or lie, one fault each (default: all): exit 0 only if every row is right."""
    import msgspec

    from attnfuzz.harness.report.selftest import FaultProgress, show_faults
    from attnfuzz.harness.selftest import faults

    progress = FaultProgress(_console(stderr=as_json))
    with progress:
        done = faults(resolve_device(device), progress, kernels)
    if as_json:
        click.echo(dumps({"right": done.right, "leaks_wrong": list(done.leaks.wrong), **msgspec.to_builtins(done)}))
    else:
        show_faults(_console(), done)
    click.get_current_context().exit(CLEAN if done.right else FAILURES)


@selftest_group.command("verdict")
@click.option("--cases", default=3000, show_default=True, type=int, metavar="N", help="Correct cases; faulty ones in proportion.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Processes [default: the cores].")
@_seed
@_json
def selftest_verdict_command(cases: int, jobs: int | None, seed: int, as_json: bool) -> None:
    """Judge emulated kernels, right ones and 36 that are wrong by little: exit 0 only if none is accused and all are found."""
    if seed < 0:
        raise reject("seed", seed, "it cannot be negative", "give 0 or more")
    jobs = None if jobs is None else min(jobs, len(os.sched_getaffinity(0)))
    from attnfuzz.harness.report.selftest_verdict import CaseProgress, show_verdict
    from attnfuzz.harness.selftest_verdict import machine_object, verdict

    with CaseProgress(_console(stderr=as_json)) as progress:
        done = verdict(cases, seed=seed, jobs=jobs, progress=progress)
    if as_json:
        click.echo(dumps(machine_object(done)))
    else:
        show_verdict(_console(), done)
    click.get_current_context().exit(CLEAN if done.right else FAILURES)


@selftest_group.command("memory")
@click.argument("faults", nargs=-1, metavar="[FAULT]...")
@click.option("--cases", default=200, show_default=True, type=int, metavar="N", help="Cases of each kernel that has no fault.")
@_seed
@_json
def selftest_memory_command(faults: tuple[str, ...], cases: int, seed: int, as_json: bool) -> None:
    """Nine faults of memory in copies of triton.varlen, and the Triton kernels as they are, all on the CPU.

    Exit 0 only if each fault is found as what it is, with its source line, and nothing is found in the kernels.
    """
    import msgspec

    from attnfuzz.harness.report.selftest import FaultProgress
    from attnfuzz.harness.report.selftest_memory import show_memory
    from attnfuzz.harness.selftest_memory import memory

    with FaultProgress(_console(stderr=as_json)) as progress:
        done = memory(progress, faults, cases, seed)
    if as_json:
        click.echo(dumps({"right": done.right, **msgspec.to_builtins(done)}))
    else:
        show_memory(_console(), done)
    click.get_current_context().exit(CLEAN if done.right else FAILURES)


@main.command("demo")
@_out
@_seed
@_json
def demo_command(out: str, seed: int, as_json: bool) -> None:
    """Find, shrink, show and reproduce a real bug planted in a copy of triton.varlen; exit 0 if all of that worked."""
    from attnfuzz.harness.campaign import campaign
    from attnfuzz.harness.report.terminal import Terminal
    from attnfuzz.harness.settings import Settings

    device: Device = "cuda" if has_cuda() else "cpu"
    settings = Settings(device=device, max_examples=150, max_failures=1, seed=seed, out=f"{out}/demo", replay=False)
    console = _console(stderr=as_json)
    if not as_json:
        console.print("A sequence without queries returns before its dK and dV are written (flash-attention issue 2421).\n")
    finished = campaign([registry.get("demo.varlen")], settings, Terminal(console))
    planted = [each for each in finished.found if each.identity.kind == "unwritten" and each.identity.output in ("dk", "dv")]
    reproduced = [_again(each.path, device, console) for each in planted if each.path]
    worked = bool(reproduced) and all(reproduced)
    if as_json:
        click.echo(dumps({**machine.campaign_object(finished), "reproduced": worked}))
    else:
        console.print("found, shrunk and reproduced" if worked else "[red]the planted bug was not found and reproduced[/]")
    click.get_current_context().exit(CLEAN if worked else FAILURES)


def _again(path: str, device: Device, console: Console) -> bool:
    """Whether the case file fails again in a fresh process."""
    command = [sys.executable, "-m", "attnfuzz.harness.cli", "repro", path, "--device", device]
    console.print(f"\n$ attnfuzz repro {path}", highlight=False, soft_wrap=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    console.print(done.stdout.rstrip() or done.stderr.rstrip(), highlight=False, markup=False, soft_wrap=True)
    return done.returncode == FAILURES


if __name__ == "__main__":
    main()
