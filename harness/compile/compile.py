"""Compile kernels, variants and Configs to machine code without a GPU, in child processes: jobs and their results."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from attnfuzz.harness.campaign.corpus import Corpus
from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.compile.child import AT, Lowered
from attnfuzz.harness.core.environment import versions
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.harness.isolation.memory_cap import memory_cap
from attnfuzz.harness.isolation.outcomes import ChildOSError, Death, Error, Outcome, Task, death_failure, exception_of
from attnfuzz.harness.isolation.supervisor import Supervisor
from attnfuzz.harness.isolation.tasks import preloads
from attnfuzz.harness.judge.failure import Failure, Kind
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Kernel
from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.lowering import ARCHITECTURES, Lowers, capability, shared_limit
from attnfuzz.kernels.problem import LAYOUTS, Layout, Problem
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.pools import covering, pool
from attnfuzz.strategies.variants import MODIFIED, all_variants, modified

__all__ = ["DEADLINE", "Job", "Left", "Row", "architectures_of", "case_file", "compiled", "default_width", "jobs_of", "planned"]

DEADLINE = 600.0
"""Seconds that all functions of one variant may take together by default."""
_FEW = 3
"""Variants that `--cover` compiles again in other forms."""
_NO_LOWER = 'not lowered: it has no `lower` (attnfuzz.kernels.lowering.Lowers; an adapter has one with backend="triton")'
_BLOCK = 128
"""Length that is a whole number of blocks of every mask."""


@dataclass(frozen=True, slots=True)
class Job:
    """One variant of a kernel, for one architecture."""

    case: Case
    arch: str
    key: str


@dataclass(frozen=True, slots=True)
class Left:
    """A kernel that is not compiled, and why. `missing`: its compiler is not installed; else there is nothing to compile."""

    kernel: str
    reason: str
    missing: bool = False


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One function of one variant on one architecture, as in `--json` and baselines."""

    kernel: str
    key: str
    """The compile key."""
    config: dict[str, Any]
    arch: str
    function: str
    """Empty if all functions failed at once."""
    ok: bool
    seconds: float
    registers: int | None = None
    spills: int | None = None
    """Bytes that a thread stores and loads because it lacks registers."""
    shared: int | None = None
    """Bytes of a block, static and dynamic."""
    shared_limit: int
    tensor_core: str | None = None
    tensor_columns: int | None = None
    """Columns of tensor memory that a block allocates."""
    instructions: int | None = None
    """Instructions of the machine code."""
    races: list[str] | None = None
    """Races that the compiler reports, or that its output shows; None: not checked."""
    error: str | None = None
    dtype: str = ""
    dims: tuple[int, int] = (0, 0)
    causal: bool = False
    cached: bool = False
    kind: str | None = None
    """Kind of the failure, if there is one: "compile-error"; "hang", "crash" or "out-of-memory" of the compiler."""
    case: str | None = None
    """The case file of a failure."""


def architectures_of(kernel: Kernel) -> tuple[str, ...]:
    """Return the architectures that the kernel is compiled for."""
    return kernel.capabilities.architectures or ARCHITECTURES


def planned(
    kernels: Sequence[Kernel], architectures: Sequence[str] | None, *, most: int | None = None, cover: bool = False
) -> tuple[tuple[Job, ...], tuple[Left, ...]]:
    """List what is compiled, kernel by kernel, and which kernels are not.

    Args:
        kernels: the kernels, in this order.
        architectures: the architectures; None: all that a kernel declares.
        most: variants of a kernel for an architecture; None: all.
        cover: as few variants as cover every Config, dtype, mask and dims of a kernel.

    Raises:
        BadArgument: an architecture is unknown, or both `most` and `cover` are set.
    """
    for arch in architectures or ():
        capability(arch)
    if cover and most is not None:
        raise reject("cover", True, f"cannot be combined with --max {most}", "leave one of them out")
    jobs: list[Job] = []
    left: list[Left] = []
    for kernel in kernels:
        reason = why_left(kernel)
        if reason is not None:
            left.append(reason)
            continue
        declared = kernel.capabilities.architectures
        wanted = [arch for arch in architectures or architectures_of(kernel) if declared is None or arch in declared]
        if not wanted:
            left.append(Left(kernel.name, f"it declares {', '.join(declared or ())} only"))
            continue
        by_key = jobs_of(kernel, most, cover=cover)
        jobs += [Job(case, arch, key) for arch in wanted for key, case in by_key.items()]
    return tuple(jobs), tuple(left)


def why_left(kernel: Kernel) -> Left | None:
    """Say why the kernel cannot be compiled here; None: it can."""
    if "cuda" not in kernel.capabilities.devices:
        return Left(kernel.name, "it does not run on CUDA")
    if not isinstance(kernel, Lowers):
        return Left(kernel.name, _NO_LOWER)
    reason = kernel.cannot_lower()
    return Left(kernel.name, f"not lowered: {reason}", missing=True) if reason else None


def jobs_of(kernel: Kernel, most: int | None = None, *, cover: bool = False) -> dict[str, Case]:
    """Return Cases by compile key: each variant and Config, then some again in other forms that change the code.

    The other forms are several query heads to a key/value head, where that changes the code, and, 40 of each or a few to cover,
    score and mask functions as a campaign of seed 0 draws them, tensors that are not contiguous, and lengths of whole blocks.
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
        problems += [(each, _grouped(problem, can.groups)) for each, problem in problems]
        with_functions = [each for each in modified(some, kernel, "cuda", 0) if each.modifiers]
        problems += [(each, each.problem(can)) for each in (with_functions[:count] if cover else with_functions)]
        problems += [(each, _whole(each.problem(can))) for each in some]
        if can.layouts:
            problems += [(each, _strided(each.problem(can))) for each in some]
    by_key: dict[str, Case] = {}
    for variant, problem in problems:
        if kernel.supports(problem, variant.config, "cuda") is None:
            key = kernel.compile_key(problem, variant.config)
            by_key.setdefault(key, Case(kernel=kernel.name, problem=problem, config=variant.config))
    return by_key


def _grouped(problem: Problem, groups: tuple[int, ...] | None) -> Problem:
    most = 2 if groups is None else max(groups)
    return replace(problem, heads=most * problem.kv_heads)


def _whole(problem: Problem) -> Problem:
    return replace(problem, seqlens_q=(_BLOCK,), seqlens_k=(_BLOCK,))


def _strided(problem: Problem) -> Problem:
    return replace(problem, **dict.fromkeys(LAYOUTS, Layout(pitch=8)))


def compiled(
    jobs: Sequence[Job], width: int, *, deadline: float = DEADLINE, left: Callable[[Left], None] = lambda _: None
) -> Iterator[tuple[Job, list[Row]]]:
    """Compile `width` variants at once, each in a child process; yield each with its rows as it is done.

    `left`: called, in place of rows, for a variant whose code cannot be had without a GPU.

    Raises:
        BadArgument: a child cannot find a kernel, or a tool is missing.
        ExecutionError: the harness itself failed in a child.
    """
    if not jobs:
        return
    backends = {registry.get(each.case.kernel).backend for each in jobs}
    # The children compile Triton even if this process interprets it; no fork survives a pool of threads.
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
            if not isinstance(outcome, Error | Death) and isinstance(outcome.result, dict):
                left(Left(jobs[index].case.kernel, f"not lowered: {outcome.result['left']}", missing=True))
                yield jobs[index], []
            else:
                yield jobs[index], _rows(jobs[index], outcome)
    finally:
        supervisor.close()


def _preloads(backends: Collection[str]) -> list[str]:
    """Return what children import before the fork: less than Trials need."""
    return ["torch", "attnfuzz.harness.compile.child", *preloads("cuda", backends)[1:]]


def default_width() -> int:
    """Return the number of cores that this process may use."""
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


def _row(job: Job, lowered: Lowered, kind: Kind = "compile-error") -> Row:
    problem, figures = job.case.problem, lowered.figures
    return Row(
        kernel=job.case.kernel,
        key=job.key,
        config=dict(job.case.config),
        arch=job.arch,
        function=lowered.function,
        ok=lowered.error is None,
        seconds=round(lowered.seconds, 2),
        **({} if figures is None else msgspec.structs.asdict(figures)),
        shared_limit=shared_limit(job.arch),
        races=None if lowered.races is None else list(lowered.races),
        error=lowered.error,
        dtype=problem.dtype,
        dims=(problem.dim_qk, problem.dim_v),
        causal=problem.causal is not None,
        cached=lowered.cached,
        kind=None if lowered.error is None else kind,
    )


def case_file(corpus: Corpus, job: Job, row: Row) -> str:
    """Write a failure as a case file, which `attnfuzz compile --case` compiles again; return its path."""
    assert row.error is not None
    check = f"{row.function or 'all functions'} for {row.arch}"
    kind: Kind = msgspec.convert(row.kind, Kind)
    failure = Failure(kernel=row.kernel, kind=kind, check=check, message=row.error)
    verdict = Verdict(status="fail", failures=(failure,), device=row.arch, versions=versions())
    return str(corpus.write(Finding(failure.identity, job.case, verdict), seed=0))
