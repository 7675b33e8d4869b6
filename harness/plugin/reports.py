"""What pytest prints of a test of a kernel: its texts are foreign, and are spelled out before any reporter has them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from attnfuzz.harness.core.github import shown
from attnfuzz.harness.plugin.cases import MARK
from attnfuzz.harness.plugin.statistics import add_figures

__all__ = ["pytest_runtest_makereport"]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Spell out the message of a test of ours, what it printed, and its properties: workers of xdist send no other."""
    own = hasattr(getattr(item, "function", None), MARK)
    if (
        own
        and call.excinfo is not None
        and isinstance(error := call.excinfo.value, (pytest.fail.Exception, pytest.skip.Exception))
    ):
        error.msg = shown(str(error.msg))
        # What it was raised from is in the message.
        error.__suppress_context__ = True
    report = yield
    if own:
        add_figures(item, report)
        report.sections = [(title, shown(text)) for title, text in report.sections]
        report.user_properties = [(name, shown(str(value))) for name, value in report.user_properties]
        if report.longrepr is not None and not isinstance(report.longrepr, tuple):
            # An error that no test of ours raises: its traceback too may show what a kernel says.
            text = report.longreprtext
            if shown(text) != text:
                report.longrepr = shown(text)
    return report
