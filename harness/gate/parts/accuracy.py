"""Accuracy and determinism: errors over budget, head against base on the same Cases; whether two runs agree bit for bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from attnfuzz.harness.core.statistics import Ratio, paired_ratio_of_rms
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.gate.measured import Errors, Measurement
from attnfuzz.harness.gate.result import Finding, Part
from attnfuzz.harness.judge.failure import OUTPUT_TITLES, Kind
from attnfuzz.harness.report.describe import describe_case
from attnfuzz.kernels.problem import OUTPUT_NAMES, OutputName
from attnfuzz.strategies.case import Case, Recipe

__all__ = ["FEWEST", "VALUES", "Compared", "Values", "accuracy", "compared", "determinism"]

_MESSAGES = {
    "rms": "the rms error over budget is {ours:.3g}, {ratio} x what it was ({theirs:.3g})",
    # Each Case's worst has the same weight, so that the largest of all may be unchanged.
    "worst": "the worst error over budget of a Case is {ratio} x what it was (the largest {ours:.3g}, before {theirs:.3g})",
}
Values = Literal["all", "normal"]
VALUES: tuple[Values, ...] = get_args(Values)
FEWEST = 6
"""Least number of Cases for a ratio of errors."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One output, head against base over the same Cases: all, or those of plain normal values.

    Ratios of rms errors and of worst errors with their intervals, and the errors themselves.
    """

    output: OutputName
    values: Values
    cases: int
    rms: Ratio
    worst: Ratio
    rms_head: float
    rms_base: float
    worst_head: float
    worst_base: float


def compared(
    head: Mapping[Case, Mapping[OutputName, Errors]], base: Mapping[Case, Mapping[OutputName, Errors]]
) -> tuple[Compared, ...]:
    """Compare every output that enough Cases have on both sides: over all Cases, and over those of plain normal values alone.

    With extreme values, one error may be so much larger than all others that it hides a change of those.
    """
    rows = []
    for name, values in itertools.product(OUTPUT_NAMES, VALUES):
        cases = [case for case in head if values == "all" or _is_plain(case)]
        pairs = [(head[case][name], base[case][name]) for case in cases if name in head[case] and name in base.get(case, {})]
        if len(pairs) < FEWEST:
            continue
        squares = [(ours.square, theirs.square) for ours, theirs in pairs]
        # Each Case's worst has the same weight: their sizes depend on the Cases' values.
        worst = [_of_one_size(ours.worst, theirs.worst) for ours, theirs in pairs]
        rows.append(
            Compared(
                output=name,
                values=values,
                cases=len(pairs),
                rms=paired_ratio_of_rms(squares),
                worst=paired_ratio_of_rms(worst),
                rms_head=math.sqrt(math.fsum(each for each, _ in squares) / len(squares)),
                rms_base=math.sqrt(math.fsum(each for _, each in squares) / len(squares)),
                worst_head=max(ours.worst for ours, _ in pairs),
                worst_base=max(theirs.worst for _, theirs in pairs),
            )
        )
    return tuple(rows)


def _is_plain(case: Case) -> bool:
    return case.recipe == Recipe(seed=case.recipe.seed)


def _of_one_size(ours: float, theirs: float) -> tuple[float, float]:
    size = math.hypot(ours, theirs)
    return (0.0, 0.0) if size == 0 else ((ours / size) ** 2, (theirs / size) ** 2)


def accuracy(
    kernel: str, head: Sequence[Measurement], base: Mapping[Case, Mapping[OutputName, Errors]], threshold: float
) -> Part:
    """Fail if the rms or the worst error over budget of an output has grown by more than `threshold`, noise considered."""
    rows = compared({each.case: each.errors for each in head if not each.failures}, base)
    if not rows:
        few = f"fewer than {FEWEST} Cases can be compared"
        return Part("accuracy", "skipped", f"{few}: {_why_few(head, base)}", figures={"outputs": []})
    findings: dict[tuple[OutputName, str], Finding] = {}
    for row in rows:
        title, of = OUTPUT_TITLES[row.output], " of normal values" if row.values == "normal" else ""
        for what, ratio, ours, theirs in (
            ("rms", row.rms, row.rms_head, row.rms_base),
            ("worst", row.worst, row.worst_head, row.worst_base),
        ):
            if ratio.above(threshold) and (row.output, what) not in findings:
                message = f"{title}: {_MESSAGES[what].format(ours=ours, theirs=theirs, ratio=ratio)}, over the same {row.cases} "
                message += f"Cases{of}; the limit is {threshold:g} x"
                findings[row.output, what] = Finding("accuracy", kernel, message, output=row.output, check=what)
    figures = {
        "threshold": threshold,
        "outputs": [
            {
                "output": row.output,
                "values": row.values,
                "cases": row.cases,
                **{f"rms_{name}": value for name, value in _bounds(row.rms).items()},
                **{f"worst_{name}": value for name, value in _bounds(row.worst).items()},
                "rms_head": row.rms_head,
                "rms_base": row.rms_base,
                "worst_head": row.worst_head,
                "worst_base": row.worst_base,
            }
            for row in rows
        ],
    }
    largest = max(rows, key=lambda row: row.rms.value)
    summary = f"rms error at most {largest.rms} x base's ({OUTPUT_TITLES[largest.output]}), {counted(largest.cases, 'Case')}"
    return Part("accuracy", "fail" if findings else "pass", summary, tuple(findings.values()), figures)


def _bounds(ratio: Ratio) -> dict[str, float]:
    return {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}


def _why_few(head: Sequence[Measurement], base: Mapping[Case, Mapping[OutputName, Errors]]) -> str:
    if not any(base.values()):
        return "the base has no errors of this kernel: none of its Cases was taken and right there"
    refused = sum(1 for each in head if each.left_out)
    lacking = sum(1 for each in head if each.errors and not base.get(each.case))
    return f"{len(head)} drawn, {refused} not taken by head, {lacking} not taken or wrong in base"


def determinism(
    kernel: str, head: Sequence[Measurement], declared: Sequence[OutputName], in_base: Sequence[OutputName] | None
) -> Part:
    """Fail if an output declared deterministic differs between two runs, or is declared in base and no longer in head."""
    findings = []
    for name in in_base or ():
        if name not in declared:
            message = f"{OUTPUT_TITLES[name]} was declared deterministic in base, and is no longer"
            findings.append(Finding("determinism", kernel, message, output=name, check="declared"))
    runs = [each for each in head if len(each.digests) == 2]
    for name in declared:
        differ = [each.case for each in runs if each.digests[0].get(name) != each.digests[1].get(name)]
        if differ:
            message = f"{OUTPUT_TITLES[name]} differs between two runs, though declared deterministic, in {len(differ)} of "
            message += counted(len(runs), "Case")
            described = tuple(describe_case(differ[0]))
            kind: Kind = "nondeterministic"
            findings.append(Finding("determinism", kernel, message, kind=kind, output=name, check="twice", described=described))
    if not declared and not in_base:
        return Part("determinism", "skipped", "no output is declared deterministic")
    titles = ", ".join(OUTPUT_TITLES[name] for name in declared) or "nothing"
    if not runs and not findings:
        return Part("determinism", "skipped", "no Case of the sample could be run twice")
    figures = {"declared": list(declared), "declared_in_base": None if in_base is None else list(in_base), "cases": len(runs)}
    summary = f"{titles} declared deterministic; {counted(len(runs), 'Case')} run twice"
    return Part("determinism", "fail" if findings else "pass", summary, tuple(findings), figures)
