"""Speed: time head and base alternately in one run; a difference counts only beyond the noise."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from attnfuzz.harness.core.statistics import Ratio, paired_ratio_of_medians
from attnfuzz.harness.gate.result import Finding, Part
from attnfuzz.harness.gate.side import BrokenSideError, Side
from attnfuzz.harness.report.describe import describe_case
from attnfuzz.strategies.case import Case

__all__ = ["ROUNDS", "Timed", "speed", "timed_alternately"]

ROUNDS = 25


@dataclass(slots=True)
class Timed:
    """One Case in one direction: seconds of a call in each round, as (head, base)."""

    case: Case
    direction: str
    rounds: list[tuple[float, float]] = field(default_factory=list)
    confirmed: bool = False
    """Whether it was too slow in two series of rounds."""

    @property
    def ratio(self) -> Ratio:
        """Head over base: above 1, head is slower."""
        return paired_ratio_of_medians(self.rounds)


def timed_alternately(
    head: Side, base: Side, cases: Sequence[Case], rounds: int = ROUNDS, progress: Callable[[int], None] = lambda _: None
) -> tuple[list[Timed], list[str]]:
    """Time every Case in both directions; return the times, and why some Cases are left out.

    Raises:
        BrokenSideError: one side's kernel raised, or ended its process.
    """
    times: list[Timed] = []
    left_out: list[str] = []
    for number, case in enumerate(cases):
        by_direction: dict[str, Timed] = {}
        order = random.Random(number)  # a clock may drop within a round: neither side always begins
        for index in range(-1, rounds):
            progress(number * (rounds + 1) + index + 1)
            answers = {}
            for side in order.sample(("head", "base"), 2):
                answers[side] = (head if side == "head" else base).ask("timed", case=case.canonical())
            if reason := next((each["unsupported"] for each in answers.values() if "unsupported" in each), None):
                left_out.append(reason)
                break
            # The first round warms both up.
            for direction in answers["head"] if index >= 0 else ():
                each = by_direction.setdefault(direction, Timed(case, direction))
                each.rounds.append((answers["head"][direction], answers["base"][direction]))
        times += by_direction.values()
    return times, left_out


def speed(
    kernel: str,
    head: Side,
    base: Side,
    cases: Sequence[Case],
    *,
    threshold: float,
    rounds: int = ROUNDS,
    progress: Callable[[int], None] = lambda _: None,
) -> Part:
    """Fail if the ratio's interval lies above `threshold`, twice."""
    try:
        times, left_out = timed_alternately(head, base, cases, rounds, progress)
    except BrokenSideError as error:
        return Part("speed", "error", f"a run could not be timed: {error}")
    doubtful = list(dict.fromkeys(each.case for each in times if each.ratio.above(threshold)))
    if doubtful:
        # Other load on the machine comes in bursts, which the interval of one run does not cover: it must show twice.
        again, _ = timed_alternately(head, base, doubtful, rounds, progress)
        first = {(each.case, each.direction): each for each in times}
        for each in again:
            each.confirmed = first[each.case, each.direction].ratio.above(threshold) and each.ratio.above(threshold)
            first[each.case, each.direction] = each
        times = list(first.values())
    if not times:
        return Part("speed", "skipped", f"no Case to time: {'; '.join(left_out) or 'the kernel takes none of the usual ones'}")
    findings, rows = [], []
    for each in times:
        ratio = each.ratio
        ours, theirs = (statistics.median(side) for side in zip(*each.rounds, strict=True))
        what = f"{each.direction} of {_label(each.case)}"
        if each.confirmed:
            message = f"{what} takes {_time(ours)}, {ratio} x what it took ({_time(theirs)}), over {len(each.rounds)} "
            message += f"alternating rounds; the limit is {threshold:g} x"
            findings.append(Finding("speed", kernel, message, check=each.direction, described=tuple(describe_case(each.case))))
        rows.append(
            {
                "case": each.case.to_object(),
                "direction": each.direction,
                "head_seconds": ours,
                "base_seconds": theirs,
                "ratio": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "rounds": len(each.rounds),
            }
        )
    slowest = max(times, key=lambda each: each.ratio.value)
    summary = f"at most {slowest.ratio} x base's time ({slowest.direction} of {_label(slowest.case)})"
    clear = all(each.ratio.clearly_below(threshold) for each in times)
    return Part(
        "speed", "fail" if findings else "pass", summary, tuple(findings), {"threshold": threshold, "rows": rows}, complete=clear
    )


def _label(case: Case) -> str:
    p = case.problem
    mask = "causal" if p.causal else "full"
    return f"{p.batch} x {p.heads}/{p.kv_heads} heads x {p.seqlens_q[0]} x {p.dim_qk} {p.dtype} {mask} {p.packing}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} us"
