"""The suite itself: what it names is there, and its order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from support.order import LONG, spread
from support.slow import SLOW, THINNED, is_slow, named


def test_every_test_called_slow_or_long_by_name_exists(request: pytest.FixtureRequest) -> None:
    found = {named(each.nodeid) for each in request.session.items}
    # Parameters of long tests may be those of a GPU node alone.
    found |= {each.partition("[")[0] for each in found}
    wanted = {*SLOW, *THINNED, *(each.partition("[")[0] for each in LONG)}
    files = {each.partition("::")[0] for each in found}
    # Of a part of the suite, those of the files that it has whole.
    if len(files) < 50 or any("::" in each for each in request.config.args):
        pytest.skip("only in a run of all tests")
    # A file that is there without a test is skipped whole, for a package that is not installed.
    skipped = {each.name for each in Path(__file__).parent.rglob("test_*.py")} - files
    missing = {each for each in wanted - found if each.partition("::")[0] not in skipped}
    assert not missing, sorted(missing)
    for name, every in THINNED.items():
        alike = [each for each in found if each.startswith(f"{name}[")]
        kept = [each for each in alike if not is_slow(each)]
        assert not alike or len(alike) / (2 * every) <= len(kept) < len(alike), (name, len(alike), len(kept))


@dataclass
class Item:
    nodeid: str


def test_each_process_begins_with_long_tests_and_the_others_keep_their_order() -> None:
    others = [Item(f"tests/test_x.py::test[{number}]") for number in range(101)]
    long = [Item(f"tests/deep/{name}") for name in LONG[:6]]
    items = [*others[:50], *long[::-1], *others[50:]]
    spread(items, 4)
    # 107 tests in four parts, as pytest-xdist divides them: 26, 27, 27, 27.
    assert [[items[begin].nodeid, items[begin + 1].nodeid] for begin in (0, 26)] == [
        [long[0].nodeid, long[4].nodeid],
        [long[1].nodeid, long[5].nodeid],
    ]
    assert [items[begin].nodeid for begin in (53, 80)] == [long[2].nodeid, long[3].nodeid]
    assert [each for each in items if each in others] == others
    assert len(items) == 107


@pytest.mark.parametrize("count", [0, 1, 5])
def test_few_tests_lose_none(count: int) -> None:
    items = [Item(f"tests/deep/{name}") for name in LONG[:count]]
    spread(items, 16)
    assert [each.nodeid for each in items] == [f"tests/deep/{name}" for name in LONG[:count]]
