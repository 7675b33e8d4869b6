"""The part of `check` that imports the kernel: in a process of its own, forked from one that has imported all else."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

from attnfuzz.harness.audit.subject import LoadError, as_kernel, import_from_sources, loaded
from attnfuzz.harness.campaign.blob import blob_of
from attnfuzz.harness.campaign.campaign import run_campaign
from attnfuzz.harness.campaign.events import CampaignFinished, Event, Finding, KernelSummary, TrialFinished
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.executors import Executor
from attnfuzz.harness.isolation.forks import ForksOfThisProcess
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.kernel_ref import inherited
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.report.describe import describe_case, describe_verdict
from attnfuzz.harness.report.explained import explanation_rows
from attnfuzz.kernels.contract import Kernel

__all__ = ["result_of", "run", "runs_here"]

_at_work = False


def runs_here() -> bool:
    """Whether this process imports a kernel for `check`: a script that calls it while it is imported must not start another."""
    return _at_work


def run(payload: dict[str, Any], enter: Callable[..., None]) -> tuple[Any, bool]:
    """Import the kernel, try it, and return a result as JSON values. No second task may run in this process.

    `payload`: folder, path (of modules), kernel (a `reference`), device, configs, declared, settings (fields of Settings).
    """
    global _at_work
    _at_work, start = True, time.monotonic()
    os.chdir(payload["folder"])
    sys.path[:] = payload["path"]
    import_from_sources()
    enter("compile")
    device = payload["device"]
    try:
        thing = loaded(payload["kernel"])
        kernel = as_kernel(thing, device, payload["configs"], _tuples(payload["declared"]))
    except LoadError as error:
        return _not_loaded(payload["title"], error), True
    enter("judge")
    forks = ForksOfThisProcess()
    # Before the first fork.
    inherited(kernel)
    executor = Isolated(device, deadline=payload["settings"]["deadline"], spares=0, forkserver=forks)
    executor.prepare()
    try:
        return result_of(kernel, Settings(**payload["settings"]), executor, start), True
    finally:
        executor.close()


def result_of(kernel: Kernel, settings: Settings, executor: Executor, start: float) -> dict[str, Any]:
    """Try the kernel and return the result as JSON values; `start`: of the call (time.monotonic)."""
    first: list[float] = []

    def listener(event: Event) -> None:
        if isinstance(event, TrialFinished) and not first:
            first.append(time.monotonic() - start)

    finished = run_campaign([kernel], settings, listener, executor)
    if finished.interrupted:
        raise KeyboardInterrupt
    (row,) = finished.summaries
    return {
        "kernel": kernel.name,
        "backend": kernel.backend,
        "failures": [_failure(each) for each in finished.findings],
        "cases": row.cases,
        "outputs": {
            name: {"cases": each.cases, "unjudged": each.unjudged, "worst": each.worst, "wrong": each.failures}
            for name, each in row.outputs.items()
        },
        "never_drawn": {name: list(values) for name, values in row.never_drawn.items()},
        "not_tried": _not_tried(finished, row),
        "seconds_to_first": first[0] if first else None,
    }


def _failure(finding: Finding) -> dict[str, Any]:
    failure, case = finding.failure, finding.case
    rows = [f"   {name:<20} {value}" for name, value in describe_case(case)[1:]]
    lines = [*describe_verdict(finding.verdict), *(f"{title}: {text}" for title, text in explanation_rows(finding.explanation))]
    text = [str(finding.identity), *rows, *(f"   {line}" for line in lines)]
    return {
        "id": finding.identity.key,
        **{name: getattr(finding.identity, name) for name in ("kernel", "kind", "output", "check")},
        "message": failure.message if failure else "",
        "detail": failure.detail if failure else "",
        "case": case.to_object(),
        "blob": blob_of(case, finding.rate),
        "path": finding.path,
        "minimal": finding.minimal,
        "text": "\n".join(text),
    }


def _not_loaded(name: str, error: LoadError) -> dict[str, Any]:
    """Return the result of a kernel whose module raised an exception: a failure without a Case."""
    return {"kernel": name, "backend": "", "failures": [load_failure(name, "exception", str(error), error.detail)], "cases": 0}


def load_failure(name: str, kind: Any, message: str, detail: str) -> dict[str, Any]:
    """Return the failure of a module that cannot be imported, as JSON values."""
    # The file and the line are no part of the bug's identity.
    plain = re.sub(r" \([^()]*\)$", "", message)
    identity = Identity(kernel=name, kind=kind, output=None, check="import", message=re.sub(r"\d+", "#", plain)[:120])
    return {
        "id": identity.key,
        "kernel": name,
        "kind": kind,
        "output": None,
        "check": "import",
        "message": message,
        "detail": detail,
        "case": None,
        "blob": None,
        "path": None,
        "minimal": True,
        "text": f"{name}: its module fails: {message}",
    }


def _not_tried(finished: CampaignFinished, row: KernelSummary) -> str:
    """Say why nothing was tried, or an output never judged; empty if all was."""
    if not row.cases:
        return finished.lost or "no Case was tried in this time; give more seconds"
    if wrong := [name for name, each in row.outputs.items() if each.unjudged and not each.cases]:
        return f"{', '.join(wrong)} could not be judged in any Case"
    return finished.lost or finished.not_kept or ""


def _tuples(value: Any) -> Any:
    """Return JSON values with tuples in place of lists, as declarations have them."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
