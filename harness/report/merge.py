"""The runs of one session as one: their kernels, failures and headers, as a report shows them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnfuzz.harness.campaign.undrawn import in_none_of
from attnfuzz.harness.report.runfile import Broken, FailureRecord, KernelRecord, Number, OutputRecord, Refused, RunRecord
from attnfuzz.strategies.case import BadCase, Case, case_from_object

__all__ = ["MergedRuns", "merge_runs", "select_runs", "size_of", "value"]


@dataclass(slots=True)
class MergedRuns:
    """The sum of several runs."""

    runs: list[RunRecord]
    broken_files: list[Broken] = field(default_factory=list)
    kernels: list[KernelRecord] = field(default_factory=list)
    failures: list[FailureRecord] = field(default_factory=list)
    more_failures: int = 0
    skipped: list[Refused] = field(default_factory=list)
    broken: list[Refused] = field(default_factory=list)
    not_tried: list[Refused] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """Distinct Cases of all kernels, without those of shrinking."""
        return sum(each.cases for each in self.kernels)

    @property
    def seconds(self) -> float:
        """From begin to end of each run, added up; runs of several workers overlap."""
        return sum(each.seconds for each in self.runs)

    @property
    def failing(self) -> int:
        """The number of kernels with failures."""
        return len({each.kernel for each in self.failures})

    @property
    def unfinished(self) -> list[RunRecord]:
        """Runs that did not finish: killed, ended by the user or by an error, or still running."""
        return [each for each in self.runs if each.state != "finished"]


def select_runs(runs: Iterable[RunRecord], *, every: bool) -> list[RunRecord]:
    """Return all of `runs`, oldest first, or those of the latest session."""
    ordered = sorted(runs, key=lambda each: each.stamp)
    return ordered if every else [each for each in ordered if each.session == ordered[-1].session]


def merge_runs(runs: Sequence[RunRecord], broken_files: Sequence[Broken] = ()) -> MergedRuns:
    """Add up the counts, and keep one record of each failure: the most shrunk, of several the one with the smallest Case."""
    done = MergedRuns(list(runs), list(broken_files))
    kernels: dict[str, KernelRecord] = {}
    failures: dict[tuple[str, str], FailureRecord] = {}
    for run in runs:
        for kernel in run.kernels:
            kernels[kernel.kernel] = _sum(kernels.get(kernel.kernel), kernel)
        for failure in run.failures:
            key = failure.kernel, failure.fingerprint
            if key not in failures or _rank(failure) > _rank(failures[key]):
                failures[key] = failure
        done.more_failures += run.more_failures
        for mine, theirs in ((done.skipped, run.skipped), (done.broken, run.broken), (done.not_tried, run.not_tried)):
            mine += [each for each in theirs if each not in mine]
        done.lost += [run.lost] if run.lost else []
    done.kernels = sorted(kernels.values(), key=lambda each: each.kernel)
    done.failures = sorted(failures.values(), key=lambda each: (each.kernel, each.title))
    return done


def value(number: Number) -> float:
    """Return a number of a run file as a float."""
    return float(number)


def size_of(case: Case) -> tuple[float, ...]:
    """Return what says which of two minimal Cases is the smaller: earlier Cases, tokens, heads, and the length of its text."""
    p = case.problem
    return len(case.after), sum(p.seqlens_q) + sum(p.seqlens_k), p.heads, len(case.canonical())


def _rank(failure: FailureRecord) -> tuple[bool, bool, tuple[float, ...], bool]:
    size: tuple[float, ...] = (math.inf,)
    with contextlib.suppress(BadCase):
        size = size_of(case_from_object(failure.case))
    smaller = tuple(-each for each in size)
    return failure.shrunk and not failure.partly, failure.shrunk, smaller, failure.maps is not None


def _sum(one: KernelRecord | None, other: KernelRecord) -> KernelRecord:
    """Return the sum of two turns of one kernel."""
    first = one is None
    one = KernelRecord(kernel=other.kernel, ended=True) if one is None else one
    numbers: dict[str, Any] = {
        name: getattr(one, name) + getattr(other, name)
        for name in (
            "cases",
            "shrink_cases",
            "reruns",
            "seconds",
            "compiles",
            "compile_seconds",
            "failed_unjudged",
            "refused",
            "replaced",
            "replayed",
        )
    }
    kinds = dict.fromkeys((*one.drawn, *other.drawn))
    return KernelRecord(
        kernel=one.kernel,
        variants=max(one.variants, other.variants),
        # Each run counts the variants that it had no time for: the fewest are those that none has reached.
        unreached=other.unreached if first else min(one.unreached, other.unreached),
        # Each run counts those that it had no time for, too.
        not_replayed=other.not_replayed if first else min(one.not_replayed, other.not_replayed),
        never_drawn=_never_drawn([other] if first else [one, other]),
        ended=one.ended and other.ended,
        outputs={
            name: _both(one.outputs.get(name, OutputRecord()), other.outputs.get(name, OutputRecord()))
            for name in dict.fromkeys((*one.outputs, *other.outputs))
        },
        captured={
            row: _both(one.captured.get(row, OutputRecord()), other.captured.get(row, OutputRecord()))
            for row in dict.fromkeys((*one.captured, *other.captured))
        },
        features=_counts(one.features, other.features),
        drawn={kind: _counts(one.drawn.get(kind, {}), other.drawn.get(kind, {})) for kind in kinds},
        stages={name: one.stages.get(name, 0.0) + other.stages.get(name, 0.0) for name in {**one.stages, **other.stages}},
        **numbers,
    )


def _never_drawn(records: Sequence[KernelRecord]) -> dict[str, list[str]]:
    """Return what none of the runs has drawn; one without Cases, or without an end, says nothing of it."""
    ended = [each.never_drawn for each in records if each.cases and each.ended]
    return {name: list(values) for name, values in in_none_of(ended).items()} if ended else {}


def _both(one: OutputRecord, other: OutputRecord) -> OutputRecord:
    return OutputRecord(
        cases=one.cases + other.cases,
        unjudged=one.unjudged + other.unjudged,
        doubted=one.doubted + other.doubted,
        failures=one.failures + other.failures,
        histogram=[a + b for a, b in zip(one.histogram, other.histogram, strict=True)],
        worst=_worse(one.worst, other.worst),
        sigmas=_worse(one.sigmas, other.sigmas),
        r=_worse(one.r, other.r),
        z=_worse(one.z, other.z),
    )


def _worse(one: Number, other: Number) -> Number:
    return max(one, other, key=lambda each: math.inf if math.isnan(value(each)) else value(each))


def _counts(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in dict.fromkeys((*one, *other))}
