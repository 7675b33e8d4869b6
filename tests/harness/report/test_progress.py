"""One progress display for all commands: on a terminal alone, with the columns that are wanted."""

from __future__ import annotations

import re
import threading
import time
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from attnfuzz.harness.campaign import events
from attnfuzz.harness.gate.report.terminal import GateProgress
from attnfuzz.harness.gate.result import Part, PartFinished, PartProgress
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report import progress
from attnfuzz.harness.report.progress import Heartbeat, Pace, ProgressView, Verbosity, progress_on, seconds_text
from attnfuzz.harness.report.terminal import Terminal
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, "doing 0:00:00"),
        ({"bar": True, "count": True}, "doing ━━━━━━━━━━━━╺━━━━━━━━━━━ 1/2 0:00:00"),
        ({"note": True, "width": 7}, "doing half 0:00:00"),
        ({"bar": True, "left": True}, "doing ━━━━━━━━━━━━╺━━━━━━━━━━━ 0:00:00 -:--:--"),
    ],
)
def test_it_shows_what_is_wanted(columns: dict[str, Any], expected: str) -> None:
    text = StringIO()
    with progress_on(Console(file=text, force_terminal=True, width=100), **columns) as progress:
        progress.add_task("doing", total=2, completed=1, note="half")
    lines = [" ".join(Text.from_ansi(line).plain.split()) for line in text.getvalue().splitlines()]
    assert any(line.endswith(expected) for line in lines), lines


@pytest.mark.parametrize(("terminal", "live"), [(False, None), (True, False)])
def test_it_is_silent_where_there_is_no_terminal(terminal: bool, live: bool | None) -> None:
    text = StringIO()
    with ProgressView(progress_on(Console(file=text, force_terminal=terminal), live=live)) as view:
        view.bars.add_task("doing", total=2)
    assert text.getvalue().strip() == ""


# --- how far a run is


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("seconds", "wanted", "cases", "left"),
    [
        (None, None, 10, None),
        (60.0, None, 0, 40.0),
        (None, 100, 0, None),
        (None, 100, 11, 178.0),
        (60.0, 100, 11, 40.0),
        (600.0, 21, 11, 20.0),
        (10.0, None, 3, 0.0),
        (None, 10, 12, 0.0),
    ],
)
def test_the_time_left_is_by_the_limit_that_is_reached_first(
    clock: list[float], seconds: float | None, wanted: int | None, cases: int, left: float | None
) -> None:
    """After 20 s; the Cases came evenly in all of them."""
    pace = Pace(seconds, wanted)
    for number in range(cases):
        clock[0] = 1000.0 + 20.0 * number / max(1, cases - 1)
        pace.count()
    clock[0] = 1020.0
    assert pace.left == (None if left is None else pytest.approx(left))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (99.4, "99 s"), (100.0, "2 min"), (3599.0, "1 h 0 min"), (4200.0, "1 h 10 min")]
)
def test_seconds_in_words(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_a_heartbeat_beats_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT", 0.001)
    beats, enough = list[int](), threading.Event()

    def beat() -> None:
        beats.append(1)
        if len(beats) == 3:
            enough.set()

    heartbeat = Heartbeat(beat)
    heartbeat.start()
    assert enough.wait(30)
    heartbeat.stop()
    count = len(beats)
    time.sleep(0.01)
    assert len(beats) == count


# --- the campaign on a console

CASE = Case(kernel="acme.flash", problem=Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=8, dim_v=8, dtype="float32"))
PASS = Verdict(status="pass")
SUMMARY = events.KernelSummary(
    kernel="acme.flash", cases=12, shrink_cases=0, seconds=1.0, compiles=0, compile_seconds=0.0, outputs={}, findings=(),
    replayed=2, not_replayed=3998, never_drawn={"dtype": ("float32",), "window": ("yes",)},
)  # fmt: skip
ENVIRONMENT = {"device": "cpu", "cores": 2, "versions": {"python": "3.11"}}


def shown(verbosity: Verbosity, *, live: bool = False, beat: bool = False) -> str:
    """What a run of one kernel that replays 2 of 4,000 Cases shows."""
    text = StringIO()
    terminal = Terminal(Console(file=text, force_terminal=live, width=200), verbosity=verbosity)
    stream = [
        events.CampaignStarted({"seed": 7, "plain": True}, ENVIRONMENT, ("acme.flash", "acme.slow"), 60.0, 7),
        events.KernelStarted("acme.flash", 3, 2),
        events.ReplayStarted("acme.flash", 4000, 4000, 15.0),
        events.CompileFinished("acme.flash", "{}", 1.5, None),
        events.TrialFinished("acme.flash", "replay", CASE, PASS),
        events.TrialFinished("acme.flash", "replay", CASE, PASS),
        events.KernelFinished(SUMMARY),
    ]
    for each in stream:
        terminal._shown = -1.0  # however fast this is
        terminal(each)
    if beat:
        terminal.beat()
    terminal(events.CampaignFinished((SUMMARY,), (), 12.0, seed=7))
    return Text.from_ansi(text.getvalue()).plain


def test_a_run_shows_its_seed_its_replays_and_what_was_not_tried() -> None:
    lines = shown("normal").splitlines()
    assert "settings: plain=True; budget: 60 s for 2 kernels; seed: 7" in lines
    assert "acme.flash: replaying 4,000 stored cases, for at most 15 s" in lines
    assert any("3,998 stored cases not replayed: their part of the run was over" in line for line in lines)
    assert any("acme.flash" in line and "(not replayed: 3998)" in line for line in lines)
    assert "acme.flash: declared, and in no case: dtype float32; window" in lines
    assert lines[-1] == "no failures in 12 cases, 12.0 s; the same cases again: --seed 7"
    assert not any("replayed " in line and CASE.id in line for line in lines)


def test_the_live_display_counts_replays_and_estimates_the_time_left() -> None:
    assert re.search(
        r"replaying 2 of 4,000 stored cases, about \d+ s left; 1 kernel: 2 cases, 0 failures", shown("normal", live=True)
    )


def test_quiet_shows_failures_and_the_last_line_only() -> None:
    assert shown("quiet").splitlines() == ["no failures in 12 cases, 12.0 s; the same cases again: --seed 7"]


def test_verbose_shows_each_replay_compile_and_kernel() -> None:
    lines = shown("verbose").splitlines()
    assert "acme.flash: begins, with 3 variants and 2 compiles" in lines
    assert "acme.flash: compiled {}: 1.5 s" in lines
    assert lines.count(f"acme.flash: replayed {CASE.id}: pass") == 2


def test_without_a_terminal_a_line_says_how_far_the_run_is() -> None:
    line = next(each for each in shown("normal", beat=True).splitlines() if each.startswith("after "))
    assert re.fullmatch(r"after 0 s: 2 cases, 1 of 2 kernels done, 0 failures, about \d+ s left", line)


def test_the_gate_says_what_it_is_at_and_quietly_only_what_could_not_be_run() -> None:
    text = StringIO()
    with GateProgress(Console(file=text, width=200)) as gate:
        gate.beat()
        gate(PartProgress("acme.flash", "replay", "replaying 5 of 4,000 stored cases, about 80 s left"))
        gate.beat()
    assert text.getvalue().splitlines() == [
        "after 0 s: loading",
        "after 0 s: acme.flash replay replaying 5 of 4,000 stored cases, about 80 s left",
    ]
    text = StringIO()
    with GateProgress(Console(file=text, width=200), "quiet") as gate:
        gate(PartFinished("acme.flash", Part("replay", "pass", "no stored case of this kernel")))
        gate(PartFinished("acme.flash", Part("campaign", "error", "it broke")))
    assert text.getvalue().splitlines() == ["acme.flash campaign: error it broke"]
    text = StringIO()
    with GateProgress(Console(file=text, width=200), "verbose") as gate:
        gate(PartProgress("acme.flash", "replay"))
    assert text.getvalue().splitlines() == ["acme.flash replay: begins"]
