"""Cases in which a TileLang kernel once did not end: long loops over the smallest tiles, on a GPU that others shared.

Of the warpgroup that loads, only one thread issues copies, and nothing keeps its other warps within one
phase of the barriers that they wait for too; a warp that misses two waits without end. Blocks of so few threads
load for themselves since (`cuda_passes`): without a warpgroup for it, all three Cases ended 20 times of 20.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tilelang")

from support.paths import CORPUS

from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.isolation.isolated import Isolated

FILES = sorted((CORPUS / "hangs").glob("*.json"))
TIMES = 20
assert FILES

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture
def executor() -> Iterator[Isolated]:
    isolated = Isolated("cuda", deadline=60.0)
    yield isolated
    isolated.close()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_ends(path: Path, executor: Isolated) -> None:
    case = read_case(path).case
    verdicts = [executor.trial(case) for _ in range(TIMES)]
    assert [each.status for each in verdicts] == ["pass"] * TIMES, [each.failures for each in verdicts if each.failures][:1]
