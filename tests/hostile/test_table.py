"""The table of hostile inputs and disasters in SECURITY.md: each group has its modules, and they have the rows that it says."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from support.paths import ROOT

FOLDER = ROOT / "tests" / "hostile"
ROW = re.compile(r"^\| (?P<group>[^|]+) \| (?P<modules>`[^|]+`) \| (?P<rows>\d+) \|$", re.MULTILINE)
LEAST = 150


def table() -> dict[str, tuple[list[str], int]]:
    """Modules, and the least number of rows, of each group."""
    text = (ROOT / "SECURITY.md").read_text()
    return {row["group"]: (re.findall(r"`(\w+)`", row["modules"]), int(row["rows"])) for row in ROW.finditer(text)}


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """The rows of each module of this folder, those that run by default and the others: cases of parametrised tests."""
    found: dict[str, list[str]] = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        if path.name == "test_table.py":
            continue
        module = pytest.Module.from_parent(request.session, path=path)
        items = [each for each in request.session.genitems(module) if isinstance(each, pytest.Function)]
        found[path.stem] = [f"{path.stem}::{each.name}" for each in items if hasattr(each, "callspec")]
    return found


def test_each_module_is_of_one_group(rows: dict[str, list[str]]) -> None:
    modules = Counter(module for modules, _ in table().values() for module in modules)
    assert set(modules) == set(rows)
    assert set(modules.values()) == {1}


def test_each_group_has_the_rows_that_it_says(rows: dict[str, list[str]]) -> None:
    for group, (modules, least) in table().items():
        number = len({row for module in modules for row in rows[module]})
        assert number >= least > 0, f"{group}: {number} rows"


def test_the_table_is_as_long_as_it_says(rows: dict[str, list[str]]) -> None:
    distinct = {row for each in rows.values() for row in each}
    assert len(distinct) >= sum(least for _, least in table().values()) >= LEAST
