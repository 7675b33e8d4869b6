"""Tests that need a GPU are skipped where there is none; slow ones run only when asked for by `-m slow`."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator

import pytest
from support.order import spread
from support.slow import is_slow

pytest_plugins = ["pytester"]

# Before torch is imported: each of xdist's workers would otherwise start as many threads as there are cores.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(workers))))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--triton-mode",
        choices=("compiled", "interpreted"),
        help="Triton's mode in pytest's own process [default: compiled where there is a GPU]; compiled needs none to be imported",
    )
    parser.addoption("--live", metavar="FILE", help="write the result of each test to this file at once, a line of JSON each")


def pytest_configure(config: pytest.Config) -> None:
    """Triton has one mode per process: compiled where there is a GPU (tests of the interpreter run apart), else interpreted."""
    from support.apart import TestsApart
    from support.bytecode import make_bytecode
    from support.live import LiveResults
    from support.triton_mode import ModeGuard

    from attnfuzz.harness.core import environment
    from attnfuzz.kernels.triton import runtime

    # A shell starts what runs in the background with SIGINT ignored, and what is started from here would ignore it as well.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    make_bytecode(config)
    on_gpu = environment.has_cuda()
    mode = config.getoption("--triton-mode", None) or ("compiled" if on_gpu else "interpreted")
    if mode == "interpreted":
        environment.prepare("cpu")
    elif runtime.unavailable("cuda" if on_gpu else "cpu") is None:
        runtime.load("cuda")
        marks = ["interpreted"] if on_gpu else ["interpreted", "any_device"]
        config.pluginmanager.register(TestsApart(marks, config))
    config.pluginmanager.register(ModeGuard())
    if (path := config.getoption("--live", None)) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(LiveResults(path))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from attnfuzz.harness.core.environment import has_cuda

    asked = config.getoption("-m") or ""
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("slow") and "slow" not in asked:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        spread(items, int(workers))


@pytest.fixture(autouse=True)
def _modules_that_are_imported_once(request: pytest.FixtureRequest) -> None:
    """Import them outside: pytester forgets modules that are first imported inside.

    torch._dynamo imports Triton, whose library aborts the process when it is loaded twice. Not when a conftest.py is imported:
    where its folder is named on the command line, Triton has no mode yet.
    """
    if "pytester" in request.fixturenames:
        for name in ("torch._dynamo", "attnfuzz.harness.campaign.campaign", "attnfuzz.harness.plugin"):
            importlib.import_module(name)


@pytest.fixture(autouse=True)
def _kernels_of_this_test_alone() -> Iterator[None]:
    """Forget kernels that a test has loaded by their modules: one whose module is gone would be listed for all later tests."""
    from attnfuzz.kernels import registry

    before = set(registry._origins)
    yield
    for name in registry._origins.keys() - before:
        del registry._origins[name]
        registry._loaded.pop(name, None)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """What the rest of the harness finds where the memory checker, which a GPU has not, is not the first."""
    from attnfuzz.kernels.support import memory

    memory.check(False)
    yield
    memory.check(True)


def pytest_terminal_summary(terminalreporter) -> None:
    """A table of the planted faults: cases to find each, time, minimal Case."""
    reports = [each for key in ("passed", "failed") for each in terminalreporter.getreports(key)]
    rows = [value for each in reports for name, value in getattr(each, "user_properties", ()) if name == "fault"]
    if rows:
        terminalreporter.section("planted faults")
        terminalreporter.write_line(f"{'kernel':<26} {'fault':<16} {'in':<4} {'cases':>5} {'s':>6}  minimal case")
        for row in sorted(rows, key=lambda row: (row["kernel"], row["fault"])):
            figures = f"{row['shows in']:<4} {row['cases']:>5} {row['seconds']:>6}"
            terminalreporter.write_line(f"{row['kernel']:<26} {row['fault']:<16} {figures}  {row['minimal']}")
