"""What the terminal says of a campaign: counts in words, failures of one likely cause, and what is no reason to worry."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from attnfuzz.harness.campaign import events
from attnfuzz.harness.campaign.events import CampaignFinished, Finding, KernelSummary
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report.console import SafeConsole
from attnfuzz.harness.report.groups import described, groups_of
from attnfuzz.harness.report.lines import EventLines
from attnfuzz.harness.report.machine import campaign_object
from attnfuzz.harness.report.terminal import Terminal, show_finding
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

SMALL, LARGE = (Problem(seqlens_q=(n,), seqlens_k=(n,), dim_qk=16, dim_v=16) for n in (1, 9))


def finding(
    output: Any = "dk", kind: Any = "unwritten", problem: Problem = SMALL, kernel: str = "acme.flash", **changed: Any
) -> Finding:
    failure = Failure(kernel=kernel, kind=kind, check="element", message="m", output=output)
    given = {"cases_to_find": 1, "shrunk": True, "shrink_trials": 3, **changed}
    return Finding(failure.identity, Case(kernel=kernel, problem=problem), Verdict(status="fail", failures=(failure,)), **given)


def shown(*all_events: Any) -> str:
    text = StringIO()
    terminal = Terminal(SafeConsole(file=text, width=200), live=False)
    for each in all_events:
        terminal(each)
    return text.getvalue()


def summary(*findings: Finding, cases: int = 1, **changed: Any) -> KernelSummary:
    return KernelSummary("acme.flash", cases, 0, 1.0, 0, 0.0, {}, findings, **changed)


def finished(*findings: Finding, cases: int = 1) -> CampaignFinished:
    return CampaignFinished(summaries=(summary(*findings, cases=cases),), skipped=(), seconds=1.0)


GROUPS: dict[str, tuple[list[Finding], list[int], list[str]]] = {
    "one minimal Problem": (
        [finding("dk"), finding("dv")], [0, 0], ["1 and 2: both may be one bug (the same minimal Problem)"],
    ),
    "three": (
        [finding("dk"), finding("dv"), finding("dq", "mismatch")], [0, 0, 0],
        ["1, 2 and 3: all of them may be one bug (the same minimal Problem)"],
    ),
    "not shrunk": ([finding("dk", partly=True), finding("dv")], [0, 0], ["1 and 2: both may be one bug (the same Problem)"]),
    "another Problem": ([finding("dk"), finding("dv", problem=LARGE)], [0, 1], []),
    "another kernel": ([finding("dk"), finding("dk", kernel="acme.other")], [0, 1], []),
    "as a whole and in elements": (
        [finding("o", "mismatch"), finding("o", "aggregate", LARGE)], [0, 0],
        ["1 and 2: both may be one bug (one output, in single elements and as a whole)"],
    ),
    "as a whole, another output": ([finding("o", "mismatch"), finding("dq", "aggregate", LARGE)], [0, 1], []),
    "two groups": (
        [finding("dk"), finding("o", "mismatch", LARGE), finding("dv"), finding("lse", "mismatch", LARGE)], [0, 1, 0, 1],
        ["1 and 3: both may be one bug (the same minimal Problem)", "2 and 4: both may be one bug (the same minimal Problem)"],
    ),
    "through another": (
        [finding("o", "aggregate", LARGE), finding("o", "mismatch"), finding("dk")], [0, 0, 0],
        ["1, 2 and 3: all of them may be one bug (one output, in single elements and as a whole; the same minimal Problem)"],
    ),
    "none": ([], [], []),
}  # fmt: skip


@pytest.mark.parametrize(("findings", "groups", "lines"), GROUPS.values(), ids=GROUPS)
def test_groups(findings: list[Finding], groups: list[int], lines: list[str]) -> None:
    assert groups_of(findings) == groups
    assert described(findings) == lines
    output = shown(finished(*findings))
    assert all(line in output for line in lines)
    assert output.count("(found after") == len(findings), "no single failure is lost"
    result = campaign_object(finished(*findings))["failures"]
    assert [each["group"] for each in result] == [findings[group].identity.key for group in groups]


@pytest.mark.parametrize(
    ("findings", "cases", "line"),
    [
        ([], 1, "no failures in 1 case, 1.0 s"),
        ([], 2, "no failures in 2 cases, 1.0 s"),
        ([finding()], 1, "1 failure in 1 case, 1.0 s"),
        ([finding("dk"), finding("dv")], 7, "2 failures, likely of 1 cause, in 7 cases, 1.0 s"),
        ([finding("dk"), finding("dv", problem=LARGE)], 7, "2 failures in 7 cases, 1.0 s"),
    ],
)
def test_the_last_line(findings: list[Finding], cases: int, line: str) -> None:
    assert shown(finished(*findings, cases=cases)).splitlines()[-1] == line


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"cases_to_find": 1, "shrink_trials": 1}, "(found after 1 case, shrunk in 1 trial)"),
        ({"cases_to_find": 2, "shrink_trials": 2, "partly": True}, "(found after 2 cases, shrunk in 2 trials, partly shrunk)"),
        ({"shrink_trials": 0, "partly": True}, "(found after 1 case, not shrunk)"),
        ({"shrink_trials": 0, "shrunk": False}, "(found after 1 case, not shrunk)"),
        ({"shrink_trials": 0}, "(found after 1 case, already minimal)"),
        ({"rate": (2, 9)}, "(found after 1 case, shrunk in 3 trials; shows in 2 of 9 runs)"),
    ],
)
def test_how_a_failure_came_to_its_case(changed: dict[str, Any], text: str) -> None:
    output = StringIO()
    show_finding(SafeConsole(file=output, width=200), 1, finding(**changed))
    assert output.getvalue().splitlines()[1] == f"1. acme.flash: unwritten in dK {text}"


def test_a_failure_is_announced_once() -> None:
    """A Case that was in flight when Ctrl-C came is found by its worker, and again as what it has left."""
    output = shown(
        events.FailureFound(finding(), 60.0), events.FailureFound(finding(), None), events.FailureFound(finding("dv"), None)
    )
    assert output.splitlines() == [
        "found acme.flash: unwritten in dK after 1 case; shrinking for at most 60 s ...",
        "found acme.flash: unwritten in dV after 1 case; shrinking ...",
    ]


@pytest.mark.parametrize(("count", "text"), [(1, "1 process replaced"), (2, "2 processes replaced")])
def test_a_process_that_was_replaced_is_no_reason_to_worry(count: int, text: str) -> None:
    output = shown(events.KernelStarted("acme.flash", 0, 0), events.KernelFinished(summary(replaced=count)))
    why = "that is fine: where a child process dies or holds too much memory, a new one takes its place"
    assert output == f"acme.flash: 1 case in 1.0 s (1.0 cases/s), {text} ({why})\n"


def test_seconds_of_several_workers_are_named_so() -> None:
    """They are more than those of the run."""
    environment = {"device": "cpu", "cores": 2, "versions": {}}
    started = events.CampaignStarted({"workers": 2}, environment, ("acme.flash",), 60.0)
    output = shown(started, events.KernelFinished(replace(summary(), cases=200, seconds=100.0)))
    assert "acme.flash: 200 cases in 100.0 s of all workers (2.0 cases/s each)" in output


@pytest.mark.parametrize(
    ("statuses", "text"),
    [
        (["pass"], "1 of 1 earlier case passes now"),
        (["fail"], "0 of 1 earlier case pass now"),
        (["pass", "fail", "pass"], "2 of 3 earlier cases pass now"),
    ],
)
def test_what_became_of_stored_cases_is_told(statuses: list[Any], text: str) -> None:
    trials = [
        events.TrialFinished("acme.flash", "replay", finding().case, Verdict(status=each, failures=()))
        if each == "pass"
        else events.TrialFinished("acme.flash", "replay", finding().case, finding().verdict)
        for each in statuses
    ]
    output = shown(*trials, events.KernelFinished(summary()))
    assert output == f"acme.flash: 1 case in 1.0 s (1.0 cases/s), {text}\n"


def test_the_lines_of_a_message_stand_under_its_failure() -> None:
    output = StringIO()
    failure = Failure(kernel="acme.flash", kind="exception", check="forward", message="one\ntwo\r\n\x1b[2Jthree")
    several = Finding(failure.identity, finding().case, Verdict(status="fail", failures=(failure,)))
    show_finding(SafeConsole(file=output, width=200), 1, several)
    assert "   exception: one\n   two\n   \\x1b[2Jthree\n" in output.getvalue()


def test_the_budget_is_for_one_kernel() -> None:
    environment = {"device": "cpu", "cores": 1, "versions": {}}
    output = shown(events.CampaignStarted({}, environment, ("acme.flash",), 60.0))
    assert "budget: 60 s for 1 kernel; seed: 0\n" in output


def test_a_path_that_looks_like_markup_is_shown() -> None:
    output = shown(events.CaseSkipped(str(Path("[red]a[/x].json")), "it [/b] cannot run"))
    assert output == "[red]a[/x].json: not tried again here: it [/b] cannot run\n"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            events.WorkerDied(3, "acme.flash", "SIGKILL", True),
            "worker 3 ended by SIGKILL while it tried acme.flash: another",
        ),
        (events.WorkerDied(0, None, "exit code 1", False), "worker 0 ended by exit code 1: none takes its place"),
    ],
)
def test_a_worker_that_dies_is_said_and_is_a_line_of_events(event: events.WorkerDied, text: str) -> None:
    assert text in shown(event)
    written: list[str] = []
    EventLines(written.append, 1)(event)
    [line] = map(json.loads, written)
    line.pop("after")
    assert line == {
        "format": 1,
        "event": "worker",
        "worker": event.worker,
        "kernel": event.kernel,
        "ending": event.ending,
        "replaced": event.replaced,
    }
