"""Shards of one test keep each failure once, and say which of them does."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from attnfuzz.harness.campaign.corpus import Corpus
from attnfuzz.harness.campaign.events import Event, Finding, Shrunk
from attnfuzz.harness.campaign.findings import Findings
from attnfuzz.harness.campaign.shared_failures import SharedFailures, drop_shared_failures, shared_failures
from attnfuzz.harness.judge.failure import Failure, Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

FAILURE = Failure(kernel="torch.reference_cpu", kind="mismatch", output="dq", check="elementwise", message="dQ is wrong")
OTHER = replace(FAILURE, output="dk")
DQ, DK = FAILURE.identity, OTHER.identity
CASE = Case(
    kernel="torch.reference_cpu",
    problem=Problem(seqlens_q=(3,), seqlens_k=(4,), dim_qk=8, dim_v=8),
    config=Config(tile_m=16, tile_n=16),
)


def shards_of(folder: Path, *names: str, test: str = "test_a.py::test_k") -> list[SharedFailures]:
    return [shared_failures(folder, "s1", test, each) for each in names]


def test_the_first_shard_keeps_a_failure_and_the_others_learn_which(tmp_path: Path) -> None:
    first, second = shards_of(tmp_path, "test_k[0]", "test_k[1]")
    assert first.claim(DQ) is None
    claim = second.claim(DQ)
    assert claim is not None
    assert (claim.test, claim.path, claim.shrunk) == ("test_k[0]", None, False)
    assert second.claim(DK) is None
    assert first.claim(DQ) is None, "its own failure, in the same test run again"
    first.note([DQ, DK], "cases/minimal.json", shrunk=True)
    latest = second.latest(DQ)
    assert latest is not None
    assert (latest.path, latest.shrunk) == ("cases/minimal.json", True)
    assert second.claim(DK) is None, "another shard's failure stays that shard's"
    assert not list(tmp_path.rglob(".*.tmp"))


def test_tests_and_sessions_share_nothing(tmp_path: Path) -> None:
    (first,) = shards_of(tmp_path, "test_k[0]")
    assert first.claim(DQ) is None
    assert shards_of(tmp_path, "test_l[0]", test="test_a.py::test_l")[0].claim(DQ) is None
    assert shared_failures(tmp_path, "s2", "test_a.py::test_k", "test_k[1]").claim(DQ) is None


def test_of_many_shards_at_once_one_keeps_a_failure(tmp_path: Path) -> None:
    shards, start, kept = shards_of(tmp_path, *map(str, range(16))), threading.Barrier(16), list[str]()

    def find(shard: SharedFailures) -> None:
        start.wait()
        if shard.claim(DQ) is None:
            kept.append(shard.test)

    threads = [threading.Thread(target=find, args=(each,)) for each in shards]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(kept) == 1
    latest = shards[0].latest(DQ)
    assert latest is not None
    assert latest.test == kept[0]


def test_a_failure_whose_file_cannot_be_read_is_kept_by_each(tmp_path: Path) -> None:
    first, second = shards_of(tmp_path, "a", "b")
    assert first.claim(DQ) is None
    next(first.folder.iterdir()).write_bytes(b"")
    assert (first.claim(DQ), second.claim(DQ), second.latest(DQ)) == (None, None, None)


def test_without_a_folder_each_shard_keeps_its_failures(tmp_path: Path) -> None:
    (tmp_path / "shards").write_text("")
    first, second = shards_of(tmp_path, "a", "b")
    assert (first.claim(DQ), second.claim(DQ)) == (None, None)
    first.note([DQ], "x.json", shrunk=True)
    drop_shared_failures(tmp_path, "s1")


def refused(error: int) -> Callable[..., None]:
    def link(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    return link


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_links_shares_failures_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    monkeypatch.setattr(os, "link", refused(error))
    first, second = shards_of(tmp_path, "test_k[0]", "test_k[1]")
    assert first.claim(DQ) is None
    claim = second.claim(DQ)
    assert claim is not None
    assert claim.test == "test_k[0]"
    assert not list(tmp_path.rglob(".*.tmp"))


def test_a_claim_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    first, second = shards_of(tmp_path, "test_k[0]", "test_k[1]")
    assert first.claim(DQ) is None
    (file,) = first.folder.iterdir()
    content = file.read_bytes()
    file.write_bytes(b"")
    writer = threading.Timer(0.02, file.write_bytes, [content])
    writer.start()
    claim = second.claim(DQ)
    writer.join()
    assert claim is not None
    assert claim.test == "test_k[0]"


def test_a_claim_that_cannot_be_written_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = shards_of(tmp_path, "test_k[0]", "test_k[1]")
    with monkeypatch.context() as full:
        full.setattr(os, "link", refused(errno.ENOSPC))
        assert first.claim(DQ) is None
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []
    assert second.claim(DQ) is None


def test_a_session_removes_its_own_and_what_is_old(tmp_path: Path) -> None:
    for session in ("s1", "old", "running", "long"):
        shards = shared_failures(tmp_path, session, "t", "a")
        assert shards.claim(DQ) is None
        if session in ("old", "long"):
            os.utime(shards.folder.parent, (0, 0))
            if session == "old":
                os.utime(shards.folder, (0, 0))
    drop_shared_failures(tmp_path, "s1")
    assert sorted(each.name for each in (tmp_path / "shards").iterdir()) == ["long", "running"]
    drop_shared_failures(tmp_path, "running")
    drop_shared_failures(tmp_path, "long")
    assert not (tmp_path / "shards").exists()


def findings_of(folder: Path, *names: str) -> tuple[list[Findings], list[Event]]:
    events: list[Event] = []
    kernel = registry.get("torch.reference_cpu")
    shards = shards_of(folder, *names)
    return [Findings(kernel, Corpus(folder), events.append, 0, each) for each in shards], events


def found(*failures: Failure) -> Finding:
    return Finding(failures[0].identity, CASE, Verdict(status="fail", failures=failures))


def test_a_failure_is_open_in_one_shard_and_known_in_the_other(tmp_path: Path) -> None:
    (first, second), _ = findings_of(tmp_path, "a", "b")
    assert not first.claimed_elsewhere(found(FAILURE))
    opened = first.open(found(FAILURE))
    assert second.claimed_elsewhere(found(FAILURE))
    (claim,) = (shards_of(tmp_path, "b")[0].latest(DQ),)
    assert claim is not None
    assert (claim.test, claim.path, claim.shrunk) == ("a", opened.path, False), "its file, should that shard die"
    assert (first.knows(DQ), second.knows(DQ)) == (True, True)
    assert (first.count, first.ended, second.count, second.ended) == (1, 0, 1, 1)
    assert [*second.elsewhere] == [DQ]
    first.close(DQ)
    claim = shards_of(tmp_path, "b")[0].latest(DQ)
    assert claim is not None
    assert (claim.path, claim.shrunk, first.ended) == (opened.path, True, 1)


def test_the_other_failures_of_a_minimal_case_are_that_shards_too(tmp_path: Path) -> None:
    (first, second), _ = findings_of(tmp_path, "a", "b")
    assert not first.claimed_elsewhere(found(FAILURE, OTHER))
    first.open(found(FAILURE, OTHER))
    first.close(DQ)
    assert second.claimed_elsewhere(found(OTHER))


def test_a_failure_that_is_not_to_be_shrunk_is_kept_by_one_shard(tmp_path: Path) -> None:
    (first, second), events = findings_of(tmp_path, "a", "b")
    for each in (first, second):
        each.keep(found(FAILURE), minimal=True)
    assert sum(isinstance(each, Shrunk) for each in events) == 1
    assert (len(first.closed), len(second.closed), [*second.elsewhere]) == (1, 0, [DQ])


def test_a_shard_alone_shares_nothing(tmp_path: Path) -> None:
    findings = Findings(registry.get("torch.reference_cpu"), Corpus(tmp_path), lambda _: None, 0)
    assert not findings.claimed_elsewhere(found(FAILURE))
    findings.keep(found(FAILURE))
    assert not (tmp_path / "shards").exists()
    assert Identity in {type(each) for each in findings.closed}
