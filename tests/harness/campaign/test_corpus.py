"""The corpus: failing Cases on disk, written whole or not at all, and refused with their path when broken."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from attnfuzz.harness.campaign.corpus import Corpus, StoredFinding, read_case
from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.judge.failure import Failure, Place
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import BadCase, Case, Recipe

PLACE = Place(sequence=0, position=2, head=1, dim=5, got=float("nan"), expected=float("-inf"), allowed=float("inf"))


def case(kernel: str = "acme.flash", seed: int = 0) -> Case:
    problem = Problem(seqlens_q=(3, 0), seqlens_k=(5, 2), dim_qk=8, dim_v=8)
    return Case(kernel=kernel, problem=problem, recipe=Recipe(seed=seed), config=Config(tile_m=64))


def failure(kernel: str = "acme.flash", **changed: Any) -> Failure:
    plain = {"kernel": kernel, "kind": "nonfinite", "output": "dk", "check": "element", "message": "dK: NaN", "place": PLACE}
    return Failure(**{**plain, **changed})


def write(corpus: Corpus, written: Case, seen: Failure | None = None, **changed: Any) -> Path:
    seen = seen or failure(written.kernel)
    verdict = Verdict(status="fail", failures=(seen,), device="cpu", versions={"torch": "2"})
    finding = Finding(seen.identity, written, verdict, **{"shrunk": True, "partly": False, **changed})
    return corpus.write(finding, seed=4)


def strict(path: Path) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_a_case_and_what_was_found_with_it(tmp_path: Path) -> None:
    path = write(Corpus(tmp_path), case())
    assert path == tmp_path / "cases" / f"acme.flash-dk-nonfinite-{case().id}.json"
    stored = read_case(path)
    assert stored.case == case()
    assert stored.path == path
    assert strict(path)["found"] == {
        "identity": {"kernel": "acme.flash", "kind": "nonfinite", "output": "dk", "check": "element", "message": ""},
        "message": "dK: NaN",
        "place": {"sequence": 0, "position": 2, "head": 1, "dim": 5, "got": "nan", "expected": "-inf", "allowed": "inf"},
        "minimal": True,
        "seed": 4,
        "device": "cpu",
        "versions": {"torch": "2"},
    }
    finding = stored.finding
    assert (finding.identity, finding.message, finding.seed, finding.device) == (failure().identity, "dK: NaN", 4, "cpu")
    assert finding.place is not None
    assert math.isnan(finding.place.got)
    assert (finding.place.allowed, finding.versions, finding.rate, finding.target) == (math.inf, {"torch": "2"}, None, None)


def test_what_a_file_says_wrongly_counts_as_not_known(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    found = {"identity": {"kind": "odd"}, "rate": [3, 2], "minimal": "yes", "seed": "x", "device": "cpu", "unknown": 1}
    path.write_text(json.dumps({**case().to_object(), "found": found}))
    assert read_case(path).finding == StoredFinding(device="cpu")


def test_the_file_is_strict_json_for_people(tmp_path: Path) -> None:
    path = write(Corpus(tmp_path), case())
    assert strict(path)["found"]["place"]["got"] == "nan"
    text = path.read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert '\n  "kernel": "acme.flash",\n' in text


def test_a_failure_without_an_output_is_named_by_its_check(tmp_path: Path) -> None:
    raised = failure(kind="exception", output=None, check="backward", place=None)
    path = write(Corpus(tmp_path), case(), raised)
    assert path.name == f"acme.flash-backward-exception-{case().id}.json"
    assert strict(path)["found"]["place"] is None


@pytest.mark.parametrize("kernel", ["a/b", "../../etc/x", "a b", "a-b", "[x]*", "ümlaut"])
def test_no_kernel_name_leads_out_of_the_folder(tmp_path: Path, kernel: str) -> None:
    corpus = Corpus(tmp_path)
    path = write(corpus, case(kernel))
    assert path.parent == tmp_path / "cases"
    assert [stored.case.kernel for stored in corpus.of(kernel)] == [kernel]


def test_writing_the_same_twice_leaves_one_file(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    assert write(corpus, case(), shrunk=False) == write(corpus, case())
    [stored] = corpus.of("acme.flash")
    assert stored.finding.minimal is True


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_in_the_middle_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    corpus = Corpus(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync", full) if step == "fsync" else (Path, "replace", full)))
    with pytest.raises(OSError, match="No space left"):
        write(corpus, case())
    assert list((tmp_path / "cases").iterdir()) == []


def test_a_failure_in_the_middle_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = Corpus(tmp_path)
    path = write(corpus, case(), shrunk=False)
    before = path.read_bytes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(corpus, case())
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_of_gives_one_kernels_cases_by_file_name(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    for kernel in ("acme.flash", "acme.flash2", "acme", "acme.flash.split", "acme-flash"):
        for seed in (0, 1, 2):
            write(corpus, case(kernel, seed))
    found = list(corpus.of("acme.flash"))
    assert {stored.case for stored in found} == {case("acme.flash", seed) for seed in (0, 1, 2)}
    assert [stored.path for stored in found] == sorted(stored.path for stored in found)
    assert [stored.case.kernel for stored in corpus.of("acme")] == ["acme"] * 3


def test_names_that_look_alike_as_files_are_kept_apart(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    write(corpus, case("a/b"))
    write(corpus, case("a_b"))
    assert [stored.case.kernel for stored in corpus.of("a/b")] == ["a/b"]
    assert [stored.case.kernel for stored in corpus.of("a_b")] == ["a_b"]


def test_a_corpus_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert list(Corpus(tmp_path / "nowhere").of("acme.flash")) == []
    assert not (tmp_path / "nowhere").exists()


def test_a_broken_file_in_the_corpus_is_an_error_with_its_path(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    write(corpus, case())
    broken = tmp_path / "cases" / "acme.flash-zzz.json"
    broken.write_text('{"format": 1,')
    with pytest.raises(BadCase) as caught:
        list(corpus.of("acme.flash"))
    assert str(caught.value) == (
        f"case={str(broken)!r}: not JSON (Input data was truncated); give a file that `attnfuzz run` wrote"
    )


def test_other_files_in_the_folder_are_let_be(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    write(corpus, case())
    (tmp_path / "cases" / "README.md").write_text("mine")
    (tmp_path / "cases" / "acme.flash-notes.txt").write_text("mine")
    assert len(list(corpus.of("acme.flash"))) == 1


def test_remove(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    path = write(corpus, case())
    corpus.remove(path)
    corpus.remove(path)
    assert list(corpus.of("acme.flash")) == []


def test_reading_a_bare_case(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(case().canonical())
    stored = read_case(str(path))
    assert stored.case == case()
    assert stored.finding == StoredFinding()
    assert stored.path == path


@pytest.mark.parametrize("found", [None, 3, [], "text"])
def test_what_was_found_may_be_anything(tmp_path: Path, found: object) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps({**case().to_object(), "found": found}))
    assert read_case(path).finding == StoredFinding()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "not JSON (Input data was truncated); give a file that `attnfuzz run` wrote"),
        ("[]", "case: not a JSON object; give a file that `attnfuzz run` wrote"),
        ('{"format": 9}', "case.format=9: this attnfuzz reads format 1; "),
        ('{"format": 1, "kernel": "x", "problem": {}}', "case.problem: Object missing required field `seqlens_q`"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "case.json"
    path.write_text(content)
    with pytest.raises(BadCase) as caught:
        read_case(path)
    assert str(caught.value).startswith(f"case={str(path)!r}: {expected}")


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    with pytest.raises(BadCase) as caught:
        read_case(missing)
    assert str(caught.value) == (
        f"case={str(missing)!r}: it cannot be read (No such file or directory); give the path of a case file"
    )
    with pytest.raises(BadCase) as caught:
        read_case(tmp_path)
    assert str(caught.value) == f"case={str(tmp_path)!r}: it cannot be read (Is a directory); give the path of a case file"


def test_json_text_is_strict_sorted_and_readable() -> None:
    nan = float("nan")
    value = {"b": [1.5, nan, (float("inf"), -float("inf"))], "a": {"x": nan, "ü": None, "t": True}}
    assert json.loads(dumps(value)) == {"a": {"t": True, "x": "nan", "ü": None}, "b": [1.5, "nan", ["inf", "-inf"]]}
    assert dumps({"b": 1, "a": "ü"}) == '{\n  "a": "ü",\n  "b": 1\n}'


def test_a_case_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        written = write(Corpus(tmp_path), case())
    finally:
        os.umask(before)
    assert written.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in written.parent.iterdir()] == [written.name]
