"""Results for machines: one JSON object per command."""

from __future__ import annotations

from typing import Any

import msgspec

from attnfuzz.harness.campaign.blob import blob_of
from attnfuzz.harness.campaign.corpus import repro_line
from attnfuzz.harness.campaign.events import CampaignFinished, Finding, KernelSummary
from attnfuzz.harness.judge.verdict import Verdict

__all__ = ["campaign_object", "finding_object", "summary_object", "verdict_object"]


def campaign_object(finished: CampaignFinished) -> dict[str, Any]:
    """A campaign's result."""
    return {
        "kernels": [summary_object(row) for row in finished.summaries],
        "skipped": [{"kernel": each.kernel, "reason": each.reason} for each in finished.skipped],
        "failures": [finding_object(each) for each in finished.findings],
        "seconds": finished.seconds,
        "interrupted": finished.interrupted,
        "broken": [{"kernel": each.kernel, "error": each.error} for each in finished.broken],
        "lost": finished.lost,
        "not_kept": finished.not_kept,
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
    }


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
        "unreached": row.unreached,
        "outputs": {name: msgspec.to_builtins(each) for name, each in row.outputs.items()},
        "failures": len(row.findings),
        "features": row.features,
        "processes_replaced": row.replaced,
        "seconds_to_recover": list(row.recoveries),
        "times": msgspec.to_builtins(row.times),
    }
