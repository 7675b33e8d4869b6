"""Speed: head and base take turns in one run, and only what noise does not explain counts."""

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

__all__ = ["ROUNDS", "Timed", "speed", "timed_by_turns"]

ROUNDS = 25


@dataclass(slots=True)
class Timed:
    """One Case in one direction: seconds of a call in each round, head and base."""

    case: Case
    direction: str
    rounds: list[tuple[float, float]] = field(default_factory=list)
    confirmed: bool = False
    """It was too slow in two series of rounds."""

    @property
    def ratio(self) -> Ratio:
        """Head over base: more than 1 is slower."""
        return paired_ratio_of_medians(self.rounds)


def timed_by_turns(
    head: Side, base: Side, cases: Sequence[Case], rounds: int = ROUNDS, progress: Callable[[int], None] = lambda _: None
) -> tuple[list[Timed], list[str]]:
    """Every Case in both directions, and why some are left out. Who begins a round is drawn: a clock may sag within it.

    Raises:
        BrokenSideError: one side's kernel raised, or ended its process.
    """
    found: list[Timed] = []
    left_out: list[str] = []
    for number, case in enumerate(cases):
        by_direction: dict[str, Timed] = {}
        drawn = random.Random(number)
        for turn in range(-1, rounds):
            progress(number * (rounds + 1) + turn + 1)
            answers = {}
            for side in drawn.sample(("head", "base"), 2):
                answers[side] = (head if side == "head" else base).ask("timed", case=case.canonical())
            if reason := next((each["unsupported"] for each in answers.values() if "unsupported" in each), None):
                left_out.append(reason)
                break
            # The first turn warms both up.
            for direction in answers["head"] if turn >= 0 else ():
                each = by_direction.setdefault(direction, Timed(case, direction))
                each.rounds.append((answers["head"][direction], answers["base"][direction]))
        found += by_direction.values()
    return found, left_out


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
    """Fails where the ratio's interval lies above `threshold`, twice."""
    try:
        found, left_out = timed_by_turns(head, base, cases, rounds, progress)
    except BrokenSideError as error:
        return Part("speed", "error", f"a run could not be timed: {error}")
    doubtful = list(dict.fromkeys(each.case for each in found if each.ratio.above(threshold)))
    if doubtful:
        # What else the machine does comes in bursts, which no interval of one run knows of: it must show twice.
        again, _ = timed_by_turns(head, base, doubtful, rounds, progress)
        first = {(each.case, each.direction): each for each in found}
        for each in again:
            each.confirmed = first[each.case, each.direction].ratio.above(threshold) and each.ratio.above(threshold)
            first[each.case, each.direction] = each
        found = list(first.values())
    if not found:
        return Part("speed", "skipped", f"no Case to time: {'; '.join(left_out) or 'the kernel takes none of the usual ones'}")
    findings, rows = [], []
    for each in found:
        ratio = each.ratio
        ours, theirs = (statistics.median(side) for side in zip(*each.rounds, strict=True))
        what = f"{each.direction} of {_label(each.case)}"
        if each.confirmed:
            message = f"{what} takes {_time(ours)}, {ratio} x what it took ({_time(theirs)}), over {len(each.rounds)} rounds by "
            message += f"turns; more than {threshold:g} x is too much"
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
    slowest = max(found, key=lambda each: each.ratio.value)
    summary = f"at most {slowest.ratio} x base's time ({slowest.direction} of {_label(slowest.case)})"
    clear = all(each.ratio.clearly_below(threshold) for each in found)
    return Part(
        "speed", "fail" if findings else "pass", summary, tuple(findings), {"threshold": threshold, "rows": rows}, complete=clear
    )


def _label(case: Case) -> str:
    p = case.problem
    mask = "causal" if p.causal else "full"
    return f"{p.batch} x {p.heads}/{p.kv_heads} heads x {p.seqlens_q[0]} x {p.dim_qk} {p.dtype} {mask} {p.packing}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} us"
