"""The suite itself: what it leaves out by default is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.slow import SLOW, named


def test_every_test_called_slow_by_name_exists(request: pytest.FixtureRequest) -> None:
    found = {named(each.nodeid) for each in request.session.items}
    files = {each.partition("::")[0] for each in found}
    # Of a part of the suite, those of the files that it has whole.
    if len(files) < 50 or any("::" in each for each in request.config.args):
        pytest.skip("only in a run of all tests")
    # A file that is there without a test is skipped whole, for a package that is not installed.
    skipped = {each.name for each in Path(__file__).parent.rglob("test_*.py")} - files
    missing = {each for each in SLOW - found if each.partition("::")[0] not in skipped}
    assert not missing, sorted(missing)
