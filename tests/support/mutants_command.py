"""`attnfuzz mutants` as the tests call it, with campaigns that take no time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.detection import Attempt, Found, Nearest
from support.mutants import FOLDER, mutants
from support.paths import TESTS

from attnfuzz.harness.cli import mutants_bank
from attnfuzz.harness.cli.main import main

__all__ = ["campaigns", "direct_case", "of_checkout", "row", "run"]


@functools.cache
def direct_case() -> str:
    """Return the direct Case of a mutant of the bank, as a row has it."""
    return mutants()["MSK-05"].direct_case("mutant.MSK-05").canonical()


def run(*arguments: str) -> Result:
    """Call the command."""
    return CliRunner(env={"COLUMNS": "160"}).invoke(main, ["mutants", *arguments])


def row(task: Attempt, *, killed: bool = True) -> Found:
    """Return the row of a campaign that has found its bug with the third Case, or has not."""
    if killed:
        return Found(task.mutant, task.seed, 3, 0.5, kind="mismatch", output="dq", case=direct_case(), tokens=4, tried=3)
    return Found(task.mutant, task.seed, None, 2.0, tried=task.most, nearest={"o": Nearest(0.75, direct_case())})


@pytest.fixture
def of_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bank of this checkout, where attnfuzz itself is installed as a wheel."""
    monkeypatch.setattr(mutants_bank, "TESTS", TESTS)
    monkeypatch.setattr(mutants_bank, "BANK", FOLDER)


@pytest.fixture
def campaigns(monkeypatch: pytest.MonkeyPatch) -> list[Attempt]:
    """Campaigns that take no time: those of seed 1 find nothing. The list gets what was asked for."""
    asked: list[Attempt] = []

    def finished(_: Any, tasks: list[Attempt], jobs: int, **limits: Any) -> Iterator[Found]:
        for each in tasks:
            asked.append(each)
            yield row(each, killed=each.seed != 1)

    monkeypatch.setattr("support.verdict.processes.finished", finished)
    return asked
