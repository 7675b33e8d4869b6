"""Cases that fail before an output is judged: a table that says "wrong in 0" must say that too."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from attnfuzz.harness.campaign.coverage import Tally, Worst
from attnfuzz.harness.campaign.events import CampaignFinished, Finding, KernelSummary
from attnfuzz.harness.judge.failure import Failure, Kind
from attnfuzz.harness.judge.verdict import Figures, Verdict
from attnfuzz.harness.report.terminal import failed_unjudged_lines, summary_table
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

CASE = Case(kernel="theirs.flash", problem=Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=8, dim_v=8))


def failure(kind: Kind, output: Any = None) -> Failure:
    return Failure(kernel="theirs.flash", kind=kind, output=output, check="forward", message="it failed")


def finished(kind: Kind, count: int) -> CampaignFinished:
    verdict = Verdict(status="fail", failures=(failure(kind),))
    finding = Finding(verdict.failures[0].identity, CASE, verdict)
    row = KernelSummary(
        kernel="theirs.flash", cases=60, shrink_cases=0, seconds=1.0, compiles=0, compile_seconds=0.0,
        outputs={"o": Worst(cases=60 - count)}, findings=(finding,), failed_unjudged=count,
    )  # fmt: skip
    return CampaignFinished((row,), (), 1.0)


def test_cases_without_figures_are_counted() -> None:
    tally = Tally()
    tally.add("generate", CASE, Verdict(status="fail", failures=(failure("out-of-bounds"),)))
    tally.add("replay", CASE, Verdict(status="fail", failures=(failure("crash"),)))
    tally.add("generate", CASE, Verdict(status="fail", failures=(failure("mismatch", "o"),), figures={"o": Figures(elements=8)}))
    tally.add("generate", CASE, Verdict(status="pass", figures={"o": Figures(elements=8)}))
    tally.add("shrink", CASE, Verdict(status="fail", failures=(failure("crash"),)))
    assert (tally.cases, tally.failed_unjudged) == (4, 2)


@pytest.mark.parametrize("kind", ["out-of-bounds", "crash"])
def test_the_table_and_a_line_say_so(kind: Kind) -> None:
    event = finished(kind, 39)
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(summary_table(event.summaries))
    assert "21 (+39 failed before)" in captured.get()
    [line] = failed_unjudged_lines(event)
    assert line.startswith("theirs.flash: 39 of 60 cases failed before an output was judged")
    assert ("--no-memory-check" in line) == (kind == "out-of-bounds")


def test_where_every_case_was_judged_nothing_is_said() -> None:
    assert failed_unjudged_lines(finished("crash", 0)) == []
