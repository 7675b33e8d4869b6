"""Every kernel, variant and Config to machine code, without a GPU: what is compiled, in child processes, and what came of it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from attnfuzz.harness.campaign.corpus import Corpus
from attnfuzz.harness.compile.child import AT, Lowered
from attnfuzz.harness.core.environment import versions
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.isolated import memory_cap
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.harness.isolation.outcomes import ChildOSError, Death, Error, Outcome, Task, death_failure, exception_of
from attnfuzz.harness.isolation.supervisor import Supervisor
from attnfuzz.harness.isolation.tasks import preloads
from attnfuzz.harness.judge.failure import Failure, Kind
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.lowering import ARCHITECTURES, Lowers, capability, shared_limit
from attnfuzz.kernels.problem import LAYOUTS, Layout, Problem, reject
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.shapes import MODIFIED, all_variants, covering, modified, pool

__all__ = ["DEADLINE", "Job", "Left", "Row", "architectures_of", "case_file", "compiled", "default_width", "jobs_of", "planned"]

DEADLINE = 600.0
"""Seconds that all functions of one variant may take together, unless told otherwise."""
_FEW = 3
"""Variants in other forms that are compiled to cover a kernel."""
_BLOCK = 128
"""Whole blocks of every mask."""


@dataclass(frozen=True, slots=True)
class Job:
    """One variant of a kernel, for one architecture."""

    case: Case
    arch: str
    key: str


@dataclass(frozen=True, slots=True)
class Left:
    """A kernel that is not compiled, and why. `missing`: a compiler is not on this machine, else there is nothing to compile."""

    kernel: str
    reason: str
    missing: bool = False


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One function of one variant on one architecture: what `--json` and baselines hold."""

    kernel: str
    key: str
    """The compile key."""
    config: dict[str, Any]
    arch: str
    function: str
    """Empty where all of them failed at once."""
    ok: bool
    seconds: float
    registers: int | None = None
    spills: int | None = None
    """Bytes stored and loaded by a thread for want of registers."""
    shared: int | None = None
    """Bytes of a block, static and dynamic."""
    shared_limit: int
    tensor_core: str | None = None
    races: list[str] | None = None
    """Races that the compiler reports, or that its output shows; None: not looked for."""
    error: str | None = None
    dtype: str = ""
    dims: tuple[int, int] = (0, 0)
    causal: bool = False
    cached: bool = False
    kind: str | None = None
    """Of the failure, where there is one: "compile-error"; "hang", "crash" or "out-of-memory" of the compiler."""
    case: str | None = None
    """The case file of a failure."""


def architectures_of(kernel: Kernel) -> tuple[str, ...]:
    """What it is compiled for."""
    return kernel.capabilities.architectures or ARCHITECTURES


def planned(
    kernels: Sequence[Kernel], asked: Sequence[str] | None, *, most: int | None = None, cover: bool = False
) -> tuple[tuple[Job, ...], tuple[Left, ...]]:
    """What is compiled, kernel by kernel, and which kernels are not.

    Args:
        kernels: in this order.
        asked: architectures; None: all that a kernel declares.
        most: variants of a kernel for an architecture; None: all.
        cover: as few variants as show every Config, dtype, mask and dims of a kernel.

    Raises:
        BadArgument: an architecture is unknown; both `most` and `cover`.
    """
    for arch in asked or ():
        capability(arch)
    if cover and most is not None:
        raise reject("cover", True, f"{most} variants are not as many as show everything", "leave --cover out, or --max")
    jobs: list[Job] = []
    left: list[Left] = []
    for kernel in kernels:
        reason = why_left(kernel)
        if reason is not None:
            left.append(reason)
            continue
        declared = kernel.capabilities.architectures
        wanted = [arch for arch in asked or architectures_of(kernel) if declared is None or arch in declared]
        if not wanted:
            left.append(Left(kernel.name, f"it declares {', '.join(declared or ())} only"))
            continue
        found = jobs_of(kernel, most, cover=cover)
        jobs += [Job(case, arch, key) for arch in wanted for key, case in found.items()]
    return tuple(jobs), tuple(left)


def why_left(kernel: Kernel) -> Left | None:
    """Why it cannot be compiled here, or None."""
    if "cuda" not in kernel.capabilities.devices:
        return Left(kernel.name, "it does not run on CUDA")
    if not isinstance(kernel, Lowers):
        return Left(kernel.name, "not lowered: it has no `lower` (attnfuzz.kernels.lowering.Lowers)")
    reason = kernel.cannot_lower()
    return Left(kernel.name, f"not lowered: {reason}", missing=True) if reason else None


def jobs_of(kernel: Kernel, most: int | None = None, *, cover: bool = False) -> dict[str, Case]:
    """Cases by compile key: each variant and Config; then some again in other forms that change the code.

    These are score and mask functions as a campaign of seed 0 would draw them, tensors that are not contiguous, and lengths
    that are whole blocks, 40 of each, or a few to cover.
    """
    can = kernel.capabilities
    variants = all_variants(kernel, "cuda")
    if cover:
        variants = covering(variants)
    elif most is not None:
        variants = pool(variants, most, 0)
    count = _FEW if cover else MODIFIED
    some = pool(variants, count, 0)
    problems = [(each, each.problem(can)) for each in variants]
    if most is None:
        with_functions = [each for each in modified(some, kernel, "cuda", 0) if each.modifiers]
        problems += [(each, each.problem(can)) for each in (with_functions[:count] if cover else with_functions)]
        problems += [(each, _whole(each.problem(can))) for each in some]
        if can.layouts:
            problems += [(each, _strided(each.problem(can))) for each in some]
    found: dict[str, Case] = {}
    for variant, problem in problems:
        if kernel.supports(problem, variant.config, "cuda") is None:
            key = kernel.compile_key(problem, variant.config)
            found.setdefault(key, Case(kernel=kernel.name, problem=problem, config=variant.config))
    return found


def _whole(problem: Problem) -> Problem:
    return replace(problem, seqlens_q=(_BLOCK,), seqlens_k=(_BLOCK,))


def _strided(problem: Problem) -> Problem:
    return replace(problem, **dict.fromkeys(LAYOUTS, Layout(pitch=8)))


def compiled(jobs: Sequence[Job], width: int, *, deadline: float = DEADLINE) -> Iterator[tuple[Job, list[Row]]]:
    """Compile, `width` variants at once, each in a child process; yields each with its rows as it is done.

    Raises:
        BadArgument: a child cannot find a kernel, or a tool is missing.
        ExecutionError: the harness itself failed in a child.
    """
    if not jobs:
        return
    backends = {registry.get(each.case.kernel).backend for each in jobs}
    # Triton is compiled here, whatever this process has it for; no fork survives a pool of threads.
    variables = {"TRITON_INTERPRET": "0"} | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    forkserver = Forkserver(_preloads(backends), variables)
    supervisor = Supervisor(forkserver, memory=memory_cap(), spares=0)
    tasks = [
        Task(
            "attnfuzz.harness.compile.child:lower",
            {
                "kernel": shipped(each.case.kernel),
                "problem": msgspec.to_builtins(each.case.problem),
                "config": dict(each.case.config),
                "arch": each.arch,
            },
            {"compile": deadline},
        )
        for each in jobs
    ]
    try:
        for index, outcome in supervisor.run_all(tasks, max(1, min(width, len(tasks)))):
            yield jobs[index], _rows(jobs[index], outcome)
    finally:
        supervisor.close()


def _preloads(backends: Collection[str]) -> list[str]:
    """What a Trial needs besides is not needed here."""
    return ["torch", "attnfuzz.harness.compile.child", *preloads("cuda", backends)[1:]]


def default_width() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _rows(job: Job, outcome: Outcome) -> list[Row]:
    if isinstance(outcome, Error):
        error = exception_of(outcome)
        if isinstance(error, ChildOSError):
            raise reject("cache", "compile", outcome.message, "see that the cache and the temporary folder can be written")
        raise error
    if isinstance(outcome, Death):
        failure = death_failure(job.case.kernel, outcome)
        function = re.findall(rf"^{AT}(.+)$", outcome.output, re.MULTILINE)
        text = f"the compiler: {failure.message}"
        return [_row(job, Lowered(function=function[-1] if function else "", seconds=outcome.seconds, error=text), failure.kind)]
    return [_row(job, msgspec.convert(each, Lowered)) for each in outcome.result]


def _row(job: Job, found: Lowered, kind: Kind = "compile-error") -> Row:
    problem, figures = job.case.problem, found.figures
    return Row(
        kernel=job.case.kernel,
        key=job.key,
        config=dict(job.case.config),
        arch=job.arch,
        function=found.function,
        ok=found.error is None,
        seconds=round(found.seconds, 2),
        **({} if figures is None else msgspec.structs.asdict(figures)),
        shared_limit=shared_limit(job.arch),
        races=None if found.races is None else list(found.races),
        error=found.error,
        dtype=problem.dtype,
        dims=(problem.dim_qk, problem.dim_v),
        causal=problem.causal is not None,
        cached=found.cached,
        kind=None if found.error is None else kind,
    )


def case_file(corpus: Corpus, job: Job, row: Row) -> str:
    """Keep a failure as a case file: `attnfuzz compile --case` compiles it again."""
    assert row.error is not None
    check = f"{row.function or 'all functions'} for {row.arch}"
    kind: Kind = msgspec.convert(row.kind, Kind)
    failure = Failure(kernel=row.kernel, kind=kind, check=check, message=row.error)
    verdict = Verdict(status="fail", failures=(failure,), device=row.arch, versions=versions())
    return str(corpus.write(job.case, verdict, failure.identity, minimal=False, seed=0))
