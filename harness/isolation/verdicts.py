"""The Verdict of a Case by the outcome of its Trial in a child: what the child says, or what its end means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from attnfuzz.harness.isolation.outcomes import (
    KERNEL_STAGES,
    ChildMemoryError,
    Death,
    Error,
    Outcome,
    Reply,
    death_failure,
    exception_of,
)
from attnfuzz.harness.judge.failure import Failure, in_earlier
from attnfuzz.harness.judge.verdict import Figures, Verdict
from attnfuzz.harness.trial.errors import MEMORY_TAKEN
from attnfuzz.strategies.case import Case

__all__ = ["verdict_of", "with_death"]


def verdict_of(case: Case, outcome: Outcome, describe: Callable[[], dict[str, Any]]) -> Verdict:
    """Return the Verdict of a Case; `describe` is asked for the device and the versions where the child has not said them.

    Raises:
        Exception: that of an outcome that says nothing of the kernel.
    """
    if isinstance(outcome, Reply):
        return msgspec.convert(outcome.result, Verdict)
    failures: tuple[Failure, ...] = ()
    figures = {}
    if isinstance(outcome, Death) and (outcome.why in ("exit", "pipe") or outcome.stage in KERNEL_STAGES):
        failure = death_failure(case.kernel, outcome)
        in_own = not 0 <= outcome.item < len(case.after)
        failures = (failure if in_own else in_earlier(failure, outcome.item, len(case.after)),)
    elif isinstance(outcome, Death) or isinstance(error := exception_of(outcome), ChildMemoryError):
        # The oracle needs more time or memory than there is: the kernel is not judged.
        late = isinstance(outcome, Death) and outcome.why == "hang"
        unjudged = "the oracle takes too long" if late else "the oracle needs too much memory"
        if isinstance(outcome, Error) and MEMORY_TAKEN in outcome.message:
            unjudged = MEMORY_TAKEN
        figures = {name: Figures(elements=0, unjudged=unjudged) for name in case.problem.needs.outputs}
    else:
        raise error
    described = describe()
    return Verdict(
        status="fail" if failures else "pass",
        failures=failures,
        figures=figures,
        device=described["device"],
        versions=described["versions"],
    )


def with_death(case: Case, verdict: Verdict, death: Death) -> Verdict:
    """Add a child's death after a kernel's calls as a failure."""
    failure = msgspec.structs.replace(death_failure(case.kernel, death), check="afterwards")
    return msgspec.structs.replace(verdict, status="fail", failures=(*verdict.failures, failure))
