"""What a worker on another node leaves to its campaign: the journal of its Cases in flight, and error maps.

Its node may go down with all that is on it, so the Cases are in the campaign's journal before they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

from attnfuzz.harness.campaign.context import WorkerContext
from attnfuzz.harness.campaign.journal import Journal
from attnfuzz.harness.campaign.maps import MapWriter
from attnfuzz.harness.judge.errormap import ErrorMaps
from attnfuzz.strategies.case import Case

__all__ = ["FarCampaign", "far_context"]


class FarCampaign(Protocol):
    """What the campaign keeps for a worker on another node."""

    def launch(self, cases: tuple[Case, ...], deaths: int) -> OSError | None:
        """Have Cases in the journal before they run; returns why they cannot be."""

    def journal(self, method: Literal["landed", "abandon", "discard"], *cases: Case) -> None:
        """Report what becomes of them."""

    def store(self, path: Path, maps: ErrorMaps) -> None:
        """Have error maps written at `path` in the campaign's folder."""


def far_context(context: WorkerContext, campaign: FarCampaign, *, maps: bool) -> WorkerContext:
    """Return the context with a journal, and with `maps`, that the campaign keeps."""
    return replace(context, journal=_FarJournal(campaign), maps=_FarMaps(campaign) if maps else None)


class _FarJournal(Journal):
    """Reports to the campaign's journal of this worker."""

    def __init__(self, campaign: FarCampaign) -> None:
        super().__init__("")
        self._campaign = campaign

    def launch(self, *cases: Case, deaths: int = 0) -> None:
        if (error := self._campaign.launch(cases, deaths)) is not None:
            raise error

    def launch_next(self, cases: Sequence[Case]) -> None:
        # One by one: a Case that has run must not be blamed for the death of its node.
        self.launch(cases[0])

    def landed(self, *failing: Case) -> None:
        self._campaign.journal("landed", *failing)

    def abandon(self) -> None:
        self._campaign.journal("abandon")

    def discard(self) -> None:
        self._campaign.journal("discard")


class _FarMaps(MapWriter):
    """Sends maps to the campaign."""

    def __init__(self, campaign: FarCampaign) -> None:
        super().__init__("")
        self._campaign = campaign

    def _store(self, path: Path, maps: ErrorMaps) -> None:
        self._campaign.store(path, maps)
