"""The Case in flight on disk: survives the run, the process and a torn write; is picked up once, and not for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnfuzz.harness.campaign.journal import Journal, left_behind
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case


def case(length: int = 3) -> Case:
    return Case(kernel="acme.flash", problem=Problem(seqlens_q=(length,), seqlens_k=(length,), dim_qk=8, dim_v=8))


def dead(folder: Path, code: str) -> None:
    """A process that journals, and dies."""
    program = f"""
import os, signal, sys
from attnfuzz.harness.campaign.journal import Journal
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case
def case(n):
    return Case(kernel="acme.flash", problem=Problem(seqlens_q=(n,), seqlens_k=(n,), dim_qk=8, dim_v=8))
journal = Journal({str(folder)!r})
{code}
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode == -9


def test_the_case_in_flight_outlives_its_process(tmp_path: Path) -> None:
    dead(tmp_path, "journal.launch(case(3)); journal.landed(); journal.launch(case(4))")
    [left] = left_behind(tmp_path)
    assert (left.case, left.deaths) == (case(4), 1)
    assert list(left_behind(tmp_path)) == [left], "looking takes nothing away"
    left.path.unlink()
    assert not list(left_behind(tmp_path))


def test_a_case_that_landed_is_not_left_behind(tmp_path: Path) -> None:
    dead(tmp_path, "journal.launch(case(3)); journal.landed()")
    assert not list(left_behind(tmp_path))
    assert not list((tmp_path / "inflight").iterdir())


def test_deaths_add_up(tmp_path: Path) -> None:
    dead(tmp_path, "journal.launch(case(3), deaths=1)")
    [left] = left_behind(tmp_path)
    assert left.deaths == 2


def test_a_run_that_lives_keeps_its_case(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.launch(case())
    assert not list(left_behind(tmp_path))
    journal.close()
    assert not list(tmp_path.iterdir()), "nothing is left of a run that ends"


def test_an_abandoned_case_is_for_the_next_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.launch(case())
    journal.abandon()
    [left] = left_behind(tmp_path)
    assert (left.case, left.deaths) == (case(), 0), "an error of attnfuzz is no death"


def test_a_case_left_behind_twice_is_one_case(tmp_path: Path) -> None:
    for deaths in (0, 2, 1):
        dead(tmp_path, f"journal.launch(case(3), deaths={deaths})")
    dead(tmp_path, "journal.launch(case(4))")
    found = {left.case: left.deaths for left in left_behind(tmp_path)}
    assert found == {case(3): 3, case(4): 1}
    assert len(list((tmp_path / "inflight").iterdir())) == 2


def test_nothing_is_made_before_the_first_case(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out")
    journal.landed()
    journal.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", range(0, 300, 7))
def test_a_torn_write_leaves_the_other_slot(tmp_path: Path, cut: int) -> None:
    """The machine dies while the entry of the second Case is written: of that slot only `cut` bytes are new."""
    dead(tmp_path, "journal.launch(case(3))")
    [path] = (tmp_path / "inflight").iterdir()
    before = path.read_bytes()
    path.unlink()
    dead(tmp_path, "journal.launch(case(3)); journal.launch(case(4))")
    [path] = (tmp_path / "inflight").iterdir()
    after = bytearray(path.read_bytes())
    start = next(i for i in range(len(after)) if after[i] != before[i])
    slot = start // (1 << 20) * (1 << 20)
    after[slot + cut : slot + 4096] = before[slot + cut : slot + 4096]
    path.write_bytes(after)
    [left] = left_behind(tmp_path)
    assert left.case in (case(3), case(4))


@pytest.mark.parametrize("content", [b"x" * 100, b"\xff" * (2 << 20)])
def test_a_spoilt_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "inflight").mkdir()
    (tmp_path / "inflight" / "1-ab").write_bytes(content)
    unread: list[tuple[Path, str]] = []
    assert not list(left_behind(tmp_path, lambda *each: unread.append(each)))
    kept = tmp_path / "inflight" / "broken.1-ab"
    assert unread == [(tmp_path / "inflight" / "1-ab", f"it holds no entry that is whole; it is kept as {kept}")]
    assert kept.read_bytes() == content
    assert not list(left_behind(tmp_path, lambda *each: unread.append(each)))
    assert len(unread) == 1, "it is reported once"


@pytest.mark.parametrize("content", [b"", bytes(2 << 20)])
def test_a_file_without_an_entry_is_cleared_away(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "inflight").mkdir()
    (tmp_path / "inflight" / "1-ab").write_bytes(content)
    assert not list(left_behind(tmp_path))
    assert not list((tmp_path / "inflight").iterdir())


def test_a_huge_batch_fits(tmp_path: Path) -> None:
    many = tuple(range(10_000))
    journal = Journal(tmp_path)
    huge = Case(kernel="acme.flash", problem=Problem(seqlens_q=many, seqlens_k=many, dim_qk=8, dim_v=8))
    journal.launch(huge)
    journal.abandon()
    [left] = left_behind(tmp_path)
    assert left.case == huge


def test_the_case_is_on_disk_before_launch_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    Journal(tmp_path).launch(case())
    assert len(synced) == 1


def several(folder: Path) -> None:
    dead(folder, "journal.launch_next([case(3), case(4), case(5)]); journal.landed(); journal.launch_next([case(4), case(5)])")


def test_of_several_cases_the_one_that_ran_is_known(tmp_path: Path) -> None:
    several(tmp_path)
    assert [(left.case, left.deaths) for left in left_behind(tmp_path)] == [(case(4), 1)]


def test_after_the_machine_died_all_of_them_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not synchronised may be old: the Case that runs now could be any of those that were."""
    several(tmp_path)
    monkeypatch.setattr("attnfuzz.harness.campaign.journal._boot", lambda: "another start")
    assert [left.case for left in left_behind(tmp_path)] == [case(4), case(3), case(5)]


def test_several_cases_are_synchronised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    journal = Journal(tmp_path)
    for rest in ([case(3), case(4), case(5)], [case(4), case(5)], [case(5)]):
        journal.launch_next(rest)
        journal.landed()
    assert len(synced) == 1
    # Another Case between them, as shrinking has: then those that are left are written again.
    journal.launch(case(7))
    journal.launch_next([case(5)])
    assert len(synced) == 3
    journal.close()


def test_a_batch_is_left_behind_whole(tmp_path: Path) -> None:
    dead(tmp_path, "journal.launch(case(3), case(4), case(5))")
    left = list(left_behind(tmp_path))
    assert [each.case for each in left] == [case(3), case(4), case(5)]
    assert [(each.last, each.alone) for each in left] == [(False, False), (False, False), (True, False)]
