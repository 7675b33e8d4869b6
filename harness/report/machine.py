"""Results for machines: one JSON object per command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from attnfuzz.harness.campaign.blob import blob_of
from attnfuzz.harness.campaign.corpus import repro_line
from attnfuzz.harness.campaign.events import CampaignFinished, Finding, KernelSummary
from attnfuzz.harness.campaign.explain import Explanation
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report.explained import explanation_rows
from attnfuzz.harness.report.groups import groups_of

__all__ = ["campaign_object", "explanation_object", "finding_object", "summary_object", "verdict_object"]


def campaign_object(finished: CampaignFinished) -> dict[str, Any]:
    """A campaign's result."""
    return {
        "kernels": [summary_object(row) for row in finished.summaries],
        "skipped": [{"kernel": each.kernel, "reason": each.reason} for each in finished.skipped],
        "failures": _failures(finished.findings),
        "seconds": finished.seconds,
        "interrupted": finished.interrupted,
        "broken": [{"kernel": each.kernel, "error": each.error} for each in finished.broken],
        "untried": [{"kernel": kernel, "reason": reason} for kernel, reason in finished.untried],
        "lost": finished.lost,
        "not_kept": finished.not_kept,
        "seed": finished.seed,
        "shared_gpu": finished.shared_gpu and msgspec.to_builtins(finished.shared_gpu),
    }


def finding_object(finding: Finding) -> dict[str, Any]:
    """One failure with its minimal Case."""
    return {
        "id": finding.identity.key,
        "identity": msgspec.to_builtins(finding.identity),
        "case": finding.case.to_object(),
        "blob": blob_of(finding.case, finding.rate),
        "verdict": verdict_object(finding.verdict),
        "partly_shrunk": finding.partly,
        "path": finding.path,
        "repro": repro_line(finding.path, finding.case.kernel) if finding.path else None,
        "cases_to_find": finding.cases_to_find,
        "seconds_to_find": finding.seconds_to_find,
        "shrink_trials": finding.shrink_trials,
        "rate": list(finding.rate) if finding.rate else None,
        "explanation": explanation_object(finding.explanation),
    }


def _failures(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return each failure, with the `id` of the first of those that likely have the same cause as its `group`."""
    groups = groups_of(findings)
    return [{**finding_object(each), "group": findings[first].identity.key} for each, first in zip(findings, groups, strict=True)]


def explanation_object(explanation: Explanation | None) -> dict[str, Any] | None:
    """An explanation as plain values, with its text line by line; None where there is none."""
    if explanation is None:
        return None
    return {**msgspec.to_builtins(explanation), "text": [f"{title}: {text}" for title, text in explanation_rows(explanation)]}


def verdict_object(verdict: Verdict) -> dict[str, Any]:
    """A Verdict as plain values."""
    plain: dict[str, Any] = msgspec.to_builtins(verdict)
    return plain


def summary_object(row: KernelSummary) -> dict[str, Any]:
    """One kernel's row."""
    return {
        "kernel": row.kernel,
        "cases": row.cases,
        "shrink_cases": row.shrink_cases,
        "reruns": row.reruns,
        "seconds": row.seconds,
        "cases_per_second": row.rate,
        "compiles": row.compiles,
        "compile_seconds": row.compile_seconds,
        "refused": row.refused,
        "failed_unjudged": row.failed_unjudged,
        "unreached": row.unreached,
        "replayed": row.replayed,
        "not_replayed": row.not_replayed,
        "outputs": {name: msgspec.to_builtins(each) for name, each in row.outputs.items()},
        "captured": {name: msgspec.to_builtins(each) for name, each in row.captured.items()},
        "failures": len(row.findings),
        "features": row.features,
        "drawn": row.drawn,
        "never_drawn": {name: list(values) for name, values in row.never_drawn.items()},
        "processes_replaced": row.replaced,
        "seconds_to_recover": list(row.recoveries),
        "times": msgspec.to_builtins(row.times),
        "disturbances": msgspec.to_builtins(row.disturbances),
    }
