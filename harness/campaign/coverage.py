"""Counts over the Cases of one kernel: what was judged, how close to its budget, what was drawn, which features were reached."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import msgspec

from attnfuzz.harness.campaign.size_relations import AROUND, at_tile, size_relations, tiles_of
from attnfuzz.harness.judge.failure import captured_row
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.expressions.tree import parse
from attnfuzz.kernels.problem import LAYOUTS, Layout, OutputName
from attnfuzz.strategies.case import Case

__all__ = ["EDGES", "OTHERS", "Phase", "Tally", "Worst", "bin_of", "drawn_values", "features"]

K = TypeVar("K", bound=str)
Phase = Literal["replay", "generate", "shrink", "explain", "rerun"]
"""Why a Case runs. explain: as a neighbour of a minimal Case.

rerun: a replayed Case once more, since it fails only sometimes, or a Case against the oracle alone.
"""
EDGES: Final = (*(round(0.05 * n, 2) for n in range(1, 21)), 2.0, 5.0, 10.0, 100.0, 1000.0)
"""Upper ends of the bins of error over budget; two more bins: above the last of them, and infinite or NaN."""

_MOST_VALUES = 40
OTHERS = "others"
"""Stands for the values beyond the first 40."""


@dataclass(frozen=True, slots=True)
class Worst:
    """One output's record over a kernel's Cases: judged, not judged, the worst error over its budget, wrong.

    `doubted`: of the judged Cases those of which elements are left out, since mask_mod is in doubt (`Figures.doubted`).
    """

    cases: int = 0
    unjudged: int = 0
    worst: float = 0.0
    failures: int = 0
    sigmas: float = 0.0
    r: float = 0.0
    z: float = 0.0
    aggregated: int = 0
    """Cases in which R and z were taken."""
    doubted: int = 0

    def merged(self, other: Worst) -> Worst:
        """Return the record of the Cases of both."""
        return Worst(
            cases=self.cases + other.cases,
            unjudged=self.unjudged + other.unjudged,
            worst=max(self.worst, other.worst),
            failures=self.failures + other.failures,
            sigmas=max(self.sigmas, other.sigmas),
            r=max(self.r, other.r),
            z=max(self.z, other.z),
            aggregated=self.aggregated + other.aggregated,
            doubted=self.doubted + other.doubted,
        )


_NONE = Worst()


@dataclass(slots=True)
class Tally:
    """Counts over the trials of one kernel. Cases of shrinking and reruns are counted, but not what they show."""

    cases: int = 0
    shrink_cases: int = 0
    reruns: int = 0
    failed_unjudged: int = 0
    """Cases that failed before an output was judged, such as by a crash, or by an access outside a tensor."""
    outputs: dict[OutputName, Worst] = field(default_factory=dict)
    captured: dict[str, Worst] = field(default_factory=dict)
    """As `outputs`, of the gradients of sinks and of other captured tensors (`CAPTURED_TITLES`)."""
    features: dict[str, int] = field(default_factory=dict)
    drawn: dict[str, dict[str, int]] = field(default_factory=dict)
    """Cases by what was drawn and its value; rare values beyond the first 40 are counted together."""
    histograms: dict[OutputName, list[int]] = field(default_factory=dict)
    """Cases by the bin of an output's worst error over its budget."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each stage of all trials."""
    apart: int = _MOST_VALUES
    """Values of one kind that are counted apart."""

    def add(self, phase: Phase, case: Case, verdict: Verdict) -> None:
        """Count one trial."""
        for stage, seconds in verdict.seconds.items():
            self.stages[stage] = self.stages.get(stage, 0.0) + seconds
        if phase in ("shrink", "explain"):
            self.shrink_cases += 1
        elif phase == "rerun":
            self.reruns += 1
        else:
            self.cases += 1
            self.failed_unjudged += bool(verdict.failures) and not verdict.figures
            self._count_outputs(verdict)
            self._count_captured(verdict)
            self._count_values(case)

    def merge(self, other: Tally) -> None:
        """Add the counts of other trials."""
        for name in ("cases", "shrink_cases", "reruns", "failed_unjudged"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for feature, count in other.features.items():
            self.features[feature] = self.features.get(feature, 0) + count
        for stage, seconds in other.stages.items():
            self.stages[stage] = self.stages.get(stage, 0.0) + seconds
        _merge(self.outputs, other.outputs)
        _merge(self.captured, other.captured)
        for output, bins in other.histograms.items():
            before = self.histograms.get(output, [0] * len(bins))
            self.histograms[output] = [one + more for one, more in zip(before, bins, strict=True)]
        for what, counts in other.drawn.items():
            for value, count in counts.items():
                self._count_value(what, value, count)

    def count_drawn(self, case: Case) -> None:
        """Count a Case that was drawn and not tried."""
        self.cases += 1
        self._count_values(case)

    def _count_outputs(self, verdict: Verdict) -> None:
        for name, figures in verdict.figures.items():
            judged = not figures.unjudged
            of_case = Worst(
                cases=int(judged),
                unjudged=int(not judged),
                worst=figures.worst,
                sigmas=figures.sigmas,
                r=figures.r or 0.0,
                z=figures.z or 0.0,
                aggregated=int(figures.r is not None),
                doubted=int(bool(figures.doubted) and judged),
            )
            _merge(self.outputs, {name: of_case})
            if judged:
                self.histograms.setdefault(name, [0] * (len(EDGES) + 2))[bin_of(figures.worst)] += 1
        for failure in verdict.failures:
            if failure.output:
                _merge(self.outputs, {failure.output: Worst(failures=1)})

    def _count_captured(self, verdict: Verdict) -> None:
        rows: dict[str, float] = {}
        for tensor, figures in verdict.captured.items():
            row = captured_row(tensor)
            rows[row] = max(rows.get(row, 0.0), figures.worst)
        _merge(self.captured, {row: Worst(cases=1, worst=worst) for row, worst in rows.items()})
        failed = {name for each in verdict.failures if (name := each.captured_row)}
        _merge(self.captured, dict.fromkeys(failed, Worst(failures=1)))

    def _count_values(self, case: Case) -> None:
        for feature in features(case):
            self.features[feature] = self.features.get(feature, 0) + 1
        for name, value in drawn_values(case):
            self._count_value(name, value, 1)

    def _count_value(self, name: str, value: str, count: int) -> None:
        counts = self.drawn.setdefault(name, {})
        key = value if value in counts or len(counts) < self.apart else OTHERS
        counts[key] = counts.get(key, 0) + count


def _merge(own: dict[K, Worst], other: Mapping[K, Worst]) -> None:
    for name, worst in other.items():
        own[name] = own.get(name, _NONE).merged(worst)


def bin_of(ratio: float) -> int:
    """The bin of an error over its budget."""
    if not math.isfinite(ratio):
        return len(EDGES) + 1
    return bisect_left(EDGES, ratio)


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
        "a length around multiples of the tile": _around_tiles(case),
        "rows without keys": bool(p.causal == "bottom_right" and any(n_q > n_k for n_q, n_k in pairs)) or 0 in p.seqlens_k,
        f"dtype {p.dtype}": True,
        f"causal {p.causal}": True,
        f"pattern {case.recipe.pattern}": True,
    }
    return [name for name, holds in checks.items() if holds]


def _around_tiles(case: Case) -> bool:
    """Whether a sequence's queries or keys are a multiple of the tile, or one more or less."""
    tile_m, tile_n = tiles_of(case.config)
    p = case.problem
    return any(at_tile(n, tile) in AROUND for lengths, tile in ((p.seqlens_q, tile_m), (p.seqlens_k, tile_n)) for n in lengths)


_LENGTHS = (0, 1, 16, 64, 128, 256, 512, 1024, 4096, 16384)


def drawn_values(case: Case) -> Iterator[tuple[str, str]]:
    """(name, value) of everything that a report counts, each once per Case."""
    p = case.problem
    yield "dtype", p.dtype
    yield "causal", p.causal or "no"
    yield "packing", p.packing
    yield "dim_qk x dim_v", f"{p.dim_qk} x {p.dim_v}"
    yield "groups", str(p.groups)
    yield "heads", str(p.heads)
    yield "sequences", str(p.batch) if p.batch < 9 else "9 or more"
    yield "longest queries", _length(max(p.seqlens_q))
    yield "longest keys", _length(max(p.seqlens_k))
    yield "values", case.recipe.pattern
    yield "check", case.check
    yield "Config", str(case.config) or "none"
    yield "window", "no" if p.window is None else "without limits" if p.window == (None, None) else "yes"
    yield "softcap", "yes" if p.softcap else "no"
    if p.page_size:
        yield "page size", str(p.page_size)
    if p.sinks:
        yield "sinks", case.recipe.sinks
    yield "score_mod", "none" if p.score_mod is None else _shape(p.score_mod)
    yield "mask_mod", "none" if p.mask_mod is None else _shape(p.mask_mod)
    yield "softmax_scale", "default" if p.softmax_scale is None else _sign(p.softmax_scale)
    yield "gradient of LSE", "yes" if p.needs.dlse else "no"
    yield from size_relations(case)
    layouts = {_layout(getattr(p, name)) for name in LAYOUTS}
    for each in sorted(layouts - {"plain"}) or ["plain"]:
        yield "layout", each


def _length(n: int) -> str:
    """Its class: "0", "1", "2-16", "17-64", ..."""
    lower = 0
    for upper in _LENGTHS:
        if n <= upper:
            return str(upper) if upper <= 1 else f"{lower + 1}-{upper}"
        lower = upper
    return f"over {lower}"


def _sign(number: float) -> str:
    return "0" if number == 0 else "positive" if number > 0 else "negative"


def _layout(layout: Layout) -> str:
    return " + ".join(sorted(msgspec.to_builtins(layout))) or "plain"


def _shape(data: tuple[Any, ...]) -> str:
    """The outermost operation of a modifier: as many trees, as few kinds."""
    return f"{parse(data).op}(...)"
