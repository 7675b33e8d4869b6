"""Counts over the Cases of one kernel: what was judged, how close to its budget, which features were reached."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from attnfuzz.harness.campaign.events import Worst
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.problem import OutputName
from attnfuzz.strategies.case import Case

__all__ = ["Tally", "features"]


@dataclass(slots=True)
class Tally:
    """Counts over the Cases tried; Cases of shrinking are counted apart."""

    cases: int = 0
    shrink_cases: int = 0
    outputs: dict[OutputName, Worst] = field(default_factory=dict)
    features: dict[str, int] = field(default_factory=dict)

    def add(self, case: Case, verdict: Verdict) -> None:
        """Count one Case."""
        self.cases += 1
        for name, figures in verdict.figures.items():
            old = self.outputs.get(name, Worst())
            skipped = bool(figures.unjudged)
            self.outputs[name] = replace(
                old,
                cases=old.cases + (not skipped),
                unjudged=old.unjudged + skipped,
                worst=max(old.worst, figures.worst),
                sigmas=max(old.sigmas, figures.sigmas),
                r=max(old.r, figures.r or 0.0),
                z=max(old.z, figures.z or 0.0),
                aggregated=old.aggregated + (figures.r is not None),
                doubted=old.doubted + (bool(figures.doubted) and not skipped),
            )
        for failure in verdict.failures:
            if failure.output:
                old = self.outputs.get(failure.output, Worst())
                self.outputs[failure.output] = replace(old, failures=old.failures + 1)
        for feature in features(case):
            self.features[feature] = self.features.get(feature, 0) + 1


def features(case: Case) -> list[str]:
    """What a Case exercises, for the counts of a summary."""
    p = case.problem
    pairs = list(zip(p.seqlens_q, p.seqlens_k, strict=True))
    checks = {
        "ragged, several sequences": p.packing == "ragged" and p.batch > 1,
        "zero-length queries": 0 in p.seqlens_q,
        "zero-length keys": 0 in p.seqlens_k,
        "q shorter than k": any(0 < n_q < n_k for n_q, n_k in pairs),
        "q longer than k": any(n_q > n_k > 0 for n_q, n_k in pairs),
        "groups > 1": p.groups > 1,
        "groups no power of two": p.groups & (p.groups - 1) != 0,
        "odd totals": bool(p.total_q % 2 or p.total_k % 2),
        "over 1000 tokens": max(p.seqlens_q + p.seqlens_k) > 1000,
        "slack rows": bool(p.slack_q or p.slack_k),
        "dim_qk != dim_v": p.dim_qk != p.dim_v,
        "rows without keys": bool(p.causal == "bottom_right" and any(n_q > n_k for n_q, n_k in pairs)) or 0 in p.seqlens_k,
        f"dtype {p.dtype}": True,
        f"causal {p.causal}": True,
        f"pattern {case.recipe.pattern}": True,
    }
    return [name for name, holds in checks.items() if holds]
