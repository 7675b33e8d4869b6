"""`attnfuzz mutants --rows`: what a file of rows is good for in the next run, and campaigns that their time has ended."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import detection_rows
from support.detection import Attempt, Found
from support.mutants_command import row, run

pytestmark = pytest.mark.usefixtures("of_checkout")


def test_rows_of_a_file_are_not_run_again(campaigns: list[Attempt], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    arguments = ("MSK-05", "DIM-04", "--seeds", "1", "--rows", str(file))
    run("MSK-05", "--seeds", "1", "--rows", str(file))
    with file.open("a") as cut:
        cut.write('{"asked":"cut off by the end of a pro')
    assert run(*arguments).exit_code == 0
    assert [each.mutant for each in campaigns] == ["MSK-05", "DIM-04"]
    done = run(*arguments)
    assert (done.exit_code, len(campaigns)) == (0, 2)
    assert "2 of 2 campaigns found their bug" in done.output
    run(*arguments, "--max-examples", "7")
    assert [each.most for each in campaigns] == [500, 500, 7, 7]


def test_rows_of_other_cases_are_run_again(campaigns: list[Attempt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed strategies draw other Cases by the same seed, and rows of earlier versions do not say which Cases theirs were."""
    file = tmp_path / "rows.jsonl"
    arguments = ("MSK-05", "--seeds", "1", "--rows", str(file))
    for _ in range(2):
        assert run(*arguments).exit_code == 0
    assert len(campaigns) == 1
    lines = file.read_text().splitlines()
    file.write_text("".join(re.sub(r',"drawn":"\w+"', "", each) + "\n" for each in lines))
    run(*arguments)
    assert len(campaigns) == 2
    plan = detection_rows.plan_of
    monkeypatch.setattr(detection_rows, "plan_of", lambda *of: dataclasses.replace(plan(*of), variants=plan(*of).variants[1:]))
    detection_rows._drawn_of.cache_clear()
    run(*arguments)
    detection_rows._drawn_of.cache_clear()
    assert len(campaigns) == 3


def test_rows_are_told_apart_by_what_a_campaign_tries_first_and_in_which_order(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = detection_rows._drawn_of.__wrapped__
    before = digest("triton.varlen", "cuda", 3, 500)
    assert before == digest("triton.varlen", "cuda", 3, 500)
    others = [
        digest("triton.varlen", "cuda", 4, 500),
        digest("triton.varlen", "cpu", 3, 500),
        digest("triton.flex", "cuda", 3, 500),
    ]
    for name in ("compile_order", "draw_round"):
        of = getattr(detection_rows, name)
        with monkeypatch.context() as changed:
            changed.setattr(detection_rows, name, lambda *values, of=of: of(*values)[:-1])
            others.append(digest("triton.varlen", "cuda", 3, 500))
    assert len({before, *others}) == 6


@pytest.mark.parametrize("content", ['{"a": 1}\n', "[1, 2]", "\udcff\udcfe\n", '{"asked":"x"}\nnotes\n'])
def test_a_file_of_something_else_gets_no_rows(content: str, campaigns: list[Attempt], tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text(content, encoding="utf-8", errors="surrogateescape")
    before = file.read_bytes()
    done = run("MSK-05", "--rows", str(file))
    assert done.exit_code == 2
    assert "is no row of a campaign; give a file of rows, or a new one" in done.output
    assert (file.read_bytes(), campaigns) == (before, [])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"mutant":"MSK-05"', '"mutant":"MSK-06"'),
        ('"mutant":"MSK-05"', '"mutant":"NOPE"'),
        ('"seed":0', '"seed":1'),
        ('"cases":3', '"cases":-3'),
        ('"case":"{', '"case":"garbage{'),
        ('"row":', '"raw":'),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(before: str, after: str, campaigns: list[Attempt], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    run("MSK-05", "--seeds", "1", "--rows", str(file))
    text = file.read_text()
    assert before in text, text
    file.write_text(text.replace(before, after))
    done = run("MSK-05", "--seeds", "1", "--rows", str(file))
    assert (done.exit_code, len(campaigns)) == (2, 1)
    assert "line 1 is no row of a campaign; give a file of rows, or a new one" in done.output


def test_a_row_that_cannot_be_written_is_an_error_that_names_the_option(
    campaigns: list[Attempt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("support.detection_rows.Rows.add", full)
    done = run("MSK-05", "--rows", str(tmp_path / "rows.jsonl"))
    assert done.exit_code == 2
    assert "rows.jsonl': it cannot be written (No space left on device)" in " ".join(done.output.split())


@pytest.mark.parametrize("changed", [{"cut": True}, {"error": "ChildError: no process"}])
def test_rows_that_time_or_an_error_ended_are_tried_again(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def finished(_: Any, tasks: list[Attempt], jobs: int, **limits: Any) -> Iterator[Found]:
        asked.extend(each.mutant for each in tasks)
        yield from (dataclasses.replace(row(each, killed=False), **changed) for each in tasks)

    monkeypatch.setattr("support.verdict.processes.finished", finished)
    for _ in range(2):
        done = run("MSK-05", "--seeds", "1", "--rows", str(tmp_path / "rows.jsonl"))
        assert done.exit_code == 1
    assert asked == ["MSK-05", "MSK-05"]
    text = "ended by their time" if "cut" in changed else "the campaign broke: ChildError: no process"
    assert text in done.output


def test_campaigns_that_their_time_has_ended_run_longer_in_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float | None]] = []

    def finished(_: Any, tasks: list[Attempt], jobs: int, **limits: Any) -> Iterator[Found]:
        asked.extend((each.mutant, each.budget) for each in tasks)
        for each in tasks:
            late = each.mutant == "DIM-04" and each.budget != 240.0
            yield dataclasses.replace(row(each, killed=not late), cut=late)

    monkeypatch.setattr("support.verdict.processes.finished", finished)
    arguments = ("MSK-05", "DIM-04", "--seeds", "1", "--each", "60s")
    content = json.loads(run(*arguments, "--budget", "9m", "--rows", str(tmp_path / "rows.jsonl"), "--json").stdout)
    assert [each["cases"] for each in content["attempts"]] == [3, 3]
    assert asked == [("MSK-05", 60.0), ("DIM-04", 60.0), ("DIM-04", 120.0), ("DIM-04", 240.0)]
    # The latest row counts, here and in the file.
    assert run(*arguments, "--rows", str(tmp_path / "rows.jsonl")).exit_code == 0
    assert len(asked) == 4
    asked.clear()
    assert run(*arguments).exit_code == run(*arguments, "--budget", "60s").exit_code == 1
    assert asked == 2 * [("MSK-05", 60.0), ("DIM-04", 60.0)]


def test_campaigns_that_an_earlier_run_cut_come_last_with_twice_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float | None]] = []
    took = {"MSK-05": 93.0, "DIM-04": 62.0}

    def finished(_: Any, tasks: list[Attempt], jobs: int, **limits: Any) -> Iterator[Found]:
        asked.extend((each.mutant, each.budget) for each in tasks)
        for each in tasks:
            late = first and each.mutant != "MSK-10"
            yield dataclasses.replace(row(each, killed=not late), cut=late, seconds=took.get(each.mutant, 4.0))

    monkeypatch.setattr("support.verdict.processes.finished", finished)
    options = ("--seeds", "1", "--each", "60s", "--rows", str(tmp_path / "rows.jsonl"))
    first = True
    assert run("MSK-05", "DIM-04", "MSK-10", *options).exit_code == 1
    asked.clear()
    assert run("MSK-05", "BWD-03", "DIM-04", "MSK-10", *options, "--budget", "70s").exit_code == 1
    assert asked == [("BWD-03", 60.0), ("DIM-04", 60.0), ("MSK-05", 60.0)], "no more than the time of all"
    asked.clear()
    first = False
    assert run("MSK-05", "DIM-04", "MSK-10", "MSK-01", *options, "--budget", "9m").exit_code == 0
    assert asked == [("MSK-01", 60.0), ("DIM-04", 124.0), ("MSK-05", 186.0)]


def test_the_end_of_the_time_in_a_longer_campaign_leaves_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from support.verdict.processes import TimeOver

    def finished(_: Any, tasks: list[Attempt], jobs: int, **limits: Any) -> Iterator[Found]:
        if tasks[0].budget != 60.0:
            raise TimeOver("over")
        yield from (dataclasses.replace(row(each, killed=False), cut=True) for each in tasks)

    monkeypatch.setattr("support.verdict.processes.finished", finished)
    done = run("MSK-05", "--seeds", "1", "--each", "60s", "--budget", "9m", "--json")
    content = json.loads(done.stdout)
    assert (done.exit_code, content["time_over"], content["left"]) == (1, False, [])
    assert [each["cut"] for each in content["attempts"]] == [True]


def test_the_end_of_the_time_keeps_the_rows_until_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.verdict.processes import TimeOver

    def finished(_: Any, tasks: list[Attempt], jobs: int, *, seconds: float, again: int) -> Iterator[Found]:
        assert seconds == 540.0
        yield row(tasks[0])
        raise TimeOver("over")

    monkeypatch.setattr("support.verdict.processes.finished", finished)
    file = tmp_path / "rows.jsonl"
    done = run("MSK-05", "DIM-04", "--seeds", "1", "--budget", "9m", "--rows", str(file), "--json")
    assert done.exit_code == 1
    content = json.loads(done.stdout)
    assert (content["time_over"], content["left"], len(content["attempts"])) == (True, [["DIM-04", 0]], 1)
    assert "time over; campaigns until then: 1, left: 1" in done.stderr
    assert "MSK-05, seed 0, triton.varlen: mismatch dq after 3 Cases, 0.5 s" in done.stderr
    assert len(file.read_text().splitlines()) == 1
