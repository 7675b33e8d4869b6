"""The folder of temporary files: one that cannot be used is replaced by another, and a small one is enough."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.disks import fill, small_disk
from support.paths import TESTS

from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.outcomes import Reply, Task
from attnfuzz.harness.isolation.supervisor import Supervisor

UNUSABLE: dict[str, Callable[[Path], object]] = {
    "absent": lambda folder: None,
    "a file": lambda folder: folder.write_text("mine"),
    "a link to nothing": lambda folder: folder.symlink_to("nowhere"),
    "a link to itself": lambda folder: folder.symlink_to(folder.name),
    "a device": lambda folder: folder.symlink_to("/dev/null"),
    "a folder under proc": lambda folder: folder.symlink_to("/proc/self"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What TMPDIR names, where /tmp is as if it were this test's own."""
    (tmp_path / "else").mkdir()
    monkeypatch.syspath_prepend(str(TESTS))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [os.environ["TMPDIR"], str(tmp_path / "else")])
    monkeypatch.setenv("TMPDIR", str(tmp_path / "place"))
    return tmp_path / "place"


def assert_works() -> None:
    supervisor = Supervisor(Forkserver(["json"]), memory=1 << 29)
    try:
        assert supervisor.run(Task("support.tasks:echo", {}, {"kernel": 30.0, "start": 30.0})) == Reply({})
    finally:
        supervisor.close()


@pytest.mark.parametrize("name", UNUSABLE)
def test_one_that_cannot_be_used_is_replaced(name: str, place: Path) -> None:
    UNUSABLE[name](place)
    assert_works()
    assert tempfile.gettempdir() == str(place.with_name("else"))
    assert not list(place.with_name("else").iterdir())


@pytest.mark.parametrize("kilobytes", [64, 200])
def test_a_small_one_is_enough(kilobytes: int, place: Path) -> None:
    with small_disk(place, kilobytes):
        assert_works()
        assert tempfile.gettempdir() == str(place)
        assert not list(place.iterdir())


@pytest.mark.parametrize("state", ["full", "read-only"])
def test_one_that_takes_nothing_is_replaced(state: str, place: Path) -> None:
    with small_disk(place, 64, read_only=state == "read-only"):
        if state == "full":
            fill(place)
        assert_works()
        assert tempfile.gettempdir() == str(place.with_name("else"))
