"""Foreign files and texts: read with a limit, decoded with a limit, and refused in words."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.hostile_files import NO_FILES

from attnfuzz.harness.core import files
from attnfuzz.harness.core.files import DEEPEST, Unreadable, decoded, decoded_toml, exists, opened, read_file, write_whole
from attnfuzz.kernels.errors import BadArgument, check_name, reject, shown


class Point(msgspec.Struct):
    x: int


def read(path: Path | str, most: int = 1 << 20) -> bytes:
    return read_file(path, most, argument="case", remedy="give another")


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_is_refused_with_argument_value_reason_and_remedy(name: str, tmp_path: Path) -> None:
    make, reason = NO_FILES[name]
    make(tmp_path / "x")
    with pytest.raises(BadArgument) as caught:
        read(tmp_path / "x")
    assert str(caught.value).startswith(f"case={str(tmp_path / 'x')!r}: {reason}")
    assert str(caught.value).endswith("; give another")


def test_a_file_of_the_largest_size_is_read_and_one_byte_more_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert read(tmp_path / "x", 5) == b"12345"
    assert read(tmp_path / "x") == b"12345"
    with pytest.raises(BadArgument, match=r"it is too large \(more than 4 bytes\)"):
        read(tmp_path / "x", 4)


@pytest.mark.parametrize("path", ["/proc/self/maps", "/proc/cpuinfo"])
def test_a_size_of_zero_is_not_believed(path: str) -> None:
    assert Path(path).stat().st_size == 0
    assert read(path, 1 << 24)
    with pytest.raises(BadArgument, match="too large"):
        read(path, 10)


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("1")
    (tmp_path / "y").symlink_to("x")
    assert read(tmp_path / "y") == b"1"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").touch(0)
    with pytest.raises(BadArgument, match=r"it cannot be read \(Permission denied\)"):
        read(tmp_path / "x")


def test_a_file_that_may_not_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "x").touch()
    monkeypatch.setattr(files.os, "open", denied)
    with pytest.raises(BadArgument, match=r"it cannot be read \(Permission denied\)"):
        read(tmp_path / "x")


def test_a_pipe_that_takes_the_files_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at it and its opening."""
    path, real = tmp_path / "x", os.open
    path.touch()

    def swapped(*arguments: Any) -> int:
        path.unlink()
        os.mkfifo(path)
        return real(*arguments)

    monkeypatch.setattr(files.os, "open", swapped)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(BadArgument, match="it is not a regular file"):
        read(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "its descriptor is closed"


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "read", lambda _, count: b"x" * count)
    (tmp_path / "x").touch()
    with pytest.raises(BadArgument, match="too large"):
        read(tmp_path / "x", 1 << 22)


def test_no_descriptor_goes_to_children_or_is_kept(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with opened(tmp_path / "x") as descriptor:
        assert not os.get_inheritable(descriptor)
    with pytest.raises(ZeroDivisionError), opened(tmp_path / "x"):
        _ = 1 / 0
    assert len(list(Path("/proc/self/fd").iterdir())) == before


NOT_DECODED = {
    "nothing": (b"", r"not JSON \(Input data was truncated\)"),
    "not UTF-8": (b'"\xff"', "not JSON"),
    "a lone surrogate": (b'"\\ud800"', "not JSON"),
    "5,000 digits": (b"9" * 5000, "Integer value out of range"),
    "infinity": (b"1e999", "Number out of range"),
    "201 levels": (b"[" * 201 + b"]" * 201, r"it is nested too deeply \(more than 200 levels\)"),
    "201 levels of objects": (b'{"a":' * 201 + b"1" + b"}" * 201, "it is nested too deeply"),
    "a million levels": (b"[" * 1_000_000, "it is nested too deeply"),
}


@pytest.mark.parametrize("name", NOT_DECODED)
def test_what_is_not_decoded_is_refused_by_one_error(name: str) -> None:
    content, reason = NOT_DECODED[name]
    with pytest.raises(Unreadable, match=reason):
        decoded(content)


def test_json_is_decoded_down_to_the_limit_and_as_a_type() -> None:
    assert decoded(b"[" * DEEPEST + b"]" * DEEPEST)
    assert decoded(b'{"x": 1}') == {"x": 1}
    assert decoded(b'{"x": 1}', Point) == Point(1)
    with pytest.raises(Unreadable, match="Expected `int`, got `str`"):
        decoded(b'{"x": "y"}', Point)


def test_a_decoded_value_can_be_walked_in_any_thread() -> None:
    """What decoding lets through exhausts no stack."""
    result: list[str] = []
    value = decoded(b"[" * DEEPEST + b"]" * DEEPEST)
    thread = threading.Thread(target=lambda: result.append(repr(value)))
    thread.start()
    thread.join()
    assert len(result[0]) == 2 * DEEPEST


def test_toml_is_decoded_alike() -> None:
    assert decoded_toml(b"a = [1]") == {"a": [1]}
    for content in (b"\xff", b"a", b"a = " + b"9" * 5000, b"a = " + b"[" * 100_000, b"a = " + b"[" * 300 + b"]" * 300):
        with pytest.raises(Unreadable):
            decoded_toml(content)


def test_any_text_is_a_path_or_not_there(tmp_path: Path) -> None:
    assert exists(tmp_path)
    for text in ("x" * 10_000, "x\0y", "\ud800", ""):
        assert not exists(text)


def test_an_error_of_writing_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    with pytest.raises(OSError, match="File name too long") as caught:
        write_whole(path, "text")
    assert caught.value.filename == str(path)
    assert not list(tmp_path.iterdir())


def test_every_value_has_a_place_in_a_message() -> None:
    endless: list[Any] = []
    for _ in range(100_000):
        endless = [endless]
    assert str(reject("x", 1 << 40_000, "r", "y")) == "x=a int that cannot be printed: r; y"
    assert str(reject("x", endless, "r", "y")) == "x=a list that cannot be printed: r; y"
    assert len(shown("x" * 10**6)) < 700
    assert shown("x" * 100) == repr("x" * 100)
    while endless:  # its own end would exhaust the stack of older Pythons
        endless = endless.pop()


@pytest.mark.parametrize("name", ["", "1x", "x y", "x\0", "for", "None", "\ufb01", "x" * 101, 3, None, "a.b", "x=1", "\ud800"])
def test_a_name_is_one_that_code_may_have(name: Any) -> None:
    with pytest.raises(BadArgument, match=r"^config=.*: it names a choice; give a Python identifier"):
        check_name("config", name, "it names a choice")


@pytest.mark.parametrize("name", ["x", "_", "größe", "match", "q_idx", "x" * 100])
def test_a_right_name_is_taken(name: str) -> None:
    check_name("config", name, "it names a choice")
