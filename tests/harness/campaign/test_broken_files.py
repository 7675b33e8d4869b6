"""Broken case files, folders that cannot be written, disks that are full: a clear message, exit 2, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support import adapters as support
from support.disks import fill, make_read_only, small_disk

from attnfuzz.harness.campaign import corpus
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.cli.options import writable, write_file
from attnfuzz.harness.core import files
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters import dense
from attnfuzz.kernels.errors import BadArgument

PROBLEM: dict[str, Any] = {
    "seqlens_q": [3],
    "seqlens_k": [3],
    "packing": "dense",
    "dim_qk": 8,
    "dim_v": 8,
    "dtype": "float32",
    "needs": {"outputs": ["o", "dq", "dk", "dv"]},
}
GOOD: dict[str, Any] = {"format": 1, "kernel": "theirs.flash", "problem": PROBLEM, "config": {"tile_m": 4, "tile_n": 4}}
SMALL: dict[str, Any] = {"dims": ((8, 8),), "dtypes": ("float32",), "devices": ("cpu",), "configs": ({"tile_m": 4, "tile_n": 4},)}


def many_keys_fail(q, k, v, softmax_scale=None, causal=False):
    if k.shape[1] > 5:
        raise ValueError("more than 5 keys")
    return support.flash(q, k, v, softmax_scale=softmax_scale, causal=causal)


WRONG = dense(many_keys_fail, name="theirs.flash", **SMALL)


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_registered", {"theirs.flash": WRONG})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("ATTNFUZZ_DEBUG", raising=False)


def attnfuzz(*arguments: str) -> Result:
    if arguments[0] in ("run", "repro"):
        arguments = (*arguments, "--in-process", "--device", "cpu")
    if arguments[0] == "run" and "--seed" not in arguments:
        arguments = (*arguments, "--seed", "0")
    sys.argv = ["attnfuzz", *arguments]
    return CliRunner().invoke(cli.main, list(arguments))


def run(out: Path | str, *arguments: str) -> Result:
    return attnfuzz(
        "run", "theirs.flash", "--max-examples", "60", "--max-failures", "1", "--seed", "1", "--out", str(out), *arguments
    )


def assert_refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert "internal error" not in result.output
    assert "Traceback" not in result.output
    for part in parts:
        assert part in result.stderr


# --- case files


def with_(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def of(**changes: Any) -> bytes:
    return with_(problem={**PROBLEM, **changes})


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not JSON"),
    "cut off": (with_()[:40], "not JSON (Input data was truncated)"),
    "not UTF-8": (b'{"format": 1, "kernel": "\xff\xfe"}', "not JSON ("),
    "UTF-16": (with_().decode().encode("utf-16"), "not JSON"),
    "a lone surrogate": (b'{"format": 1, "kernel": "\\ud800"}', "not JSON"),
    "zeros at its end": (with_() + b"\0\0", "not JSON"),
    "nested too deeply": (b"[" * 200_000, "nested too deeply"),
    "a list": (b"[1]", "not a JSON object"),
    "null": (b"null", "not a JSON object"),
    "no version": (b"{}", "case.format=None: this attnfuzz reads format 1"),
    "another version": (with_(format=2), "case.format=2: this attnfuzz reads format 1"),
    "a version in words": (with_(format="1"), "case.format='1'"),
    "an unknown part": (with_(colour=1), "case.colour: no such part"),
    "no problem": (b'{"format": 1, "kernel": "x"}', "case.problem: it is missing"),
    "a kernel that is a number": (with_(kernel=3), "case.kernel: Expected `str`, got `int`"),
    "a kernel to import": (with_(kernel="os:path"), "case.kernel='os:path': a kernel's own name is expected; give --kernel"),
    "a problem of another type": (with_(problem="x"), "case.problem: Expected `object`, got `str`"),
    "lengths in words": (of(seqlens_q="abc"), "case.problem: Expected `array`, got `str` - at `$.seqlens_q`"),
    "half a token": (of(seqlens_q=[1.5]), "Expected `int`, got `float`"),
    "a negative length": (of(seqlens_q=[-1]), "a length cannot be negative"),
    "a length beyond all memory": (of(seqlens_q=[10**400]), "does not fit cu_seqlens, which is int32"),
    "no heads": (of(heads=0), "heads=0: it must be positive"),
    "an unknown dtype": (of(dtype="float8"), "Invalid enum value 'float8'"),
    "a broken expression": (of(score_mod=["nope"]), "no operation on None"),
    "a broken layout": (of(layout_q={"order": "xyz"}), "Invalid enum value 'xyz'"),
    "a recipe in a list": (with_(recipe=[]), "case.recipe: Expected `object`, got `array`"),
    "a broken seed": (with_(recipe={"seed": -1}), "recipe.seed=-1"),
    "a broken config": (with_(config={"tile": [1]}), "case.config: Expected"),
    "an unknown check": (with_(check="magic"), "case.check: Invalid enum value 'magic'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_case_file_is_refused(name: str) -> None:
    content, message = BROKEN[name]
    Path("case.json").write_bytes(content)
    for command in ("show", "repro"):
        assert_refused(attnfuzz(command, "case.json"), "case='case.json'", message)
    result = attnfuzz("show", "case.json", "--json")
    assert result.exit_code == 2
    assert message in json.loads(result.stdout)["error"]


FOUND = {
    "a list": [1],
    "a number": 3,
    "a message of numbers": {"message": [1, 2]},
    "versions in a list": {"device": "x", "versions": [1]},
    "an identity in words": {"identity": 7},
    "a check in a list": {"identity": {"check": [1]}},
    "a rate in words": {"rate": ["a", "b"]},
    "a rate of too many": {"rate": [1, 10**9]},
    "a target in a list": {"target": [3]},
    "markup": {"message": "[bold][/nope]", "device": "[/x]"},
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_broken_in_what_was_found_spoils_no_case(name: str) -> None:
    Path("case.json").write_bytes(with_(found=FOUND[name]))
    assert attnfuzz("show", "case.json").exit_code == 0
    assert attnfuzz("show", "case.json", "--json").exit_code == 0
    result = attnfuzz("repro", "case.json")
    assert (result.exit_code, result.output[:5]) == (0, "FIXED"), result.output


def fifo(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


ODD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a folder": (Path.mkdir, "it cannot be read (Is a directory)"),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), "it cannot be read (No such file or directory)"),
    "a link to itself": (lambda path: path.symlink_to(path), "it cannot be read (Too many levels of symbolic links)"),
    "a pipe": (fifo, "it is not a regular file"),
    "a device without end": (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
    "a terabyte": (huge, "it is too large"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_file_is_refused(name: str) -> None:
    make, message = ODD[name]
    make(Path("case.json").absolute())
    for command in ("show", "repro"):
        assert_refused(attnfuzz(command, "case.json"), message)


# --- folders


def test_a_broken_file_among_the_cases_stops_the_run_before_it_costs_anything() -> None:
    folder = Path("out/cases")
    folder.mkdir(parents=True)
    (folder / "theirs.flash-o-mismatch-0.json").write_text("{")
    assert_refused(run("out"), "theirs.flash-o-mismatch-0.json", "not JSON")
    (folder / "theirs.flash-o-mismatch-0.json").unlink()
    (folder / "theirs.flash-o-mismatch-0.json").mkdir()
    assert_refused(run("out"), "Is a directory")


def test_a_broken_journal_stops_nothing() -> None:
    folder = Path("out/inflight")
    folder.mkdir(parents=True)
    (folder / "1-abc").write_bytes(b"\xff" * 100)
    (folder / "2-abc").write_bytes(b"")
    result = run("out")
    assert result.exit_code == 1, result.output
    assert "1 failure in " in result.stdout


@pytest.mark.parametrize("where", ["out", "out/below"])
def test_a_file_in_place_of_the_folder(where: str) -> None:
    Path("out").write_text("mine")
    assert_refused(run(where), f"out='{where}'", "failing Cases could not be written there")
    assert Path("out").read_text() == "mine"


def test_a_file_in_place_of_the_cases() -> None:
    Path("out").mkdir()
    Path("out/cases").write_text("mine")
    assert_refused(run("out"), "failing Cases could not be written there (Not a directory)")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB, of its own."""
    with small_disk(tmp_path / "disk", 128) as folder:
        yield folder


def test_a_folder_that_can_only_be_read(disk: Path) -> None:
    make_read_only(disk)
    assert_refused(run(disk / "out"), "failing Cases could not be written there (Read-only file system)")
    assert not (disk / "out").exists()


def test_a_disk_that_is_full_from_the_start_loses_nothing(disk: Path) -> None:
    fill(disk)
    result = run(disk / "out")
    assert_nothing_lost(result, "No space left on device")


def test_a_disk_that_fills_while_a_run_goes_on_loses_nothing(disk: Path) -> None:
    def filling(q, k, v, softmax_scale=None, causal=False):
        if k.shape[1] > 5 and not (disk / "filler").exists():
            fill(disk)
        return many_keys_fail(q, k, v, softmax_scale, causal)

    registry._registered["theirs.flash"] = dense(filling, name="theirs.flash", files=[__file__], **SMALL)
    result = run(disk / "out")
    assert_nothing_lost(result, "No space left on device")
    # What is there is whole.
    for path in (disk / "out").rglob("*.json"):
        json.loads(path.read_text())
    (disk / "filler").unlink()
    registry._registered["theirs.flash"] = WRONG
    assert run(disk / "out").exit_code == 1


def no_space(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "cases/x.json")


def test_a_failed_write_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "write_whole", no_space)
    assert_nothing_lost(run("out"), "No space left on device (cases/x.json)")
    result = run("out", "--json")
    assert result.exit_code == 2
    told = json.loads(result.stdout)
    assert told["not_kept"] == "No space left on device (cases/x.json)"
    [failure] = told["failures"]
    assert (failure["path"], failure["repro"]) == (None, None)
    assert failure["case"]["problem"]["seqlens_k"] == [6]


def test_the_minimal_case_is_told_where_only_the_first_could_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = corpus.write_whole, []

    def once(path: Path, text: str) -> None:
        calls.append(path)
        write(path, text) if len(calls) == 1 else no_space()

    monkeypatch.setattr(corpus, "write_whole", once)
    assert_nothing_lost(run("out"), "No space left on device")
    [kept] = Path("out/cases").glob("*.json")
    assert attnfuzz("repro", str(kept)).exit_code == 1


def assert_nothing_lost(result: Result, reason: str) -> None:
    """Exit 2, the reason, and the minimal case on the terminal, from where it can be saved and run again."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert reason in result.stdout
    assert "1 failure in " in result.stdout
    [line] = [each for each in result.stdout.splitlines() if "its case, in no file: " in each]
    text = line.partition("its case, in no file: ")[2]
    assert json.loads(text)["problem"]["seqlens_k"] == [6]
    Path("saved.json").write_text(text)
    again = attnfuzz("repro", "saved.json")
    assert again.exit_code == 1
    assert "more than 5 keys" in again.stdout


# --- the output itself


@pytest.mark.parametrize("arguments", [["show", "case.json", "--json"], ["show", "case.json"]], ids=["json", "text"])
def test_an_output_that_cannot_be_written_ends_with_2(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "case.json").write_bytes(with_())
    command = [sys.executable, "-P", "-m", "attnfuzz.harness.cli", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "| head -0; exit ${PIPESTATUS[0]}"])
def test_nobody_who_reads_changes_no_verdict(closed: str, tmp_path: Path) -> None:
    (tmp_path / "case.json").write_bytes(with_())
    command = f"{shlex.quote(sys.executable)} -P -m attnfuzz.harness.cli show case.json {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_before_anything_was_found_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "names", interrupted)
    result = attnfuzz("list")
    assert result.exit_code == 130
    assert "interrupted: nothing was found until then" in result.output


def test_a_file_that_cannot_be_written_is_named_and_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("there.py").write_text("before")
    with pytest.raises(BadArgument, match=r"script='/dev/full': it cannot be written \(No space left on device\); give a file"):
        write_file(Path("/dev/full"), "text", "script")
    monkeypatch.setattr(files, "write_whole", no_space)
    for name in ("there.py", "new.py"):
        with pytest.raises(BadArgument, match=rf"script='{name}': it cannot be written"):
            write_file(writable(name, "script"), "text", "script")
    assert Path("there.py").read_text() == "before"
    assert not Path("new.py").exists()


def test_a_table_that_cannot_be_written_is_known_before_the_run() -> None:
    Path("there").mkdir()
    assert_refused(attnfuzz("run", "theirs.flash", "--device", "cpu", "--table", "there"), "table='there': it is a folder")
    Path("file").write_text("")
    result = attnfuzz("run", "theirs.flash", "--device", "cpu", "--table", "file/table.md")
    assert_refused(result, "table='file/table.md': it cannot be written")
