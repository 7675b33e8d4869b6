"""Error maps of a run's findings, in `DIR/maps`: made when a Case is minimal, since later the kernel may be another."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attnfuzz.harness.campaign.events import FailureMapped, Finding, Rate
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.isolation.outcomes import OutOfTime
from attnfuzz.harness.judge.errormap import ErrorMaps, write_maps
from attnfuzz.strategies.case import Case

__all__ = ["MapWriter"]

_MOST: Final = 100
"""Findings of a run with maps, some hundred kilobytes each at most."""


class MapWriter:
    """Maps the errors of findings by one more run of their minimal Case; what goes wrong there costs the picture only."""

    def __init__(self, folder: Path | str) -> None:
        self._folder, self._written = Path(folder), 0

    def write(self, finding: Finding, first: Case, runner: TrialRunner) -> FailureMapped:
        """Make and write the maps of a finding's minimal Case, and of the Case as it was `first` seen.

        Raises:
            DeviceLost: the kernel broke the device for this process.
        """
        if not any(each.elements for each in finding.verdict.figures.values()):
            return FailureMapped(finding.identity, None, "the kernel gave no outputs that could be judged")
        if self._written >= _MOST:
            return FailureMapped(finding.identity, None, f"a run keeps the maps of {_MOST} failures")
        path, reason = self._mapped(finding.case, finding.rate, runner)
        if path is None:
            return FailureMapped(finding.identity, None, reason)
        self._written += 1
        larger = None if first == finding.case else self._mapped(first, finding.rate, runner, wrong=True)[0]
        return FailureMapped(finding.identity, path, first=larger)

    def _store(self, path: Path, maps: ErrorMaps) -> None:
        write_maps(self._folder / path, maps)

    def _mapped(self, case: Case, rate: Rate | None, runner: TrialRunner, *, wrong: bool = False) -> tuple[str | None, str]:
        """The file of a Case's maps, in DIR, or why there is none. `wrong`: only if they show errors."""
        try:
            maps = runner.map_errors(case, rate)
            if isinstance(maps, str):
                return None, maps
            if wrong and not maps.over:
                return None, "no error shows"
            path = Path("maps") / f"{case.id}.json"
            self._store(path, maps)
        except OutOfTime:
            return None, "the time of the run was over"
        except Exception as error:  # a run must not end for its maps
            return None, f"{type(error).__name__}: {error}"
        return str(path), ""
