"""Statements, ifs and masks of Triton functions, and which of them a record has reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnfuzz.harness.audit.coverage.source import FunctionCoverage, Step, compared, device_functions

SOURCE = '''\
import triton
import triton.language as tl

@triton.jit
def scale(x_ptr, n, TWICE: tl.constexpr):
    """Docstring."""
    at = tl.arange(0, 16)
    x = tl.load(
        x_ptr + at,
        mask=at < n,
    )
    if TWICE:
        x *= 2
    else:
        x *= 3
    if (
        n > 5
        and n < 9
    ):
        x += 1
    tl.store(x_ptr + at, x, mask=at < n)

@triton.jit(do_not_specialize=["n"])
def unused(n):
    return n

def host(n):
    return n
'''


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "device.py"
    file.write_text(SOURCE)
    return str(file)


def scale_after(path: str, *lines: int, masks: dict[tuple[int, str], set[bool]] | None = None) -> FunctionCoverage:
    steps: list[Step] = list(zip((0, *lines), (*lines, 0), strict=True))
    return next(iter(compared(device_functions(path), steps, masks or {})))


def test_functions_of_a_file(path: str) -> None:
    scale, unused = device_functions(path)
    assert (scale.name, scale.first, unused.name) == ("scale", 5, "unused")
    assert scale.statements == ((7, 7), (8, 11), (12, 12), (13, 13), (15, 15), (16, 19), (20, 20), (21, 21))
    assert scale.ifs == ((12, 12, 13, 13), (16, 19, 20, 20))


def test_a_file_that_is_not_python_has_no_functions(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("def (")
    assert device_functions(str(tmp_path / "x.py")) == ()
    assert device_functions(str(tmp_path / "absent.py")) == ()


def test_lines_and_branches_that_were_not_reached(path: str) -> None:
    row = scale_after(path, 7, 8, 12, 13, 17, 18, 21)
    assert (row.called, row.statements) == (True, 8)
    assert row.never == (15, 20)
    assert row.one_way == ((12, True), (16, False))


def test_both_ways_of_an_if_without_else(path: str) -> None:
    functions = device_functions(path)
    steps = [(0, 7), (7, 8), (8, 12), (12, 15), (12, 13), (13, 17), (17, 18), (18, 20), (17, 21), (20, 21), (21, 0)]
    row = next(iter(compared(functions, steps, {})))
    assert (row.never, row.one_way) == ((), ())


def test_a_function_that_was_never_called_is_one_row(path: str) -> None:
    _, unused = compared(device_functions(path), [(0, 7)], {})
    assert (unused.called, unused.never, unused.one_way) == (False, (), ())


def test_masks_of_one_value(path: str) -> None:
    masks = {(8, "load"): {True, False}, (21, "store"): {True}, (99, "load"): {False}}
    assert scale_after(path, 7, masks=masks).one_valued == ((21, "store", True),)
