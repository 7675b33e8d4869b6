"""Runs of one kernel on variants of a test's choice, and executors that a function stands for."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from attnfuzz.harness.campaign.context import Batch, CampaignContext, WorkerContext
from attnfuzz.harness.campaign.coordinator import Coordinator, LocalTurns
from attnfuzz.harness.campaign.corpus import CaseFile, Corpus
from attnfuzz.harness.campaign.events import FailureFound, Listener
from attnfuzz.harness.campaign.journal import Journal
from attnfuzz.harness.campaign.kernel_state import KernelState
from attnfuzz.harness.campaign.plan import KernelPlan, plan_of
from attnfuzz.harness.campaign.settings import PROFILES, Settings
from attnfuzz.harness.campaign.worker import Worker
from attnfuzz.harness.core import environment
from attnfuzz.harness.isolation.executors import Compiled, Compiler, Executor, InProcess, SerialCompiler
from attnfuzz.harness.isolation.outcomes import Past
from attnfuzz.harness.isolation.statistics import Statistics
from attnfuzz.harness.judge.errormap import ErrorMaps
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report.describe import lengths
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Device, Kernel
from attnfuzz.kernels.support.memory import MemoryKind
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.variants import Variant, all_variants


def try_variants(
    kernel: Kernel,
    variants: Sequence[Variant],
    folder: Path | None,
    *,
    seed: int,
    most: int,
    device: Device = "cpu",
    executor: Executor | None = None,
    max_failures: int = 1,
    plain: bool = False,
    limits: Device = "cpu",
    listener: Listener = lambda _: None,
) -> KernelState:
    """Try `most` Cases of `variants`, already compiled or compiled by their trials; returns the kernel with its findings."""
    settings = Settings(device=device, max_examples=most, max_failures=max_failures, plain=plain, out=None)
    plan = KernelPlan(tuple(variants), PROFILES["quick"].limits[limits], seed)
    corpus = Corpus(folder) if folder else None
    return run_kernel(kernel, settings, executor or InProcess(device), corpus, plan=plan, listener=listener)


def run_kernel(
    kernel: Kernel,
    settings: Settings,
    executor: Executor,
    corpus: Corpus | None = None,
    *,
    plan: KernelPlan | None = None,
    stored: Sequence[CaseFile] = (),
    listener: Listener = lambda _: None,
    journal: Journal | None = None,
    batch: Batch | None = None,
) -> KernelState:
    """Try one kernel in this process, without the campaign around it; returns the kernel with its counts and findings."""
    context = CampaignContext(settings, listener, corpus)
    state = KernelState(kernel, plan or plan_of(kernel, settings), context, stored)
    coordinator = Coordinator(context, [state], executor)
    worker = WorkerContext(settings, executor, journal, batch=batch or Batch())
    try:
        Worker(lambda _: (kernel, state.plan), worker, coordinator, LocalTurns(coordinator)).work()
    finally:
        coordinator.compiles.close()
    for error in coordinator.errors:
        raise error
    return state


class FunctionExecutor:
    """An executor whose Verdicts a function makes; `fresh` counts new processes."""

    def __init__(self, verdict: Callable[[Case], Verdict], fresh: Callable[[], None] = lambda: None) -> None:
        self.statistics = Statistics()
        self._verdict, self._fresh = verdict, fresh
        self.cases: list[Case] = []
        self._begun: tuple[Sequence[Case], Collection[Identity] | None] | None = None

    def prepare(self) -> None:
        pass

    def begin(self, case: Case, *, patient: bool = False) -> None:
        assert not self._begun, "a batch is at work"
        self.cases.append(case)

    def finish(self) -> Verdict:
        return self._verdict(self.cases[-1])

    def begin_batch(self, cases: Sequence[Case], known: Collection[Identity] | None = None) -> None:
        assert not self._begun, "a batch is at work"
        self._begun = cases, known

    @property
    def at_work(self) -> Sequence[Case]:
        """The batch that is begun and not finished."""
        return self._begun[0] if self._begun else ()

    def finish_batch(self) -> list[Verdict]:
        assert self._begun
        (cases, known), self._begun = self._begun, None
        return self.batch(cases, known)

    def batch(self, cases: Sequence[Case], known: Collection[Identity] | None = None) -> list[Verdict]:
        self.cases += cases
        return [self._verdict(case) for case in cases]

    def limit(self, until: float | None) -> None:
        pass

    def past(self, case: Case) -> Past:
        return Past()

    def forget_pasts(self) -> None:
        pass

    def compiler(self) -> Compiler:
        return SerialCompiler(lambda case: Compiled(case, 0.0))

    def mapped(self, case: Case) -> ErrorMaps | str:
        return "nothing ran"

    def fresh(self) -> None:
        assert not self._begun, "a batch is at work"
        self._fresh()

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


CASES = 200


def few_variants(variants: tuple[Variant, ...], config: Config, causal: bool) -> tuple[Variant, ...]:
    """fp16, 64/64, one Config: causal alone where only that shows the fault (each variant costs TileLang a compile)."""
    plain = [each for each in variants if each.dtype == "float16" and each.dims == variants[0].dims and each.config == config]
    return tuple(each for each in plain if bool(each.causal) == causal)


def row_of(
    kernel: Kernel, backend: str, fault: str, folder: Path, *, causal: bool, ahead: bool = False, races: bool = False
) -> dict[str, object]:
    """The row that tells how `fault` was found in `kernel`, which must be so. `races`: on a GPU it may show only sometimes."""
    device: Device = "cuda" if environment.has_cuda() and "cuda" in kernel.capabilities.devices else "cpu"
    environment.prepare(device)
    if reason := kernel.unavailable(device):
        pytest.skip(reason)
    registry.register(kernel)
    variants = all_variants(kernel, device)
    if device in kernel.capabilities.compiles_on:
        # Small tiles cost a CPU the least.
        configs = dict.fromkeys(each.config for each in variants if not ahead or each.config.integer("threads") >= 128)
        smallest = min(configs, key=lambda each: each.tile("tile_m", 1) * each.tile("tile_n", 1))
        own = "back_tile_m" in smallest
        variants = few_variants(variants, smallest if own else variants[0].config, causal)
    start, drawn = time.monotonic(), list[Case]()

    def listen(event: object) -> None:
        if isinstance(event, FailureFound):
            drawn.append(event.finding.case)

    try:
        run = try_variants(kernel, variants, folder, seed=1, most=CASES, device=device, listener=listen)
    finally:
        registry.unregister(kernel.name)
    assert run.findings.closed, f"not found in {run.tally.cases} cases"
    found = next(iter(run.findings.closed.values()))
    assert found.verdict.failure is not None
    kinds = ["mismatch", "aggregate", "nonfinite", "unwritten", *get_args(MemoryKind)]
    if races and device == "cuda":
        # The oracle alone may pass where two launches have differed.
        kinds += ["relation", "nondeterministic"]
    elif max(drawn[0].problem.seqlens_q + drawn[0].problem.seqlens_k) > run.plan.limits.length:
        # Relations are drawn at lengths that no oracle could follow; at others the oracle alone must find what they find.
        kinds.append("relation")
    if found.identity.check == "slack rows":
        # A store that reaches too far shows there first.
        kinds.append("contract")
    assert found.identity.kind in kinds, found.verdict.failure.message
    if not (races and device == "cuda"):
        # What shows only sometimes passes in some trials of the shrinking.
        assert found.case.problem.batch <= 2, found.case.canonical()
        assert not found.partly
    problem = found.case.problem
    return {
        "kernel": backend,
        "fault": fault,
        "shows in": str(found.identity.output or found.identity.kind),
        "cases": found.cases_to_find,
        "seconds": round(time.monotonic() - start, 1),
        "minimal": f"{lengths(found.case)} heads {problem.heads}/{problem.kv_heads} {problem.dtype} "
        f"{problem.causal or 'full'} {found.case.recipe.pattern}",
    }
