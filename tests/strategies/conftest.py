"""Cases that several of these test files look at, drawn once in each process."""

from __future__ import annotations

import pytest
from support.drawn_cases import draw_cases
from support.subjects import Subject

from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import Limits


@pytest.fixture(scope="session")
def many() -> list[Case]:
    return draw_cases(Subject(), 400)


@pytest.fixture(scope="session")
def roomy() -> list[Case]:
    return draw_cases(Subject(), 400, Limits(batch=4, heads=6, length=300, tiles=200))


@pytest.fixture(scope="session")
def strided() -> list[Case]:
    subject = Subject(can={"layouts": True, "packings": ("ragged", "dense")})
    # Of one seed Cases are much alike: 600 of another have no expanded heads at all.
    return [case for seed in (5, 6, 7, 8) for case in draw_cases(subject, 250, seed=seed)]
