"""`attnfuzz gate --write FILE`: measure the kernels for later gates to compare with."""

from __future__ import annotations

import time
from pathlib import Path

from attnfuzz.harness.core.text import counted
from attnfuzz.harness.gate.base.baseline import Recorded, recorded, write_baseline
from attnfuzz.harness.gate.base.checkout import checkout_at
from attnfuzz.harness.gate.measured import measurements
from attnfuzz.harness.gate.parts.compiles import NoSuchTableError, compile_table
from attnfuzz.harness.gate.parts.sample import accuracy_cases
from attnfuzz.harness.gate.plan import Plan
from attnfuzz.harness.gate.result import Finding, Gate, KernelGate, Listener, Part, PartFinished, PartProgress
from attnfuzz.harness.gate.side import Side
from attnfuzz.harness.gate.subjects import Subject, fingerprint, named
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.report.describe import describe_case
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.targets import why_not_on

__all__ = ["written"]


def written(plan: Plan, path: Path, listener: Listener) -> Gate:
    """Measure the kernels of `plan` (none: those of the checkout that can run here) and write `path`, unless one is wrong.

    Raises:
        BadArgument: no kernel can run here, or one cannot be loaded.
    """
    start = time.monotonic()
    targets = plan.kernels or plan.known
    chosen, broken = named(targets, None if targets else _root(plan.folder))
    for error in broken.values():
        raise error
    if not chosen:
        remedy = "name it by --kernel, or install its package from there (pip install -e .)"
        raise reject("write", str(path), f"no known kernel has a file in {_root(plan.folder)}", remedy)
    able = [each for each in chosen if why_not_on(each.kernel, plan.device) is None]
    if not able:
        reasons = "; ".join(f"{each.name}: {why_not_on(each.kernel, plan.device)}" for each in chosen) or "none is known"
        raise reject("kernel", ", ".join(targets), f"none can run on {plan.device} here ({reasons})", "choose another device")
    kernels: dict[str, Recorded] = {}
    done: list[KernelGate] = []
    backends = sorted({each.kernel.backend for each in able})
    executor = Isolated(plan.device, backends=backends, deadline=plan.deadline, memory_check=plan.memory_check)
    try:
        described = executor.describe()
        for each in able:
            part, kernel = _measured(each, plan, executor, listener)
            listener(PartFinished(each.name, part))
            done.append(KernelGate(each.name, "measured", (part,)))
            if kernel is not None:
                kernels[each.name] = kernel
    finally:
        executor.close()
    whole = len(kernels) == len(able)
    if whole:
        try:
            write_baseline(path, plan.device, described, kernels)
        except OSError as error:
            raise reject("write", str(path), f"it cannot be written ({error.strerror})", "give a file elsewhere") from None
    return Gate(
        against="",
        kernels=tuple(done),
        seconds=time.monotonic() - start,
        environment=described,
        written=str(path) if whole else None,
    )


def _root(folder: Path) -> Path:
    """Return the folder whose kernels are measured: the checkout, or `folder` itself outside of one."""
    try:
        return checkout_at(folder).root
    except BadArgument:
        return folder.resolve()


def _measured(subject: Subject, plan: Plan, executor: Isolated, listener: Listener) -> tuple[Part, Recorded | None]:
    """Measure a kernel. A wrong one has no figures: the part names the first Case on which it is wrong."""
    start = time.monotonic()
    listener(PartProgress(subject.name, "accuracy", "drawing the sample"))
    cases = accuracy_cases(subject.kernel, plan.device, plan.sample, plan.seed)
    side = Side(executor, subject.target, subject.name)
    side.fresh()
    results = measurements(
        side,
        cases,
        memory_check=plan.memory_check,
        progress=lambda n: listener(PartProgress(subject.name, "accuracy", f"{n} of {counted(len(cases), 'Case')}")),
    )
    seconds = time.monotonic() - start
    wrong = next((each for each in results if each.failures), None)
    if wrong is not None:
        failure = wrong.failures[0]
        described = tuple(describe_case(wrong.case))
        finding = Finding.of("accuracy", failure.identity, failure.message, failure.detail, described=described)
        return Part("accuracy", "fail", "it is wrong, so that no baseline is written", (finding,), seconds=seconds), None
    table = None
    if plan.compile != "off" and subject.kernel.capabilities.compiles_on:
        try:
            table = compile_table(subject.target, plan.architectures, plan.folder)
        except NoSuchTableError as error:
            if plan.compile == "on":
                raise reject("compile", plan.compile, str(error), "use --compile auto") from None
    kept = recorded(fingerprint(subject.kernel), subject.kernel.capabilities.deterministic, results, table)
    summary = f"{counted(len(kept.measured), 'Case')} measured" + (f", {counted(len(table), 'compile')}" if table else "")
    return Part("accuracy", "pass", summary, seconds=seconds), kept
