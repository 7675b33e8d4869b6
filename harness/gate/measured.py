"""Errors and digests of one side on the sample of Cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from attnfuzz.harness.gate.side import BrokenSideError, Side
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.kernels.problem import OutputName
from attnfuzz.strategies.case import Case

__all__ = ["Errors", "Measurement", "measurements"]


class Errors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One output's errors over their budgets on one Case: elements, mean square, largest."""

    elements: int
    square: float
    worst: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One Case on one side: errors by output, digests of two runs, or why there are none."""

    case: Case
    errors: dict[OutputName, Errors] = field(default_factory=dict)
    digests: tuple[dict[str, str], ...] = ()
    failures: tuple[Failure, ...] = ()
    left_out: str = ""
    """Why the side does not take the Case."""


def measurements(
    side: Side, cases: Sequence[Case], *, memory_check: bool, progress: Callable[[int], None] = lambda _: None
) -> tuple[Measurement, ...]:
    """Measure every Case on `side`; `progress` gets the number done. A Case that ends its process is a failure of kind crash."""
    results = []
    for number, case in enumerate(cases):
        progress(number)
        try:
            answer = side.ask("measure", case=case.canonical(), memory_check=memory_check)
        except BrokenSideError as error:
            failure = Failure(kernel=case.kernel, kind="crash", check="kernel", message=str(error))
            results.append(Measurement(case, failures=(failure,)))
            continue
        if "unsupported" in answer:
            results.append(Measurement(case, left_out=answer["unsupported"]))
            continue
        results.append(
            Measurement(
                case,
                errors=msgspec.convert(answer["figures"], dict[OutputName, Errors]),
                digests=tuple(answer["digests"]),
                failures=msgspec.convert(tuple(answer["failures"]), tuple[Failure, ...]),
            )
        )
    return tuple(results)
