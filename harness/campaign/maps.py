"""Error maps of a run's findings, in `DIR/maps`: made when a Case is minimal, since later the kernel may be another."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attnfuzz.harness.campaign.events import FailureMapped, Found
from attnfuzz.harness.campaign.journal import Journal
from attnfuzz.harness.campaign.shrink import Rate, tries
from attnfuzz.harness.isolation.executors import Executor
from attnfuzz.harness.judge.errormap import ErrorMaps, write_maps
from attnfuzz.harness.trial.errors import DeviceLost
from attnfuzz.strategies.case import Case

__all__ = ["Gallery"]

_MOST: Final = 100
"""Findings of a run of which maps are kept, some hundred kilobytes each at most."""


class Gallery:
    """Maps the errors of findings by one more launch of their minimal Case; what goes wrong there costs the picture only.

    Args:
        folder: DIR.
        executor: where the Cases ran.
    """

    def __init__(self, folder: Path | str, executor: Executor) -> None:
        self._folder, self._executor, self._kept = Path(folder), executor, 0

    def keep(self, found: Found, first: Case, journal: Journal | None = None) -> FailureMapped:
        """Make and write the maps of a finding, and of the Case as it was `first` seen; both are in `journal` while they run.

        Raises:
            DeviceLost: the kernel broke the device for this process.
        """
        if not any(each.elements for each in found.verdict.figures.values()):
            return FailureMapped(found.identity, None, "the kernel gave no outputs that could be judged")
        if self._kept >= _MOST:
            return FailureMapped(found.identity, None, f"a run keeps the maps of {_MOST} failures")
        path, reason = self._mapped(found.case, found.rate, journal)
        if path is None:
            return FailureMapped(found.identity, None, reason)
        self._kept += 1
        larger = None if first == found.case else self._mapped(first, found.rate, journal, wrong=True)[0]
        return FailureMapped(found.identity, path, first=larger)

    def _mapped(self, case: Case, rate: Rate | None, journal: Journal | None, *, wrong: bool = False) -> tuple[str | None, str]:
        """The file of a Case's maps, in DIR, or why there is none. `wrong`: only if errors show in them."""
        try:
            maps = self._tried(case, tries(rate), journal)
            if isinstance(maps, str):
                return None, maps
            if wrong and not maps.over:
                return None, "no error shows"
            path = Path("maps") / f"{case.id}.json"
            write_maps(self._folder / path, maps)
        except DeviceLost:
            raise
        except Exception as error:  # a picture must not end a run; why there is none is told
            return None, f"{type(error).__name__}: {error}"
        return str(path), ""

    def _tried(self, case: Case, runs: int, journal: Journal | None) -> ErrorMaps | str:
        """The first maps with errors, or the last without."""
        for run in range(1, runs + 1):
            if journal:
                journal.launch(case)
            maps = self._executor.mapped(case)
            if journal:
                journal.landed()
            if isinstance(maps, str) or maps.over or run == runs:
                break
        return maps
