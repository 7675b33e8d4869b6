"""Results for machines: one JSON object per command."""

from __future__ import annotations

from typing import Any

import msgspec

from attnfuzz.harness.campaign.corpus import repro_line
from attnfuzz.harness.campaign.events import CampaignFinished, Found, KernelSummary
from attnfuzz.harness.judge.verdict import Verdict

__all__ = ["campaign_object", "found_object", "verdict_object"]


def campaign_object(finished: CampaignFinished) -> dict[str, Any]:
    """A campaign's result."""
    return {
        "kernels": [_summary_object(row) for row in finished.summaries],
        "skipped": [{"kernel": each.kernel, "reason": each.reason} for each in finished.skipped],
        "failures": [found_object(each) for each in finished.found],
        "seconds": finished.seconds,
        "interrupted": finished.interrupted,
        "broken": [{"kernel": each.kernel, "error": each.error} for each in finished.broken],
        "lost": finished.lost,
        "not_kept": finished.not_kept,
    }


def found_object(found: Found) -> dict[str, Any]:
    """One failure with its minimal Case."""
    return {
        "identity": msgspec.to_builtins(found.identity),
        "case": found.case.to_object(),
        "verdict": verdict_object(found.verdict),
        "partly_shrunk": found.partly,
        "path": found.path,
        "repro": repro_line(found.path, found.case.kernel) if found.path else None,
        "cases_to_find": found.cases_to_find,
        "seconds_to_find": found.seconds_to_find,
        "shrink_trials": found.shrink_trials,
        "rate": list(found.rate) if found.rate else None,
    }


def verdict_object(verdict: Verdict) -> dict[str, Any]:
    """A Verdict as plain values."""
    plain: dict[str, Any] = msgspec.to_builtins(verdict)
    return plain


def _summary_object(row: KernelSummary) -> dict[str, Any]:
    return {
        "kernel": row.kernel,
        "cases": row.cases,
        "shrink_cases": row.shrink_cases,
        "seconds": row.seconds,
        "cases_per_second": row.rate,
        "compiles": row.compiles,
        "compile_seconds": row.compile_seconds,
        "refused": row.refused,
        "outputs": {name: msgspec.to_builtins(each) for name, each in row.outputs.items()},
        "failures": len(row.found),
        "features": row.features,
        "processes_replaced": row.replaced,
        "seconds_to_recover": list(row.recoveries),
    }
