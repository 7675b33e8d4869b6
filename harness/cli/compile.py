"""`attnfuzz compile`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnfuzz.harness.cli.options import (
    CLEAN,
    FAILURES,
    INTERRUPTED,
    WRONG_USE,
    check_owner,
    console,
    json_option,
    kernel_option,
    out_option,
    writable,
    write_file,
    writing,
)
from attnfuzz.harness.core.environment import versions
from attnfuzz.harness.core.text import dumps
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import reject

if TYPE_CHECKING:
    from attnfuzz.harness.compile.compile import Job, Left, Row

__all__ = ["compile_command"]

_COMPILERS = ("triton", "tilelang", "nvcc")


@click.command("compile")
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("--arch", metavar="sm_80,sm_90a,sm_100a", help="Architectures [default: all that each kernel declares].")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Compiles at once [default: the cores].")
@click.option("--max", "most", type=click.IntRange(min=1), metavar="N", help="Variants of a kernel, well spread [default: all].")
@click.option("--cover", is_flag=True, help="As few variants as show every Config, dtype, mask and dims [default: all together].")
@click.option("--deadline", metavar="600s", help="Time that all functions of a variant may take together [default: 600s].")
@click.option(
    "--baseline", metavar="FILE", help="Fail only for what is worse than there: a failure, spills, a lost tensor-core path."
)
@click.option("--write", "written", metavar="FILE", help="Write the table there: a baseline for later.")
@click.option("--markdown", metavar="FILE", help="Write the table there, for people: into a page between its marks.")
@click.option("--case", metavar="FILE", help="Compile the kernel of one case file again: FIXED (exit 0) or FAILED (1).")
@kernel_option
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
    case: str | None,
    owner: str | None,
    out: str,
    as_json: bool,
) -> None:
    """Compile kernels (default: all) to machine code, without a GPU: registers, spills, shared memory, tensor cores."""
    from attnfuzz.harness.campaign.corpus import Corpus
    from attnfuzz.harness.campaign.settings import duration
    from attnfuzz.harness.compile import baseline as compiling_baseline
    from attnfuzz.harness.compile import compile as compiling

    # All that can be wrong with the arguments, before compiles that take hours.
    seconds = compiling.DEADLINE if deadline is None else duration(deadline, "deadline")
    before = None if baseline is None else compiling_baseline.read(baseline)
    targets = {name: writable(path, name) for name, path in (("write", written), ("markdown", markdown)) if path is not None}
    corpus = Corpus(Path(out) / "compile")
    corpus.check()
    asked = None if arch is None else _architectures(arch)
    if owner is not None and case is None:
        raise reject("kernel", owner, "it is for --case", "give the kernel without --kernel")
    planned, left = (
        _one(case, kernels, owner, asked) if case else compiling.planned(_kernels(kernels), asked, most=most, cover=cover)
    )
    rows, interrupted = _compile(planned, jobs, seconds, None if case else corpus, as_json=as_json)
    found: dict[str, Any] = {"rows": rows, "left": left, "versions": _compilers()}
    compared = None
    if before is not None and baseline is not None:
        chosen = {(each.case.kernel, each.arch) for each in planned}
        compared = compiling_baseline.compare(rows, before, baseline, found["versions"], chosen)
    if interrupted:
        for path in targets.values():
            if not path.stat().st_size:
                path.unlink()  # made to see that it can be written
    else:
        _write(targets, rows, left, found["versions"])
    _tell(rows, left, compared, case, as_json=as_json, interrupted=interrupted)
    failed = compared.worse if compared is not None else any(not each.ok for each in rows)
    # A gate must not pass on nothing.
    nothing = bool(kernels) and not rows
    if nothing and not interrupted:
        click.echo("error: nothing was compiled; name a kernel that is compiled for CUDA, and an architecture of it", err=True)
    broken = nothing or any(each.missing for each in left)
    code = FAILURES if failed else INTERRUPTED if interrupted else WRONG_USE if broken else CLEAN
    click.get_current_context().exit(code)


def _architectures(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    if not found:
        raise reject("arch", text, "it names no architecture", "give some, such as sm_80,sm_90a")
    return found


def _kernels(names: Sequence[str]) -> list[Any]:
    return [registry.get(name) for name in dict.fromkeys(names or registry.names())]


def _one(
    path: str, kernels: Sequence[str], owner: str | None, asked: Sequence[str] | None
) -> tuple[tuple[Job, ...], tuple[Left, ...]]:
    """The compile of a case file: for the architecture that it tells, unless one is asked for."""
    from attnfuzz.harness.campaign.corpus import read_case
    from attnfuzz.harness.compile.compile import Job, architectures_of, why_left
    from attnfuzz.kernels.lowering import capability

    if kernels:
        raise reject("case", path, "it names its own kernel", "leave the kernels out, or the case")
    stored = read_case(path)
    check_owner(owner, path, stored.case.kernel, stored.finding.target)
    kernel = registry.get(stored.case.kernel)
    if (reason := why_left(kernel)) is not None:
        return (), (reason,)
    if problem := kernel.supports(stored.case.problem, stored.case.config, "cuda"):
        raise reject("case", path, f"{kernel.name} does not take it: {problem}", "find it again with the kernel as it is now")
    told = stored.finding.device
    wanted = asked or ((told,) if re.fullmatch(r"sm_\d+[a-z]?", told) else architectures_of(kernel))
    for each in wanted:
        capability(each)
    key = kernel.compile_key(stored.case.problem, stored.case.config)
    return tuple(Job(stored.case, each, key) for each in wanted), ()


def _compile(planned: Sequence[Job], jobs: int | None, seconds: float, corpus: Any, *, as_json: bool) -> tuple[list[Row], bool]:
    """(rows, interrupted); what was found before Ctrl-C is kept."""
    import msgspec

    from attnfuzz.harness.compile import compile as compiling
    from attnfuzz.harness.compile.report import Progressing

    rows: list[Row] = []
    try:
        with Progressing(console(stderr=as_json), len(planned)) as progress:
            for job, found in compiling.compiled(planned, jobs or compiling.default_width(), deadline=seconds):
                kept = [
                    each
                    if each.ok or corpus is None
                    else msgspec.structs.replace(each, case=compiling.case_file(corpus, job, each))
                    for each in found
                ]
                rows += kept
                progress(job, kept)
    except KeyboardInterrupt:
        return rows, True
    rows.sort(key=lambda row: (row.kernel, row.arch, row.key, row.function))
    return rows, False


def _compilers() -> dict[str, str]:
    from attnfuzz.kernels.tilelang.lower import nvcc_version

    found = {**versions(), **({"nvcc": nvcc} if (nvcc := nvcc_version()) else {})}
    return {name: found[name] for name in _COMPILERS if name in found}


def _write(targets: dict[str, Path], rows: Sequence[Row], left: Sequence[Left], compilers: dict[str, str]) -> None:
    from attnfuzz.harness.compile import baseline as compiling_baseline
    from attnfuzz.harness.compile.report import markdown, placed

    if "write" in targets:
        with writing(targets["write"], "write"):
            compiling_baseline.write(targets["write"], rows, compilers)
    if "markdown" in targets:
        page = targets["markdown"]
        write_file(page, placed(page.read_text(encoding="utf-8"), markdown(rows, left, compilers, _command())), "markdown")


def _command() -> str:
    """The command line as it was given, less where the table goes."""
    context = click.get_current_context()
    words = ["attnfuzz", "compile", *context.params["kernels"]]
    for name, option in (("arch", "--arch"), ("most", "--max")):
        if context.params[name] is not None:
            words += [option, str(context.params[name])]
    if context.params["cover"]:
        words.append("--cover")
    return shlex.join(words)


def _tell(
    rows: Sequence[Row], left: Sequence[Left], compared: Any, case: str | None, *, as_json: bool, interrupted: bool
) -> None:
    import dataclasses

    import msgspec

    from attnfuzz.harness.compile.baseline import as_object
    from attnfuzz.harness.compile.report import show, show_compared

    if as_json:
        found: dict[str, Any] = {
            "rows": msgspec.to_builtins(list(rows)),
            "left": [dataclasses.asdict(each) for each in left],
            "versions": _compilers(),
            "interrupted": interrupted,
        }
        click.echo(dumps(found | ({} if compared is None else {"compared": as_object(compared)})))
        return
    terminal = console()
    show(terminal, rows, left)
    if compared is not None:
        show_compared(terminal, compared)
    if case is not None and rows:
        outcome = "[green]FIXED[/]" if all(each.ok for each in rows) else "[red]FAILED[/]"
        terminal.print(f"{outcome} {case}", highlight=False, soft_wrap=True)
    if interrupted:
        terminal.print("interrupted: nothing was written; what was compiled is in the cache", highlight=False)
