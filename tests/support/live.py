"""Results in a file while the tests run: a line of JSON for each test, so that nothing is lost where the run is cut off."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

__all__ = ["LiveResults"]


class LiveResults:
    """A plugin: `path` gets the outcome, seconds, worker and, where it failed, the text of each phase of a test."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed in pytest_unconfigure
        self._start = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed and report.duration < 1:
            return
        line = {
            "test": report.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "at": round(time.monotonic() - self._start, 1),
            "worker": getattr(report, "worker_id", "master"),
        }
        if report.failed:
            line["text"] = "\n".join([report.longreprtext, *(f"--- {title}\n{text}" for title, text in report.sections)])[-8000:]
        self._file.write(json.dumps(line) + "\n")

    def pytest_unconfigure(self) -> None:
        self._file.close()
