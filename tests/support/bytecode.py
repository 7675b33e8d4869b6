"""Bytecode of the tests and of what they import, made once before pytest-xdist starts processes, which all collect all tests.

Without it every process rewrites the assertions of each file, and compiles torch where an image of a container holds none of its
bytecode: three times the processor's time of a collection that finds it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from attnfuzz.harness.core.bytecode import in_caches

__all__ = ["make_bytecode"]

_TESTS = Path(__file__).resolve().parents[1]
_FEWEST = 4
"""Processes from which on it takes less time than it saves."""


def make_bytecode(config: pytest.Config) -> None:
    """Let the processes that are started keep bytecode, and make it by several at once where all tests are run and have none yet.

    It fails where a file cannot be collected; that is said by the collection itself, which comes next.
    """
    processes = config.getoption("numprocesses", None) or 0
    # Where tests are only listed, no processes are started.
    if processes < _FEWEST or hasattr(config, "workerinput") or config.getoption("collectonly"):
        return
    if sys.dont_write_bytecode and sys.pycache_prefix is None:
        os.environ.update(in_caches())
    # A few named files are collected sooner than all of them.
    if config.getoption("file_or_dir") or not _can_be_kept() or _is_made():
        return
    files = sorted(map(str, _TESTS.rglob("test_*.py")), key=os.path.getsize)
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", "-n", "0"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    children = [
        subprocess.Popen([*collect, *files[index::processes]], cwd=config.rootpath, env=environment, **streams)
        for index in range(processes)
    ]
    try:
        for each in children:
            each.wait()
    finally:
        for each in children:
            each.kill()


def _folder() -> Path:
    """Return where the children keep the bytecode of the tests."""
    prefix = os.environ.get("PYTHONPYCACHEPREFIX")
    source = _TESTS / "test_suite.py"
    return Path(prefix, *source.parts[1:-1]) if prefix else Path(cache_from_source(str(source))).parent


def _can_be_kept() -> bool:
    """Whether files can be made in that folder, or it can be made; else every run would make them in vain."""
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=_folder()):
            return True
    except OSError:
        return False


def _is_made() -> bool:
    """Whether this version of Python and pytest has collected these tests before; asked where the children will look."""
    return any(_folder().glob(f"test_suite.{sys.implementation.cache_tag}-pytest-{pytest.__version__}.pyc"))
