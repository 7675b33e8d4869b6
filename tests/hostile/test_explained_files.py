"""Case files that are something else by the time their explanation is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostile_files import NO_FILES, apart, case, written

from attnfuzz.harness.campaign.corpus import CaseFile, StoredFinding
from attnfuzz.harness.campaign.explain import Explanation
from attnfuzz.harness.repro import explain
from attnfuzz.strategies.case import case_from_object


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with apart(tmp_path, monkeypatch):
        yield


REPLACED: dict[str, tuple[Callable[[Path], Any], str]] = {
    **NO_FILES,
    "nothing": (lambda path: path.write_bytes(b""), "not JSON"),
    "201 levels": (lambda path: path.write_bytes(b"[" * 201 + b"]" * 201), "it is nested too deeply"),
    "a list": (lambda path: path.write_bytes(b"[1]"), "it is no Case any more"),
}


@pytest.mark.parametrize("name", REPLACED)
def test_an_explanation_is_not_written_into_another_file(name: str, tmp_path: Path) -> None:
    make, reason = REPLACED[name]
    path = tmp_path / "case.json"
    make(path)
    kind = path.lstat()
    stored = CaseFile(case_from_object(case()), StoredFinding(), path)
    assert reason in explain._write(stored, Explanation(trials=1))
    assert (path.lstat().st_mode, path.lstat().st_ino) == (kind.st_mode, kind.st_ino)
    assert list(tmp_path.iterdir()) == [path]


def test_an_explanation_is_added_to_what_a_case_file_says(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_bytes(written(case(found={"message": "O is wrong", "later": 3})))
    stored = CaseFile(case_from_object(case()), StoredFinding(), path)
    assert explain._write(stored, Explanation(trials=1)) == ""
    assert json.loads(path.read_bytes())["found"] == {"message": "O is wrong", "later": 3, "explanation": {"trials": 1}}
