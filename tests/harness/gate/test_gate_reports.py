"""What a gate prints and writes: annotations, JUnit XML, Markdown, JSON; and it survives what a kernel's text may hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
from rich.console import Console

from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.gate.report import github
from attnfuzz.harness.gate.report.junit import junit
from attnfuzz.harness.gate.report.terminal import GateProgress, gate_object, markdown, show_gate
from attnfuzz.harness.gate.result import Finding, Gate, KernelGate, Part, PartFinished, Waiver
from attnfuzz.kernels.errors import BadArgument

NASTY = 'dK: 100 % wrong,\nat "a:b" <script> ``` | [x](y) \x1b[31m \x00 \udc80 ::error::'
WAIVER = Waiver(2, "#12", "2026-06-30")


def result(*findings: Finding, outcome: str = "fail", **changed: object) -> Gate:
    part = Part("campaign", outcome, "60 cases, 1 failure", findings, seconds=1.5)  # type: ignore[arg-type]
    parts = (Part("replay", "pass", "no stored case"), part, Part("accuracy", "skipped", "not run: campaign failed"))
    gated = KernelGate("acme.flash", "src/a,b.py is changed", parts, "src/a,b.py", 14)
    return Gate(against="3f2a91c4d0 (main)", kernels=(gated,), seconds=2.0, **changed)  # type: ignore[arg-type]


def finding(message: str = NASTY, waiver: Waiver | None = None) -> Finding:
    described = (("kernel", "acme.flash"), ("heads", "3 query, 1 key/value (groups of 3)"))
    return Finding(
        "campaign",
        "acme.flash",
        message,
        "mismatch",
        "dk",
        "element",
        case="found/c.json",
        blob="AF1-abc=",
        described=described,
        waiver=waiver,
    )


def test_an_annotation_is_one_line_and_its_parts_cannot_break_out() -> None:
    (line,) = github.annotation_lines(result(finding()))
    assert "\n" not in line
    assert line.startswith("::error file=src/a%2Cb.py,line=14,title=acme.flash%3A mismatch::dK: 100 %25 wrong,%0Aat ")
    assert "%0Aheads: 3 query, 1 key/value (groups of 3)%0Arun it again: attnfuzz repro found/c.json" in line
    assert "%0Awithout that file: attnfuzz repro AF1-abc=%0A" in f"{line}%0A"
    assert "\\udc80" in line


def test_what_the_ledger_lets_through_is_a_notice_and_its_own_errors_are_on_its_file() -> None:
    gate = result(finding("dK", WAIVER), outcome="known", ledger="l.toml", stale=(("entry 1: expired", 3),), notes=("entry 2",))
    lines = list(github.annotation_lines(gate))
    assert lines[0].startswith("::notice file=")
    assert "known: #12, until 2026-06-30" in lines[0]
    assert lines[1:] == [
        "::error file=l.toml,line=3,title=attnfuzz ledger::entry 1: expired",
        "::warning file=l.toml,line=1,title=attnfuzz ledger::entry 2",
    ]


def test_an_interrupted_gate_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    part = Part("replay", "pass", "no stored case")
    gated = KernelGate("acme.flash", "why", (part, Part("campaign", "skipped", "not run: interrupted")))
    done = Gate(against="base", kernels=(gated,), interrupted=True)
    assert done.outcome == gate_object(done)["outcome"] == "interrupted"
    assert markdown(done).startswith("## attnfuzz gate: INTERRUPTED\n")
    show_gate(Console(width=200), done)
    assert "gate INTERRUPTED against base" in capsys.readouterr().out
    wrong = dataclasses.replace(done, kernels=(dataclasses.replace(gated, parts=(Part("campaign", "fail", "1 failure"),)),))
    assert wrong.outcome == "fail"
    assert ", interrupted; " in markdown(wrong)


def test_an_annotation_without_a_file() -> None:
    assert github.annotation("error", "m") == "::error::m"


def test_junit_is_xml_with_a_case_for_each_part_and_right_counts() -> None:
    text = junit(result(finding(), ledger="l.toml", stale=(("entry 1: it expired", 3),)))
    root = Xml.fromstring(text.encode())
    assert {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4",
        "failures": "2",
        "errors": "0",
        "skipped": "1",
    }
    suite = root[0]
    assert [(case.get("name"), [each.tag for each in case]) for case in suite] == [
        ("replay", []),
        ("campaign", ["failure"]),
        ("accuracy", ["skipped"]),
    ]
    assert suite[1].get("file") == "src/a,b.py"
    told = suite[1][0].text or ""
    assert "groups of 3" in told
    assert "<script>" in told
    assert "found/c.json" in told
    assert root[1].get("name") == "attnfuzz.ledger"


def test_what_is_known_counts_as_skipped_in_junit() -> None:
    root = Xml.fromstring(junit(result(finding("dK", WAIVER), outcome="known")).encode())
    assert (root.get("failures"), root.get("skipped")) == ("0", "2")


def test_markdown_cannot_be_broken_by_a_message() -> None:
    text = markdown(result(finding(), stale=(("entry 1: it expired | <b>", 3),)))
    outside = text.split("````")[0] + text.split("````")[2]
    assert "<script>" not in outside
    assert "| `acme.flash` | replay | pass | no stored case |" in text
    assert "| campaign | **FAIL** | 60 cases, 1 failure |" in text
    assert "expired \\| &lt;b&gt;" in text
    assert "run it again         attnfuzz repro found/c.json" in text


def test_the_terminal_shows_everything_and_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    gate = result(finding(), stale=(("entry 1: it expired", 3),), ledger="l.toml", notes=("entry 2: not seen",), untouched=2)
    with Console(width=160).capture() as _:
        pass
    console = Console(width=160, force_terminal=False)
    with console.capture() as captured:
        show_gate(console, gate)
    text = captured.get()
    for expected in (
        "acme.flash: mismatch in dK",
        "src/a,b.py:14",
        "attnfuzz repro found/c.json",
        "l.toml:3: entry 1: it expired",
    ):
        assert expected in text
    assert "gate FAIL against 3f2a91c4d0 (main): 1 fail, 2 unchanged, 1 ledger error" in text
    plain = json.loads(dumps(gate_object(gate)))
    assert plain["outcome"] == "fail"
    assert plain["kernels"][0]["parts"][1]["findings"][0]["repro"] == "attnfuzz repro found/c.json"
    assert plain["ledger_errors"] == [{"error": "entry 1: it expired", "line": 3}]


def test_progress_tells_of_each_part() -> None:
    console = Console(width=160, force_terminal=False)
    with console.capture() as captured, GateProgress(console) as progress:
        progress(PartFinished("acme.flash", Part("campaign", "pass", "60 cases", seconds=1.0)))
    assert "acme.flash campaign: pass 60 cases (1.0 s)" in captured.get()


def test_outcomes_in_order() -> None:
    assert result(finding()).outcome == "fail"
    assert result(outcome="known").outcome == "pass"
    assert result(outcome="error").outcome == "error"
    assert result(outcome="pass", stale=(("x", 1),)).outcome == "fail"
    assert Gate("x", ()).outcome == "pass"


def test_a_summary_that_cannot_be_written(tmp_path: Path) -> None:
    github.append_summary(tmp_path / "s.md", "one\n")
    github.append_summary(tmp_path / "s.md", "two\n")
    assert (tmp_path / "s.md").read_text() == "one\ntwo\n"
    with pytest.raises(BadArgument, match="GITHUB_STEP_SUMMARY"):
        github.append_summary(tmp_path / "none" / "s.md", "x")
