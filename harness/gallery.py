"""Error maps of a run's findings, in `DIR/maps`: made when a Case is minimal, since later the kernel may be another."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attnfuzz.harness.errormap import write_maps
from attnfuzz.harness.events import FailureMapped, Found
from attnfuzz.harness.executors import Executor
from attnfuzz.harness.lost import DeviceLost
from attnfuzz.harness.shrink import tries

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

    def keep(self, found: Found) -> FailureMapped:
        """Make and write the maps of a finding.

        Raises:
            DeviceLost: the kernel broke the device for this process.
        """
        if not any(each.elements for each in found.verdict.figures.values()):
            return FailureMapped(found.identity, None, "the kernel gave no outputs that could be judged")
        if self._kept >= _MOST:
            return FailureMapped(found.identity, None, f"a run keeps the maps of {_MOST} failures")
        try:
            for _ in range(tries(found.rate)):
                maps = self._executor.mapped(found.case)
                if isinstance(maps, str) or maps.over:
                    break
            if isinstance(maps, str):
                return FailureMapped(found.identity, None, maps)
            path = Path("maps") / f"{found.case.id}.json"
            write_maps(self._folder / path, maps)
        except DeviceLost:
            raise
        except Exception as error:  # a picture must not end a run; why there is none is told
            return FailureMapped(found.identity, None, f"{type(error).__name__}: {error}")
        self._kept += 1
        return FailureMapped(found.identity, str(path))
