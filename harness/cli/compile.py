"""`attnfuzz compile`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnfuzz.harness.cli.complete import complete_cases, complete_kernels
from attnfuzz.harness.cli.options import (
    CLEAN,
    FAILURES,
    INTERRUPTED,
    WRONG_USE,
    Asked,
    asked_for,
    check_owner,
    console,
    echo_json,
    json_option,
    kernel_option,
    like_option,
    out_option,
    with_like,
    writable,
    write_file,
    writing,
)
from attnfuzz.harness.cli.streams import echo
from attnfuzz.harness.core.environment import versions
from attnfuzz.harness.core.signals import ending
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import reject

if TYPE_CHECKING:
    from attnfuzz.harness.compile.compile import Job, Left, Row

__all__ = ["compile_command"]

_COMPILERS = ("triton", "tilelang", "nvcc")
_MOST_REASONS = 3


@click.command("compile")
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...", shell_complete=complete_kernels)
@click.option("--arch", metavar="sm_80,sm_90a,sm_100a", help="Architectures [default: all that each kernel declares].")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Compiles at once [default: the cores].")
@click.option("--max", "most", type=click.IntRange(min=1), metavar="N", help="Variants of a kernel, spread out [default: all].")
@click.option("--cover", is_flag=True, help="Few variants that have every Config, dtype, mask and dims [default: all].")
@click.option("--deadline", metavar="600s", help="Time limit of all functions of a variant together [default: 600s].")
@click.option(
    "--baseline", metavar="FILE", help="Fail only for what is worse than in FILE: a failure, spills, a lost tensor-core path."
)
@click.option("--write", "written", metavar="FILE", help="Write the table to FILE, for a later --baseline.")
@click.option("--markdown", metavar="FILE", help="Write the table as Markdown, between the marks of an existing page.")
@click.option("--by-config", is_flag=True, help="In --markdown, a line for each function and Config [default: for each dtype].")
@click.option(
    "--case",
    metavar="FILE",
    shell_complete=complete_cases,
    help="Compile the kernel of one case file again: FIXED (exit 0) or FAILED (1).",
)
@kernel_option
@like_option
@out_option
@json_option
def compile_command(
    kernels: tuple[str, ...],
    arch: str | None,
    jobs: int | None,
    most: int | None,
    cover: bool,
    deadline: str | None,
    baseline: str | None,
    written: str | None,
    markdown: str | None,
    by_config: bool,
    case: str | None,
    owner: str | None,
    like: str | None,
    out: str,
    as_json: bool,
) -> None:
    """Compile kernels (default: all) to machine code, without a GPU: registers, spills, shared memory, tensor cores."""
    from attnfuzz.harness.campaign.corpus import Corpus
    from attnfuzz.harness.campaign.settings import duration
    from attnfuzz.harness.compile import baseline as compiling_baseline
    from attnfuzz.harness.compile import compile as compiling

    # All checks of the arguments come first: compiles take hours.
    seconds = compiling.DEADLINE if deadline is None else duration(deadline, "deadline")
    before = None if baseline is None else compiling_baseline.read(baseline)
    targets = {name: writable(path, name) for name, path in (("write", written), ("markdown", markdown)) if path is not None}
    corpus = Corpus(Path(out) / "compile")
    corpus.check()
    archs = None if arch is None else _architectures(arch)
    if by_config and markdown is None:
        raise reject("by-config", True, "it is how --markdown has its lines, and there is none", "give --markdown FILE too")
    if owner is not None and case is None:
        kernels = (*kernels, owner)
    kernels = with_like(kernels, like) if case is None else kernels
    if case:
        planned, left = _one(case, kernels, owner, like, archs)
    else:
        planned, left = _planned(asked_for(kernels), archs, most=most, cover=cover)
    uncaptured: dict[Left, None] = {}
    rows, interrupted = _compile(planned, jobs, seconds, None if case else corpus, uncaptured, as_json=as_json)
    left = (*left, *uncaptured)
    compilers, compared = _compilers(), None
    if before is not None and baseline is not None:
        chosen = {(each.case.kernel, each.arch) for each in planned}
        compared = compiling_baseline.compare(rows, before, baseline, compilers, chosen)
    # Where nothing was compiled, nothing passed, and an empty table would let anything pass later.
    nothing = not rows and not interrupted
    if not (interrupted or nothing):
        _write(targets, rows, left, compilers)
    _report(rows, left, compared, case, as_json=as_json, interrupted=interrupted)
    failed = compared.worse if compared is not None else any(not each.ok for each in rows)
    named = [each.kernel for each in left if kernels]
    if nothing:
        echo(f"error: {_why_nothing(case, left)}", err=True)
    elif named:
        echo(f"error: not compiled, though named: {', '.join(named)}", err=True)
    broken = nothing or bool(named) or any(each.missing for each in left)
    code = FAILURES if failed else INTERRUPTED if interrupted else WRONG_USE if broken else CLEAN
    click.get_current_context().exit(code)


def _architectures(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    if not names:
        raise reject("arch", text, "it names no architecture", "give some, such as sm_80,sm_90a")
    return names


def _planned(
    asked: Asked, architectures: Sequence[str] | None, *, most: int | None, cover: bool
) -> tuple[tuple[Job, ...], tuple[Left, ...]]:
    from attnfuzz.harness.compile.compile import Left, planned

    jobs, left = planned(asked.kernels, architectures, most=most, cover=cover)
    return jobs, (*left, *(Left(name, reason, missing=True) for name, reason in asked.broken))


def _why_nothing(case: str | None, left: Sequence[Left]) -> str:
    reasons = "".join(f"; {each.kernel}: {each.reason}" for each in left[:_MOST_REASONS])
    if case is not None:
        return f"case={case!r}: nothing was compiled{reasons}; name the architecture by --arch, or run the case by attnfuzz repro"
    return f"nothing was compiled{reasons}; name a kernel that is compiled for CUDA, and an architecture of it"


def _one(
    path: str, kernels: Sequence[str], owner: str | None, like: str | None, architectures: Sequence[str] | None
) -> tuple[tuple[Job, ...], tuple[Left, ...]]:
    """Return the compiles of a case file: for `architectures`, by default for the one that the file names."""
    from attnfuzz.harness.campaign.corpus import read_case
    from attnfuzz.harness.compile.compile import Job, architectures_of, why_left
    from attnfuzz.harness.trial.supports import with_config
    from attnfuzz.kernels.lowering import capability

    if kernels:
        raise reject("case", path, "it names its own kernel", "leave the kernels out, or the case")
    stored = read_case(path)
    check_owner(owner, path, stored.case.kernel, stored.finding.target, like)
    kernel = registry.get(stored.case.kernel)
    if (reason := why_left(kernel)) is not None:
        return (), (reason,)
    case = with_config(kernel, stored.case)
    if problem := kernel.supports(case.problem, case.config, "cuda"):
        raise reject("case", path, f"{kernel.name} does not take it: {problem}", "find it again with the kernel as it is now")
    device = stored.finding.device
    wanted = architectures or ((device,) if re.fullmatch(r"sm_\d+[a-z]?", device) else architectures_of(kernel))
    for each in wanted:
        capability(each)
    key = kernel.compile_key(case.problem, case.config)
    return tuple(Job(case, each, key) for each in wanted), ()


def _compile(
    planned: Sequence[Job], jobs: int | None, seconds: float, corpus: Any, left: dict[Left, None], *, as_json: bool
) -> tuple[list[Row], bool]:
    """Return (rows, interrupted): Ctrl-C keeps the rows until then. What cannot be compiled after all is added to `left`."""
    import msgspec

    from attnfuzz.harness.compile import compile as compiling
    from attnfuzz.harness.compile.report import Progressing

    rows: list[Row] = []
    try:
        with Progressing(console(stderr=as_json), len(planned)) as progress:
            width = jobs or compiling.default_width()
            for job, results in compiling.compiled(planned, width, deadline=seconds, left=lambda each: left.update({each: None})):
                kept = [
                    each
                    if each.ok or corpus is None
                    else msgspec.structs.replace(each, case=compiling.case_file(corpus, job, each))
                    for each in results
                ]
                rows += kept
                progress(job, kept)
            ending()
    except KeyboardInterrupt:
        ending()
        return rows, True
    rows.sort(key=lambda row: (row.kernel, row.arch, row.key, row.function))
    return rows, False


def _compilers() -> dict[str, str]:
    from attnfuzz.kernels.tilelang.lower import nvcc_version

    known = {**versions(), **({"nvcc": nvcc} if (nvcc := nvcc_version()) else {})}
    return {name: known[name] for name in _COMPILERS if name in known}


def _write(targets: dict[str, Path], rows: Sequence[Row], left: Sequence[Left], compilers: dict[str, str]) -> None:
    from attnfuzz.harness.compile import baseline as compiling_baseline
    from attnfuzz.harness.compile.report import markdown, placed

    if "write" in targets:
        with writing(targets["write"], "write"):
            compiling_baseline.write(targets["write"], rows, compilers)
    if "markdown" in targets:
        page = targets["markdown"]
        by_config = click.get_current_context().params["by_config"]
        table = markdown(rows, left, compilers, _command(), by_config=by_config)
        before = page.read_text(encoding="utf-8") if page.exists() else ""
        write_file(page, placed(before, table, _command()), "markdown")


def _command() -> str:
    """Return the command line, without the options that say where the table goes."""
    context = click.get_current_context()
    words = ["attnfuzz", "compile", *context.params["kernels"], *filter(None, [context.params["owner"]])]
    for name, option in (("arch", "--arch"), ("most", "--max")):
        if context.params[name] is not None:
            words += [option, str(context.params[name])]
    words += [f"--{name.replace('_', '-')}" for name in ("cover", "by_config") if context.params[name]]
    return shlex.join(words)


def _report(
    rows: Sequence[Row], left: Sequence[Left], compared: Any, case: str | None, *, as_json: bool, interrupted: bool
) -> None:
    import dataclasses

    import msgspec

    from attnfuzz.harness.compile.baseline import as_object
    from attnfuzz.harness.compile.report import show, show_compared

    if as_json:
        result: dict[str, Any] = {
            "rows": msgspec.to_builtins(list(rows)),
            "left": [dataclasses.asdict(each) for each in left],
            "versions": _compilers(),
            "interrupted": interrupted,
        }
        echo_json(result | ({} if compared is None else {"compared": as_object(compared)}))
        return
    from rich.markup import escape

    terminal = console()
    show(terminal, rows, left)
    if compared is not None:
        show_compared(terminal, compared)
    if case is not None and rows:
        outcome = "[green]FIXED[/]" if all(each.ok for each in rows) else "[red]FAILED[/]"
        terminal.print(f"{outcome} {escape(case)}", highlight=False, soft_wrap=True)
    if interrupted:
        terminal.print("interrupted: nothing was written; what was compiled is in the cache", highlight=False)
