"""Shards of one test keep each failure once, and say which of them does."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from attnfuzz.harness.campaign.shards import SharedFailures, drop_shared_failures, shared_failures
from attnfuzz.harness.judge.failure import Identity

DQ = Identity(kernel="acme.flash", kind="mismatch", output="dq", check="elementwise")
DK = Identity(kernel="acme.flash", kind="mismatch", output="dk", check="elementwise")


def shards_of(folder: Path, *names: str, test: str = "test_a.py::test_k") -> list[SharedFailures]:
    return [shared_failures(folder, "s1", test, each) for each in names]


def test_the_first_shard_keeps_a_failure_and_the_others_learn_which(tmp_path: Path) -> None:
    first, second = shards_of(tmp_path, "test_k[0]", "test_k[1]")
    assert first.holder(DQ) is None
    held = second.holder(DQ)
    assert held is not None
    assert (held.shard, held.path) == ("test_k[0]", None)
    assert second.holder(DK) is None
    assert first.holder(DQ) is None, "its own failure, in the same test run again"
    first.keep([DQ, DK], "cases/minimal.json")
    assert second.latest(DQ).path == "cases/minimal.json"
    assert second.holder(DK) is None, "another shard's failure stays that shard's"


def test_tests_and_sessions_share_nothing(tmp_path: Path) -> None:
    (first,) = shards_of(tmp_path, "test_k[0]")
    assert first.holder(DQ) is None
    assert shards_of(tmp_path, "test_l[0]", test="test_a.py::test_l")[0].holder(DQ) is None
    assert shared_failures(tmp_path, "s2", "test_a.py::test_k", "test_k[1]").holder(DQ) is None


def test_of_many_shards_at_once_one_keeps_a_failure(tmp_path: Path) -> None:
    shards, start, kept = shards_of(tmp_path, *map(str, range(16))), threading.Barrier(16), list[str]()

    def find(shard: SharedFailures) -> None:
        start.wait()
        if shard.holder(DQ) is None:
            kept.append(shard.shard)

    threads = [threading.Thread(target=find, args=(each,)) for each in shards]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(kept) == 1
    assert shards[0].latest(DQ).shard == kept[0]


def test_a_file_that_cannot_be_read_is_another_shards(tmp_path: Path) -> None:
    first, second = shards_of(tmp_path, "a", "b")
    assert first.holder(DQ) is None
    next(first.folder.iterdir()).write_bytes(b"")
    held = second.holder(DQ)
    assert held is not None
    assert held.shard == "another shard"


def test_without_a_folder_each_shard_keeps_its_failures(tmp_path: Path) -> None:
    (tmp_path / "shards").write_text("")
    first, second = shards_of(tmp_path, "a", "b")
    assert (first.holder(DQ), second.holder(DQ)) == (None, None)
    first.keep([DQ], "x.json")
    drop_shared_failures(tmp_path, "s1")


def test_a_session_removes_its_own_and_what_is_old(tmp_path: Path) -> None:
    for session in ("s1", "old", "running"):
        assert shared_failures(tmp_path, session, "t", "a").holder(DQ) is None
    os.utime(tmp_path / "shards" / "old", (0, 0))
    drop_shared_failures(tmp_path, "s1")
    assert [each.name for each in (tmp_path / "shards").iterdir()] == ["running"]
    drop_shared_failures(tmp_path, "running")
    assert not (tmp_path / "shards").exists()
