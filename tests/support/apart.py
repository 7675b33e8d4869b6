"""Tests in a pytest of their own: a child process in which Triton is interpreted, and no GPU is seen.

Each pytest process that needs one starts one child, at its first such test, and keeps it. A test stays an item of its own: it is
set up, called and torn down in the child, and its result becomes the result of the call here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest

from attnfuzz.kernels.triton import runtime

__all__ = ["Child", "TestsApart", "main"]

_TESTS = Path(__file__).resolve().parents[1]
_START = "import sys; sys.path.insert(0, sys.argv[1]); from support.apart import main; main(*sys.argv[2:])"
_VARIABLES = {"CUDA_VISIBLE_DEVICES": "", runtime.VARIABLE: "1"}


class TestsApart:
    """A plugin: the tests with one of `marks` run in a child, which starts at the first of them."""

    __test__ = False

    def __init__(self, marks: Sequence[str], config: pytest.Config) -> None:
        self._marks, self._config = marks, config
        self._files: list[str] = []
        self._child: Child | None = None

    # Last: other hooks may still skip or deselect a test.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        redirected = [item for item in items if any(item.get_closest_marker(each) for each in self._marks)]
        self._files = list(dict.fromkeys(str(item.path) for item in redirected))
        for item in redirected:
            self._redirect(item)

    def pytest_unconfigure(self) -> None:
        if self._child:
            self._child.close()

    def _redirect(self, item: Any) -> None:
        """Its fixtures are the child's, so nothing is set up here."""
        item.setup = lambda: None
        item.runtest = lambda: self._run(item)

    def _run(self, item: pytest.Item) -> None:
        if self._child is None or not self._child.alive():
            self._child = Child(self._config, self._files)
        reports = [
            self._config.hook.pytest_report_from_serializable(config=self._config, data=each)
            for each in self._child.run(item.nodeid)
        ]
        item.user_properties += [each for report in reports[-1:] for each in report.user_properties]
        _repeat(reports)


def _repeat(reports: list[pytest.TestReport]) -> None:
    """Let this call end as the test did."""
    for report in reports:
        # A test that is marked xfail and passed is judged here once more.
        if report.failed and not report.longreprtext.startswith("[XPASS(strict)]"):
            pytest.fail("\n".join([f"in {report.when}, apart:", report.longreprtext, *_printed(report)]), pytrace=False)
    for report in reports:
        if report.skipped:
            if hasattr(report, "wasxfail"):
                pytest.xfail(report.wasxfail)
            pytest.skip(report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr))


def _printed(report: pytest.TestReport) -> list[str]:
    return [f"--- {title}\n{text}" for title, text in report.sections]


class Child:
    """A pytest process that collects `files` and runs the tests of theirs that it is asked for, one after the other."""

    def __init__(self, config: pytest.Config, files: Sequence[str]) -> None:
        self._channel, theirs = Pipe()
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in close()
        arguments = [str(_TESTS), str(theirs.fileno()), str(config.rootpath), str(config.inipath or os.devnull), *files]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, *arguments],
            cwd=config.invocation_params.dir,
            env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | _VARIABLES,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def alive(self) -> bool:
        """Whether it can run another test."""
        return self._process.poll() is None

    def run(self, nodeid: str) -> list[dict[str, Any]]:
        """Run a test; returns its reports in serializable form. The test fails here if the process ends during it."""
        try:
            self._channel.send(nodeid)
            while not self._channel.poll(0.5):
                if not self.alive() and not self._channel.poll():
                    raise EOFError
            reports: list[dict[str, Any]] = self._channel.recv()
        except (EOFError, OSError):
            reports = []
        if not reports:
            code = self._end()
            self._output.seek(0)
            text = self._output.read()[-4000:]
            self._output.close()
            pytest.fail(f"the process that ran the test apart ended with code {code}:\n{text}", pytrace=False)
        return reports

    def close(self) -> None:
        """End the process."""
        self._end()
        self._output.close()

    def _end(self) -> int:
        """Its exit code; it ends by itself when the channel closes."""
        self._channel.close()
        try:
            return self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(20)


class _Server:
    """The child's plugin: runs what it is asked for until the other side closes the channel."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None  # pytest itself ends after errors of the collection
        items = {item.nodeid: item for item in session.items}
        while True:
            try:
                nodeid = self._channel.recv()
            except EOFError:
                return True
            # A missing one ends the process: its output says which.
            item = items[nodeid]
            self._reports.clear()
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            hook = session.config.hook
            data = [hook.pytest_report_to_serializable(config=session.config, report=report) for report in self._reports]
            self._channel.send(data)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)


def main(descriptor: str, root: str, ini: str, *files: str) -> None:
    """Be the child, with the channel at `descriptor`."""
    os.set_inheritable(int(descriptor), False)
    # Slow tests are left out on the other side; the cache is the other side's.
    options = ["--rootdir", root, "-c", ini, "-m", "slow or not slow", "-p", "no:cacheprovider", "-q", *files]
    sys.exit(pytest.main(options, plugins=[_Server(Connection(int(descriptor)))]))
