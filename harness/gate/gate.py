"""The gate: find the kernels that changed, run each one's parts against its base, and give one verdict."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

from attnfuzz.harness.campaign.corpus import CaseFile, Corpus
from attnfuzz.harness.core.signals import ending
from attnfuzz.harness.gate.base.base import Base
from attnfuzz.harness.gate.base.baseline import FromFile
from attnfuzz.harness.gate.base.commit import Commit
from attnfuzz.harness.gate.base.write import written
from attnfuzz.harness.gate.kernel import KernelGateRun
from attnfuzz.harness.gate.ledger import DEFAULT, Entry, Ledger, case_of, check_kernels, read_ledger, spent
from attnfuzz.harness.gate.parts.correctness import stored_cases
from attnfuzz.harness.gate.plan import Plan
from attnfuzz.harness.gate.result import Finding, Gate, KernelGate, Listener, Part
from attnfuzz.harness.gate.subjects import Subject, importing_from, named, why_absent, within
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.trial.errors import describe_exception
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.targets import LeavesProcess, why_not_on

__all__ = ["gate"]


def gate(plan: Plan, listener: Listener, today: date | None = None) -> Gate:
    """Gate the kernels of `plan`. Ctrl-C ends it with the findings so far.

    Args:
        plan: the settings.
        listener: receives every event.
        today: date by which the ledger's entries expire; None: the current date.

    Raises:
        BadArgument: no checkout, an unknown ref, a broken ledger or baseline, something that is not a kernel.
    """
    start = time.monotonic()
    Corpus(plan.out).check()
    if plan.write is not None:
        with importing_from(plan.folder, plan.kernels or plan.known):
            return written(plan, plan.write, listener)
    today = today or date.today()
    ledger = _ledger(plan, today)
    base: Base
    if plan.baseline is not None:
        base = FromFile(plan.baseline, plan.device)
    else:
        assert plan.base is not None
        base = Commit(plan.folder, plan.base, plan.device)
    targets = plan.kernels or plan.known or (base.kernels if isinstance(base, FromFile) else ())
    with importing_from(plan.folder, targets), base:
        return _gated(plan, targets, base, ledger, listener, today, start)


def _gated(
    plan: Plan, targets: tuple[str, ...], base: Base, ledger: Ledger | None, listener: Listener, today: date, start: float
) -> Gate:
    chosen, broken = named(targets, base.root)
    done = list(_without_head(broken, base, explicit=bool(plan.kernels)))
    _check_places(chosen, base, explicit=bool(plan.kernels))
    if ledger is not None and not broken:
        check_kernels(ledger, {each.name for each in chosen})
    if ledger is not None:
        ledger = ledger.on(plan.device, today)
    why = {each.name: _why(each, plan, base) for each in chosen}
    gated = [each for each in chosen if why[each.name] is not None]
    entries = ledger.entries if ledger else ()
    in_force = ledger.in_force(today) if ledger else ()
    stored = _stored(plan, entries)
    gated, refused = _refused(gated, why, plan, base)
    done += refused
    described: dict[str, Any] = {}
    interrupted = False
    if able := sum(why_not_on(each.kernel, plan.device) is None for each in gated):
        base.preload(backends := sorted({each.kernel.backend for each in gated}))
        executor = Isolated(plan.device, backends=backends, deadline=plan.deadline, memory_check=plan.memory_check)
        with closing(executor):
            described = executor.describe()
            own = plan.shared(able)
            runs, interrupted = _run([KernelGateRun(each, own, base, executor, stored, in_force, listener) for each in gated])
        not_run = Part("load", "skipped", "not run: interrupted")
        parts = [*(tuple(run.parts) for run in runs), *[(not_run,)] * (len(gated) - len(runs))]
        places = [base.place(each) for each in gated]
        done += [
            KernelGate(each.name, why[each.name] or "", of_it, *at) for each, of_it, at in zip(gated, parts, places, strict=True)
        ]
    else:
        done += [_not_here(each, why[each.name] or "", plan, base) for each in gated]
    wrong, notes = spent(ledger, done, today) if ledger else ((), ())
    if isinstance(base, FromFile) and (note := base.other_versions(described)) is not None:
        notes = (*notes, note)
    return Gate(
        against=base.label,
        kernels=tuple(done),
        untouched=len(chosen) - len(gated),
        notes=notes,
        ledger=str(ledger.path) if ledger else None,
        stale=wrong,
        seconds=time.monotonic() - start,
        environment=described,
        interrupted=interrupted,
    )


def _run(runs: Sequence[KernelGateRun]) -> tuple[Sequence[KernelGateRun], bool]:
    """Run the gates of kernels one after the other; return those that began, and whether the user has interrupted them."""
    begun: list[KernelGateRun] = []
    try:
        for each in runs:
            begun.append(each)
            each.run()
        ending()
    except KeyboardInterrupt:
        ending()
        for each in begun[-1:]:
            each.skip_the_rest()
        return begun, True
    return begun, False


def _ledger(plan: Plan, today: date) -> Ledger | None:
    if plan.ledger is not None:
        return read_ledger(plan.ledger, today)
    default = plan.folder / DEFAULT
    return read_ledger(default, today) if os.path.lexists(default) else None


def _check_places(chosen: Sequence[Subject], base: Base, *, explicit: bool) -> None:
    if base.root is None:
        return
    remedy = "install its package from the checkout (pip install -e .), or put it on PYTHONPATH"
    for each in chosen if explicit else ():
        if not within(each.kernel, base.root):
            files = ", ".join(each.kernel.files) or "it declares none"
            reason = f"none of its files is in the checkout {base.root} ({files})"
            raise reject("kernel", each.target, reason, remedy)
    if not chosen and not explicit:
        raise reject("kernel", "", f"no known kernel has a file in the checkout {base.root}", f"name it by --kernel; or {remedy}")


def _why(subject: Subject, plan: Plan, base: Base) -> str | None:
    """Say why the kernel is gated; None: it is not."""
    if changed := base.why_changed(subject):
        return changed
    if plan.kernels:
        return "asked for by --kernel"
    return "asked for by --all" if plan.everything else None


def _without_head(broken: dict[str, BadArgument], base: Base, *, explicit: bool) -> Iterator[KernelGate]:
    """Report kernels that cannot be loaded: deleted ones are skipped, broken ones fail.

    One whose module ends its process says nothing about the kernel: the gate itself could not be run, an error.

    Raises:
        BadArgument: there is no such kernel in the checkout or in base.
    """
    for target, error in broken.items():
        if absent := why_absent(error):
            # Names come from installed packages, which are the same for both sides.
            if isinstance(error, registry.UnknownKernel) and ":" not in target and isinstance(base, Commit):
                raise error
            if not base.has(target):
                if not explicit:
                    continue
                raise error
            yield KernelGate(target, "deleted", (Part("load", "skipped", f"it is deleted: {absent}, and {base.label} has it"),))
            continue
        file, line = _raised_at(error, base.root)
        left = isinstance(error, LeavesProcess)
        reason = str(error) if left else describe_exception(error.__cause__ or error)
        detail = _trace(error) if error.__cause__ is not None else ""
        finding = Finding("load", target, f"it cannot be loaded: {reason}", detail=detail)
        part = Part("load", "error" if left else "fail", reason.splitlines()[0], (finding,))
        yield KernelGate(target, "it cannot be loaded", (part,), file, line)


def _raised_at(error: BaseException, root: Path | None) -> tuple[str, int]:
    """Return where in the checkout an import failed: the file that does not parse, or the innermost frame."""
    cause = error.__cause__ or error
    places = [(each.filename, each.lineno or 1) for each in reversed(traceback.extract_tb(cause.__traceback__))]
    if isinstance(cause, SyntaxError) and cause.filename:
        places.insert(0, (cause.filename, cause.lineno or 1))
    for name, line in places:
        path = Path(name).resolve()
        if root is not None and path.is_relative_to(root) and path.is_file():
            return path.relative_to(root).as_posix(), line
    return "", 1


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error.__cause__ or error))[-4000:]


def _refused(
    gated: Sequence[Subject], why: Mapping[str, str | None], plan: Plan, base: Base
) -> tuple[list[Subject], list[KernelGate]]:
    """Return the kernels that say whether they can run here, and a failure for each of the others."""
    left: list[Subject] = []
    refused: list[KernelGate] = []
    for each in gated:
        try:
            why_not_on(each.kernel, plan.device)
            left.append(each)
        except BadArgument as error:
            finding = Finding("load", each.name, str(error), detail=_trace(error))
            part = Part("load", "fail", str(error).splitlines()[0], (finding,))
            refused.append(KernelGate(each.name, why[each.name] or "", (part,), *base.place(each)))
    return left, refused


def _not_here(subject: Subject, why: str, plan: Plan, base: Base) -> KernelGate:
    """An error, not a skip: where none of the kernels can run, the gate has tried nothing."""
    reason = f"it cannot run on {plan.device} here: {why_not_on(subject.kernel, plan.device)}"
    part = Part("load", "error", f"{reason}; no kernel of this gate was tried: run it where one can run")
    return KernelGate(subject.name, why, (part,), *base.place(subject))


def _stored(plan: Plan, entries: Sequence[Entry]) -> tuple[CaseFile, ...]:
    stored = {each.case: each for each in stored_cases(plan.out, plan.corpora)}
    for entry in entries:
        if (file := case_of(entry)) is not None:
            stored.setdefault(file.case, file)
    return tuple(stored.values())
