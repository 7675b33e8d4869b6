"""Files in `inflight` that no run wrote: set aside with a line that says so, and no run is stopped by them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.hostile_files import NO_FILES, PROBLEM, apart, attnfuzz, case, digits, nested, written

from attnfuzz.harness.campaign.journal import _HEAD, _SLOT, Journal, copy_left_behind, left_behind
from attnfuzz.strategies.case import Case, case_from_object

RUN = ("run", "torch.reference_cpu", "--device", "cpu", "--in-process", "--max-examples", "1", "--out", "out")
FILE = Path("out/inflight/1-a")


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with apart(tmp_path, monkeypatch):
        FILE.parent.mkdir(parents=True)
        yield


def slot(content: bytes) -> bytes:
    return _HEAD.pack(hashlib.sha256(content).digest(), len(content)) + content


def entry(**changed: Any) -> dict[str, Any]:
    return {"number": 1, "case": written(case()).decode(), **changed}


def in_slot(content: Any) -> bytes:
    return slot(content if isinstance(content, bytes) else written(content))


BROKEN: dict[str, tuple[bytes, str]] = {
    "noise": (b"\xff" * 100, "it holds no entry that is whole"),
    "text": (b"# notes\n" * 1000, "it holds no entry that is whole"),
    "three slots of noise": (b"x" * 3 * _SLOT, "it holds no entry that is whole"),
    "larger than a journal": (b"x" * (3 * _SLOT + 1), "it is too large"),
    "an endless length": (_HEAD.pack(b"x" * 32, 2**64 - 1) + b"x" * 100, "it holds no entry that is whole"),
    "another digest": (_HEAD.pack(b"x" * 32, 2) + b"{}", "it holds no entry that is whole"),
    "a sound digest of no JSON": (in_slot(b"{"), "not JSON"),
    "a sound digest of a list": (in_slot([]), "Expected `object`"),
    "a sound digest of other types": (in_slot(entry(number="x")), "Expected `int`"),
    "200,000 brackets": (in_slot(b"[" * 200_000), "nested too deeply"),
    "a number of 5,000 digits": (in_slot(entry(number=digits(5000))), "out of range"),
    "negative deaths": (in_slot(entry(deaths=-5)), "Expected `int` >= 0"),
    "deaths of 400 digits": (in_slot(entry(deaths=digits(400))), "Expected `int` <= 1000000"),
    "no case but text": (in_slot(entry(case="x")), "the Case in it cannot be read: not JSON"),
    "a case of another version": (in_slot(entry(case='{"format": 2}')), "this attnfuzz reads format 1"),
    "a case of 200,000 brackets": (in_slot(entry(case="[" * 200_000)), "nested too deeply"),
    "a case of 900 levels": (in_slot(entry(case=written(case(config={"a": nested(900)})).decode())), "nested too deeply"),
    "a case to import": (in_slot(entry(case=written(case(kernel="os:system")).decode())), "a kernel's own name is expected"),
    "two slots, one broken": (in_slot(entry()).ljust(_SLOT, b"\0") + in_slot(b"{"), "not JSON"),
}  # fmt: skip


def assert_set_aside(reason: str) -> None:
    """The run says so and runs; the next one has nothing to say."""
    aside = FILE.with_name("broken.1-a")
    result = attnfuzz(*RUN)
    assert result.exit_code == 0, result.output
    [line] = [each for each in result.stdout.splitlines() if str(FILE) in each]
    assert reason in line
    assert line.endswith(f"it is kept as {aside}")
    assert os.path.lexists(aside)
    assert not os.path.lexists(FILE)
    assert list(left_behind("out", lambda *_: pytest.fail("reported twice"))) == []
    record = json.loads(min(Path("out/runs").iterdir()).read_text())
    assert [each["what"] for each in record["not_tried"]] == [str(FILE)]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_set_aside(name: str) -> None:
    content, reason = BROKEN[name]
    FILE.write_bytes(content)
    assert_set_aside(reason)
    assert FILE.with_name("broken.1-a").read_bytes() == content


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_is_set_aside(name: str) -> None:
    make, reason = NO_FILES[name]
    make(FILE.absolute())
    assert_set_aside(reason)


ODD_NAMES = ["x-y", "-", "\u0662-a", "1", "broken.1-a", ".1-a", "1_000-a"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_what_is_named_unlike_a_journal_is_left_alone(name: str) -> None:
    FILE.with_name(name).write_bytes(b"mine")
    result = attnfuzz(*RUN)
    assert result.exit_code == 0, result.output
    assert FILE.with_name(name).read_bytes() == b"mine"


def test_a_second_broken_file_of_one_name_overwrites_none() -> None:
    for content in (b"one", b"two"):
        FILE.write_bytes(content)
        assert list(left_behind("out")) == []
    assert sorted(each.read_bytes() for each in FILE.parent.iterdir()) == [b"one", b"two"]


def test_a_name_that_leaves_no_room_is_set_aside_too() -> None:
    long = FILE.with_name("1-" + "a" * 253)
    long.write_bytes(b"x")
    assert list(left_behind("out")) == []
    assert not long.exists()
    assert len(list(FILE.parent.iterdir())) == 1


def test_a_file_of_a_run_that_lives_is_not_touched() -> None:
    journal = Journal("out")
    journal.launch(case_from_object(case()))
    assert journal.path is not None
    assert list(left_behind("out", lambda *_: pytest.fail("reported"))) == []
    assert journal.path.exists()
    journal.close()


def test_the_cases_that_can_be_read_are_kept() -> None:
    good = written(case(recipe={"seed": 3})).decode()
    FILE.write_bytes(in_slot(entry(more=["{", good, '{"format": 2}'])))
    reports: list[str] = []
    cases = [each.case for each in left_behind("out", lambda path, reason: reports.append(f"{path}: {reason}"))]
    assert cases == [case_from_object(case()), case_from_object(json.loads(good))]
    assert reports == [f"{FILE}: 2 of its 4 Cases cannot be read: not JSON (Input data was truncated)"]


def test_deaths_without_end_make_no_case_deadly_in_thousands() -> None:
    FILE.write_bytes(in_slot(entry(deaths=1_000_000)))
    [left] = left_behind("out")
    assert left.deaths == 1_000_001
    result = attnfuzz(*RUN)
    assert result.exit_code == 0, result.output
    assert "not tried again here: 1000001 runs died while this Case was in flight" in result.stdout


@pytest.mark.parametrize("name", [*BROKEN, *NO_FILES])
def test_merge_leaves_out_what_it_cannot_read_and_renames_nothing(name: str) -> None:
    if name in BROKEN:
        FILE.write_bytes(BROKEN[name][0])
    else:
        NO_FILES[name][0](FILE.absolute())
    reports: list[Any] = []
    assert copy_left_behind("out", "all", lambda *each: reports.append(each)) == []
    assert [path for path, _ in reports] == [FILE]
    assert os.path.lexists(FILE)
    assert not Path("all").exists()


def test_a_sound_file_is_read() -> None:
    expected: Case = case_from_object(case())
    FILE.write_bytes(in_slot(entry()))
    [left] = left_behind("out")
    assert (left.case, left.pid) == (expected, 1)
    assert msgspec.to_builtins(expected.problem)["seqlens_q"] == tuple(PROBLEM["seqlens_q"])


MAKERS: dict[str, Callable[[], Any]] = {
    "a file in place of the folder": lambda: (FILE.parent.rmdir(), Path("out/inflight").write_text("mine")),
    "a link to nothing in place of the folder": lambda: (FILE.parent.rmdir(), Path("out/inflight").symlink_to("nowhere")),
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_stands_in_place_of_the_folder_is_named_and_the_run_goes_on(name: str) -> None:
    MAKERS[name]()
    result = attnfuzz(*RUN)
    assert result.exit_code == 2, result.output
    assert "the case in flight cannot be noted on disk any more: File exists (out/inflight)" in result.stdout
    assert "1 cases in" in result.stdout or "1 case in" in result.stdout
