"""Tests that run in a process of their own, and what refuses Triton's interpreter to the others."""

from __future__ import annotations

import json

import pytest
from support.paths import TESTS

from attnfuzz.kernels.triton import runtime

APART = f"""
import os, pytest, sys
sys.path.insert(0, {str(TESTS)!r})
from support.apart import TestsApart

def pytest_configure(config):
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        os.environ["FIRST"] = str(os.getpid())
        config.pluginmanager.register(TestsApart(["interpreted"], config))

@pytest.fixture
def of_the_conftest():
    return "the conftest's fixture is there"
"""
GUARD = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from support.triton_mode import ModeGuard

def pytest_configure(config):
    config.pluginmanager.register(ModeGuard())
"""
INI = "[pytest]\nmarkers =\n  interpreted: apart\n  any_device: either\nxfail_strict = true\n"
needs_triton = pytest.mark.skipif(runtime.unavailable("cpu") is not None, reason=str(runtime.unavailable("cpu")))


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makeini(INI)
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "CUDA_VISIBLE_DEVICES", runtime.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return pytester


def run(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return folder.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:attnfuzz", "-rA", *arguments)


RESULTS = """
import os
import pytest

PIDS = set()

@pytest.fixture(scope="module")
def here():
    return os.getpid()

def test_before(here):
    assert str(here) == os.environ["FIRST"]

@pytest.mark.interpreted
@pytest.mark.parametrize("number", [1, 2])
def test_apart(here, tmp_path, number, record_property):
    record_property("seen", number)
    PIDS.add(here)
    assert len(PIDS) == 1, "one child for all"
    assert str(here) == str(os.getpid()) != os.environ["FIRST"]
    assert os.environ["TRITON_INTERPRET"] == "1" and os.environ["CUDA_VISIBLE_DEVICES"] == ""

@pytest.mark.interpreted
def test_fails(of_the_conftest):
    print(of_the_conftest)
    value = 41
    assert value == 42

@pytest.fixture
def broken():
    raise ValueError("no such fixture value")

@pytest.mark.interpreted
def test_setup_fails(broken):
    pass

@pytest.fixture
def broken_after():
    yield
    raise ValueError("wrong at the end")

@pytest.mark.interpreted
def test_teardown_fails(broken_after):
    pass

@pytest.mark.interpreted
def test_skips():
    pytest.skip("nothing to see")

@pytest.mark.interpreted
@pytest.mark.xfail(reason="known")
def test_known():
    assert False

@pytest.mark.interpreted
@pytest.mark.xfail(reason="thought so")
def test_not_wrong_any_more():
    pass

@pytest.mark.interpreted
def test_ends_its_process():
    os._exit(3)

@pytest.mark.interpreted
def test_after_that(here):
    assert str(here) != os.environ["FIRST"]

def test_at_the_end(here):
    assert str(here) == os.environ["FIRST"]
"""


def test_each_test_apart_has_its_own_result(folder: pytest.Pytester) -> None:
    folder.makeconftest(APART)
    folder.makepyfile(test_them=RESULTS)
    result = run(folder, "--junitxml", "junit.xml")
    result.assert_outcomes(passed=5, failed=5, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines_random(
        [
            "*assert 41 == 42*",
            "*the conftest's fixture is there*",
            "*in setup, apart:*",
            "*ValueError: no such fixture value*",
            "*in teardown, apart:*",
            "*ValueError: wrong at the end*",
            "*XPASS(strict)*",
            "*ended with code 3:*",
            "SKIPPED*nothing to see*",
        ]
    )
    assert '<property name="seen" value="2"' in (folder.path / "junit.xml").read_text()


def test_a_test_is_never_apart_twice(folder: pytest.Pytester) -> None:
    """A child that cannot find the test says so; it does not hang, and nothing passes."""
    folder.makeconftest(APART)
    folder.makepyfile(
        test_them="import os, pytest\n"
        "@pytest.mark.interpreted\n@pytest.mark.parametrize('pid', [os.getpid()])\ndef test_of_one_process(pid): pass\n"
    )
    result = run(folder)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the process that ran the test apart ended with code *", "*KeyError: *test_of_one_process*"])


MODES = """
import os
import pytest
from attnfuzz.kernels.triton import runtime

def test_unmarked():
    runtime.load("cpu")

def test_unmarked_where_everything_is_caught():
    try:
        runtime.load("cpu")
    except BaseException:
        pass

@pytest.mark.interpreted
def test_marked():
    assert runtime.load("cpu").__name__ == "triton"

@pytest.mark.any_device
def test_of_any_device():
    runtime.load("cpu")

def test_leaves_another_mode():
    os.environ["TRITON_INTERPRET"] = "maybe"

def test_sets_it_back(monkeypatch):
    assert os.environ["TRITON_INTERPRET"] == "1"
    monkeypatch.setenv("TRITON_INTERPRET", "maybe")
"""


@needs_triton
def test_who_uses_the_interpreter_unmarked_or_leaves_another_mode_fails(
    folder: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(runtime.VARIABLE, "1")
    folder.makeconftest(GUARD)
    folder.makepyfile(test_modes=MODES)
    result = run(folder)
    result.assert_outcomes(passed=4, failed=2, errors=1)
    message = "*uses Triton's interpreter in pytest's own process*"
    result.stdout.fnmatch_lines_random(
        [
            f"*test_modes.py::test_unmarked {message}",
            f"*test_unmarked_where_everything_is_caught {message}",
            "ERROR *test_leaves_another_mode*",
            "*TRITON_INTERPRET='maybe': the test leaves it so, it was '1' before*",
        ]
    )


@needs_triton
def test_a_module_that_uses_the_interpreter_at_import_is_an_error(folder: pytest.Pytester) -> None:
    folder.makeconftest(GUARD)
    folder.makepyfile(test_module="from attnfuzz.kernels.triton import runtime\n\nruntime.load('cpu')\n\ndef test(): pass\n")
    result = run(folder)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*the import of a test module uses Triton's interpreter*"])


def test_results_are_in_the_file_when_the_run_is_cut_off(folder: pytest.Pytester) -> None:
    folder.makeconftest(f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from support.live import LiveResults

def pytest_configure(config):
    config.pluginmanager.register(LiveResults("live.jsonl"))
""")
    folder.makepyfile(test_them="import os\ndef test_one(): pass\ndef test_two(): assert 1 == 2\ndef test_last(): os._exit(9)\n")
    assert run(folder).ret == 9
    lines = [json.loads(line) for line in (folder.path / "live.jsonl").read_text().splitlines()]
    assert [(each["test"], each["outcome"]) for each in lines] == [
        ("test_them.py::test_one", "passed"),
        ("test_them.py::test_two", "failed"),
    ]
    assert "assert 1 == 2" in lines[1]["text"]
